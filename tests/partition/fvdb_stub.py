# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the module `fvdb`: signatures of fvdb-core 0.6.0, a dict behind them, and a record of all calls.

Signatures and habits are those of fvdb/grid.py and src/fvdb/detail/ops of github.com/openvdb/fvdb-core: empty tensors are
refused, points that are not finite go to any voxel, halves are rounded up, `neighbor_indexes` has a dimension an axis,
codes keep the last 21 bits of an axis. It is not fVDB: that our calls are taken as meant is all that it can show.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "oracles"))

from twin_order import hilbert_code

__version__ = "0.6.0"
NumericMaxRank1 = Any

calls: list[tuple[str, dict[str, Any]]] = []
"""What was called, in order, with which arguments."""

SIGNATURES = {
    "from_points": "(points: torch.Tensor, voxel_size: NumericMaxRank1 = 1, origin: NumericMaxRank1 = 0)",
    "from_ijk": "(ijk: torch.Tensor, voxel_size: NumericMaxRank1 = 1, origin: NumericMaxRank1 = 0)",
    "from_zero_voxels": "(device: DeviceIdentifier = 'cpu', voxel_size: NumericMaxRank1 = 1, origin: NumericMaxRank1 = 0)",
    "voxel_to_world": "(self, ijk: torch.Tensor)",
    "world_to_voxel": "(self, points: torch.Tensor)",
    "ijk_to_index": "(self, ijk: torch.Tensor, cumulative: bool = False)",
    "points_in_grid": "(self, points: torch.Tensor)",
    "neighbor_indexes": "(self, ijk: torch.Tensor, extent: int, bitshift: int = 0)",
    "coarsened_grid": "(self, coarsening_factor: NumericMaxRank1)",
}
"""Of the methods that we call, as read in fvdb/grid.py."""
PROPERTIES = ("device", "num_voxels", "voxel_size", "origin", "bbox", "ijk", "morton", "hilbert")


def _note(name: str, **arguments: Any) -> None:
    """Record a call; tensors must be where fVDB's ordinary kernels run, detached and of a type they take."""
    for value in arguments.values():
        if isinstance(value, Tensor):
            assert value.device.type in ("cpu", "cuda"), value.device
            assert not value.requires_grad
    calls.append((name, arguments))


def _three(value: Any, kind: type) -> list[Any]:
    numbers = [value] * 3 if isinstance(value, (int, float)) else list(value)
    assert len(numbers) == 3
    assert all(type(x) is kind or (kind is float and type(x) is int) for x in numbers), numbers
    return [kind(x) for x in numbers]


def _rows(tensor: Tensor, integers: bool) -> list[list[float]]:
    assert tensor.dim() == 2
    assert tensor.shape[1] == 3
    assert tensor.dtype in ((torch.int32, torch.int64) if integers else (torch.float32, torch.float64))
    if tensor.shape[0] == 0:
        raise RuntimeError("Empty tensor")
    return tensor.cpu().tolist()


class Grid:
    """See the module's text."""

    def __init__(
        self, voxels: Any, voxel_size: list[float], origin: list[float], device: torch.device
    ) -> None:
        # by blocks of 8 x 8 x 8, as NanoVDB's leaves: not in the order of the built-in grid
        self._voxels = sorted(set(voxels), key=lambda v: ([c >> 3 for c in v], v))
        self._index = {voxel: i for i, voxel in enumerate(self._voxels)}
        self._voxel_size, self._origin, self.device = voxel_size, origin, device

    @classmethod
    def from_points(
        cls, points: Tensor, voxel_size: NumericMaxRank1 = 1, origin: NumericMaxRank1 = 0
    ) -> Grid:
        _note("from_points", points=points, voxel_size=voxel_size, origin=origin)
        grid = cls([], _three(voxel_size, float), _three(origin, float), points.device)
        return cls(map(grid._voxel, _rows(points, False)), grid._voxel_size, grid._origin, points.device)

    @classmethod
    def from_ijk(cls, ijk: Tensor, voxel_size: NumericMaxRank1 = 1, origin: NumericMaxRank1 = 0) -> Grid:
        _note("from_ijk", ijk=ijk, voxel_size=voxel_size, origin=origin)
        voxels = map(tuple, _rows(ijk, True))
        return cls(voxels, _three(voxel_size, float), _three(origin, float), ijk.device)

    @classmethod
    def from_zero_voxels(
        cls, device: Any = "cpu", voxel_size: NumericMaxRank1 = 1, origin: NumericMaxRank1 = 0
    ) -> Grid:
        _note("from_zero_voxels", device=device, voxel_size=voxel_size, origin=origin)
        assert torch.device(device).type in ("cpu", "cuda")
        return cls([], _three(voxel_size, float), _three(origin, float), torch.device(device))

    @property
    def num_voxels(self) -> int:
        return len(self._voxels)

    @property
    def voxel_size(self) -> Tensor:
        return torch.tensor(self._voxel_size, device=self.device)

    @property
    def origin(self) -> Tensor:
        return torch.tensor(self._origin, device=self.device)

    @property
    def bbox(self) -> Tensor:
        corners = np.array(self._voxels or [[0, 0, 0]])
        return torch.tensor(np.stack([corners.min(0), corners.max(0)]), dtype=torch.int32, device=self.device)

    @property
    def ijk(self) -> Tensor:
        return torch.tensor(self._voxels, dtype=torch.int32, device=self.device)

    def _codes(self, curve: Any) -> Tensor:
        least = np.array(self._voxels).min(0)  # raises for a grid without voxels, as fVDB does
        cells = [[int(c - low) & 0x1FFFFF for c, low in zip(v, least, strict=True)] for v in self._voxels]
        return torch.tensor([curve(cell) for cell in cells], dtype=torch.int64, device=self.device)

    @property
    def morton(self) -> Tensor:
        return self._codes(
            lambda cell: sum((cell[a] >> b & 1) << (3 * b + a) for b in range(21) for a in range(3))
        )

    @property
    def hilbert(self) -> Tensor:
        return self._codes(hilbert_code)

    def _voxel(self, point: list[float]) -> tuple[int, ...]:
        if not all(map(math.isfinite, point)):
            return (-(2**31),) * 3
        scaled = zip(point, self._origin, self._voxel_size, strict=True)
        voxel = tuple(math.floor((x - o) / s + 0.5) for x, o, s in scaled)
        return tuple(max(-(2**31), min(v, 2**31 - 1)) for v in voxel)

    def world_to_voxel(self, points: Tensor) -> Tensor:
        _note("world_to_voxel", points=points)
        _rows(points, False)
        return ((points.cpu() - torch.tensor(self._origin)) / torch.tensor(self._voxel_size)).to(points)

    def voxel_to_world(self, ijk: Tensor) -> Tensor:
        _note("voxel_to_world", ijk=ijk)
        _rows(ijk, False)
        return (ijk.cpu() * torch.tensor(self._voxel_size) + torch.tensor(self._origin)).to(ijk)

    def ijk_to_index(self, ijk: Tensor, cumulative: bool = False) -> Tensor:
        _note("ijk_to_index", ijk=ijk, cumulative=cumulative)
        found = [self._index.get(tuple(voxel), -1) for voxel in _rows(ijk, True)]  # type: ignore[arg-type]
        return torch.tensor(found, dtype=torch.int64, device=ijk.device)

    def points_in_grid(self, points: Tensor) -> Tensor:
        _note("points_in_grid", points=points)
        if not self._voxels:
            raise RuntimeError("Empty grid")
        inside = [self._voxel(point) in self._index for point in _rows(points, False)]
        return torch.tensor(inside, device=points.device)

    def neighbor_indexes(self, ijk: Tensor, extent: int, bitshift: int = 0) -> Tensor:
        _note("neighbor_indexes", ijk=ijk, extent=extent, bitshift=bitshift)
        found = []
        for voxel in ijk.cpu().tolist():
            around = itertools.product(
                *(range((c << bitshift) - extent, (c << bitshift) + extent + 1) for c in voxel)
            )
            found.append([self._index.get(place, -1) for place in around])
        assert found
        side = 2 * extent + 1
        out = torch.tensor(found, dtype=torch.int64, device=ijk.device)
        return out.reshape(-1, side, side, side)

    def coarsened_grid(self, coarsening_factor: NumericMaxRank1) -> Grid:
        _note("coarsened_grid", coarsening_factor=coarsening_factor)
        factor = _three(coarsening_factor, int)
        voxels = [tuple(c // f for c, f in zip(voxel, factor, strict=True)) for voxel in self._voxels]
        size = [s * f for s, f in zip(self._voxel_size, factor, strict=True)]
        terms = zip(self._origin, factor, self._voxel_size, strict=True)
        return Grid(voxels, size, [o + (f - 1) / 2 * s for o, f, s in terms], self.device)
