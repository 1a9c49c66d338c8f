# SPDX-License-Identifier: Apache-2.0
"""The splat table: the columns of all Gaussians, as parameters on `mgpu` that grow in place."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats import ply, seed
from ns_mgpu_splat.splats.arguments import whole_number

if TYPE_CHECKING:
    import numpy as np

    from ns_mgpu_splat.splats.optimizer import SplatAdam

COLUMNS = ("means", "quats", "scales", "opacities", "sh0", "shN")
"""Names of the columns, in the order that all operators use."""

HALF_MAX = 65504.0  # the largest float16
COPY_ROWS = 1 << 18  # rows that go between host and table at a time
COUNT_ROWS = 1 << 22  # rows that are looked at at a time


def column_shapes(rows: int, sh_degree: int) -> dict[str, tuple[int, ...]]:
    """Shape of each column of a table with `rows` rows."""
    return {
        "means": (rows, 3),
        "quats": (rows, 4),
        "scales": (rows, 3),
        "opacities": (rows,),
        "sh0": (rows, 3),
        "shN": (rows, (sh_degree + 1) ** 2 - 1, 3),
    }


def check_degree(sh_degree: int) -> None:
    """Raise ValueError if spherical harmonics of this degree are not supported."""
    if sh_degree not in (0, 1, 2, 3):
        raise ValueError(
            f"sh_degree is {sh_degree}; spherical harmonics of degree 0, 1, 2 or 3 are supported."
        )


def reserve(shape: tuple[int, ...], capacity: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A zero tensor on `mgpu` whose first dimension can grow to `capacity` in place."""
    return torch.mgpu.reserve(shape, max(capacity, shape[0], 1), dtype)  # type: ignore[attr-defined]


class SplatTable:
    """N Gaussians as six `nn.Parameter` columns on `mgpu`, float32 (`shN` of a half table: float16), one row each.

    `means` (N, 3) in world units; `quats` (N, 4) wxyz, normalised when used; `scales` (N, 3), logs of world units;
    `opacities` (N,), logits; `sh0` (N, 3) and `shN` (N, K, 3), spherical harmonics in 3DGS order, K = 0, 3, 8 or 15.
    Make one with `from_points`, `from_ply` or `from_columns`. N may be 0.
    """

    means: nn.Parameter
    quats: nn.Parameter
    scales: nn.Parameter
    opacities: nn.Parameter
    sh0: nn.Parameter
    shN: nn.Parameter

    cells: Any
    """Boxes of runs of rows, by which renders find the rows that a camera may see (cuda/splat/cells.h). Kept by all that
    this package does. Who writes columns behind autograd's back (`table.means.data[...] = ...`) calls `cells.forget()`."""

    def __init__(
        self, num_rows: int, *, sh_degree: int = 3, capacity: int | None = None, half: bool = False
    ) -> None:
        """A table of `num_rows` zero rows, with room for `capacity` rows (default: just these).

        half: keep `shN` in float16, which halves what most of a row takes; `SplatAdam` then keeps first moments in
        bfloat16, rounds both stochastically and computes in float32. State of degree 3: 504 bytes a row, not 712.
        Raises: ValueError for a degree outside 0 to 3 or a capacity below `num_rows`.
        """
        check_degree(sh_degree)
        num_rows = whole_number("num_rows", num_rows, 0)
        self._placed: list[tuple[int, int]] | None = None
        self._capacity = num_rows if capacity is None else whole_number("capacity", capacity)
        if self._capacity < num_rows:
            raise ValueError(
                f"capacity is {self._capacity:,}, but the table has {num_rows:,} rows. Raise the capacity."
            )
        from ns_mgpu_splat.device import init

        init()
        self.cells = native().TableCells()
        self.optimizers: weakref.WeakSet[SplatAdam] = weakref.WeakSet()
        """Those that were made of this table and are still there."""
        for name, shape in column_shapes(num_rows, int(sh_degree)).items():
            dtype = torch.float16 if half and name == "shN" else torch.float32
            setattr(self, name, nn.Parameter(reserve(shape, self._capacity, dtype)))

    # ---- making a table

    @classmethod
    def from_points(
        cls,
        points: Tensor | np.ndarray,
        colors: Tensor | np.ndarray | None = None,
        *,
        sh_degree: int = 3,
        max_gaussians: int | None = None,
        capacity: int | None = None,
        opacity: float = 0.1,
        seed: int = 0,
        half: bool = False,
    ) -> SplatTable:
        """One isotropic Gaussian per point, as wide as its three nearest neighbours are far on average.

        Args:
            points: (N, 3), world units; N may be 0, and points may coincide.
            colors: (N, 3), uint8 or float in [0, 1]; None: mid grey.
            max_gaussians: hard cap. A larger cloud is thinned evenly in space, and one line says so.
            capacity: rows that the table can grow to in place; default: `max_gaussians`, else the rows it has.
            opacity: of every Gaussian, in (0, 1).
            seed: of the random orientations.
            half: as in the constructor.
        Raises: ValueError for a wrong shape, a value that is not finite (with its row) or an opacity outside (0, 1).
        """
        columns = seeds_to_columns(points, colors, sh_degree, max_gaussians, opacity, seed)
        if capacity is None:
            capacity = max_gaussians
        return cls.from_columns(**columns, capacity=capacity, half=half)

    @classmethod
    def from_columns(
        cls,
        *,
        means: Tensor,
        quats: Tensor,
        scales: Tensor,
        opacities: Tensor,
        sh0: Tensor,
        shN: Tensor | None = None,
        capacity: int | None = None,
        half: bool = False,
    ) -> SplatTable:
        """A table with copies of these columns (shapes as in the class; `shN` None: degree 0; any device and float dtype).

        half: as in the constructor.

        Raises: ValueError naming the column whose shape does not fit.
        """
        rows = means.shape[0] if means.dim() else 0
        if shN is None:
            shN = sh0.new_zeros((rows, 0, 3))
        rest = shN.shape[1] if shN.dim() == 3 else -1
        if rest not in (0, 3, 8, 15):
            raise ValueError(
                f"shN is {list(shN.shape)}, expected [N, K, 3] with K = 0, 3, 8 or 15 (degree 0 to 3)."
            )
        given = dict(zip(COLUMNS, (means, quats, scales, opacities, sh0, shN), strict=True))
        degree = math.isqrt(rest + 1) - 1
        for name, shape in column_shapes(rows, degree).items():
            if tuple(given[name].shape) != shape:
                order = " Order is w, x, y, z: docs/conventions.md." if name == "quats" else ""
                raise ValueError(
                    f"{name} is {list(given[name].shape)}, expected {list(shape)} with N = {rows} as in means.{order}"
                )
        table = cls(rows, sh_degree=degree, capacity=capacity, half=half)
        table.write_rows(0, given)
        return table

    @classmethod
    def from_ply(cls, path: str | Path, *, capacity: int | None = None, half: bool = False) -> SplatTable:
        """Read a 3DGS `.ply` (INRIA's properties, binary). Rows that are not finite are dropped, and one line says so.

        half: as in the constructor.

        Raises: ValueError naming file and property if one is missing, or if the file is cut short.
        """
        source = ply.PlyReader(path)
        rows = source.count_finite()
        table = cls(rows, sh_degree=source.sh_degree, capacity=capacity, half=half)
        begin = 0
        for chunk in source.chunks():
            table.write_rows(begin, {name: torch.from_numpy(values) for name, values in chunk.items()})
            begin += chunk["means"].shape[0]
        return table

    def to_ply(self, path: str | Path) -> int:
        """Write a 3DGS `.ply` (INRIA's properties and order, binary) and return the number of rows in it.

        Written aside, synced and renamed: a file of that name is always whole. Only rows with a value that is not finite
        are left out, and one line says how many.
        """
        return ply.write(Path(path), self.num_rows, self.sh_degree, self.read_rows)

    # ---- looking at it

    @property
    def num_rows(self) -> int:
        """Rows the table has."""
        return int(self.means.shape[0])

    @property
    def capacity(self) -> int:
        """Rows the table can grow to in place."""
        return self._capacity

    @property
    def sh_degree(self) -> int:
        """Degree of the spherical harmonics, 0 to 3."""
        return math.isqrt(int(self.shN.shape[1]) + 1) - 1

    @property
    def half(self) -> bool:
        """Whether `shN` is in float16 (and first moments in bfloat16)."""
        return self.shN.dtype == torch.float16

    def columns(self) -> tuple[nn.Parameter, ...]:
        """The six columns in the order of `COLUMNS`."""
        return tuple(getattr(self, name) for name in COLUMNS)

    def named_columns(self) -> dict[str, nn.Parameter]:
        """The six columns by name, in the order of `COLUMNS`."""
        return {name: getattr(self, name) for name in COLUMNS}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles keep capacity and `requires_grad`: their columns can grow, too."""
        columns = {name: column.detach() for name, column in self.named_columns().items()}
        wanted = {name: column.requires_grad for name, column in self.named_columns().items()}
        return _rebuilt, (columns, self.capacity, wanted)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        kind = ", half" if self.half else ""
        return (
            f"SplatTable({self.num_rows:,} rows of {self.capacity:,}, SH degree {self.sh_degree}{kind}, "
            f"{self.means.device})"
        )

    def read_rows(self, begin: int, end: int) -> dict[str, np.ndarray]:
        """Copies of rows [begin, end) on the host, by column, float32."""
        return {
            name: column.detach()[begin:end].cpu().float().numpy()
            for name, column in self.named_columns().items()
        }

    @property
    def homes(self) -> list[tuple[int, int]]:
        """(begin, end) of the rows at home on each shard: as `place` has dealt them, else equal chunks."""
        return torch.mgpu.row_homes(self.means)  # type: ignore[attr-defined]

    @property
    def placed(self) -> list[tuple[int, int]]:
        """The homes for which pages were last dealt. Rows that were added or taken away since have stretched `homes`, but moved
        no page."""
        return self.homes if self._placed is None else self._placed

    @property
    def is_placed(self) -> bool:
        """Whether `place` was called, since the table has the memory that it has."""
        return self._placed is not None

    # ---- changing it

    def place(self, homes: Sequence[tuple[int, int]], optimizer: SplatAdam | None = None) -> int:
        """Make shards the homes of these rows, and move pages so; images, gradients and addresses stay the same.

        Call it between steps, with no gradient pending. A page that a boundary falls in lies whole on one of the two
        shards (`torch.mgpu.place_rows`). Others may render meanwhile: they wait while pages move.

        Args:
            homes: (begin, end) for each shard, ascending and without gaps; some may be empty.
            optimizer: of this table, if it has one; its state follows.
        Returns: how many pages have moved.
        Raises: ValueError for ranges that do not fit, or if the optimizer has gradients pending.
        """
        if optimizer is not None and optimizer.pending:
            raise ValueError("place() with gradients pending: call step() or zero_pending() first.")
        # the means last: by them all stages go, and the other columns are there by then
        tensors = [*self.columns()[1:], *([] if optimizer is None else optimizer.rows_of_all())]
        moved = sum(place_rows(tensor, homes) for tensor in tensors) + place_rows(self.means, homes)
        self._placed = [(int(begin), int(end)) for begin, end in homes]
        return moved

    def requires_grad_(self, requires_grad: bool = True) -> SplatTable:
        """Set `requires_grad` of all columns; returns the table."""
        for column in self.columns():
            column.requires_grad_(requires_grad)
        return self

    def write_rows(self, begin: int, values: Mapping[str, Tensor]) -> None:
        """Overwrite rows from `begin` on, in place and piece by piece; all columns of `values` have as many rows.

        Raises: ValueError, and nothing is written, for a column that the table has not, or rows that do not fit into it.
        """
        self._check_rows(whole_number("begin", begin, 0), values)
        with torch.no_grad():
            for name, source in values.items():
                column = getattr(self, name).detach()
                for first in range(0, source.shape[0], COPY_ROWS):
                    piece = source.detach()[first : first + COPY_ROWS].to(torch.float32)
                    if column.dtype == torch.float16:  # too large becomes the largest, not infinite
                        piece = piece.clamp(-HALF_MAX, HALF_MAX)
                    column[begin + first : begin + first + piece.shape[0]].copy_(piece)

    def _check_rows(self, begin: int, values: Mapping[str, Tensor]) -> None:
        columns = self.named_columns()
        if unknown := sorted(set(values) - set(columns)):
            raise ValueError(f"values names {unknown}; the columns are {', '.join(columns)}.")
        rows = next((source.shape[0] for source in values.values() if source.dim()), 0)
        for name, source in values.items():
            wanted = (rows, *columns[name].shape[1:])
            if tuple(source.shape) != wanted:
                raise ValueError(f"{name} is {list(source.shape)}, expected {list(wanted)}.")
        if begin + rows > self.num_rows:
            raise ValueError(
                f"Rows {begin:,} to {begin + rows:,} do not fit into a table of {self.num_rows:,} rows. Grow it first."
            )

    def count_bad_rows(self) -> int:
        """Rows with a mean, size, rotation or opacity that is not finite: nothing draws them.

        Reads 44 bytes a row and waits for the device; counts, which takes longer, only if a sum says that there are some.
        """
        columns = [column.detach() for column in (self.means, self.quats, self.scales, self.opacities)]
        if self.num_rows == 0 or bool(
            torch.isfinite(torch.stack([column.sum() for column in columns])).all().item()
        ):
            return 0
        good = 0
        for begin in range(0, self.num_rows, COUNT_ROWS):
            pieces = [column[begin : begin + COUNT_ROWS] for column in columns]
            finite = [torch.isfinite(piece).reshape(len(piece), -1).all(dim=1) for piece in pieces]
            good += int(torch.stack(finite).all(dim=0).sum().item())
        return self.num_rows - good

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows in place: parameters and addresses stay, the new rows are zero. No graph may be alive.

        Raises: ValueError if `rows` is below what the table has, or above its capacity.
        """
        rows = whole_number("rows", rows, 0)
        if rows < self.num_rows:
            raise ValueError(
                f"grow({rows:,}) on a table of {self.num_rows:,} rows; use shrink() to make it smaller."
            )
        if rows > self.capacity:
            raise ValueError(
                f"The table cannot grow to {rows:,} rows in place: it was made with capacity={self.capacity:,}. Make it with "
                "a larger capacity (or max_gaussians)."
            )
        if rows > self.num_rows:
            self.cells.forget()
            for column in self.columns():
                grow_parameter(column, rows)

    def shrink(self, rows: int) -> None:
        """Have the first `rows` rows only, in place: parameters and addresses stay, and so does the capacity.

        Raises: ValueError if `rows` is more than the table has.
        """
        rows = whole_number("rows", rows, 0)
        if rows > self.num_rows:
            raise ValueError(f"shrink({rows:,}) on a table of {self.num_rows:,} rows; use grow().")
        if rows < self.num_rows:
            self.cells.forget()
            for column in self.columns():
                shrink_parameter(column, rows)

    def compact(self, keep: Tensor, optimizer: SplatAdam | None = None) -> int:
        """Keep the rows where `keep` is true, in their order and in place; returns how many they are.

        Args:
            keep: (N,) bool, on any device.
            optimizer: of this table, if it has one; it is flushed, and its state follows.
        Raises: ValueError for another shape or type.
        """
        if optimizer is not None:
            optimizer.flush()
        state = None if optimizer is None else optimizer.state()
        others = [] if optimizer is None else optimizer.other_rows()
        rows = native().compact(self.columns(), state, others, keep.to(self.means.device).contiguous())
        del state, others
        self.shrink(rows)
        if optimizer is not None:
            optimizer.shrink(rows)
        return int(rows)

    def reorder(
        self,
        optimizer: SplatAdam | None = None,
        *,
        deal: Sequence[tuple[int, int]] = (),
        stripe: int = 0,
    ) -> None:
        """Put rows that are close in space close in memory: in the order of their means along a Hilbert curve, in place.

        Any run of rows is then one region of space; the curve visits a voxel as a whole before the next, whatever the voxels'
        size (the side of the cube around all means, by a power of two). Rows whose means are not finite come last; ties keep
        their order, and the order does not depend on the mesh.

        Images and gradients stay the same, row for row, but where two Gaussians have equal depth in a pixel: then the lower
        row is in front. What is drawn by row number changes: MCMC's exploration noise of a Gaussian comes from its new row
        from here on, which is as good a draw.

        Args:
            optimizer: of this table, if it has one; it is flushed, and its state follows.
            deal: (begin, end) of ranges of rows, ascending and without gaps, to which the sequence is dealt in stretches: the
                first stretch to the first range, the second to the second, and so on in rounds. All but empty ranges begin at
                multiples of 256 rows, and so does every stretch. `partition.stripes.deal` deals to the homes of a mesh.
            stripe: rows of a stretch at most, but for the rounding.
        Raises: ValueError for ranges that do not fit, if an optimizer of this table has gradients pending, or if one has taken
            steps and none is given.
        """
        if optimizer is not None:
            optimizer.flush()
        self._check_followed("reorder", optimizer)
        native().reorder(
            self.columns(),
            None if optimizer is None else optimizer.state(),
            [] if optimizer is None else optimizer.other_rows(),
            deal=[(int(begin), int(end)) for begin, end in deal],
            stripe=int(stripe),
        )

    def _check_followed(self, what: str, optimizer: SplatAdam | None) -> None:
        """Raise ValueError if what an optimizer has of rows that are about to move would stay behind."""
        others = [other for other in self.optimizers if other is not optimizer]
        if any(other.pending for other in others):
            raise ValueError(
                f"{what}() with gradients pending in an optimizer of this table: call its step() or zero_pending() first, "
                f"then {what}(optimizer)."
            )
        if optimizer is None and any(other.steps for other in others):
            raise ValueError(
                f"{what}() without the table's optimizer, whose moments must follow the rows: call {what}(optimizer), or "
                "delete an optimizer that is no longer used."
            )

    def resize(self, rows: int, *, capacity: int | None = None) -> None:
        """Have exactly `rows` rows, as before loading a checkpoint: parameters keep their identity, not their address.

        The rows that fit keep their values; new ones are zero. `capacity`: as in the constructor; default: unchanged,
        or `rows` if that is more.
        """
        rows = whole_number("rows", rows, 0)
        capacity = max(self.capacity, rows) if capacity is None else whole_number("capacity", capacity)
        if capacity < rows:
            raise ValueError(
                f"capacity is {capacity:,}, but resize() was asked for {rows:,} rows. Raise the capacity."
            )
        if self.num_rows <= rows <= self.capacity == capacity:
            self.grow(rows)
            return
        self.cells.forget()
        for column in self.columns():
            column.grad = None
            column.data = resized(column.data, rows, capacity)
        self._capacity = capacity
        self._placed = None


def _rebuilt(columns: dict[str, Tensor], capacity: int, wanted: dict[str, bool]) -> SplatTable:
    """What `copy.deepcopy` and `pickle` make of a table."""
    half = columns["shN"].dtype == torch.float16
    table = SplatTable.from_columns(**columns, capacity=capacity, half=half)
    for name, column in table.named_columns().items():
        column.requires_grad_(wanted[name])
    return table


def grow_parameter(tensor: Tensor, rows: int) -> None:
    """Grow a reserved tensor (or parameter) in place; the object stays the same."""
    tensor.grad = None  # of the old shape
    torch.mgpu.grow(tensor, rows)  # type: ignore[attr-defined]


def place_rows(tensor: Tensor, homes: Sequence[tuple[int, int]]) -> int:
    """Place a reserved tensor's rows; returns how many pages have moved."""
    return torch.mgpu.place_rows(tensor.detach(), homes)  # type: ignore[attr-defined]


def shrink_parameter(tensor: Tensor, rows: int) -> None:
    """Let a reserved tensor (or parameter) have its first `rows` rows, in place; the object stays the same."""
    tensor.grad = None
    torch.mgpu.shrink(tensor, rows)  # type: ignore[attr-defined]


def resized(tensor: Tensor, rows: int, capacity: int) -> Tensor:
    """A newly reserved tensor with the first rows of `tensor`; the rest is zero."""
    out = reserve((rows, *tensor.shape[1:]), capacity, tensor.dtype)
    kept = min(rows, tensor.shape[0])
    for first in range(0, kept, COPY_ROWS):
        last = min(kept, first + COPY_ROWS)
        out[first:last].copy_(tensor[first:last])
    return out


def seeds_to_columns(
    points: Tensor | np.ndarray,
    colors: Tensor | np.ndarray | None,
    sh_degree: int,
    max_gaussians: int | None,
    opacity: float,
    random_seed: int,
) -> dict[str, Tensor]:
    """Columns on the host for `SplatTable.from_points`, which says what the arguments mean."""
    if not 0.0 < opacity < 1.0:
        raise ValueError(f"opacity is {opacity}, expected a value between 0 and 1.")
    check_degree(sh_degree)
    if max_gaussians is not None and (max_gaussians < 0 or int(max_gaussians) != max_gaussians):
        raise ValueError(f"max_gaussians is {max_gaussians}, expected a whole number of rows, 0 or more.")
    xyz, rgb = seed.check_cloud(points, colors)
    if max_gaussians is not None and len(xyz) > max_gaussians:
        kept = seed.thin_evenly(xyz, int(max_gaussians))
        xyz, rgb = xyz[kept], rgb[kept]
    rows = len(xyz)
    distances = torch.from_numpy(seed.neighbour_distances(xyz))
    return {
        "means": torch.from_numpy(xyz).to(torch.float32),
        "quats": torch.from_numpy(seed.random_quats(rows, random_seed)),
        "scales": distances.log().to(torch.float32)[:, None].repeat(1, 3),
        "opacities": torch.full((rows,), math.log(opacity / (1.0 - opacity))),
        "sh0": torch.from_numpy(seed.rgb_to_sh0(rgb)),
        "shN": torch.zeros(column_shapes(rows, sh_degree)["shN"]),
    }
