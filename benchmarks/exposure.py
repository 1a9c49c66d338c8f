# SPDX-License-Identifier: Apache-2.0
"""What exposures and measured depths cost: milliseconds of a training step at 1920x1080, each way in turn.

plain: `train_step`. exposed: the same with a map of colours, its gradient and Adam's step. autograd: `render`, loss, `backward`,
`step`. depth: autograd with depth and 2,000 measured pixels. Gaussians in a box; the least of many
rounds, in which the ways take turns.

    python benchmarks/exposure.py [--rows N] [--size WxH] [--steps S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.splats.exposure import ExposureAdam, Exposures
from ns_mgpu_splat.splats.loss import disparity_loss, l1_ssim_loss

LRS = {"means": 1.6e-4, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1.25e-4}
ROUNDS = 15
MEASURED = 2_000


def ways(rows: int, width: int, height: int) -> dict[str, Callable[[], None]]:
    """One step of each way, all on one table."""
    device = ns_mgpu_splat.init()
    draw = np.random.default_rng(0)
    points = draw.uniform(-1, 1, (rows, 3)) * (3.0, 2.0, 1.0)
    colors = draw.integers(0, 256, (rows, 3), dtype=np.uint8)
    table = SplatTable.from_points(points, colors).requires_grad_(True)
    adam = SplatAdam(table, LRS, report_means=False)
    viewmat = torch.eye(4)
    viewmat[2, 3] = 4.0
    camera = Camera(viewmat, 0.74 * width, 0.74 * width, width / 2, height / 2, width, height)
    target = torch.from_numpy(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).to(device)
    exposures = Exposures(100, device)
    exposure_adam = ExposureAdam([exposures.maps])
    pixels = torch.from_numpy(draw.integers(0, width * height, MEASURED)).to(device)
    depths, weights = torch.full((MEASURED,), 3.5).to(device), torch.ones(MEASURED).to(device)

    def plain() -> None:
        train_step(table, adam, camera, target)

    def exposed() -> None:
        exposure_adam.zero_grad()
        report = train_step(table, adam, camera, target, exposures=exposures.row(7))
        assert report.exposure_grads is not None
        exposures.add_gradient(7, report.exposure_grads[0])
        exposure_adam.step()

    def autograd(depth: bool = False) -> None:
        (image,) = render(table, camera, optimizer=adam, depth=depth)
        loss = l1_ssim_loss(image.rgb, target)
        if depth:
            loss = loss + 0.1 * disparity_loss(image.depth, image.accumulation, pixels, depths, weights, 3.5)
        loss.backward()
        adam.step()

    return {"plain": plain, "exposed": exposed, "autograd": autograd, "depth": lambda: autograd(True)}


def main() -> None:
    """Measure, print a line for each way, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="Gaussians")
    parser.add_argument("--size", default="1920x1080", help="of the image")
    parser.add_argument("--steps", type=int, default=40, help="of each way in a round")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    times: dict[str, list[float]] = {}
    steps = ways(arguments.rows, width, height)
    wait: Callable[[], None] = torch.mgpu.synchronize  # type: ignore[attr-defined]
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()
            wait()
            start = time.perf_counter()
            for _ in range(arguments.steps):
                step()
            wait()
            times.setdefault(name, []).append((time.perf_counter() - start) / arguments.steps * 1e3)
    least = {name: min(values) for name, values in times.items()}
    for name, value in least.items():
        print(f"{name:10}{value:9.3f} ms  {100 * value / least['plain'] - 100:+6.1f} %")
    if arguments.json:
        row = {"rows": arguments.rows, "size": arguments.size, "milliseconds": least}
        arguments.json.write_text(
            json.dumps({"benchmark": "exposure", "torch": torch.__version__, **row}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
