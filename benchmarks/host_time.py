# SPDX-License-Identifier: Apache-2.0
"""Where the host's time goes: microseconds to issue small operators and a small training step, and torch's profile of it.

    MGPU_DEVICES=0,0,0,0 python benchmarks/host_time.py mgpu
    python benchmarks/host_time.py cuda        # to compare with, in a process of its own
    python benchmarks/host_time.py loops       # microseconds a step of the bare loop and of ns-train's

On `mgpu`, operators on a plain CUDA tensor over the same memory are timed too: what they cost is not the backend's.
`loops`: the native step returns at once, so that what is left is the loops' own; data, logging and callbacks are real.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


def issue_time(run: Callable[[], object], wait: Callable[[], None], calls: int = 40) -> float:
    """Median microseconds for which a call keeps the host."""
    for _ in range(5):
        run()
    times: list[float] = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    wait()
    return statistics.median(times)


def operators(z: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Small operators without gradient, on a matrix of 16 x 4 and an image."""
    index = torch.arange(3, device=z.device)
    weight, bias = x.new_full((32, 3, 3, 3), 0.1), x.new_zeros(32)
    steps = [z.new_zeros(()) for _ in range(6)]
    y = torch.conv2d(x, weight, bias, padding=1)

    def convolution_backward() -> object:
        return torch.ops.aten.convolution_backward(
            y, x, weight, [32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )

    return {
        "empty": lambda: torch.empty(16, 4, device=z.device),
        "add": lambda: z + z,
        "add_": lambda: z.add_(z),
        "sum": lambda: z.sum(),
        "flip (its kernel makes the result)": lambda: z.flip(0),
        "index_select": lambda: z.index_select(0, index),
        "z[index]": lambda: z[index],
        "sort": lambda: z.sort(),
        "addmm": lambda: torch.addmm(z, z, z[:4]),
        "_foreach_add_ of six": lambda: torch._foreach_add_(steps, 1),
        "convolution": lambda: torch.conv2d(x, weight, bias, padding=1),
        "convolution_backward": convolution_backward,
    }


class NoStep:
    """Stands in for the native training step: does nothing, leaves what a step leaves, and looks at the clocks.

    Attributes:
        first, last: calls' (time, processor time of this thread), in seconds; calls: how many there were.
    """

    frame = dL_dviewmats = dL_dexposures = None
    report: dict[str, float] = {"rows_seen": 0, "mean_opacity": 0.0, "mean_scale": 0.0}  # noqa: RUF012
    culled: dict[str, list[int]] = {"cells": [0], "cells_kept": [0], "candidates": [0]}  # noqa: RUF012

    def __init__(self) -> None:
        self.images: list[torch.Tensor] = []
        self.picture: torch.Tensor | None = None
        self.calls = 0
        self.first = self.last = (0.0, 0.0)

    def microseconds(self) -> tuple[float, float]:
        """From one call to the next, by the clock and by the thread's own time."""
        a, b = (
            (end - begin) / (self.calls - 1) * 1e6 for begin, end in zip(self.first, self.last, strict=True)
        )
        return a, b

    def __call__(self, *arguments: Any) -> NoStep:
        """`arguments` as of the native function: targets are the fifth, whether images are wanted is the fourteenth."""
        self.last = time.perf_counter(), time.thread_time()
        self.calls += 1
        if self.picture is None:
            self.first = self.last
            height, width = arguments[4][0].shape[:2]
            self.picture = torch.zeros(height, width, 3, device="mgpu")
        self.images = [self.picture] if arguments[13] else []
        return self

    def take_images(self) -> list[torch.Tensor]:
        """As rendered, if they were wanted."""
        return self.images

    def losses(self) -> list[tuple[float, float, float]]:
        """Of the one camera: loss, L1, SSIM."""
        return [(0.5, 0.5, 0.5)]


def write_capture(folder: Path, images: int = 60, width: int = 64, height: int = 48) -> None:
    """A Nerfstudio folder of noise, seen from one place."""
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    noise = np.random.default_rng(0)
    pose = np.eye(4).tolist()
    frames = []
    for i in range(images):
        name = f"images/{i:03d}.png"
        Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
        frames.append({"file_path": name, "transform_matrix": pose})
    lens = {"fl_x": width, "fl_y": width, "cx": width / 2, "cy": height / 2, "w": width, "h": height}
    (folder / "transforms.json").write_text(json.dumps({"camera_model": "OPENCV", **lens, "frames": frames}))


def run_config(folder: Path, steps: int, vis: str) -> Any:
    """A run that trains, logs and saves at its end, and never refines or evaluates."""
    from ns_mgpu_splat.nerfstudio.config import mgpu_splat

    config: Any = copy.deepcopy(mgpu_splat.config)
    config.vis, config.output_dir, config.timestamp = vis, folder / "runs", str(time.time_ns())
    config.max_num_iterations = config.schedule_steps = config.steps_per_save = steps
    config.steps_per_eval_image = config.steps_per_eval_all_images = 0
    config.eval_at_end, config.viewer.quit_on_train_completion = False, True
    config.pipeline.datamanager.data = folder
    config.pipeline.datamanager.dataparser.num_random_points = 300
    config.pipeline.model.max_gaussians, config.pipeline.model.warmup_length = 300, 1 << 30
    return config


def loops(steps: int, rounds: int, vis: str, profiled: Path | None) -> None:
    """Print what a step costs in each loop, in turn."""
    import cProfile
    import pstats

    from caliterra import bare_loop

    from ns_mgpu_splat.device import native
    from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer, writer

    found: dict[str, list[tuple[float, float]]] = {"bare": [], "ns-train": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "capture"
        write_capture(folder)
        for _ in range(rounds):
            writer.EVENT_WRITERS.clear()
            trainer = MgpuSplatTrainer(run_config(folder, steps, vis))
            trainer.setup()
            profile = cProfile.Profile(time.thread_time)
            for name, values in found.items():
                step = NoStep()
                vars(native())["train_step"] = step
                if name == "bare":
                    bare_loop(trainer.pipeline, trainer.optimizers, steps)
                elif profiled is None:
                    trainer.train()
                else:
                    profile.runcall(trainer.train)
                    with profiled.open("w") as out:
                        pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(60)
                values.append(step.microseconds())
    print("us a step (fewest of the rounds)    by the clock    of the thread's time")
    best = {name: [min(column) for column in zip(*values, strict=True)] for name, values in found.items()}
    best["more"] = [b - a for a, b in zip(best["bare"], best["ns-train"], strict=True)]
    for name, (wall, processor) in best.items():
        print(f"{name:32s}{wall:16.1f}{processor:24.1f}")


def main() -> None:
    """Print one line an operator, then the profile; or the loops."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("mgpu", "cuda", "cpu", "loops"))
    parser.add_argument("--profile", action="store_true", help="torch's profile of the training step")
    parser.add_argument("--steps", type=int, default=3000, help="of each loop")
    parser.add_argument("--rounds", type=int, default=3, help="in which the loops take turns")
    parser.add_argument("--vis", default="tensorboard", help="as of ns-train")
    parser.add_argument("--cprofile", type=Path, help="file for Python's profile of ns-train's loop")
    arguments = parser.parse_args()
    if arguments.what == "loops":
        loops(arguments.steps, arguments.rounds, arguments.vis, arguments.cprofile)
        return
    device = arguments.what
    if device == "mgpu":
        import ns_mgpu_splat

        ns_mgpu_splat.init()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    wait: Callable[[], None] = torch.accelerator.synchronize if device != "cpu" else lambda: None

    z, x = torch.rand(16, 4, device=device), torch.rand(1, 3, 16, 16, device=device)
    with torch.no_grad():
        for name, run in operators(z, x).items():
            print(f"{name:42s} {issue_time(run, wait):8.1f}")
        if device == "mgpu" and torch.cuda.is_available():
            alias = vars(torch)["mgpu"].as_cuda
            for name, run in operators(alias(z), alias(x)).items():
                print(f"{'CUDA alias: ' + name:42s} {issue_time(run, wait):8.1f}")

    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1)]
    net = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def backward() -> None:
        (net(x) - x).square().mean().backward()

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    backward()
    for name, run in {"forward and backward": backward, "optimizer": optimizer.step, "step": step}.items():
        print(f"{name:42s} {issue_time(run, wait):8.1f}")
    if arguments.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                step()
            wait()
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=45))


if __name__ == "__main__":
    main()
