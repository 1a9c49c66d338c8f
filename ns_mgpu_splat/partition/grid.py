# SPDX-License-Identifier: Apache-2.0
"""SparseGrid: which voxels hold points, with the names and meanings of `fvdb.Grid` (fvdb-core 0.5 and 0.6).

Where fvdb imports, a SparseGrid is fVDB's grid (fvdb_grid.py); elsewhere a built-in one (sorted_grid.py) with the same
voxels, neighbours and round trips. The order of the index may differ between the two.
"""

from __future__ import annotations

import abc
import functools
import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from types import ModuleType

CHUNK = 1 << 20  # points at a time: bounds what is alive beside a grid and its points
Provider = Literal["auto", "fvdb", "built-in"]
Vector = float | Sequence[float] | Tensor


class SparseGrid(abc.ABC):
    """The voxels that hold at least one point of a cloud; immutable. Make one with `from_points` or `from_ijk`.

    Voxel (i, j, k) is centred on `origin + voxel_size * (i, j, k)`; a point's voxel is `world_to_voxel(point).round()`.
    Tensors come back on the device of the points. Index space counts the voxels from 0 to `num_voxels - 1`.
    """

    provider: str
    """What stands behind the grid: "fvdb" or "built-in"."""

    # ---- making one

    @classmethod
    def from_points(
        cls, points: Tensor, voxel_size: Vector = 1.0, origin: Vector = 0.0, *, provider: Provider = "auto"
    ) -> SparseGrid:
        """The voxels that points lie in.

        Args:
            points: (N, 3) floating point, world, on `mgpu`, the CPU or CUDA; N may be 0. Read without a copy of N rows.
            voxel_size: world units, above 0; one number, or one for each axis.
            origin: world; the centre of voxel (0, 0, 0).
            provider: "auto": fvdb if it imports.
        Raises: ValueError for another shape, a point that is not finite (with its row), a voxel size that is not above 0,
            or voxels beyond 32 bits or, in the built-in grid, more cells in their box than 2^63; ImportError for
            provider="fvdb" where it does not import.
        """
        check_points(points)
        size, centre = vector(voxel_size, "voxel_size"), vector(origin, "origin")
        check_voxel_size(size)
        return cls._provider(provider)._from_points(points.detach(), size, centre)

    @classmethod
    def from_ijk(
        cls, ijk: Tensor, voxel_size: Vector = 1.0, origin: Vector = 0.0, *, provider: Provider = "auto"
    ) -> SparseGrid:
        """These voxels, each once. ijk: (N, 3), integers of at most 32 bits. The rest as in `from_points`."""
        check_ijk(ijk)
        size, centre = vector(voxel_size, "voxel_size"), vector(origin, "origin")
        check_voxel_size(size)
        return cls._provider(provider)._from_ijk(ijk, size, centre)

    @staticmethod
    def _provider(provider: Provider) -> type[SparseGrid]:
        from ns_mgpu_splat.partition.fvdb_grid import FvdbGrid
        from ns_mgpu_splat.partition.sorted_grid import SortedGrid

        if provider not in ("auto", "fvdb", "built-in"):
            raise ValueError(f"provider is {provider!r}, expected 'auto', 'fvdb' or 'built-in'.")
        if provider == "built-in":
            return SortedGrid
        if fvdb_module() is None:
            if provider == "fvdb":
                raise ImportError(f"fvdb {why_no_fvdb()}; docs/install.md says how to get it.")
            return SortedGrid
        return FvdbGrid

    @classmethod
    @abc.abstractmethod
    def _from_points(cls, points: Tensor, voxel_size: list[float], origin: list[float]) -> SparseGrid:
        """As `from_points`, checked but for values."""

    @classmethod
    @abc.abstractmethod
    def _from_ijk(cls, ijk: Tensor, voxel_size: list[float], origin: list[float]) -> SparseGrid:
        """As `from_ijk`, checked."""

    # ---- looking at it

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    @abc.abstractmethod
    def num_voxels(self) -> int:
        """How many voxels are active."""

    @property
    @abc.abstractmethod
    def voxel_size(self) -> Tensor:
        """(3,), world units."""

    @property
    @abc.abstractmethod
    def origin(self) -> Tensor:
        """(3,), world: the centre of voxel (0, 0, 0)."""

    @property
    @abc.abstractmethod
    def bbox(self) -> Tensor:
        """(2, 3) int32: least and greatest voxel; zeros for a grid without voxels."""

    @property
    @abc.abstractmethod
    def ijk(self) -> Tensor:
        """(num_voxels, 3) int32, in index order."""

    @property
    @abc.abstractmethod
    def morton(self) -> Tensor:
        """(num_voxels,) int64: codes along the Morton curve from the least corner on. ValueError beyond 21 bits an axis."""

    @property
    @abc.abstractmethod
    def hilbert(self) -> Tensor:
        """(num_voxels,) int64: codes along the Hilbert curve from the least corner on. ValueError beyond 21 bits an axis."""

    # ---- asking it

    @abc.abstractmethod
    def world_to_voxel(self, points: Tensor) -> Tensor:
        """(N, 3) of points (N, 3): voxel coordinates with fractions, in the points' type."""

    @abc.abstractmethod
    def voxel_to_world(self, ijk: Tensor) -> Tensor:
        """(N, 3) of voxel coordinates (N, 3), which may have fractions: world."""

    @abc.abstractmethod
    def ijk_to_index(self, ijk: Tensor, cumulative: bool = False) -> Tensor:
        """(N,) int64 of voxels (N, 3), integers: their index, -1 if inactive. cumulative: the same for a single grid."""

    @abc.abstractmethod
    def points_in_grid(self, points: Tensor) -> Tensor:
        """(N,) bool: whether each point (N, 3) lies in an active voxel; False for points that are not finite."""

    @abc.abstractmethod
    def neighbor_indexes(self, ijk: Tensor, extent: int, bitshift: int = 0) -> Tensor:
        """(N, (2 extent + 1)^3) int64: the index of every voxel around `ijk << bitshift`, -1 if inactive.

        Ordered by i, then j, then k, each from -extent to extent; the voxel itself is in the middle.
        """

    @abc.abstractmethod
    def coarsened_grid(self, coarsening_factor: int | Sequence[int] | Tensor) -> SparseGrid:
        """The voxels `floor(ijk / factor)`, each centred in the block that it stands for. factor: whole, above 0."""

    def __repr__(self) -> str:
        size = ", ".join(f"{x:g}" for x in self.voxel_size.tolist())
        return f"SparseGrid({self.num_voxels:,} voxels of ({size}), {self.provider}, {self.device})"


def voxel_counts(grid: SparseGrid, points: Tensor) -> Tensor:
    """(num_voxels,) int64: how many of the points (N, 3) lie in each active voxel; others do not count."""
    check_points(points)
    counts = torch.zeros(grid.num_voxels, dtype=torch.int64, device=points.device)
    if grid.num_voxels == 0:
        return counts
    for piece in points.detach().split(CHUNK):
        within = piece[grid.points_in_grid(piece)]
        index = grid.ijk_to_index(grid.world_to_voxel(within).round().to(torch.int32))
        counts += torch.bincount(index[index >= 0], minlength=grid.num_voxels)
    return counts


# ---- fvdb


@functools.cache
def _import_fvdb() -> tuple[ModuleType | None, str]:
    """fvdb, or why it is not there."""
    try:
        module = importlib.import_module("fvdb")
    except ModuleNotFoundError as error:
        if error.name == "fvdb":
            return None, "is not installed"
        return None, f"does not import ({error})"
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch, or without its libraries
        return None, f"does not import ({(str(error).splitlines() or [type(error).__name__])[0]})"
    if not hasattr(module, "Grid"):
        return None, "is older than 0.5"
    return module, ""


def fvdb_module() -> ModuleType | None:
    """The module `fvdb`, if it imports and has `Grid`."""
    return _import_fvdb()[0]


def why_no_fvdb() -> str:
    """How the sentence "fvdb ..." goes on where `fvdb_module()` is None."""
    return _import_fvdb()[1]


def grid_in_use() -> str:
    """For people: `fvdb 0.6.0`, or `built-in (fvdb is not installed)`."""
    module = fvdb_module()
    if module is None:
        return f"built-in (fvdb {why_no_fvdb()})"
    return f"fvdb {getattr(module, '__version__', '')}".strip()


# ---- checks that both kinds share


def vector(value: Vector, name: str) -> list[float]:
    """Three floats from one number or three. Raises ValueError naming the argument."""
    numbers = value.detach().cpu().tolist() if isinstance(value, Tensor) else value
    try:
        if isinstance(numbers, (int, float)):
            out = [float(numbers)] * 3
        else:
            out = [float(x) for x in numbers]
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, expected one number or three.") from None
    if len(out) == 1:
        out *= 3
    if len(out) != 3 or not all(math.isfinite(x) for x in out):
        raise ValueError(f"{name} is {numbers}, expected one finite number or three.")
    return out


def check_voxel_size(size: list[float]) -> None:
    """Raise ValueError unless all sides are above 0."""
    if min(size) <= 0:
        raise ValueError(f"voxel_size is {size}, expected sides above 0.")


def check_points(points: Tensor) -> None:
    """Raise ValueError unless points is floating point, (N, 3)."""
    if points.dim() != 2 or points.shape[1] != 3 or not points.dtype.is_floating_point:
        raise ValueError(
            f"points is {points.dtype} {list(points.shape)}, expected floating point [N, 3] in world units."
        )


def check_ijk(ijk: Tensor) -> None:
    """Raise ValueError unless ijk holds integers, (N, 3)."""
    whole = not (ijk.dtype.is_floating_point or ijk.dtype.is_complex or ijk.dtype == torch.bool)
    if ijk.dim() != 2 or ijk.shape[1] != 3 or not whole:
        raise ValueError(f"ijk is {ijk.dtype} {list(ijk.shape)}, expected integers [N, 3].")


def check_neighbourhood(extent: int, bitshift: int) -> None:
    """Raise ValueError for a negative extent or shift."""
    if int(extent) != extent or extent < 0 or int(bitshift) != bitshift or not 0 <= bitshift < 32:
        raise ValueError(
            f"extent is {extent} and bitshift {bitshift}, expected whole numbers, 0 or more (bitshift below 32)."
        )


def factor_of(coarsening_factor: int | Sequence[int] | Tensor) -> list[int]:
    """Three whole numbers above 0."""
    factor = vector(coarsening_factor, "coarsening_factor")
    if any(x < 1 or x != int(x) for x in factor):
        raise ValueError(f"coarsening_factor is {factor}, expected whole numbers above 0.")
    return [int(x) for x in factor]


def not_finite(row: int) -> ValueError:
    """The error for a point that no voxel holds."""
    return ValueError(
        f"points has a value that is not finite in row {row:,}. Leave such rows out: points[points.isfinite().all(1)]."
    )


def too_far() -> ValueError:
    """The error for voxels beyond int32."""
    return ValueError(
        "voxels are counted in 32 bits, and some points lie further than 2^31 voxels from the origin. Use a larger "
        "voxel_size, an origin among the points, or leave far points out."
    )
