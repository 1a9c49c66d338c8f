# SPDX-License-Identifier: Apache-2.0
"""Stripes: how a sorted sequence is dealt, by its properties; when dealt rows are sorted again; homes that stay even."""

from __future__ import annotations

import itertools

import fvdb_stub  # noqa: F401 - makes the oracles importable
import numpy as np
import pytest
import torch
from torch import Tensor
from twin_order import slow_order

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable
from ns_mgpu_splat.partition.order import RUN_ROWS, RowOrder, measure
from ns_mgpu_splat.partition.placement import (
    PAGE_BYTES,
    UNIT_ROWS,
    Placement,
    PlacementSettings,
    even_homes,
    imbalance,
)
from ns_mgpu_splat.partition.stripes import chosen_layout, deal, stripe_rows
from ns_mgpu_splat.splats.densify import DefaultStrategy, McmcStrategy

STRIPES = PlacementSettings(layout="stripes")


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def shards() -> int:
    return len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]


def scene(rows: int, seed: int = 0) -> Tensor:
    """A bumpy surface of 8 x 8 units."""
    xy = torch.rand(rows, 2, generator=torch.Generator().manual_seed(seed)) * 8
    return torch.cat([xy, 0.3 * torch.sin(3 * xy[:, :1]) + 0.2 * torch.cos(2 * xy[:, 1:])], dim=1)


def table_of(means: Tensor, capacity: int | None = None, degree: int = 0) -> SplatTable:
    rows = means.shape[0]
    table = SplatTable(rows, sh_degree=degree, capacity=capacity)
    table.write_rows(0, {"means": means, "quats": torch.ones(rows, 4), "scales": torch.full((rows, 3), -4.0)})
    with torch.no_grad():
        table.opacities.detach().fill_(2.0)
    return table


def ranges(*sizes: int) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


# ---- the deal


@pytest.mark.parametrize(
    ("to", "stripe"),
    [
        ([0], 300),
        ([1], 256),
        ([600], 4096),
        ([2560, 2560, 2441], 512),
        ([2560, 2560, 2560, 100], 256),  # the last one has much less
        ([1024, 0, 7168, 2000], 1000),  # uneven, one empty, an odd length
        ([512, 256, 256, 256, 17], 100_000),  # one stretch each: the sequence itself
        ([256, 256, 88], 2**63 - 1),
        ([*[1280] * 7, 1100, 0, 0], 700),
    ],
)
def test_a_sequence_is_dealt_in_turns(to: list[int], stripe: int) -> None:
    """What makes a deal one: all rows once, each range ascending, stretches begin at multiples of 256, and whatever piece of
    the sequence is looked at, each range has its share of it, but for a stretch at both ends."""
    rows = sum(to)
    table = table_of(scene(rows))
    adam = SplatAdam(table, {})
    with torch.no_grad():
        table.sh0.detach()[:, 0] = torch.arange(rows).float()
        adam.exp_avg["means"][:, 2] = torch.arange(rows).float()
    order = torch.tensor(slow_order(table.means.detach().cpu()), dtype=torch.long)
    table.reorder(adam, deal=ranges(*to), stripe=stripe)
    came_from = table.sh0.detach()[:, 0].cpu().long()
    assert torch.equal(adam.exp_avg["means"][:, 2].cpu().long(), came_from)
    place = torch.empty(rows, dtype=torch.long)
    place[order] = torch.arange(rows)
    rank = place[came_from]
    assert torch.equal(rank.sort().values, torch.arange(rows))
    owner = torch.repeat_interleave(torch.arange(len(to)), torch.tensor(to))
    most = -(-max(to) // max(1, -(-max(to) // stripe))) + 2 * UNIT_ROWS if rows else 0
    for begin, end in ranges(*to):
        steps = rank[begin:end].diff()
        assert (steps > 0).all()
        jumps = (steps > 1).nonzero()[:, 0] + 1
        assert (jumps % UNIT_ROWS == 0).all()
        assert all(length <= most for length in np.diff([0, *jumps.tolist(), end - begin]))
    sequence = owner[rank.argsort()]
    for index, size in enumerate(to):
        so_far = torch.cat([torch.zeros(1), (sequence == index).cumsum(0)])
        even = torch.arange(rows + 1) * (size / max(1, rows))
        assert float((so_far - even).abs().max()) <= most, index


def test_one_stretch_a_range_is_the_sequence_itself() -> None:
    one, other = table_of(scene(3_000)), table_of(scene(3_000))
    one.reorder()
    other.reorder(deal=ranges(1024, 1976), stripe=3_000)
    assert torch.equal(one.means.detach().cpu(), other.means.detach().cpu())


def test_deals_that_do_not_fit_are_refused() -> None:
    table = table_of(scene(1_000))
    before = table.means.detach().cpu().clone()
    for to, stripe, words in (
        (
            ranges(500, 500),
            256,
            r"deal\[1\] is \(500, 1000\), expected a range from row 500 on; all but empty",
        ),
        ([(0, 256), (512, 1000)], 256, r"deal\[1\] is \(512, 1000\), expected a range from row 256 on"),
        (ranges(512, 512), 256, "deal ends at row 1024, and the table has 1000 rows"),
        (ranges(512, 488), 0, "stripe is 0 rows, expected at least 1"),
        (ranges(1000, *[0] * 80), 256, "deal has 81 ranges of rows, expected 1 to 64"),
    ):
        with pytest.raises(ValueError, match=words):
            table.reorder(deal=to, stripe=stripe)
    assert torch.equal(table.means.detach().cpu(), before)


@pytest.mark.parametrize("rows", [0, 100, 5_000, 60_001])
def test_dealt_rows_have_even_homes_in_whole_cells(rows: int) -> None:
    table = table_of(scene(rows))
    deal(table, SplatAdam(table, {}))
    if shards() > 1:
        assert table.homes == even_homes(rows, shards(), 16)
    sizes = [end - begin for begin, end in table.homes]
    assert sum(sizes) == rows
    assert all(begin % UNIT_ROWS == 0 or begin == rows for begin, _ in table.homes)
    assert max(sizes) - min(sizes) <= 2 * UNIT_ROWS


def test_even_homes_of_large_tables_begin_near_pages() -> None:
    rows, row_bytes = 40_000_001, 180
    homes = even_homes(rows, 8, row_bytes)
    for begin, end in homes:
        assert begin % UNIT_ROWS == 0
        assert (
            abs(begin - round(begin * row_bytes / PAGE_BYTES) * PAGE_BYTES / row_bytes) <= UNIT_ROWS // 2 + 1
        )
        assert abs((end - begin) - rows / 8) <= PAGE_BYTES / row_bytes + UNIT_ROWS
    assert homes[-1][1] == rows


@pytest.mark.parametrize("rows", [20_000, 3_000_000, 400_000_000])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_stretches_are_whole_cells_and_many(rows: int, count: int) -> None:
    stripe = stripe_rows(rows, count)
    assert 256 <= stripe <= 4096
    assert stripe % UNIT_ROWS == 0
    assert rows // count // stripe >= 1024 or stripe == 256


def test_auto_is_stripes_on_several_shards() -> None:
    assert [chosen_layout(wanted, 4) for wanted in ("auto", "space", "stripes")] == [
        "stripes",
        "space",
        "stripes",
    ]
    assert {chosen_layout(wanted, 1) for wanted in ("auto", "space", "stripes")} == {"space"}


# ---- what a shard sees


def test_what_lies_in_a_piece_of_the_scene_is_at_home_on_all_shards() -> None:
    """A window of a quarter of the scene: in pieces of space few shards have its rows, in stripes all have as many."""
    if shards() < 2:
        pytest.skip("needs a mesh of several shards")
    table = table_of(scene(120_000))

    def unevenness() -> float:
        inside = ((table.means.detach().cpu()[:, :2] - 3.0).abs() < 2.0).all(1)
        return imbalance(np.array([float(inside[begin:end].sum()) for begin, end in table.homes]))

    table.reorder()
    Placement().update(table)
    assert unevenness() > 1.5
    deal(table)
    assert unevenness() < 1.25


# ---- when rows are sorted again


def test_stripes_are_dealt_again_when_that_is_due_and_not_before() -> None:
    """Rows that moved a little are no reason, nor are rows taken out, which puts ends of stretches anywhere; copies are."""
    rows = 60_000
    table = table_of(scene(rows))
    order = RowOrder(layout="stripes")
    assert order.begins_anew
    assert order.begin(table)
    assert not order.keep(table)
    with torch.no_grad():
        table.means.detach().add_(1e-3 * torch.randn(rows, 3).to("mgpu"))
    assert not order.is_due(table.means)
    keep = torch.ones(rows, dtype=torch.bool)
    keep[7::3_000] = False
    table.compact(keep)
    assert not order.is_due(table.means)
    if shards() > 1:  # a plain comparison of widths would be fooled
        assert order.seams > 0
        assert measure(table.means).run_extent > 1.1 * order.fresh
    with torch.no_grad():
        table.means.detach()[::100] = table.means.detach()[50::100].flip(0)[: -(-table.num_rows // 100)]
    assert order.is_due(table.means)
    assert order.keep(table)
    assert not order.keep(table)


def test_sorted_runs_are_as_small_in_stripes() -> None:
    """Boxes of 256 rows lie within stretches: culling by cells finds no larger ones."""
    table = table_of(scene(60_000))
    table.reorder()
    whole = measure(table.means).run_extent
    deal(table)
    assert measure(table.means).run_extent < 1.1 * whole
    assert table.num_rows % RUN_ROWS  # the last run is short


def test_a_resumed_order_knows_whose_stripes_rows_are_in() -> None:
    table = table_of(scene(9_000))
    order = RowOrder(layout="stripes")
    order.keep(table)
    saved = order.state_dict()
    assert saved["layout"] == "stripes"
    assert saved["shards"] == shards()
    same = RowOrder(layout="stripes")
    same.load_state_dict(saved)
    assert not same.begins_anew
    assert not same.is_due(table.means)
    assert same.state_dict() == saved
    for layout, state in (
        ("stripes", {**saved, "shards": shards() + 1}),
        ("stripes", {"fresh": saved["fresh"]}),  # of a version without layouts
        ("space", saved),
        ("stripes", {**RowOrder().state_dict(), "fresh": saved["fresh"]}),
    ):
        other = RowOrder(layout=layout)  # type: ignore[arg-type]
        other.load_state_dict(state)
        assert other.begin(table), (layout, state)
        assert not other.begin(table)
    plain = RowOrder()
    plain.load_state_dict({})
    assert not plain.begin(table)  # rows in space wait for the next refinement, as ever
    assert plain.is_due(table.means)


def test_a_layout_is_one_of_two_and_the_same_for_order_and_placement() -> None:
    with pytest.raises(ValueError, match='layout is "rows", expected "space" or "stripes"'):
        RowOrder(layout="rows")  # type: ignore[arg-type]
    for kind in (McmcStrategy, DefaultStrategy):
        with pytest.raises(ValueError, match=r'order has layout "stripes" and the placement "space"'):
            kind(100, order=RowOrder(layout="stripes"), placement=Placement())
        kind(100, order=RowOrder(layout="stripes"), placement=Placement(STRIPES))


# ---- homes


def test_homes_of_stripes_stay_even_while_rows_come() -> None:
    """Growth lies behind, on the last shard, until that is crowded or rows are sorted; boundaries stay multiples of 256."""
    if shards() < 2:
        pytest.skip("needs a mesh of several shards")
    table = table_of(scene(40_000), capacity=90_000)
    adam = SplatAdam(table, {})
    order, placement = RowOrder(layout="stripes"), Placement(STRIPES)
    placement.update(table, adam)
    assert table.homes == even_homes(40_000, shards(), 16)
    order.keep(table, adam)
    assert placement.update(table, adam).pages_moved == 0
    for _ in range(12):
        table.grow(table.num_rows * 21 // 20)
        adam.grow(table.num_rows)
        report = placement.update(table, adam)
        assert report.row_imbalance <= 1.5 + 1e-9
        assert all(begin % UNIT_ROWS == 0 for begin, _ in table.homes[:-1])
    with torch.no_grad():
        table.means.detach()[40_000:] = scene(table.num_rows - 40_000, 1).to("mgpu")
    assert order.keep(table, adam)
    assert table.homes == even_homes(table.num_rows, shards(), 16)
    assert placement.update(table, adam).row_imbalance < 1.05


@pytest.mark.parametrize("kind", [McmcStrategy, DefaultStrategy])
def test_a_strategy_keeps_stripes_with_their_moments(kind: type[McmcStrategy | DefaultStrategy]) -> None:
    rows = 20_000
    table = table_of(scene(rows), capacity=rows + 4_000)
    with torch.no_grad():
        table.opacities.detach().copy_(torch.where(torch.arange(rows) % 50 == 0, -9.0, 2.0))
    adam = SplatAdam(table, {})
    strategy = kind(
        rows + 4_000,
        refine_start=0,
        refine_every=10,
        order=RowOrder(1.0001, "stripes"),
        placement=Placement(STRIPES),
    )
    strategy.post_step(table, adam, 5)
    with torch.no_grad():
        table.sh0.detach().copy_(table.means.detach())
        adam.exp_avg["means"].copy_(table.means.detach() + 1)
    strategy.post_step(table, adam, 10)
    assert table.num_rows == (21_000 if kind is McmcStrategy else 19_600)
    means, moments = table.means.detach().cpu(), adam.exp_avg["means"].cpu()
    assert torch.equal(table.sh0.detach().cpu(), means)
    kept = moments.abs().sum(1) > 0  # copies start with none
    assert kept.sum() > 18_000
    assert torch.equal(moments[kept], means[kept] + 1)
    assert table.homes == even_homes(table.num_rows, shards(), 16) or shards() == 1
    assert sum(measure(table.means).descents) <= shards() - 1  # each shard's rows ascend
