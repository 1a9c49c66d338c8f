# SPDX-License-Identifier: Apache-2.0
"""The town of `mgpu-splat-city --splats N` written straight into a table's memory: hundreds of millions of rows in seconds.

Means, quaternions, scales and opacities are those of data/city/splats.py, row by row; colours are the surfaces' own under
one sun, without textures and shadows, which cost seconds a million; higher SH bands are noise of 0.02.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fast_step import SH_C0, hashed
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "partition"))
from city_scene import city_cameras

GOLDEN = (0.7548776662466927, 0.5698402909980532)  # of the R2 sequence, as in data/city/splats.py
STRIDE = 0.6180339887498949  # of all rows, from one row of an unsorted table to the next
CHUNK = 1 << 19  # rows at a time: 300 MB of temporaries
SUN = (0.35, 0.25, 0.9)
SH_NOISE = 0.02  # sigma


def plain(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor of torch's, on the first shard."""
    mgpu = vars(torch)["mgpu"]
    on_gpus = mgpu.mesh().shards[0].startswith("cuda")
    return mgpu.as_cuda(tensor.detach()) if on_gpus else mgpu.as_host(tensor.detach())


def coprime_stride(rows: int) -> int:
    """A number near the golden section of `rows` that has no factor in common with it."""
    stride = max(1, round(rows * STRIDE))
    while np.gcd(stride, rows) != 1:
        stride += 1
    return stride


def places(first: int, last: int, rows: int, order: str, device: torch.device) -> Tensor:
    """Which place of the town's sequence rows [first, last) of a table come from: always a permutation.

    order: "town": their own; "unsorted": anywhere.
    """
    row = torch.arange(first, last, device=device)
    return (row * coprime_stride(rows)).remainder_(rows) if order == "unsorted" else row


class TownScene:
    """A town with `rows` Gaussians on it, in the order of its blocks or in none; host arrays until `fill` is called."""

    def __init__(self, blocks: int, rows: int) -> None:
        from ns_mgpu_splat.data.city.splats import FLATNESS, SplatSampler
        from ns_mgpu_splat.data.city.town import build_town

        self.town, self.rows, self.flatness = build_town(blocks), rows, FLATNESS
        self.tables = SplatSampler(self.town, rows).tables()
        color = self.town.color[self.town.surface] * 0.9 + 0.05
        sun = np.array(SUN) / np.linalg.norm(SUN)
        lit = 0.45 + 0.55 * np.clip(self.tables["facets"] @ sun, 0, 1)
        self.color = np.clip(color * lit[:, None], 0, 1) ** (1 / 2.2)

    def cameras(self, images: int, width: int, height: int) -> dict[str, list[Any]]:
        """Half of them from the air, half in the streets, spread over the town in no order."""
        found = city_cameras(self.town, max(images, 512), width, height)
        out = {}
        for kind, cameras in found.items():
            order = torch.randperm(len(cameras), generator=torch.Generator().manual_seed(5)).tolist()
            out[kind] = [cameras[i] for i in order[: images // 2]]
        return out

    @torch.no_grad()
    def fill(self, table: Any, order: str = "town") -> None:
        """Write all rows of `table` (of `rows` rows, any SH degree), some hundred thousand at a time.

        order: as in `places`; the same set of rows in any.
        """
        columns = {name: plain(column) for name, column in table.named_columns().items()}
        device = columns["means"].device
        on_device = {
            name: torch.from_numpy(np.ascontiguousarray(t)).to(device) for name, t in self.tables.items()
        }
        on_device["color"] = torch.from_numpy(self.color).float().to(device)
        for first in range(0, self.rows, CHUNK):
            last = min(self.rows, first + CHUNK)
            place = places(first, last, self.rows, order, device)
            for name, values in self._of(place, on_device, columns["shN"].shape[1]).items():
                columns[name][first:last].copy_(values)
        table.cells.forget()
        vars(torch)["mgpu"].synchronize()  # other GPUs wait for the first one
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _of(self, place: Tensor, tables: dict[str, Tensor], bands: int) -> dict[str, Tensor]:
        """Columns of the rows at these places of the sequence."""
        upper, shift = tables["upper"], self.tables["shift"]
        at = (place.double() + float(shift[0])) * (float(self.tables["upper"][-1]) / self.rows)
        triangle = torch.searchsorted(upper, at, right=True).clamp_(max=len(upper) - 1)
        a = (place.double() * GOLDEN[0] + float(shift[1])).remainder_(1.0)
        b = (place.double() * GOLDEN[1] + float(shift[2])).remainder_(1.0)
        fold = a + b > 1
        a, b = (torch.where(fold, 1 - x, x).float()[:, None] for x in (a, b))
        corners, normal = tables["corners"][triangle], tables["facets"][triangle].float()
        origin = corners[:, 0]
        means = origin + (corners[:, 1] - origin) * a + (corners[:, 2] - origin) * b
        quats = torch.stack(
            [1 + normal[:, 2], -normal[:, 1], normal[:, 0], torch.zeros_like(normal[:, 0])], 1
        )
        quats[normal[:, 2] < -0.99999] = torch.tensor([0.0, 1.0, 0.0, 0.0], device=place.device)
        radius = float(np.log(self.tables["radius"][0])) - 0.5 * tables["density"][triangle].log()
        scales = radius.float()[:, None].repeat(1, 3)
        scales[:, 2] += float(np.log(self.flatness))
        color = tables["color"][triangle] + 0.1 * (hashed(place, 1)[:, None] - 0.5)
        bits = place[:, None] * max(1, 3 * bands) + torch.arange(3 * bands, device=place.device)
        noise = hashed(bits, 2).sub_(0.5).mul_(SH_NOISE * 12**0.5)
        return {
            "means": means,
            "quats": quats / quats.norm(dim=1, keepdim=True),
            "scales": scales,
            "opacities": torch.full_like(scales[:, 0], 2.9444390),  # logit of 0.95
            "sh0": (color - 0.5) / SH_C0,
            "shN": noise.view(len(place), bands, 3),
        }
