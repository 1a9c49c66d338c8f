# SPDX-License-Identifier: Apache-2.0
"""Not a test: renders and trains what is large in images on the mesh of MGPU_DEVICES (test_large_gpu.py).

Usage: large_probe.py FOLDER: writes what `wide_view` and `eight_views` return to FOLDER/wide.pt and FOLDER/eight.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import splat_scenes as scenes
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatAdam, render
from ns_mgpu_splat.splats.loss import l1_ssim_loss

WIDE = (12_000, 9_000)
EIGHT = [(640, 480), (801, 600), (33, 700), (1000, 17), (512, 512), (400, 300), (1, 1), (931, 777)]
LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}


def camera(seed: int, width: int, height: int) -> Camera:
    """A little turned and shifted; the focal length follows the longer side."""
    focal = 0.9 * max(width, height)
    return Camera(scenes.random_viewmat(seed), focal, focal, width / 2 + 0.3, height / 2 - 0.7, width, height)


def photograph(width: int, height: int) -> Tensor:
    """A pattern of bytes without a period of the image's, on `mgpu`."""
    rows = torch.arange(height, dtype=torch.int32)[:, None, None] * 7
    columns = torch.arange(width, dtype=torch.int32)[None, :, None] * 13
    return ((rows + columns + torch.arange(3, dtype=torch.int32) * 91) % 251).to(torch.uint8).to("mgpu")


def wide_view() -> dict[str, Any]:
    """One view of 108 million pixels: its image, its loss and the gradients of all columns, on the CPU."""
    columns = scenes.random_columns(30_000, 21)
    columns["scales"] -= 2.5  # some 30 pixels wide
    table = scenes.table_of(columns)
    target = photograph(*WIDE)
    rgb = render(table, camera(1, *WIDE), depth=False)[0].rgb
    loss = l1_ssim_loss(rgb, target)
    loss.backward()
    grads = {name: column.grad.cpu() for name, column in table.named_columns().items()}  # type: ignore[union-attr]
    return {"rgb": rgb.detach().cpu(), "loss": loss.item(), "grads": grads}


def eight_views() -> dict[str, Any]:
    """One step of Adam on eight views of different sizes: images, losses and first moments, on the CPU."""
    table = scenes.table_of(scenes.random_columns(20_000, 22))
    adam = SplatAdam(table, LRS, opacity_reg=0.01, scale_reg=0.01)
    cameras = [camera(i, *size) for i, size in enumerate(EIGHT)]
    images = render(table, cameras, optimizer=adam, depth=False)
    losses = [l1_ssim_loss(image.rgb, photograph(*size)) for image, size in zip(images, EIGHT, strict=True)]
    torch.stack(losses).mean().backward()
    adam.step()
    return {
        "rgb": [image.rgb.detach().cpu() for image in images],
        "losses": [loss.item() for loss in losses],
        "exp_avg": {name: moment.cpu() for name, moment in adam.exp_avg.items()},
        "rows_seen": adam.report["rows_seen"],
    }


if __name__ == "__main__":
    ns_mgpu_splat.init()
    folder = Path(sys.argv[1])
    torch.save(eight_views(), folder / "eight.pt")
    torch.save(wide_view(), folder / "wide.pt")
