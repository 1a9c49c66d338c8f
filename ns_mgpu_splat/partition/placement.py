# SPDX-License-Identifier: Apache-2.0
"""Placement: which shard is home to which rows, so that every shard has as much to hold and to do.

The layout says what a shard's run of rows is. "space": rows are in an order of space, so a run is a piece of the scene, and
what a camera sees is at home on few shards. The sequence is cut into one run a shard, of equal expected cost: half of a
row's cost is that it is there (memory, and the pass over all rows), half how often it is seen. So no shard has more than
twice its share of the rows, and none more than twice its share of the work. "stripes" (stripes.py): every run has a part
of every region, so what a camera sees is at home on all shards, and equally many rows are equally much work.

Hysteresis. A boundary stays where it is while the cost before it is within `tolerance` of what it should be; else it
moves to where it is exactly right, so what is measured with an error below the tolerance never moves pages to and fro.
And all moves together must pay: the seconds that the steps until the next chance save, by bytes that a step moves in
memory, must exceed the seconds that the pages take over the links. But a shard that holds far more rows than the others
(`crowded`) gives some away whatever it costs: where memory is full, the run ends.

Boundaries are cut at rows where the widest column (`shN`) begins a page, if a shard has `align_pages` of these or more;
in smaller tables at any row, because there a page is a large part of a shard; of stripes at the nearest multiple of 256,
so that neither cells nor runs of rows have some of two stretches. In the other columns, and in small tables,
a boundary falls inside a page, which then lies on the shard whose row is in its middle: its neighbour reaches at most
half of it over a link. `PlacementReport.misplaced_bytes` counts these bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ns_mgpu_splat.splats.optimizer import SplatAdam
    from ns_mgpu_splat.splats.table import SplatTable

PAGE_BYTES = 2 << 20
SAMPLED_ROWS = 256
"""Rows of a piece that are looked at, evenly among them: a look costs the same for any table."""
FEW_STEPS = 10  # fewer steps say little of how often a row is seen
ALIGN_PAGES = 16
UNIT_ROWS = 256
"""Rows of a cell (cuda/splat/cells.h), and what homes and stretches of stripes are multiples of (cuda/splat/reorder.h)."""

Layout = Literal["space", "stripes"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PlacementSettings:
    """What placement weighs. Bytes and speeds are those of an H200; only their ratios matter."""

    tolerance: float = 0.05
    """Error of the cost before a boundary, as a share of one shard's cost, up to which it stays where it is."""
    horizon: int = 100
    """Steps until the next chance to move pages."""
    align_pages: int = ALIGN_PAGES
    """Pages of the widest column that a shard has at least, for boundaries to lie at pages."""
    crowded: float = 1.5
    """Largest over mean number of rows of a shard above which pages move even where that saves no time."""
    blocks: int = 512
    """Pieces of the sequence of rows for which costs are known; never below 256 rows each."""
    row_bytes: float = 28.0
    """What a step reads of a row that it does not see: mean, scales, opacity's step."""
    seen_bytes: float = 2200.0
    """What a step moves for a row that it sees: columns and moments to and fro, records and their gradients."""
    memory_speed: float = 3.5e12
    """Bytes a second of a shard's memory."""
    page_speed: float = 4e10
    """Bytes a second at which pages change their shard, with the mapping."""
    layout: Layout = "space"
    """What a shard's run of rows is: a piece of the scene, or stripes of all of it. That of `RowOrder`, which sorts them."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.tolerance < 0.5:
            raise ValueError(f"tolerance is {self.tolerance}, expected 0 to 0.5.")
        if self.horizon < 1 or self.blocks < 1:
            raise ValueError(
                f"horizon is {self.horizon} and blocks {self.blocks}, expected at least 1 of each."
            )


@dataclass(frozen=True)
class CostMap:
    """Cost along the sequence of rows: known where blocks end, even inside of them.

    `rows` (B + 1,) ascending from 0 to N; `cost` (B + 1,) ascending from 0: the cost of the rows before.
    """

    rows: Floats
    cost: Floats

    @classmethod
    def from_blocks(cls, block_rows: Sequence[int] | Floats, seen: Sequence[float] | Floats) -> CostMap:
        """Blocks of so many rows, each row of which is `seen` in so many of 100 steps (any unit); total cost is 1."""
        rows = np.asarray(block_rows, np.float64)
        work = rows * np.asarray(seen, np.float64)
        share = rows / max(rows.sum(), 1.0)
        if work.sum() > 0:
            share = 0.5 * share + 0.5 * work / work.sum()
        return cls(np.concatenate([[0.0], np.cumsum(rows)]), np.concatenate([[0.0], np.cumsum(share)]))

    def before(self, rows: Sequence[int]) -> Floats:
        """Cost of the rows before each of these."""
        return np.interp(np.asarray(rows, np.float64), self.rows, self.cost)

    def of(self, homes: Sequence[tuple[int, int]]) -> Floats:
        """Cost of each range."""
        return self.before([end for _, end in homes]) - self.before([begin for begin, _ in homes])

    def row_at(self, cost: float) -> float:
        """The row before which there is this much cost; the last such row where rows cost nothing."""
        return float(np.interp(cost, self.cost, self.rows))


def imbalance(costs: Floats) -> float:
    """Largest over mean; 1 where there is nothing."""
    return float(costs.max() / costs.mean()) if len(costs) and costs.sum() > 0 else 1.0


def row_imbalance(homes: Sequence[tuple[int, int]]) -> float:
    """The same of the numbers of rows."""
    return imbalance(np.array([end - begin for begin, end in homes], np.float64))


def page_starts(
    rows: int, row_bytes: int, shards: int, align_pages: int, unit: int = 1
) -> NDArray[np.int64] | None:
    """First whole rows of the pages of a column, or the multiples of `unit` nearest to these; None if shards have fewer than
    `align_pages` of them, so any multiple will do."""
    pages = -(-rows * row_bytes // PAGE_BYTES)
    if row_bytes == 0 or pages < align_pages * shards:
        return None
    starts = -(-np.arange(pages, dtype=np.int64) * PAGE_BYTES // row_bytes)
    return np.unique((starts + unit // 2) // unit * unit)


def snapped(row: float, starts: NDArray[np.int64] | None, rows: int, unit: int = 1) -> int:
    """The allowed boundary nearest to `row`: a multiple of `unit` or the end of the table, and one of `starts` if given."""
    if starts is None:
        return min(rows, max(0, unit * round(row / unit)))
    after = int(np.searchsorted(starts, row))
    near = [int(starts[i]) for i in (after - 1, after) if 0 <= i < len(starts)] + [rows]
    return min(near, key=lambda start: abs(start - row))


def cut(
    costs: CostMap,
    shards: int,
    *,
    starts: NDArray[np.int64] | None = None,
    unit: int = 1,
    before: Sequence[int] | None = None,
    tolerance: float = 0.0,
) -> list[tuple[int, int]]:
    """One contiguous run of rows a shard, of equal cost but for what boundaries and tolerance allow.

    Args:
        costs: of all rows.
        starts: rows at which a run may begin; None: any.
        unit: what boundaries that move are multiples of, without `starts`.
        before: (shards - 1,) boundaries so far; one stays if the cost before it is right within `tolerance` shares of a
            shard's cost.
    Returns: (begin, end) for each shard, ascending and without gaps; some are empty if there are few rows.
    """
    rows, total = int(costs.rows[-1]), float(costs.cost[-1])
    bounds = [0]
    for shard in range(1, shards):
        wanted = total * shard / shards
        row = snapped(costs.row_at(wanted), starts, rows, unit)
        if before is not None:
            kept = min(before[shard - 1], rows)
            if abs(float(costs.before([kept])[0]) - wanted) <= tolerance * total / shards:
                row = kept
        bounds.append(max(bounds[-1], row))
    bounds.append(rows)
    return list(pairwise(bounds))


def row_bytes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of a row of each."""
    return [tensor.stride(0) * tensor.element_size() if tensor.numel() else 0 for tensor in tensors]


def even_homes(
    rows: int, shards: int, row_bytes: int = 0, align_pages: int = ALIGN_PAGES
) -> list[tuple[int, int]]:
    """Runs of equally many rows, a multiple of 256, near the pages of a column with `row_bytes` a row where shards have many."""
    starts = page_starts(rows, row_bytes, shards, align_pages, UNIT_ROWS)
    return cut(CostMap.from_blocks([rows], [0.0]), shards, starts=starts, unit=UNIT_ROWS)


@dataclass(frozen=True)
class PlacementReport:
    """What the latest `Placement.update` found and did."""

    pages_moved: int = 0
    imbalance: float = 1.0
    """Largest over mean cost of the shards, as expected."""
    row_imbalance: float = 1.0
    """Largest over mean number of rows."""
    misplaced_bytes: int = 0
    """Bytes of rows of all columns and moments that lie on a neighbour's page."""


class Placement:
    """Keeps the homes of a table's rows; one for a table. Nothing to do on a mesh of one shard.

    `observe` before rows are flushed, `update` after rows have changed: between the two a refinement may add, take away
    and reorder rows. How often rows are seen is carried over by place: a piece of the new sequence takes it from the
    observed piece whose middle is nearest.
    """

    def __init__(self, settings: PlacementSettings | None = None) -> None:
        self.settings = settings or PlacementSettings()
        self.report = PlacementReport()
        """Of the latest update."""
        self.pages_moved = 0
        """Since the beginning."""
        self._observed: tuple[Floats, Floats] | None = None  # middles (B, 3), rates (B,) per step

    def block_rows(self, rows: int) -> int:
        """Rows of one piece of the sequence."""
        return max(256, -(-rows // self.settings.blocks))

    def observe(self, table: SplatTable, optimizer: SplatAdam) -> None:
        """Estimate how often rows are seen from when they were last, since the latest flush; call it before a flush.

        A row's age since it was last seen, cut off at the flush, tells its rate by maximum likelihood: seen rows over the
        steps in which they were not. Of a piece of rows: the sums of both, over some hundred of its rows.
        """
        now, window = optimizer.history.now, optimizer.history.now - optimizer.history.base
        if shard_count() < 2 or window < FEW_STEPS or table.num_rows == 0:
            return
        last = optimizer.last_step

        def seen_and_missed(rows: torch.Tensor) -> torch.Tensor:
            age = (now - rows).clamp_(max=window)
            return torch.stack([(age < window).sum(1), age.sum(1)], 1)

        rows_seen, steps_missed = _by_block(seen_and_missed, last, self.block_rows(table.num_rows)).T
        self._observed = (self._middles(table), rows_seen / np.maximum(steps_missed + rows_seen, 1.0))

    def update(self, table: SplatTable, optimizer: SplatAdam | None = None) -> PlacementReport:
        """Cut the sequence anew, and move the pages that it pays to move; call it between steps."""
        shards = shard_count()
        if shards < 2 or table.num_rows == 0:
            return self.report
        rows, settings = table.num_rows, self.settings
        widest, striped = max(row_bytes_of(table.columns())), settings.layout == "stripes"
        costs = CostMap.from_blocks([rows], [0.0]) if striped else self.costs(table)
        if striped and not table.is_placed:
            homes = even_homes(rows, shards, widest, settings.align_pages)
        else:
            # rows may have been added since pages were dealt: what counts is where the pages are
            kept = [end for _, end in table.placed[:-1]]
            unit = UNIT_ROWS if striped else 1
            starts = page_starts(rows, widest, shards, settings.align_pages, unit)
            stay = cut(costs, shards, before=kept, tolerance=float("inf"))
            homes = cut(costs, shards, starts=starts, unit=unit, before=kept, tolerance=settings.tolerance)
            if not self._pays(table, optimizer, costs, stay, homes):
                homes = stay
        moved = table.place(homes, optimizer)  # also when nothing moves: rows may be new
        self.pages_moved += moved
        tensors = [*table.columns(), *([] if optimizer is None else optimizer.rows_of_all())]
        self.report = PlacementReport(
            moved,
            imbalance(costs.of(homes)),
            row_imbalance(homes),
            sum(torch.mgpu.misplaced_bytes(tensor.detach()) for tensor in tensors),  # type: ignore[attr-defined]
        )
        return self.report

    def costs(self, table: SplatTable) -> CostMap:
        """Cost along the table's rows, from what was observed; without an observation every row costs the same."""
        rows, size = table.num_rows, self.block_rows(table.num_rows)
        block_rows = np.minimum(size, rows - np.arange(0, rows, size)).astype(np.float64)
        seen = np.zeros(len(block_rows))
        if self._observed is not None:
            middles, rates = self._observed
            seen = rates[nearest(self._middles(table), middles)]
        return CostMap.from_blocks(block_rows, seen)

    def figures(self) -> dict[str, float]:
        """For the training metrics."""
        return {
            "pages_moved": float(self.pages_moved),
            "home_cost_imbalance": self.report.imbalance,
            "home_row_imbalance": self.report.row_imbalance,
            "misplaced_mib": self.report.misplaced_bytes / 2**20,
        }

    def _middles(self, table: SplatTable) -> Floats:
        """(B, 3) mean position of each piece, on the host."""
        size = self.block_rows(table.num_rows)
        middles = _by_block(lambda rows: rows.mean(1), table.means.detach(), size)
        return np.nan_to_num(middles, posinf=0.0, neginf=0.0)

    def _pays(
        self,
        table: SplatTable,
        optimizer: SplatAdam | None,
        costs: CostMap,
        stay: Sequence[tuple[int, int]],
        homes: Sequence[tuple[int, int]],
    ) -> bool:
        """Whether the steps until the next chance save more seconds than moving pages takes, or a shard is crowded."""
        if list(stay) == list(homes):
            return True
        settings, rows = self.settings, table.num_rows
        tensors = [*table.columns(), *([] if optimizer is None else optimizer.rows_of_all())]
        bytes_a_row = sum(row_bytes_of(tensors))
        moved_rows = sum(abs(a - b) for (_, a), (_, b) in zip(stay, homes, strict=True))
        seen = 0.0 if self._observed is None else float(self._observed[1].mean())
        step_bytes = rows * (settings.row_bytes + seen * settings.seen_bytes) / len(homes)
        gain = imbalance(costs.of(stay)) - imbalance(costs.of(homes))
        saved = settings.horizon * gain * step_bytes / settings.memory_speed
        crowded = row_imbalance(stay) > max(settings.crowded, row_imbalance(homes))
        return crowded or saved > moved_rows * bytes_a_row / settings.page_speed


def nearest(points: Floats, others: Floats) -> NDArray[np.intp]:
    """(A,) number of the nearest of `others` (B, 3) to each of `points` (A, 3), but for rounding to float32.

    NumPy's argmin of float32 goes by vectors: a twentieth of what torch.cdist and its argmin take.
    """
    centre = others.mean(0)
    near, far = (points - centre).astype(np.float32), (others - centre).astype(np.float32)
    closeness: NDArray[np.float32] = (far**2).sum(1) - 2 * near @ far.T
    return closeness.argmin(1)


def shard_count() -> int:
    """Shards of the mesh."""
    return len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]


def _by_block(value: Callable[[torch.Tensor], torch.Tensor], column: torch.Tensor, size: int) -> Floats:
    """(B, ...) float64 on the host: `value` of (blocks, rows of a block, ...), of evenly sampled rows of each block.

    Blocks have `size` rows, and the last one what is left.
    """
    rows, step = column.shape[0], -(-size // SAMPLED_ROWS)
    whole = rows // size * size
    parts = []
    if whole > 0:
        parts.append(value(column[:whole].unflatten(0, (-1, size))[:, ::step]))
    if whole < rows:
        parts.append(value(column[None, whole::step]))
    out: Floats = torch.cat(parts).cpu().double().numpy()
    return out
