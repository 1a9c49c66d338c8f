# SPDX-License-Identifier: Apache-2.0
"""Not a test: trains a little on the mesh of MGPU_DEVICES and writes what came out (test_optimizer_meshes.py).

Usage: train_probe.py OUT.pt
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatTable, render
from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.densify import McmcStrategy
from ns_mgpu_splat.splats.loss import l1_ssim_loss
from ns_mgpu_splat.splats.optimizer import SplatAdam

ROWS = 9_000  # several hardware pages per shard in every column, so that the locality check has something to protect
STEPS = 10
LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}


def camera(angle: float) -> Camera:
    """In the middle of the cloud, looking along `angle`."""
    viewmat = torch.eye(4)
    c, s = math.cos(angle), math.sin(angle)
    viewmat[:3, :3] = torch.tensor([[c, 0.0, -s], [0.0, 1.0, 0.0], [s, 0.0, c]])
    return Camera(viewmat, 70.0, 70.0, 48.0, 35.0, 96, 70)


def main(out: str) -> None:
    """Train, densify, flush, save."""
    device = ns_mgpu_splat.init()
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(ROWS, 3, generator=generator) * 2
    table = SplatTable.from_points(points, torch.rand(ROWS, 3, generator=generator), capacity=12_000)
    table.requires_grad_(True)
    with torch.no_grad():
        table.opacities[::9] = -9.0  # some dead rows
        table.scales += 0.3 * torch.randn(ROWS, 3, generator=generator).to(device)
    adam = SplatAdam(table, LRS, opacity_reg=0.01, scale_reg=0.01, noise_lr=100.0, seed=3)
    strategy = McmcStrategy(10_000, refine_start=0, refine_every=4)
    target = torch.randint(0, 256, (70, 96, 3), generator=generator, dtype=torch.uint8).to(device)
    mask = torch.ones(70, 96, dtype=torch.bool)
    mask[20:30] = False
    mask = mask.to(device)

    result: dict[str, Any] = {"losses": [], "reports": [], "sampled": [], "stats": []}
    for step in range(1, STEPS + 1):
        torch.mgpu.reset_op_stats()  # type: ignore[attr-defined]
        views = [camera(0.5 * step), camera(0.5 * step + 0.4)]
        images = render(table, views, optimizer=adam)
        loss = l1_ssim_loss(images[0].rgb, target) + l1_ssim_loss(images[1].rgb, target, mask=mask)
        loss.backward()
        adam.step()
        result["stats"].append(torch.mgpu.op_stats())  # type: ignore[attr-defined]
        result["losses"].append(float(loss.detach()))
        if step == 1:
            result["exp_avg"] = {name: moment.cpu().clone() for name, moment in adam.exp_avg.items()}
        result["reports"].append(strategy.post_step(table, adam, step))
    waiting = int((adam.last_step.cpu() < adam.steps).sum())
    adam.flush()
    columns = [column.detach() for column in table.columns()]
    result["waiting"] = waiting
    assert all(bool(column.isfinite().all()) for column in columns)
    result["gradient"] = loss_gradient(target)

    # From here on the table is the same on any mesh, so what follows must be, bit for bit.
    fresh = torch.Generator().manual_seed(1)
    for column in columns:
        column.copy_(torch.randn(column.shape, generator=fresh))
    sampled = native().sample_rows(columns, 0.3, 2_000, 7, 8)
    dead = native().RowList(native().dead_rows(columns, 0.3).tensor()[:2_000], table.num_rows)
    native().relocate(columns, adam.state(), sampled, dead, 0.3, adam.steps)
    result["sampled"], result["dead"] = sampled.tensor(), dead.tensor()
    result["relocated"] = [column.cpu() for column in columns]
    torch.save(result, out)


def loss_gradient(target: torch.Tensor) -> torch.Tensor:
    """Of an image that does not depend on the mesh."""
    rgb = (
        torch.rand(target.shape, generator=torch.Generator().manual_seed(2))
        .to(target.device)
        .requires_grad_(True)
    )
    l1_ssim_loss(rgb, target).backward()
    assert rgb.grad is not None
    return rgb.grad.cpu()


if __name__ == "__main__":
    main(sys.argv[1])
