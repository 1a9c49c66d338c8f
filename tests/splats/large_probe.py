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
from ns_mgpu_splat import Camera, SplatAdam, SplatTable, render, train_step
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


def columns_seen(seen: int) -> dict[str, Tensor]:
    """Twice `seen` rows, in front of the cameras."""
    columns = scenes.random_columns(2 * seen, 24)
    columns["scales"] -= 2.0
    return columns


def table_with_rows_between(rows: int, small: dict[str, Tensor]) -> SplatTable:
    """`small`, half at each end of a table of `rows` rows; those between lie behind the camera."""
    seen = len(small["means"]) // 2
    table = SplatTable(rows, sh_degree=3)
    with torch.no_grad():
        table.means[:, 2] = -10.0
        table.quats[:, 0] = 1.0
        table.scales.fill_(-3.0)
    table.write_rows(0, {name: column[:seen] for name, column in small.items()})
    table.write_rows(rows - seen, {name: column[seen:] for name, column in small.items()})
    return table.requires_grad_(True)


def ends(tensor: Tensor, seen: int) -> Tensor:
    """The first and the last `seen` rows, on the CPU."""
    return torch.cat([tensor.detach()[:seen].cpu(), tensor.detach()[-seen:].cpu()])


def check_that_rows_between_change_nothing(rows: int, seen: int, size: tuple[int, int]) -> None:
    """Train a table of `rows` rows, of which the first and the last `seen` can be seen, beside a table of these alone: the
    same bits come out, and the rows between stay as they are.

    Who blends a tile follows from where its rows are at home, and so does the order in which a row's gradients are summed:
    so on several shards the rows that are seen get the same homes in both tables.
    """
    small = columns_seen(seen)
    tables = [table_with_rows_between(rows, small), scenes.table_of(small)]
    adams = [SplatAdam(table, LRS, opacity_reg=0.01, scale_reg=0.01) for table in tables]
    homes = tables[0].homes
    if len(homes) > 1:
        assert homes[0][1] >= seen
        assert homes[-1][0] <= rows - seen
        tables[1].place([(0, seen), *[(seen, seen)] * (len(homes) - 2), (seen, 2 * seen)], adams[1])
    cameras = [camera(i, *size) for i in range(3)]
    target = photograph(*size)
    for view in cameras:  # the second and third replay what they missed
        losses = [
            train_step(table, adam, view, target).loss for table, adam in zip(tables, adams, strict=True)
        ]
        assert losses[0] == losses[1]
    for adam in adams:
        adam.flush()
    for name, column in tables[1].named_columns().items():
        assert torch.equal(ends(tables[0].named_columns()[name], seen), column.detach().cpu()), name
        assert torch.equal(ends(adams[0].exp_avg[name], seen), adams[1].exp_avg[name].cpu()), name
        assert not torch.equal(column.detach().cpu(), small[name]), f"{name} was not trained"
    some = min(1000, rows // 2 - seen)
    between = tables[0].means.detach()[rows // 2 - some : rows // 2 + some].cpu()
    assert torch.equal(between, torch.tensor([0.0, 0.0, -10.0]).expand(2 * some, 3))
    assert float(adams[0].exp_avg_sq["shN"][seen : seen + some].abs().max()) == 0.0


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
