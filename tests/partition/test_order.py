# SPDX-License-Identifier: Apache-2.0
"""How well rows are in order, against plain Python; voxels that hold some hundreds of rows; when rows are sorted again."""

from __future__ import annotations

import itertools
from collections import Counter

import fvdb_stub  # noqa: F401 - makes the oracles importable
import numpy as np
import pytest
import torch
from torch import Tensor
from twin_order import BITS, cube_of, slow_keys

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable
from ns_mgpu_splat.partition import SparseGrid, grid_in_use
from ns_mgpu_splat.partition.order import RUN_ROWS, VOXEL_ROWS, RowOrder, measure
from ns_mgpu_splat.partition.summary import summarise
from ns_mgpu_splat.splats.densify import McmcStrategy
from ns_mgpu_splat.splats.optimizer import SplatAdam


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def scene(rows: int, seed: int = 0) -> Tensor:
    """A bumpy surface of 8 x 8 units: what most of a captured scene is."""
    xy = torch.rand(rows, 2, generator=torch.Generator().manual_seed(seed)) * 8
    return torch.cat([xy, 0.3 * torch.sin(3 * xy[:, :1]) + 0.2 * torch.cos(2 * xy[:, 1:])], dim=1)


def table_of(means: Tensor, capacity: int | None = None) -> SplatTable:
    rows = means.shape[0]
    table = SplatTable(rows, sh_degree=0, capacity=capacity)
    table.write_rows(0, {"means": means, "quats": torch.ones(rows, 4), "scales": torch.full((rows, 3), -4.0)})
    return table


@pytest.mark.parametrize("rows", [0, 1, 255, 256, 257, 5_000])
@pytest.mark.parametrize("in_order", [False, True])
def test_the_measure_is_that_of_plain_python(rows: int, in_order: bool) -> None:
    means = scene(rows)
    if rows > 200:
        means[17, 1] = float("nan")
        means[100:110] = means[99]
        means[150] = torch.tensor([900.0, -3.0, 4.0])
    table = table_of(means)
    if in_order:
        table.reorder()
        means = table.means.detach().cpu().clone()
    found = measure(table.means)
    keys = slow_keys(means)
    finite = [key < 1 << 63 for key in keys]
    assert found.finite_rows == sum(finite)
    if not any(finite):
        assert (found.runs, found.run_cells, found.voxels(0), found.run_extent) == (0, 0, 0, 0.0)
        return
    corner, side = cube_of(means[torch.tensor(finite)].numpy())
    assert list(found.low) == corner
    assert found.side == side
    changes, descents = Counter(), Counter()
    for before, after in itertools.pairwise(keys):
        if before < 1 << 63 > after and before != after:
            level = BITS - ((before ^ after).bit_length() - 1) // 3
            changes[level] += 1
            descents[level] += after < before
    assert list(found.changes) == [changes[level] for level in range(BITS + 1)]
    assert list(found.descents) == [descents[level] for level in range(BITS + 1)]
    scale = 2**BITS / side if side else 0.0
    cells = np.clip((means.double().numpy() - corner) * scale, 0, 2**BITS - 1)
    total = runs = 0
    for begin in range(0, rows, RUN_ROWS):
        of_run = cells[begin : begin + RUN_ROWS]
        of_run = np.floor(of_run[np.isfinite(of_run).all(1)])
        runs += len(of_run) > 0
        total += int((of_run.max(0) - of_run.min(0)).sum()) if len(of_run) else 0
    assert (found.runs, found.run_cells) == (runs, total)
    if in_order:
        assert sum(found.descents) == 0 == found.out_of_order()


def test_sorted_rows_tell_how_many_voxels_of_each_size_they_fill() -> None:
    """And these voxels are those of a SparseGrid."""
    table = table_of(scene(40_000))
    table.reorder()
    found = measure(table.means)
    for level in (0, 3, 5, 7):
        size, origin = found.voxel_size(level), found.voxel_origin(level)
        grid = SparseGrid.from_points(table.means.detach().double(), size, origin)
        assert grid.num_voxels == found.voxels(level)
    level = found.level()
    assert found.voxels(level) * VOXEL_ROWS <= 40_000 < found.voxels(level + 1) * VOXEL_ROWS
    assert found.level(1) > level > found.level(20_000)


def test_voxels_are_visited_one_after_the_other() -> None:
    """Of any level: the rows of a voxel are one run of rows."""
    table = table_of(scene(20_000))
    table.reorder()
    found = measure(table.means)
    for level in (2, 4, 6):
        grid = SparseGrid.from_points(
            table.means.detach().double(), found.voxel_size(level), found.voxel_origin(level)
        )
        voxels = grid.world_to_voxel(table.means.detach().double()).round().int()
        index = grid.ijk_to_index(voxels).cpu()
        assert int((index[1:] != index[:-1]).sum()) + 1 == grid.num_voxels


def test_sorted_runs_are_small_and_few_rows_out_of_place_tell() -> None:
    means = scene(50_000)
    table = table_of(means)
    shuffled = measure(table.means).run_extent
    table.reorder()
    in_order = measure(table.means).run_extent
    assert in_order < 0.15 * shuffled
    with torch.no_grad():  # a row in 1,000 becomes a copy of another one, as when dead rows are relocated
        table.means.detach()[::1_000] = table.means.detach()[500::1_000].flip(0)
    assert measure(table.means).run_extent > 1.5 * in_order


@pytest.mark.parametrize("in_order", [False, True])
def test_the_summary_finds_voxels_of_some_hundreds_of_rows_in_any_order(in_order: bool) -> None:
    means = scene(30_000)
    means[5] = float("nan")
    table = table_of(means)
    if in_order:
        table.reorder()
    found = summarise(table.means)
    low = np.array(measure(table.means).low)
    places = np.delete(means.double().numpy(), 5, axis=0)
    assert found.voxels == len(np.unique(np.floor((places - low) / found.voxel_size), axis=0))
    assert (
        VOXEL_ROWS <= found.rows_per_voxel < 5 * VOXEL_ROWS
    )  # a surface: the next finer ones hold a quarter
    assert found.finite_rows == 29_999
    assert (found.out_of_order == 0) == in_order
    assert str(found).startswith(grid_in_use())
    assert f"{found.voxels:,} voxels of" in str(found)


def test_the_summary_of_nothing_and_of_one_place() -> None:
    assert summarise(torch.empty(0, 3, device="mgpu")).voxels == 0
    one = summarise(torch.ones(1_000, 3, device="mgpu"))
    assert (one.voxels, one.rows_per_voxel, one.out_of_order) == (1, 1_000.0, 0.0)


def test_rows_are_sorted_when_that_is_due_and_not_before() -> None:
    table = table_of(scene(30_000))
    order = RowOrder()
    assert order.keep(table)
    sorted_means = table.means.detach().cpu().clone()
    with torch.no_grad():
        table.means.detach().add_(1e-3 * torch.randn(30_000, 3).to("mgpu"))  # training moves rows a little
    assert not order.keep(table)
    assert torch.equal(
        (table.means.detach().cpu() - sorted_means).abs() < 0.1, torch.ones(30_000, 3, dtype=torch.bool)
    )
    with torch.no_grad():
        table.means.detach()[::100] = table.means.detach()[50::100].flip(0)
    assert order.is_due(table.means)
    assert order.keep(table)
    assert sum(measure(table.means).descents) == 0
    assert not order.keep(table)


def test_a_resumed_order_sorts_at_the_same_steps() -> None:
    table = table_of(scene(5_000))
    order, resumed = RowOrder(), RowOrder()
    order.keep(table)
    resumed.load_state_dict(order.state_dict())
    assert not resumed.is_due(table.means)
    resumed.load_state_dict({})  # saved by a version without it
    assert resumed.is_due(table.means)
    assert not RowOrder().is_due(torch.empty(0, 3, device="mgpu"))
    for decay in (1.0, 0.5, float("nan")):
        with pytest.raises(ValueError, match=r"decay is .*, expected a factor above 1"):
            RowOrder(decay)


def test_a_strategy_keeps_rows_in_order_with_their_moments() -> None:
    """Growth and relocation spoil the order; afterwards it is restored, and every row has its own moments and values."""
    rows = 20_000
    table = table_of(scene(rows), capacity=rows + 4_000)
    with torch.no_grad():
        table.opacities.detach().copy_(torch.where(torch.arange(rows) % 50 == 0, -9.0, 2.0))
    adam = SplatAdam(table, {})
    strategy = McmcStrategy(rows + 4_000, refine_start=0, refine_every=10, order=RowOrder(1.0001))
    strategy.post_step(table, adam, 5)
    assert sum(measure(table.means).descents) > 0  # no refinement: nothing was touched
    report = strategy.post_step(table, adam, 10)
    assert report == {"relocated": 400, "added": 1_000, "total": 21_000}
    assert sum(measure(table.means).descents) == 0
    with torch.no_grad():
        table.sh0.detach().copy_(table.means.detach())
        adam.exp_avg["means"].copy_(table.means.detach() + 1)
        table.opacities.detach()[::40] = -9.0
    alive = table.opacities.detach().cpu() > -5  # 0.7 %
    before = {tuple(row) for row in table.means.detach().cpu()[alive].tolist()}
    strategy.post_step(table, adam, 20)
    assert sum(measure(table.means).descents) == 0
    assert torch.equal(table.sh0.detach().cpu(), table.means.detach().cpu())
    moments = adam.exp_avg["means"].cpu()
    untouched = moments.abs().sum(1) > 0  # copies start with none
    assert torch.equal(moments[untouched], table.means.detach().cpu()[untouched] + 1)
    assert {tuple(row) for row in table.means.detach().cpu().tolist()} <= before


def test_without_an_order_rows_stay_where_they_are() -> None:
    table = table_of(scene(2_000))
    adam = SplatAdam(table, {})
    with torch.no_grad():
        table.opacities.detach().fill_(2.0)
    means = table.means.detach().cpu().clone()
    McmcStrategy(2_000, refine_start=0, refine_every=10).post_step(table, adam, 10)
    assert torch.equal(table.means.detach().cpu(), means)
