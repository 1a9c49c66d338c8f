# SPDX-License-Identifier: Apache-2.0
"""The cutter, by its properties on random costs; hysteresis, by what it must not do; and pages on a mesh of four."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable
from ns_mgpu_splat.partition.placement import (
    PAGE_BYTES,
    CostMap,
    Placement,
    PlacementSettings,
    cut,
    imbalance,
    nearest,
    page_starts,
)

SEEDS = range(25)


def random_costs(seed: int, blocks: int = 400) -> CostMap:
    """Blocks of unlike sizes; most rows are never seen, a few in nearly every step."""
    rng = np.random.default_rng(seed)
    return CostMap.from_blocks(rng.integers(1, 5000, blocks), rng.random(blocks) ** 8)


def bounds(homes: list[tuple[int, int]]) -> list[int]:
    return [end for _, end in homes[:-1]]


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_cover_all_rows_in_order(seed: int) -> None:
    costs = random_costs(seed, blocks=1 + seed * 7)
    shards = 1 + seed % 9
    homes = cut(costs, shards)
    assert len(homes) == shards
    assert homes[0][0] == 0
    assert homes[-1][1] == costs.rows[-1]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(homes))
    assert all(begin <= end for begin, end in homes)


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_cost_the_same_but_for_a_row(seed: int) -> None:
    """Boundaries at any row: off by at most the dearest row on either side."""
    costs = random_costs(seed)
    for shards in (2, 3, 8):
        found = costs.of(cut(costs, shards))
        dearest = float((np.diff(costs.cost) / np.diff(costs.rows)).max())
        assert abs(found - 1 / shards).max() <= 2 * dearest + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_no_shard_has_more_than_twice_its_share_of_rows_or_of_work(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, seen = rng.integers(100, 5000, 300).astype(float), rng.random(300) ** 8
    homes = cut(CostMap.from_blocks(rows, seen), 8)
    sizes = np.array([end - begin for begin, end in homes], float)
    assert imbalance(sizes) <= 2.01
    ends = np.concatenate([[0.0], np.cumsum(rows)])
    work = np.diff(
        np.interp([0, *[end for _, end in homes]], ends, np.concatenate([[0], np.cumsum(rows * seen)]))
    )
    assert imbalance(work) <= 2.01


@pytest.mark.parametrize("seed", SEEDS)
def test_boundaries_lie_where_pages_begin(seed: int) -> None:
    """180 bytes a row: no page begins with a whole row but the first in 45; a boundary is the first whole row of one."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2_000_000, 30_000_000))
    starts = page_starts(rows, 180, 8, 16)
    assert starts is not None
    costs = CostMap.from_blocks(np.full(1000, rows / 1000), rng.random(1000))
    for row in bounds(cut(costs, 8, starts=starts)):
        assert row in (0, rows) or (row - 1) * 180 < row * 180 // PAGE_BYTES * PAGE_BYTES <= row * 180


def test_small_tables_are_cut_at_any_row() -> None:
    assert page_starts(200_000, 180, 4, 16) is None
    assert page_starts(200_000, 0, 4, 16) is None
    assert page_starts(16 * 4 * PAGE_BYTES // 180 + 1, 180, 4, 16) is not None


def test_empty_and_tiny_tables() -> None:
    assert cut(CostMap.from_blocks([0], [0.0]), 3) == [(0, 0)] * 3
    homes = cut(CostMap.from_blocks([2], [1.0]), 5)
    assert sum(end - begin for begin, end in homes) == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_errors_of_measurement_move_nothing(seed: int) -> None:
    """Costs measured again and again with an error: pages move once, to the right place, and then never."""
    rng = np.random.default_rng(seed)
    rows, seen = np.full(512, 1000.0), rng.random(512) ** 4
    homes = cut(CostMap.from_blocks(rows, seen), 8)
    for _ in range(50):
        noisy = CostMap.from_blocks(rows, seen * rng.uniform(0.7, 1.4, 512))
        again = cut(noisy, 8, before=bounds(homes), tolerance=0.25)
        assert again == homes


@pytest.mark.parametrize("seed", SEEDS)
def test_boundaries_that_move_are_right_and_stay(seed: int) -> None:
    """From any cut: those off by more than the tolerance become exact; a second look moves none."""
    rng = np.random.default_rng(seed)
    costs = random_costs(seed)
    before = sorted(rng.integers(0, int(costs.rows[-1]), 7).tolist())
    homes = cut(costs, 8, before=before, tolerance=0.05)
    wanted = np.arange(1, 8) / 8
    error = abs(costs.before(bounds(homes)) - wanted) * 8
    assert error.max() <= 0.05 + 1e-9
    assert cut(costs, 8, before=bounds(homes), tolerance=0.05) == homes
    for old, new, share in zip(before, bounds(homes), wanted, strict=True):
        kept = abs(float(costs.before([old])[0]) - share) * 8 <= 0.05
        assert (old == new) == (kept or old == round(costs.row_at(share)))


def test_the_nearest_piece_is_found() -> None:
    """Against all distances in float64; far from the origin, where float32 without a centre would be coarse."""
    rng = np.random.default_rng(0)
    points, others = (rng.random((n, 3)) + np.array([5000.0, -3000.0, 100.0]) for n in (300, 200))
    distance = np.linalg.norm(points[:, None] - others[None], axis=2)
    found = nearest(points, others)
    assert (distance[np.arange(300), found] <= distance.min(1) + 1e-5).all()


# ---- on the mesh

ROWS = 40_000


@pytest.fixture
def table() -> SplatTable:
    """A table whose rows lie on a line, in order: row r at x = r / ROWS."""
    ns_mgpu_splat.init()
    if len(torch.mgpu.mesh().shards) < 2:  # type: ignore[attr-defined]
        pytest.skip("needs a mesh of several shards: MGPU_DEVICES=cpu:4 (tests/run_suite.py sets it)")
    means = torch.zeros(ROWS, 3)
    means[:, 0] = torch.arange(ROWS) / ROWS
    return SplatTable.from_columns(
        means=means,
        quats=torch.tensor([1.0, 0, 0, 0]).repeat(ROWS, 1),
        scales=torch.full((ROWS, 3), -6.0),
        opacities=torch.zeros(ROWS),
        sh0=torch.zeros(ROWS, 3),
        shN=torch.zeros(ROWS, 15, 3),
        capacity=2 * ROWS,
    )


class History:
    """A history of 100 steps since the flush at step 200."""

    now, base = 300, 200


def seen_by(table: SplatTable, rate: torch.Tensor, seed: int = 0) -> SplatAdam:
    """An optimizer that has seen each row independently with probability `rate` (N,) in each of 100 steps."""
    adam = SplatAdam(table, {"means": 1e-3})
    draw = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)).double()
    # steps since a row was seen: geometric
    age = (draw.clamp_min(1e-12).log() / torch.log1p(-rate.double().clamp(1e-9, 1 - 1e-9))).floor()
    adam.last_step.copy_((History.now - age.clamp(max=100)).to(torch.int32))
    adam.history = History()  # type: ignore[assignment]
    return adam


def test_how_often_rows_are_seen_is_found_again(table: SplatTable) -> None:
    """Rates of 0.002 to 0.6 a step, from the steps in which rows were last seen: within 15 % of the truth."""
    rate = torch.logspace(math.log10(0.002), math.log10(0.6), 4).repeat_interleave(ROWS // 4)
    adam = seen_by(table, rate)
    placement = Placement(PlacementSettings(blocks=64))
    placement.observe(table, adam)
    costs = placement.costs(table)
    quarters = costs.before([ROWS * i // 4 for i in range(5)])
    found = np.diff(quarters) - 0.5 / 4
    truth = rate.view(4, -1).mean(1).double().numpy()
    assert np.allclose(found / found.sum(), truth / truth.sum(), rtol=0.15)


def test_pages_follow_the_work_and_come_to_rest(table: SplatTable) -> None:
    rate = torch.where(torch.arange(ROWS) < ROWS // 4, 0.5, 0.001)
    placement = Placement(PlacementSettings(horizon=10**9))
    shards = len(table.homes)
    first = table.homes[0]
    for seed in range(5):
        adam = seen_by(table, rate, seed)
        placement.observe(table, adam)
        report = placement.update(table, adam)
        if seed == 0:
            assert table.homes[0][1] < first[1]  # the rows that are seen most are shared by more shards
            assert report.imbalance < 1.05
            homes = table.homes
            moments = {id(m): torch.mgpu.row_homes(m) for m in adam.rows_of_all()}  # type: ignore[attr-defined]
            assert all(of == homes for of in moments.values())
        assert table.homes == homes
        assert len(homes) == shards


def test_moves_that_do_not_pay_are_left_alone(table: SplatTable) -> None:
    """One step until the next chance saves less than the pages cost; ten million do not."""
    rate = torch.where(torch.arange(ROWS) < ROWS // 4, 0.5, 0.001)
    adam = seen_by(table, rate)
    homes = table.homes
    table.place(homes, adam)  # pages that are dealt evenly do not all lie where these rows' homes are
    short = Placement(PlacementSettings(horizon=1))
    short.observe(table, adam)
    assert short.update(table, adam).pages_moved == 0
    assert table.homes == homes
    long = Placement(PlacementSettings(horizon=10_000_000))
    long.observe(table, adam)
    assert long.update(table, adam).pages_moved > 0
    assert table.homes != homes


def test_growth_at_the_end_crowds_no_shard(table: SplatTable) -> None:
    """5 % more rows a round, all behind the last: no time is saved by moving (horizon 1), but no shard may be too full.

    Here too full is what the last of equal shards is with a fifth more rows: 1.17 times the mean of two, 1.5 times that of four.
    """
    shards = len(table.homes)
    crowded = shards - (shards - 1) / 1.2
    placement = Placement(PlacementSettings(horizon=1, crowded=crowded))
    moving, rounds = 0, 14
    for _ in range(rounds):
        table.grow(min(2 * ROWS, table.num_rows * 21 // 20))
        before = table.placed
        report = placement.update(table)
        assert report.row_imbalance <= crowded
        moving += [end for _, end in table.homes[:-1]] != [end for _, end in before[:-1]]
    assert table.num_rows > 1.9 * ROWS
    assert 1 <= moving <= rounds // 2  # several rounds' growth is dealt at once


def test_pages_of_new_rows_are_made_where_they_stay(table: SplatTable) -> None:
    """With the last shard, to which they belong: a dealing that moves no boundary moves no page of a large column."""
    Placement().update(table)
    homes, shard_of = table.homes, lambda: torch.mgpu.placement(table.shN.detach()).tolist()  # type: ignore[attr-defined]
    before = shard_of()
    table.grow(ROWS * 5 // 4)
    grown = shard_of()
    assert grown == before + [len(homes) - 1] * (len(grown) - len(before))
    assert len(grown) > len(before)
    Placement(PlacementSettings(horizon=1, crowded=3.0)).update(table)
    assert table.homes == [*homes[:-1], (homes[-1][0], table.num_rows)]
    assert shard_of() == grown


def test_what_was_seen_is_carried_over_by_place(table: SplatTable) -> None:
    """Rows turned round and grown by a tenth: the dear end is at the other end now."""
    rate = torch.where(torch.arange(ROWS) < ROWS // 4, 0.5, 0.001)
    placement = Placement(PlacementSettings(blocks=64))
    placement.observe(table, seen_by(table, rate))
    with torch.no_grad():
        table.means.detach()[:, 0] = 1 - table.means.detach()[:, 0]
    table.grow(ROWS * 11 // 10)
    table.means.detach()[ROWS:, 0] = 0.9  # where rows are hardly seen
    costs = placement.costs(table)
    quarter = costs.before([ROWS * 3 // 4, ROWS])
    assert quarter[1] - quarter[0] > 0.5
    assert costs.cost[-1] - quarter[1] < 0.1


def test_misplaced_bytes_are_half_a_page_at_most(table: SplatTable) -> None:
    """Of each boundary and tensor; and what is counted is what an enumeration of rows finds."""
    ends = [*[777, 12345, 12345, *([ROWS] * len(table.homes))][: len(table.homes) - 1], ROWS]
    homes = list(zip([0, *ends[:-1]], ends, strict=True))
    table.place(homes)
    for name, column in table.named_columns().items():
        found = torch.mgpu.misplaced_bytes(column.detach())  # type: ignore[attr-defined]
        row_bytes = column.stride(0) * 4
        places = torch.mgpu.placement(column.detach()).long()  # type: ignore[attr-defined]
        home = torch.empty(ROWS, dtype=torch.long)
        for shard, (begin, end) in enumerate(homes):
            home[begin:end] = shard
        byte = torch.arange(ROWS * row_bytes)
        assert found == int((places[byte // PAGE_BYTES] != home[byte // row_bytes]).sum()), name
        assert found <= PAGE_BYTES // 2 * (len(homes) - 1)


def test_place_refuses_what_does_not_fit(table: SplatTable) -> None:
    homes = table.homes
    with pytest.raises(ValueError, match="expected one for each of"):
        table.place([(0, ROWS)])
    with pytest.raises(ValueError, match="begins at row"):
        table.place([(0, 10), (11, ROWS), *[(ROWS, ROWS)] * (len(homes) - 2)])
    with pytest.raises(ValueError, match="up to row"):
        table.place([(0, ROWS - 1), *[(ROWS - 1, ROWS - 1)] * (len(homes) - 1)])
    adam = SplatAdam(table, {"means": 1e-3})
    adam.pending.append(object())
    with pytest.raises(ValueError, match="pending"):
        table.place(homes, adam)
    assert table.homes == homes


def test_homes_follow_growth_and_are_forgotten_with_the_memory(table: SplatTable) -> None:
    shards = len(table.homes)
    table.place([(0, 100), *[(100, 100)] * (shards - 2), (100, ROWS)])
    table.grow(2 * ROWS)
    assert table.homes == [(0, 200), *[(200, 200)] * (shards - 2), (200, 2 * ROWS)]
    assert table.placed[0] == (0, 100)
    table.resize(ROWS, capacity=3 * ROWS)  # other memory: in equal chunks
    chunk = -(-ROWS // shards)  # the last one has what is left
    assert table.homes == [(min(ROWS, i * chunk), min(ROWS, (i + 1) * chunk)) for i in range(shards)]
    assert table.placed == table.homes


def test_pages_that_move_are_counted(table: SplatTable) -> None:
    """By place(), and again on the way back; not by a place() that moves none."""
    homes, columns = table.homes, [column.detach() for column in table.columns()]
    table.place(homes)  # pages that are dealt evenly do not all lie where these rows' homes are
    before = [torch.mgpu.placement(column) for column in columns]  # type: ignore[attr-defined]
    torch.mgpu.reset_link_stats()  # type: ignore[attr-defined]
    moved = table.place([(0, ROWS), *[(ROWS, ROWS)] * (len(homes) - 1)])
    assert moved == sum(int((places != 0).sum()) for places in before) > 0
    assert table.place(table.homes) == 0
    assert torch.mgpu.link_stats()["pages_moved"] == moved  # type: ignore[attr-defined]
    table.place(homes)
    assert torch.mgpu.link_stats(reset=True)["pages_moved"] == 2 * moved  # type: ignore[attr-defined]
    assert torch.mgpu.link_stats()["pages_moved"] == 0  # type: ignore[attr-defined]
