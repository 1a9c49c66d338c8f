# SPDX-License-Identifier: Apache-2.0
"""The built-in grid: voxels as sorted 64-bit keys, in torch operators; for tensors on `mgpu`, the CPU or CUDA.

A key counts the cells of the voxels' bounding box, i slowest: any extent goes, as long as the box has fewer cells than
2^63. Points are read in chunks, so that beside the keys only a chunk's temporaries are alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ns_mgpu_splat.partition.curves import codes_of
from ns_mgpu_splat.partition.grid import (
    CHUNK,
    SparseGrid,
    check_ijk,
    check_neighbourhood,
    check_points,
    factor_of,
    not_finite,
    too_far,
)

MOST = 2**31 - 1
NO_POINT = ([0, 0, 0], [-1, -1, -1])


class SortedGrid(SparseGrid):
    """See the module's text; made by `SparseGrid.from_points`."""

    provider = "built-in"

    def __init__(
        self, keys: Tensor, low: list[int], high: list[int], voxel_size: list[float], origin: list[float]
    ) -> None:
        """keys: (V,) int64, ascending, each once; low and high: least and greatest voxel of the box that keys count."""
        self._keys, self._low, self._high = keys, low, high
        self._size = [high[axis] - low[axis] + 1 for axis in range(3)]
        self._voxel_size, self._origin = voxel_size, origin

    @classmethod
    def _from_points(cls, points: Tensor, voxel_size: list[float], origin: list[float]) -> SortedGrid:
        def pieces() -> Iterator[Tensor]:
            for piece in points.split(CHUNK):
                yield _world_to_voxel(piece, voxel_size, origin).round()

        low, high = NO_POINT
        row = 0
        for piece in pieces():
            if piece.shape[0] == 0:
                continue
            least, most = torch.stack([piece.amin(0), piece.amax(0)]).double().cpu().tolist()
            if not all(abs(x) <= MOST for x in (*least, *most)):  # false for NaN, too
                wrong = (~points[row : row + CHUNK].isfinite()).any(1).nonzero()
                raise not_finite(row + int(wrong[0])) if len(wrong) else too_far()
            low, high = _union((low, high), ([int(x) for x in least], [int(x) for x in most]))
            row += piece.shape[0]
        return cls._from_pieces((p.to(torch.int64) for p in pieces()), points, low, high, voxel_size, origin)

    @classmethod
    def _from_ijk(cls, ijk: Tensor, voxel_size: list[float], origin: list[float]) -> SortedGrid:
        low, high = NO_POINT
        if ijk.shape[0]:
            low, high = ijk.amin(0).tolist(), ijk.amax(0).tolist()
            if min(low) < -MOST - 1 or max(high) > MOST:
                raise too_far()
        pieces = (piece.to(torch.int64) for piece in ijk.split(CHUNK))
        return cls._from_pieces(pieces, ijk, low, high, voxel_size, origin)

    @classmethod
    def _from_pieces(
        cls,
        pieces: Iterator[Tensor],
        like: Tensor,
        low: list[int],
        high: list[int],
        voxel_size: list[float],
        origin: list[float],
    ) -> SortedGrid:
        """Of the voxels (N, 3) int64 in all pieces, which lie between low and high."""
        grid = cls(
            torch.empty(0, dtype=torch.int64, device=like.device), low, high, list(voxel_size), list(origin)
        )
        cells = grid._size[0] * grid._size[1] * grid._size[2]
        if cells >= 2**63:
            spans = " x ".join(f"{size:,}" for size in grid._size)
            raise ValueError(
                f"The voxels span {spans}, more than the 2^63 cells that the built-in grid can count. Use a larger voxel_size, "
                "or leave far points out."
            )
        waiting: list[Tensor] = []
        for piece in pieces:
            waiting.append(grid._key(piece).unique())
            if sum(map(len, waiting)) > 2 * len(grid._keys) + CHUNK:
                grid._keys, waiting = torch.cat([grid._keys, *waiting]).unique(), []
        if waiting:
            grid._keys = torch.cat([grid._keys, *waiting]).unique()
        return grid

    def _key(self, ijk: Tensor) -> Tensor:
        """(N,) of voxels (N, 3) int64 in the box."""
        i, j, k = ijk.unbind(1)
        low, size = self._low, self._size
        return ((i - low[0]) * size[1] + (j - low[1])) * size[2] + (k - low[2])

    # ---- looking at it

    @property
    def device(self) -> torch.device:
        return self._keys.device

    @property
    def num_voxels(self) -> int:
        return len(self._keys)

    @property
    def voxel_size(self) -> Tensor:
        return torch.tensor(self._voxel_size, dtype=torch.float64, device=self.device)

    @property
    def origin(self) -> Tensor:
        return torch.tensor(self._origin, dtype=torch.float64, device=self.device)

    @property
    def bbox(self) -> Tensor:
        corners = [self._low, self._high] if self.num_voxels else [[0] * 3, [0] * 3]
        return torch.tensor(corners, dtype=torch.int32, device=self.device)

    @property
    def ijk(self) -> Tensor:
        out = torch.empty((self.num_voxels, 3), dtype=torch.int32, device=self.device)
        for keys, voxels in zip(self._keys.split(CHUNK), out.split(CHUNK), strict=True):
            rest = keys
            for axis in (2, 1, 0):
                voxels[:, axis] = rest % self._size[axis] + self._low[axis]
                rest = rest // self._size[axis]
        return out

    @property
    def morton(self) -> Tensor:
        return codes_of(self.ijk, "morton")

    @property
    def hilbert(self) -> Tensor:
        return codes_of(self.ijk, "hilbert")

    # ---- asking it

    def world_to_voxel(self, points: Tensor) -> Tensor:
        check_points(points)
        return _world_to_voxel(points, self._voxel_size, self._origin)

    def voxel_to_world(self, ijk: Tensor) -> Tensor:
        dtype = ijk.dtype if ijk.dtype.is_floating_point else torch.float32
        scale, shift = (
            torch.tensor(v, dtype=torch.float64, device=ijk.device) for v in (self._voxel_size, self._origin)
        )
        return (ijk.double() * scale + shift).to(dtype)

    def ijk_to_index(self, ijk: Tensor, cumulative: bool = False) -> Tensor:
        check_ijk(ijk)
        out = torch.empty(ijk.shape[0], dtype=torch.int64, device=ijk.device)
        for voxels, index in zip(ijk.split(CHUNK), out.split(CHUNK), strict=True):
            index.copy_(self._find(voxels.to(torch.int64)))
        return out

    def _find(self, voxels: Tensor) -> Tensor:
        """As `ijk_to_index`, for int64."""
        if self.num_voxels == 0:
            return torch.full((voxels.shape[0],), -1, dtype=torch.int64, device=voxels.device)
        low, high = (
            torch.tensor(c, dtype=torch.int64, device=voxels.device) for c in (self._low, self._high)
        )
        inside = ((voxels >= low) & (voxels <= high)).all(1)
        key = self._key(torch.minimum(torch.maximum(voxels, low), high))
        place = torch.searchsorted(self._keys, key).clamp(max=self.num_voxels - 1)
        return torch.where(inside & (self._keys[place] == key), place, -1)

    def points_in_grid(self, points: Tensor) -> Tensor:
        check_points(points)
        out = torch.empty(points.shape[0], dtype=torch.bool, device=points.device)
        for piece, mask in zip(points.detach().split(CHUNK), out.split(CHUNK), strict=True):
            voxels = _world_to_voxel(piece, self._voxel_size, self._origin).round()
            near = (voxels.abs() <= MOST).all(1)  # false for NaN
            index = self._find(torch.where(near[:, None], voxels, 0).to(torch.int64))
            mask.copy_(near & (index >= 0))
        return out

    def neighbor_indexes(self, ijk: Tensor, extent: int, bitshift: int = 0) -> Tensor:
        check_ijk(ijk)
        check_neighbourhood(extent, bitshift)
        reach = torch.arange(-extent, extent + 1, device=ijk.device)
        offsets = torch.cartesian_prod(reach, reach, reach)
        out = torch.empty((ijk.shape[0], len(offsets)), dtype=torch.int64, device=ijk.device)
        rows = max(1, CHUNK // len(offsets))
        for voxels, index in zip(ijk.split(rows), out.split(rows), strict=True):
            around = (voxels.to(torch.int64) << bitshift)[:, None] + offsets
            index.copy_(self._find(around.reshape(-1, 3)).reshape(index.shape))
        return out

    def coarsened_grid(self, coarsening_factor: int | Sequence[int] | Tensor) -> SortedGrid:
        factor = factor_of(coarsening_factor)
        by = torch.tensor(factor, dtype=torch.int32, device=self.device)
        ijk = torch.div(self.ijk, by, rounding_mode="floor")
        size = [self._voxel_size[axis] * factor[axis] for axis in range(3)]
        origin = [self._origin[axis] + (factor[axis] - 1) / 2 * self._voxel_size[axis] for axis in range(3)]
        return self._from_ijk(ijk, size, origin)


def _world_to_voxel(points: Tensor, voxel_size: list[float], origin: list[float]) -> Tensor:
    """In doubles, then in the points' type."""
    scale, shift = (torch.tensor(v, dtype=torch.float64, device=points.device) for v in (voxel_size, origin))
    return ((points.double() - shift) / scale).to(points.dtype)


def _union(a: tuple[list[int], list[int]], b: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """The box around two boxes, of which the first may hold nothing."""
    if a[0][0] > a[1][0]:
        return b
    return [min(*pair) for pair in zip(a[0], b[0], strict=True)], [
        max(*pair) for pair in zip(a[1], b[1], strict=True)
    ]
