# SPDX-License-Identifier: Apache-2.0
"""Train on real photographs, with the plug-in's data and defaults: by a bare loop, and through `ns-train`.

The bare loop is the least that a user of the library writes: `train_step`, `McmcStrategy`, nothing of Nerfstudio's loop.
Prints seconds of the training loop, steps a second, and PSNR, PSNR with corrected colours and SSIM over the held-out images
(every 8th). `--views DIR` adds, of the bare loop, pictures from two places where no photograph was taken, and how much hangs in
the air: the mean opacity, over the held-out views, of what lies in the upper half of the way to the ground.

    python benchmarks/caliterra.py [--data DIR] [--steps N] [--seeds 42 43 44] [--runs bare ns-train] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

CAP = 1_000_000
LARGEST_PICTURE = 150_000  # bytes
# PSNR, SSIM and PSNR with corrected colours in the last words of a run (`MgpuSplatPipeline.metrics_line`)
kScores = r"held-out images: PSNR ([\d.]+) dB, SSIM (\d\.\d+), PSNR ([\d.]+) dB with corrected colours"


def data_folder() -> Path:
    """caliterra_aerial in $MGPU_TEST_DATA, or in ../shared/data."""
    folder = os.environ.get("MGPU_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(folder) / "caliterra_aerial"


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold an exclusive lock, so that benchmarks of other processes wait."""
    with contextlib.ExitStack() as stack:
        if lock is not None:
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        yield


# ns-train that takes the lock for the training loop alone
NS_TRAIN = """
import sys
from pathlib import Path
sys.argv[0] = 'ns-train'
sys.path.insert(0, {folder!r})
from caliterra import alone
from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer as T
from nerfstudio.scripts.train import entrypoint
lock, choose, say = alone({lock}), T._choose_steps, T._say_how_long
T._choose_steps = lambda self: (lock.__enter__(), choose(self))
T._say_how_long = lambda self: (say(self), lock.__exit__(None, None, None))
entrypoint()
"""


def bare_loop(pipeline: Any, optimizers: Any, steps: int) -> float:
    """Train with the least that does what ns-train's steps do; seconds. Cameras and photographs are there before it starts."""
    from ns_mgpu_splat import train_step

    model, images = pipeline.model, pipeline.datamanager.train_dataset
    table, adam, strategy = model.table, optimizers.table, model.strategy
    cameras = [model._camera(images.cameras[i : i + 1]) for i in range(len(images))]
    targets = [images.picture(i).image.to(table.means.device) for i in range(len(images))]
    torch.mgpu.synchronize()  # type: ignore[attr-defined]
    exposure = model.exposure
    start = time.perf_counter()
    model.train()
    for step in range(steps):
        index = pipeline.datamanager.train_index(step)
        model.step = step
        report = train_step(
            table,
            adam,
            cameras[index],
            targets[index],
            ssim_weight=model.config.ssim_lambda,
            background=model.background(),
            sh_degree=model.active_sh_degree(),
            lrs=optimizers.rates(step),
            exposures=None if exposure is None else exposure.row(index),
        )
        if exposure is not None and report.exposure_grads is not None:
            exposure.add_gradient(index, report.exposure_grads[0])
            optimizers.step_some(["exposure"], step)
            optimizers.zero_grad_some(["exposure"])
            optimizers.scheduler_step_all(step)
        strategy.post_step(table, adam, step)
    torch.mgpu.synchronize()  # type: ignore[attr-defined]
    return time.perf_counter() - start


def bare(data: Path, steps: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train without Nerfstudio's loop; scores by its pipeline."""
    from ns_mgpu_splat.nerfstudio.config import mgpu_splat
    from ns_mgpu_splat.nerfstudio.device import start_device
    from ns_mgpu_splat.nerfstudio.evaluate import metrics_by_photograph
    from ns_mgpu_splat.nerfstudio.optimizers import SplatOptimizers

    device = start_device()
    config: Any = copy.deepcopy(mgpu_splat.config)
    config.pipeline.datamanager.data = data
    config.pipeline.datamanager.train_cameras_sampling_seed = seed
    config.pipeline.datamanager.dataparser.downscale_factor = options["downscale"]
    config.pipeline.model.max_gaussians = CAP
    config.pipeline.model.color_corrected_metrics = True
    for name, value in options["model"]:
        setattr(config.pipeline.model, name, yaml.safe_load(value))
    pipeline = config.pipeline.setup(device=device, test_mode="val")
    model = pipeline.model
    optimizers = SplatOptimizers(config.optimizers, pipeline.get_param_groups(), model, steps, seed)
    model.start_training(optimizers.table, steps, seed)
    table, images = model.table, pipeline.datamanager.train_dataset
    cameras = [model._camera(images.cameras[i : i + 1]) for i in range(len(images))]
    ground = distance_to_ground(table, cameras)
    with alone(options["lock"]):
        seconds = bare_loop(pipeline, optimizers, steps)

    model.eval()
    model.step = steps
    scores = [metrics for _, metrics in metrics_by_photograph(pipeline)]
    figures = {
        "seconds": seconds,
        "steps_per_second": steps / seconds,
        **{key: statistics.fmean(score[key] for score in scores) for key in ("psnr", "cc_psnr", "ssim")},
        "gaussians": model.num_points,
        "photographs": [score["psnr"] for score in scores],
        "trained_psnr": trained_psnr(table, images, cameras),
    }
    if options["views"]:
        name = "-".join([*(f"{n}={v}" for n, v in options["model"]), f"seed-{seed}"])
        save_views(table, cameras, ground, options["views"], name)
        held_out = pipeline.datamanager.eval_dataset.cameras
        views = [model._camera(held_out[i : i + 1]) for i in range(len(held_out))]
        figures["in_the_air"] = in_the_air(table, views, ground)
    return figures


def trained_psnr(table: Any, images: Any, cameras: list[Any]) -> float:
    """Mean PSNR in dB over the photographs that were trained on, which chance moves far less than the held-out ones."""
    from ns_mgpu_splat import render

    found = []
    for index, camera in enumerate(cameras):
        with torch.no_grad():
            (out,) = render(table, camera, depth=False)
        want = images.picture(index).image.to(out.rgb.device).float() / 255
        found.append(-10 * math.log10(float((out.rgb.clamp(0, 1) - want).square().mean())))
    return statistics.fmean(found)


def distance_to_ground(table: Any, cameras: list[Any]) -> float:
    """Median depth of the seed points in the cameras' views, in world units."""
    points = table.means.detach().cpu()
    depths = [points @ c.viewmat[2, :3].cpu() + c.viewmat[2, 3].cpu() for c in cameras]
    return float(torch.cat([d[d > 0] for d in depths]).median())


def novel_views(cameras: list[Any], ground: float, seed: int = 7) -> dict[str, Any]:
    """Two views that no photograph has: half-way between two photographs; and from the side, further away, of what a third
    looks at. Which ones, depends on `seed` alone."""
    from ns_mgpu_splat import Camera

    draw = random.Random(seed)
    first, third = draw.randrange(len(cameras) - 1), draw.randrange(len(cameras))

    def camera(world_from_camera: torch.Tensor, like: Any) -> Any:
        return Camera(torch.linalg.inv(world_from_camera).float(), *like.intrinsics, *like.size)

    one, other = (torch.linalg.inv(c.viewmat.cpu().double()) for c in cameras[first : first + 2])
    between = (one + other) / 2
    u, _, v = torch.linalg.svd(between[:3, :3])
    between[:3, :3] = u @ v
    pose = torch.linalg.inv(cameras[third].viewmat.cpu().double())
    angle = math.radians(50)
    turn = torch.eye(4, dtype=torch.float64)
    turn[1:3, 1:3] = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64
    )
    there, back = torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    there[2, 3], back[2, 3] = ground, -1.3 * ground
    lifted = pose @ there @ turn @ back
    return {"between": camera(between, cameras[first]), "aside": camera(lifted, cameras[third])}


def save_views(table: Any, cameras: list[Any], ground: float, folder: Path, name: str) -> None:
    """Write the two novel views as small JPEG files."""
    from PIL import Image

    from ns_mgpu_splat import render

    folder.mkdir(parents=True, exist_ok=True)
    for view, camera in novel_views(cameras, ground).items():
        with torch.no_grad():
            (out,) = render(table, camera, depth=False)
        pixels = (out.rgb.clamp(0, 1).cpu() * 255).round().to(torch.uint8).numpy()
        picture = Image.fromarray(pixels)
        picture.thumbnail((800, 800))
        path = folder / f"{name}-{view}.jpg"
        for quality in range(85, 20, -10):
            picture.save(path, quality=quality)
            if path.stat().st_size <= LARGEST_PICTURE:
                break


def in_the_air(table: Any, cameras: list[Any], ground: float) -> float:
    """Mean opacity, over all pixels of the views, of the Gaussians nearer than half of the way to the ground."""
    from ns_mgpu_splat import SplatTable, render

    columns = {name: column.detach().cpu() for name, column in table.named_columns().items()}
    sums = []
    for camera in cameras:
        depth = columns["means"] @ camera.viewmat[2, :3].cpu() + camera.viewmat[2, 3].cpu()
        near = (depth > 0) & (depth < ground / 2)
        part = SplatTable.from_columns(**{name: column[near] for name, column in columns.items()})
        with torch.no_grad():
            (out,) = render(part, camera, depth=False)
        sums.append(float(out.accumulation.mean()))
    return sum(sums) / len(sums)


def ns_train(data: Path, steps: int, seed: int, options: dict[str, Any]) -> dict[str, float]:
    """Train with Nerfstudio's command, in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options["keep"] or temporary
        lock = f"Path({str(options['lock'])!r})" if options["lock"] else "None"
        start = NS_TRAIN.format(folder=str(Path(__file__).parent), lock=lock)
        command = [sys.executable, "-c", start, "mgpu-splat", "--data", data, "--output-dir", folder]
        command += ["--experiment-name", "caliterra", "--timestamp", f"seed-{seed}"]
        command += ["--vis", "tensorboard", "--viewer.quit-on-train-completion", "True"]
        command += ["--max-num-iterations", steps, "--schedule-steps", steps, "--machine.seed", seed]
        command += ["--pipeline.model.max-gaussians", CAP, "--pipeline.model.color-corrected-metrics", True]
        for name, value in options["model"]:
            command += [f"--pipeline.model.{name.replace('_', '-')}", value]
        command += ["--pipeline.datamanager.train-cameras-sampling-seed", seed]
        command += ["--pipeline.datamanager.dataparser.downscale-factor", options["downscale"]]
        env = {**os.environ, "COLUMNS": "200"}
        package = (
            "ns_mgpu_splat.nerfstudio"  # where it is not installed, Nerfstudio does not find it by itself
        )
        env.setdefault("NERFSTUDIO_METHOD_CONFIGS", f"mgpu-splat={package}.config:mgpu_splat")
        env.setdefault(
            "NERFSTUDIO_DATAPARSER_CONFIGS",
            f"mgpu-splat-data={package}.dataparser:mgpu_splat_dataparser",
        )
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
        if options["log"]:
            options["log"].write_text(done.stdout + done.stderr)
        text = " ".join(done.stdout.split())
        trained = re.search(r"Trained ([\d,]+) steps in ([\d.]+) s, ([\d.]+) steps/s", text)
        scored = re.search(kScores, text)
        counts = re.findall(r"([\d,]+) Gaussians", text)
        if done.returncode != 0 or trained is None or scored is None:
            sys.exit(f"ns-train ended with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return {
            "seconds": float(trained[2]),
            "steps_per_second": float(trained[3]),
            "psnr": float(scored[1]),
            "cc_psnr": float(scored[3]),
            "ssim": float(scored[2]),
            "gaussians": int(counts[-1].replace(",", "")),
        }


def main() -> None:
    """Run, print a line for each run and the means, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=data_folder(), help="a Nerfstudio or COLMAP folder")
    parser.add_argument("--steps", type=int, default=7000, help="steps; schedules are as long")
    parser.add_argument("--downscale", type=int, default=1, help="divide the images' sides by this")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42], help="of noise, draws and image order")
    parser.add_argument(
        "--runs", nargs="+", choices=["bare", "ns-train"], default=["bare", "ns-train"], help="which loops"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        type=lambda text: tuple(text.split("=", 1)),
        metavar="NAME=VALUE",
        help="options of the model, as in strategy=default",
    )
    parser.add_argument("--views", type=Path, help="folder for pictures of the bare loop's scenes")
    parser.add_argument("--keep", type=Path, help="folder for what ns-train writes")
    parser.add_argument("--lock", type=Path, help="file to lock while training, against other benchmarks")
    parser.add_argument("--log", type=Path, help="file for what ns-train prints")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    options = vars(arguments)
    rows: list[dict[str, Any]] = []
    print(f"{'run':10}{'seed':>6}{'s':>9}{'steps/s':>10}{'PSNR dB':>9}{'cc':>7}{'SSIM':>8}{'Gaussians':>12}")
    for run in arguments.runs:
        for seed in arguments.seeds:
            figures = (bare if run == "bare" else ns_train)(arguments.data, arguments.steps, seed, options)
            rows.append({"run": run, "seed": seed, **figures})
            _print(run, str(seed), figures)
            if arguments.json:  # after each, for whoever ends this by a time limit
                write_figures(arguments.json, rows)
    for run in arguments.runs:
        mine = [row for row in rows if row["run"] == run]
        if len(mine) > 1:
            keys = [key for key in mine[0] if key not in ("run", "seed", "photographs")]
            _print(run, "mean", {key: sum(row[key] for row in mine) / len(mine) for key in keys})
    if len(arguments.runs) == 2:
        rates = [
            sum(row["steps_per_second"] for row in rows if row["run"] == run) for run in ("bare", "ns-train")
        ]
        print(f"ns-train's steps/s are {100 * rates[1] / rates[0]:.0f} % of the bare loop's")


def write_figures(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all runs' figures; whoever reads the file meanwhile sees them whole."""
    figures = {"benchmark": "caliterra", "torch": torch.__version__, "rows": rows}
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(figures, indent=2) + "\n")
    aside.replace(path)


def _print(run: str, seed: str, figures: dict[str, float]) -> None:
    print(
        f"{run:10}{seed:>6}{figures['seconds']:9.2f}{figures['steps_per_second']:10.1f}{figures['psnr']:9.2f}"
        f"{figures['cc_psnr']:7.2f}{figures['ssim']:8.4f}{figures['gaussians']:12,.0f}"
        + (f"  in the air {figures['in_the_air']:.4f}" if "in_the_air" in figures else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
