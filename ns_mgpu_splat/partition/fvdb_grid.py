# SPDX-License-Identifier: Apache-2.0
"""SparseGrid on `fvdb.Grid`, through zero-copy aliases of `mgpu` tensors (CUDA ones; CPU ones in the host flavour).

Signatures are those of fvdb/grid.py of fvdb-core 0.5.1 and 0.6.0, which a recording stub checks in the tests; fvdb-core
itself has not been run with this: its wheels are built for one torch and one CUDA each, and none was at hand.

What fVDB leaves to its callers is done here: it refuses empty tensors, converts what is not finite to any voxel, and
wraps codes beyond 21 bits an axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ns_mgpu_splat.partition.curves import CURVE_BITS
from ns_mgpu_splat.partition.grid import (
    CHUNK,
    SparseGrid,
    check_ijk,
    check_neighbourhood,
    check_points,
    factor_of,
    fvdb_module,
    not_finite,
    too_far,
)


class FvdbGrid(SparseGrid):
    """See the module's text; made by `SparseGrid.from_points`."""

    provider = "fvdb"

    def __init__(self, grid: Any, device: torch.device) -> None:
        """grid: a fvdb.Grid on the device behind `device`, which is that of the points."""
        self.grid = grid
        """The fvdb.Grid itself, for whatever else fVDB can do with it."""
        self._device = device

    @classmethod
    def _from_points(cls, points: Tensor, voxel_size: list[float], origin: list[float]) -> FvdbGrid:
        if points.shape[0] == 0:
            return cls._empty(points.device, voxel_size, origin)
        scale, shift = (
            torch.tensor(v, dtype=torch.float64, device=points.device) for v in (voxel_size, origin)
        )
        for first in range(0, points.shape[0], CHUNK):
            piece = points[first : first + CHUNK]
            far = ((piece.double() - shift) / scale).abs().amax()
            if not bool(far < 2**31):
                wrong = (~piece.isfinite()).any(1).nonzero()
                raise not_finite(first + int(wrong[0])) if len(wrong) else too_far()
        grid = _fvdb().Grid.from_points(_alias(points), voxel_size=voxel_size, origin=origin)
        return cls(grid, points.device)

    @classmethod
    def _from_ijk(cls, ijk: Tensor, voxel_size: list[float], origin: list[float]) -> FvdbGrid:
        if ijk.shape[0] == 0:
            return cls._empty(ijk.device, voxel_size, origin)
        voxels = _alias(_int32(ijk))
        return cls(_fvdb().Grid.from_ijk(voxels, voxel_size=voxel_size, origin=origin), ijk.device)

    @classmethod
    def _empty(cls, device: torch.device, voxel_size: list[float], origin: list[float]) -> FvdbGrid:
        behind = _alias(torch.empty((1, 3), device=device)).device
        grid = _fvdb().Grid.from_zero_voxels(device=behind, voxel_size=voxel_size, origin=origin)
        return cls(grid, device)

    # ---- looking at it

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def num_voxels(self) -> int:
        return int(self.grid.num_voxels)

    @property
    def voxel_size(self) -> Tensor:
        return self._back(self.grid.voxel_size)

    @property
    def origin(self) -> Tensor:
        return self._back(self.grid.origin)

    @property
    def bbox(self) -> Tensor:
        return self._back(self.grid.bbox)

    @property
    def ijk(self) -> Tensor:
        if self.num_voxels == 0:
            return torch.empty((0, 3), dtype=torch.int32, device=self._device)
        return self._back(self.grid.ijk)

    @property
    def morton(self) -> Tensor:
        self._check_codes("morton")
        return self._none() if self.num_voxels == 0 else self._back(self.grid.morton)

    @property
    def hilbert(self) -> Tensor:
        self._check_codes("hilbert")
        return self._none() if self.num_voxels == 0 else self._back(self.grid.hilbert)

    def _none(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self._device)

    def _check_codes(self, curve: str) -> None:
        low, high = self.bbox.tolist()
        span = max(b - a for a, b in zip(low, high, strict=True)) + 1
        if span > 1 << CURVE_BITS:
            raise ValueError(
                f"{curve} codes have 21 bits an axis, and the voxels span {span:,} along one. Use a larger voxel_size, or "
                "leave far points out."
            )

    # ---- asking it

    def world_to_voxel(self, points: Tensor) -> Tensor:
        check_points(points)
        if points.shape[0] == 0:
            return torch.empty_like(points)
        return self._back(self.grid.world_to_voxel(_alias(points.detach())))

    def voxel_to_world(self, ijk: Tensor) -> Tensor:
        floats = ijk.detach() if ijk.dtype.is_floating_point else ijk.to(torch.float32)
        if ijk.shape[0] == 0:
            return torch.empty_like(floats)
        return self._back(self.grid.voxel_to_world(_alias(floats)))

    def ijk_to_index(self, ijk: Tensor, cumulative: bool = False) -> Tensor:
        check_ijk(ijk)
        if ijk.shape[0] == 0 or self.num_voxels == 0:
            return torch.full((ijk.shape[0],), -1, dtype=torch.int64, device=ijk.device)
        wide = ijk.to(torch.int64)
        fits = ((wide >= -(2**31)) & (wide < 2**31)).all(1)
        voxels = torch.where(fits[:, None], wide, 0).to(torch.int32)
        index = self._back(self.grid.ijk_to_index(_alias(voxels), cumulative=cumulative))
        return torch.where(fits, index.to(torch.int64), -1)

    def points_in_grid(self, points: Tensor) -> Tensor:
        check_points(points)
        if points.shape[0] == 0 or self.num_voxels == 0:
            return torch.zeros(points.shape[0], dtype=torch.bool, device=points.device)
        inside = self._back(self.grid.points_in_grid(_alias(points.detach())))
        return inside & points.detach().isfinite().all(1)

    def neighbor_indexes(self, ijk: Tensor, extent: int, bitshift: int = 0) -> Tensor:
        check_ijk(ijk)
        check_neighbourhood(extent, bitshift)
        rows, count = ijk.shape[0], (2 * extent + 1) ** 3
        if rows == 0 or self.num_voxels == 0:
            return torch.full((rows, count), -1, dtype=torch.int64, device=ijk.device)
        found = self.grid.neighbor_indexes(_alias(_int32(ijk)), extent, bitshift=bitshift)
        return self._back(found.reshape(rows, count).to(torch.int64))  # 0.6.0 gives [N, K, K, K]

    def coarsened_grid(self, coarsening_factor: int | Sequence[int] | Tensor) -> FvdbGrid:
        factor = factor_of(coarsening_factor)
        if self.num_voxels == 0:
            size, origin = self.voxel_size.tolist(), self.origin.tolist()
            centre = [o + (f - 1) / 2 * s for o, f, s in zip(origin, factor, size, strict=True)]
            return self._empty(self._device, [f * s for f, s in zip(factor, size, strict=True)], centre)
        return type(self)(self.grid.coarsened_grid(factor), self._device)

    def _back(self, tensor: Tensor) -> Tensor:
        """A tensor of fVDB's on the device of the points; no copy."""
        if self._device.type != "mgpu" or tensor.device.type == "mgpu":
            return tensor
        if tensor.device.type == "cuda":
            return torch.mgpu.from_cuda(tensor)  # type: ignore[attr-defined]
        return torch.mgpu.from_host(tensor)  # type: ignore[attr-defined]


def _fvdb() -> Any:
    module = fvdb_module()
    assert module is not None
    return module


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as fVDB's kernels take it."""
    if tensor.device.type != "mgpu":
        return tensor
    if torch.mgpu.mesh().shards[0].startswith("cpu"):  # type: ignore[attr-defined]
        return torch.mgpu.as_host(tensor)  # type: ignore[attr-defined]
    return torch.mgpu.as_cuda(tensor)  # type: ignore[attr-defined]


def _int32(ijk: Tensor) -> Tensor:
    """As fVDB stores voxels. Raises ValueError if one does not fit."""
    if ijk.dtype == torch.int32:
        return ijk
    if ijk.numel() and (int(ijk.amin()) < -(2**31) or int(ijk.amax()) >= 2**31):
        raise too_far()
    return ijk.to(torch.int32)
