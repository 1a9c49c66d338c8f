# SPDX-License-Identifier: Apache-2.0
"""The order of a table's rows: how good it is, which voxels suit it, and when it is worth sorting again.

Rows are sorted along a Hilbert curve through the cube around all means (`SplatTable.reorder`; cuda/splat/reorder.h). The
curve visits any voxel whose side is the cube's by a power of two as a whole before the next one, so one order serves
voxels of all sizes, and any run of rows is one region of space. In stripes (stripes.py) that holds for a stretch of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition.curves import CURVE_BITS
from ns_mgpu_splat.partition.placement import Layout, shard_count
from ns_mgpu_splat.partition.stripes import deal

if TYPE_CHECKING:
    from ns_mgpu_splat.splats.optimizer import SplatAdam
    from ns_mgpu_splat.splats.table import SplatTable

RUN_ROWS = 256
"""Rows of a run, as cuda/splat/row_measure.h counts them."""

VOXEL_ROWS = 256
"""Rows that a voxel should hold on average: some hundreds, so that work by voxel is worth its overhead."""


@dataclass(frozen=True)
class RowMeasure:
    """What one pass over the means of a table says about the order of its rows; the same on any mesh.

    Voxels of level l are `side / 2**l` wide; level 0 is the cube, level 21 its finest cells.
    """

    low: tuple[float, float, float]
    """Least corner of the cube, world."""
    side: float
    """Of the cube, world; 0 if all means are in one place."""
    finite_rows: int
    """Rows whose means are finite; only these count."""
    runs: int
    """Runs of 256 rows that have one."""
    run_cells: int
    """Sum over the runs of their boxes' three sides, in finest cells."""
    changes: tuple[int, ...]
    """By level: pairs of consecutive rows that part at it: in two voxels of this level, in one of the level before."""
    descents: tuple[int, ...]
    """Of these, those whose second row comes first along the curve: none if the rows are sorted."""

    def voxels(self, level: int) -> int:
        """Voxels of a level that hold rows, if the rows are sorted; else more: every return to a voxel counts anew."""
        return 1 + sum(self.changes[: level + 1]) if self.finite_rows else 0

    def voxel_size(self, level: int) -> float:
        """Side of the voxels of a level, world; 1 if all means are in one place."""
        return self.side / 2**level if self.side > 0 else 1.0

    def voxel_origin(self, level: int) -> tuple[float, ...]:
        """For `SparseGrid.from_points`: the centre of the cube's least voxel."""
        return tuple(corner + self.voxel_size(level) / 2 for corner in self.low)

    def level(self, voxel_rows: int = VOXEL_ROWS) -> int:
        """The finest level whose voxels hold this many rows on average, of those that hold any."""
        finest = 0
        for level in range(CURVE_BITS + 1):
            if self.voxels(level) * voxel_rows <= self.finite_rows:
                finest = level
        return finest

    @property
    def run_extent(self) -> float:
        """How wide a run's box is: the sum of its three sides, world, mean over the runs. A few rows out of place tell."""
        return self.side / 2**CURVE_BITS * self.run_cells / self.runs if self.runs else 0.0

    def out_of_order(self, level: int = CURVE_BITS) -> float:
        """Share of consecutive pairs of rows whose voxels of a level come in the wrong order."""
        return sum(self.descents[: level + 1]) / max(1, self.finite_rows - 1)


def measure(means: Tensor, first_run: int = RUN_ROWS) -> RowMeasure:
    """Measure the order of rows. Waits for the result.

    Args:
        means: (N, 3) float32 on `mgpu`, contiguous, flushed.
        first_run: rows of the first run, 1 to 256; the next ones have 256.
    """
    found = native().measure_rows(means.detach(), first_run)
    return RowMeasure(
        tuple(found["low"]),
        found["side"],
        found["finite_rows"],
        found["runs"],
        found["run_cells"],
        tuple(found["changes"]),
        tuple(found["descents"]),
    )


@dataclass
class RowOrder:
    """Keeps the rows of a table in order: remembers how wide runs of rows were when they were last sorted."""

    decay: float = 1.5
    """Sort once runs are this many times as wide, above 1. Copies of rows and rows that moved far widen runs at once; a
    table that has grown by a factor of 2.25 in order could be half as wide again, which does not count."""
    layout: Layout = "space"
    """What a shard's rows are after a sort: a piece of space, or stripes (stripes.py). That of the `Placement` beside this."""
    fresh: float | None = None
    """`RowMeasure.run_extent` after the latest sort; None: not known, so sort."""
    seams: float = 0.0
    """By how much that grows where runs lie across the ends of stretches, as they do once rows were taken out."""
    of_another: bool = False
    """Whether rows came from a run that had them in another layout, or in stripes for another number of shards."""

    def __post_init__(self) -> None:
        if not self.decay > 1.0:
            raise ValueError(f"decay is {self.decay}, expected a factor above 1.")
        if self.layout not in ("space", "stripes"):
            raise ValueError(f'layout is "{self.layout}", expected "space" or "stripes".')

    def is_due(self, means: Tensor) -> bool:
        """Whether rows are to be sorted now: one pass over the means (N, 3), flushed."""
        if means.shape[0] == 0:
            return False
        if self.fresh is None or self.of_another:
            return True
        return self._extent_across(means) - self.seams > self.decay * self.fresh

    def keep(self, table: SplatTable, optimizer: SplatAdam | None = None) -> bool:
        """Sort the rows if that is due, and say so; call it between steps, after rows have changed."""
        if not self.is_due(table.means):
            return False
        if self.layout == "stripes":
            deal(table, optimizer)
        else:
            table.reorder(optimizer)
        self.fresh, self.of_another = measure(table.means).run_extent, False
        self.seams = self._extent_across(table.means) - self.fresh
        return True

    def begin(self, table: SplatTable, optimizer: SplatAdam | None = None) -> bool:
        """Before the first step of a run: deal stripes, and sort the rows of a run with another layout; says if it did.

        Without it such rows wait for the next refinement, of which a run that goes on may have none left.
        """
        return self.begins_anew and self.keep(table, optimizer)

    @property
    def begins_anew(self) -> bool:
        """Whether `begin` would sort the rows."""
        return self.of_another or (self.layout == "stripes" and self.fresh is None)

    def _extent_across(self, means: Tensor) -> float:
        """How wide runs are: of stripes those that lie across the ends of stretches, as many wherever these have moved to."""
        return measure(means, RUN_ROWS // 2 if self.layout == "stripes" else RUN_ROWS).run_extent

    def _arrangement(self) -> tuple[str, int]:
        """The layout, and how many shards stripes are dealt to."""
        return self.layout, shard_count() if self.layout == "stripes" else 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to sort at the same steps."""
        layout, shards = self._arrangement()
        return {"fresh": self.fresh, "seams": self.seams, "layout": layout, "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved run was; where it had rows in another layout, they are sorted next."""
        fresh = state.get("fresh")
        self.fresh = None if fresh is None else float(fresh)
        self.seams = float(state.get("seams", 0.0))
        self.of_another = (state.get("layout", "space"), int(state.get("shards", 1))) != self._arrangement()
