# SPDX-License-Identifier: Apache-2.0
"""Stripes: rows sorted in space, and dealt to the shards in stretches, so that each has a part of every region.

What one camera sees is a piece of the scene. Where each shard is home to a piece of its own, few shards project and step
these rows, and the others wait (docs/benchmarks.md, "Several GPUs"). In stripes all have as many of them, at the price of
more records over the links. Within a stretch rows stay in the order of space: cells are as small and memory as local.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ns_mgpu_splat.partition.placement import UNIT_ROWS, Layout, even_homes, row_bytes_of, shard_count

if TYPE_CHECKING:
    from ns_mgpu_splat.splats.optimizer import SplatAdam
    from ns_mgpu_splat.splats.table import SplatTable

MOST_ROWS = 4096
"""Rows of a stretch in large tables: 16 cells, so that few have rows of two once rows were taken out."""
STRETCHES = 1024
"""Stretches of a shard in smaller ones, whose length goes down to a cell. A camera that sees a twentieth of the scene then sees
50 of each shard, which makes the shards alike within some 5 % (docs/benchmarks.md)."""


def chosen_layout(wanted: Literal["auto"] | Layout, shards: int) -> Layout:
    """The layout of a run: "auto" is stripes, which won with one camera a step and with one for each GPU (docs/benchmarks.md).

    On one shard there is nothing to deal: always "space".
    """
    if shards < 2:
        return "space"
    return "stripes" if wanted == "auto" else wanted


def stripe_rows(rows: int, shards: int) -> int:
    """Rows of a stretch, of a table of so many."""
    wanted = rows // (max(1, shards) * STRETCHES) // UNIT_ROWS * UNIT_ROWS
    return min(MOST_ROWS, max(UNIT_ROWS, wanted))


def deal(table: SplatTable, optimizer: SplatAdam | None = None) -> None:
    """Sort the rows and deal them in stretches to equally large homes on all shards of the mesh; one sort, in place.

    Call it between steps, with no gradient pending. Images and gradients stay the same, row for row, as after
    `SplatTable.reorder`; which row is where depends on the number of shards.
    """
    shards = shard_count()
    homes = even_homes(table.num_rows, shards, max(row_bytes_of(table.columns())))
    if shards > 1:
        table.place(homes, optimizer)
    table.reorder(optimizer, deal=homes, stripe=stripe_rows(table.num_rows, shards))
