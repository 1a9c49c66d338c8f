# SPDX-License-Identifier: Apache-2.0
"""Time a training step: in one call, and its parts through autograd; flush and densification apart.

`train_step` is timed over many calls without waiting in between. Its `host` lines say what the calling thread does in one:
each stage (launching, and waiting where a stage reads back), and what is left: Python and its bindings.

Scene: the garden benchmark of gsplat where $MGPU_TEST_DATA (default ../shared/data) has it, else Gaussians in a box. The
camera alternates between the first two of the scene, so that rows miss steps and are replayed.

    python benchmarks/train_step.py [--rows N] [--steps S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatTable, render, train_step
from ns_mgpu_splat.splats.densify import McmcStrategy
from ns_mgpu_splat.splats.loss import l1_ssim_loss
from ns_mgpu_splat.splats.optimizer import SplatAdam

LRS = {"means": 1.6e-4, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}


def garden(path: Path) -> tuple[np.ndarray, np.ndarray, list[Camera]]:
    """Points, colours and cameras of gsplat's garden crop."""
    data = np.load(path)
    height, width = int(data["height"]), int(data["width"])
    cameras = [
        Camera.from_K(torch.from_numpy(view).float(), torch.from_numpy(calibration).float(), width, height)
        for view, calibration in zip(data["viewmats"], data["Ks"], strict=True)
    ]
    return data["means3d"], data["colors"], cameras


def box(rows: int) -> tuple[np.ndarray, np.ndarray, list[Camera]]:
    """Points in a box in front of two cameras, 648x420."""
    generator = np.random.default_rng(0)
    points = generator.uniform(-1, 1, (rows, 3)) * (3.0, 2.0, 1.0)
    cameras = []
    for shift in (-0.5, 0.5):
        viewmat = torch.eye(4)
        viewmat[0, 3], viewmat[2, 3] = shift, 4.0
        cameras.append(Camera(viewmat, 480.0, 480.0, 324.0, 210.0, 648, 420))
    return points, generator.integers(0, 256, (rows, 3), dtype=np.uint8), cameras


def scene(rows: int | None) -> tuple[str, np.ndarray, np.ndarray, list[Camera]]:
    """Name, points, colours and cameras."""
    folder = Path(os.environ.get("MGPU_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    path = folder / "garden" / "test_garden.npz"
    if rows is None and path.is_file():
        return ("garden", *garden(path))
    return ("box", *box(rows or 100_000))


class Times:
    """Wall times in milliseconds by name of the part."""

    def __init__(self) -> None:
        self.lists: dict[str, list[float]] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Do `work` and note how long it took."""
        start = time.perf_counter()
        result = work()
        self.lists.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
        return result

    def medians(self) -> dict[str, float]:
        """Of each part, without its first run."""
        return {name: statistics.median(times[1:] or times) for name, times in self.lists.items()}


def one_call(
    table: SplatTable, adam: SplatAdam, camera: Camera, target: torch.Tensor, steps: int
) -> tuple[float, dict[str, float]]:
    """Milliseconds of `train_step`, and medians in microseconds of what the host does in one."""
    adam.report_means = False
    wait: Callable[[], None] = torch.mgpu.synchronize  # type: ignore[attr-defined]
    host: dict[str, list[float]] = {}
    for count in (5, max(steps, 50)):  # warm first
        wait()
        start = time.perf_counter()
        for _ in range(count):
            before = time.perf_counter()
            report = train_step(table, adam, camera, target)
            called = time.perf_counter() - before
            stages = dict(report.times)
            for name, seconds in {
                **stages,
                "python, bindings": called - sum(stages.values()),
                "whole call": called,
            }.items():
                host.setdefault(name, []).append(seconds * 1e6)
        wait()
        milliseconds = (time.perf_counter() - start) / count * 1e3
    return milliseconds, {name: statistics.median(times[5:]) for name, times in host.items()}


def measure(rows: int | None, steps: int) -> dict[str, Any]:
    """Train for `steps` steps and time the parts."""
    device = ns_mgpu_splat.init()
    name, points, colors, cameras = scene(rows)
    table = SplatTable.from_points(points, colors, capacity=len(points) * 2).requires_grad_(True)
    adam = SplatAdam(table, LRS, opacity_reg=0.01, scale_reg=0.01, noise_lr=5e5)
    strategy = McmcStrategy(table.capacity, refine_start=0, refine_every=1)
    generator = torch.Generator().manual_seed(0)
    shape = (cameras[0].height, cameras[0].width, 3)
    target = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
    times = Times()
    seen = []
    for step in range(steps):
        view = cameras[step // 3 % 2]
        image = times.run("render", partial(render, table, view, optimizer=adam))[0]
        loss = times.run("loss", partial(l1_ssim_loss, image.rgb, target))
        times.run("backward", loss.backward)
        times.run("step", adam.step)
        seen.append(adam.report["rows_seen"])
    for step in range(1, 4):
        adam.step()
        times.run("flush, all rows", adam.flush)
        report = times.run("densify", partial(strategy.post_step, table, adam, step))
    medians = times.medians()
    whole, host = one_call(table, adam, cameras[0], target, steps)
    return {
        "benchmark": "train_step",
        "scene": name,
        "rows": len(points),
        "rows_seen": int(statistics.median(seen)),
        "image": f"{shape[1]}x{shape[0]}",
        "mesh": list(torch.mgpu.mesh().shards),  # type: ignore[attr-defined]
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "milliseconds": medians,
        "train_step_ms": whole,
        "train_step_host_us": host,
        "iteration_ms": sum(medians[part] for part in ("render", "loss", "backward", "step")),
        "rows_at_end": report["total"],
    }


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, help="Gaussians in a box instead of the garden")
    parser.add_argument("--steps", type=int, default=12, help="training steps to time")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    result = measure(arguments.rows, arguments.steps)
    print(
        f"{result['scene']}, {result['rows']:,} rows ({result['rows_seen']:,} seen), {result['image']}, {result['mesh']}"
    )
    for part, milliseconds in result["milliseconds"].items():
        print(f"  {part:16s} {milliseconds:9.2f} ms")
    print(f"  {'iteration':16s} {result['iteration_ms']:9.2f} ms through autograd, waiting after each part")
    print(f"  {'train_step':16s} {result['train_step_ms']:9.3f} ms in one call")
    for stage, microseconds in result["train_step_host_us"].items():
        print(f"    host: {stage:18s} {microseconds:9.1f} us")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
