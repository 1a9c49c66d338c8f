# SPDX-License-Identifier: Apache-2.0
"""How a table's rows lie in space, in a few numbers: for the training log and for `mgpu-splat-info`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ns_mgpu_splat.partition.curves import CURVE_BITS
from ns_mgpu_splat.partition.grid import SparseGrid, grid_in_use
from ns_mgpu_splat.partition.order import VOXEL_ROWS, measure
from ns_mgpu_splat.words import counted


@dataclass(frozen=True)
class Summary:
    """Voxels that hold some hundreds of rows on average, and the order of rows in them."""

    in_use: str
    """The grid, and why it is not fVDB's."""
    voxels: int
    voxel_size: float
    """World units."""
    finite_rows: int
    out_of_order: float
    """Share of consecutive rows whose voxels come in the wrong order along the curve."""
    run_extent: float
    """Sum of the three sides of the box of 256 consecutive rows, world units, on average."""

    @property
    def rows_per_voxel(self) -> float:
        """Finite rows over voxels that hold any."""
        return self.finite_rows / self.voxels if self.voxels else 0.0

    def __str__(self) -> str:
        return (
            f"{self.in_use}, {counted(self.voxels, 'voxel')} of {self.voxel_size:.3g} with "
            f"{self.rows_per_voxel:,.0f} Gaussians on average"
        )


def summarise(means: Tensor, voxel_rows: int = VOXEL_ROWS) -> Summary:
    """Of means (N, 3) on `mgpu`, flushed, in any order; builds a grid, so not in every step.

    The voxels are of the order's own lattice: the finest ones that hold at least `voxel_rows` rows on average.
    """
    measured = measure(means)
    finite = means.detach()
    if measured.finite_rows < means.shape[0]:
        finite = finite[finite.isfinite().all(1)]

    def grid(level: int) -> SparseGrid:
        return SparseGrid.from_points(finite, measured.voxel_size(level), measured.voxel_origin(level))

    level = measured.level(voxel_rows)
    found = grid(level)
    while level < CURVE_BITS:  # where rows are out of order, the measure counts too many voxels
        finer = grid(level + 1)
        if finer.num_voxels * voxel_rows > measured.finite_rows:
            break
        level, found = level + 1, finer
    return Summary(
        grid_in_use(),
        found.num_voxels,
        measured.voxel_size(level),
        measured.finite_rows,
        measured.out_of_order(level),
        measured.run_extent,
    )
