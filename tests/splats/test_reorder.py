# SPDX-License-Identifier: Apache-2.0
"""Rows that move in place: the Hilbert order against a slow one in Python's integers, and compaction against indexing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from splat_scenes import camera_of, mesh_of, random_columns, random_twin_camera, table_of
from torch import Tensor
from twin_order import slow_order

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable, render
from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition.stripes import deal
from ns_mgpu_splat.splats.densify import DefaultStrategy, McmcStrategy
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.statistics import RowStatistics
from ns_mgpu_splat.splats.table import COLUMNS


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def trained(columns: dict[str, Tensor], capacity: int | None = None) -> tuple[SplatTable, SplatAdam]:
    """A table and an optimizer in whose state every value tells its row."""
    table = SplatTable.from_columns(**columns, capacity=capacity)
    adam = SplatAdam(table, {})
    rows = table.num_rows
    for offset, moments in enumerate((adam.exp_avg, adam.exp_avg_sq)):
        for name in COLUMNS:
            shape = moments[name].shape
            moments[name].copy_(torch.arange(moments[name].numel()).reshape(shape) % 9973 + offset)
    adam.statistics = RowStatistics(rows, table.capacity, radius=True)
    for tensor in adam.statistics.tensors():
        tensor.copy_(torch.arange(rows))
    return table, adam


def everything(table: SplatTable, adam: SplatAdam) -> list[Tensor]:
    tensors = [*table.columns(), *adam.state(), *adam.other_rows()]
    return [tensor.detach().cpu().clone() for tensor in tensors]


@pytest.mark.parametrize("rows", [1, 2, 17, 5_000])
@pytest.mark.parametrize("degree", [0, 2, 3])
def test_reorder_sorts_rows_along_the_hilbert_curve(rows: int, degree: int) -> None:
    columns = random_columns(rows, 5, degree=degree)
    columns["means"][::7] = columns["means"][0].clone()  # equal keys keep their order
    if rows > 100:
        columns["means"][3, 1] = float("nan")
        columns["means"][40, 2] = float("inf")
    table, adam = trained(columns)
    before = everything(table, adam)
    addresses = [column.data_ptr() for column in table.columns()]
    order = slow_order(columns["means"])
    table.reorder(adam)
    for old, new in zip(before, everything(table, adam), strict=True):
        assert torch.equal(new, old[order]) or torch.equal(new.nan_to_num(7), old[order].nan_to_num(7))
    assert addresses == [column.data_ptr() for column in table.columns()]
    table.reorder(adam)  # sorted rows stay
    for old, new in zip(before, everything(table, adam), strict=True):
        assert torch.equal(new.nan_to_num(7), old[order].nan_to_num(7))


def test_a_column_that_does_not_fit_the_scratch_goes_in_slices() -> None:
    columns = random_columns(3_000, 6)
    table, adam = trained(columns)
    before = everything(table, adam)
    order = slow_order(columns["means"])
    native().reorder(table.columns(), adam.state(), adam.other_rows(), 40_000)
    for old, new in zip(before, everything(table, adam), strict=True):
        assert torch.equal(new, old[order])


@pytest.mark.parametrize("work", ["reorder", "deal", "mcmc", "default"])
def test_no_more_than_one_column_is_there_twice(work: str) -> None:
    """At most one column's bytes are taken meanwhile, and lists of rows; the two widest alone would be half of all."""
    rows = 50_000
    columns = random_columns(rows, 8)
    columns["opacities"][::10] = -9.0
    table, adam = trained(columns)
    before = table.means.detach().cpu().clone()
    allocated = torch.mgpu.memory_allocated()  # type: ignore[attr-defined]
    torch.mgpu.reset_peak_memory_stats()  # type: ignore[attr-defined]
    if work == "reorder":
        table.reorder(adam)
    elif work == "deal":
        deal(table, adam)
    elif work == "mcmc":
        McmcStrategy(rows, refine_start=0, refine_every=1).post_step(table, adam, 1)
    else:
        DefaultStrategy(rows).post_step(table, adam, 600)
    taken = torch.mgpu.max_memory_allocated() - allocated  # type: ignore[attr-defined]
    assert taken <= table.shN.nbytes + 128 * rows
    assert not torch.equal(table.means.detach().cpu()[:40_000], before[:40_000])


def test_reorder_of_nothing_and_of_one_place() -> None:
    empty = SplatTable(0)
    empty.reorder(SplatAdam(empty, {}))
    columns = random_columns(50, 1)
    columns["means"] = torch.ones(50, 3)
    table = table_of(columns)
    table.reorder()
    assert all(
        torch.equal(column.detach().cpu(), columns[name]) for name, column in table.named_columns().items()
    )


def test_rows_do_not_move_away_from_gradients_and_moments() -> None:
    """Pending gradients, and moments, of an optimizer that was not given went to whichever rows then had those numbers."""
    table = table_of(random_columns(50, 3))
    adam, another = SplatAdam(table, {"sh0": 0.1}), SplatAdam(table, {})
    means = table.means.detach().cpu()
    (image,) = render(table, camera_of(random_twin_camera(4, 40, 30)), optimizer=adam)
    image.rgb.square().sum().backward()
    for given in (None, another):
        with pytest.raises(
            ValueError, match=r"gradients pending .*: call its step\(\) or zero_pending\(\) first"
        ):
            table.reorder(given)
    adam.step()
    with pytest.raises(ValueError, match=r"without the table's optimizer, .*: call reorder\(optimizer\)"):
        table.reorder()
    assert torch.equal(table.means.detach().cpu(), means)
    colors = table.sh0.detach().cpu()
    table.reorder(adam)
    assert torch.equal(table.sh0.detach().cpu(), colors[slow_order(means)])


def test_an_optimizer_that_is_gone_is_not_missed() -> None:
    """Nor is one that has taken no step: it has nothing of a row."""
    table = table_of(random_columns(50, 3))
    adam, fresh = SplatAdam(table, {"sh0": 0.1}), SplatAdam(table, {})
    adam.step()
    del adam
    table.reorder()
    assert fresh.steps == 0


@pytest.mark.parametrize("far", [1e4, 1e30])
def test_a_few_rows_far_out_do_not_make_the_order_coarse(far: float) -> None:
    """Four rows of 5,000 lie far away; the others come in as good an order as without them."""
    alone = random_columns(5_000, 5, degree=0)["means"]
    alone = alone[slow_order(alone)]
    columns = random_columns(5_000, 5, degree=0)
    for row, sign in ((10, 1.0), (2_000, -1.0), (2_001, 1.0), (4_999, -1.0)):
        columns["means"][row, row % 3] = sign * far
    order = slow_order(columns["means"])
    table = table_of(columns)
    table.reorder()
    assert torch.equal(table.means.detach().cpu(), columns["means"][order])
    measured = native().measure_rows(table.means.detach())
    assert sum(measured["changes"]) > 4_900  # hardly two rows in one cell
    near = columns["means"][[row for row in order if row not in (10, 2_000, 2_001, 4_999)]]

    def stride(points: Tensor) -> float:
        return float((points[1:] - points[:-1]).abs().sum(1).mean())

    assert stride(near) < 1.1 * stride(alone)


@pytest.mark.parametrize("rows", [3_000, pytest.param(48_000_000, marks=pytest.mark.gpu)])
def test_rows_stay_whole_in_columns_of_more_than_2_31_values(rows: int) -> None:
    """Every row carries its number; means on a line, with the same place for many: sorted by place, then by number."""
    table = SplatTable(rows, sh_degree=3)
    number = torch.arange(rows, device="mgpu")
    with torch.no_grad():
        table.means.detach()[:, 0] = (number * 1_000_003 % 2**20).float()
        table.sh0.detach()[:, 0] = (number // 4096).float()
        table.sh0.detach()[:, 1] = (number % 4096).float()
        table.shN.detach()[:, 14, 2] = (number % 4099).float()
    table.reorder()
    sh0 = table.sh0.detach()
    found = sh0[:, 0].long() * 4096 + sh0[:, 1].long()
    place = table.means.detach()[:, 0].long()
    assert torch.equal(place, found * 1_000_003 % 2**20)
    assert torch.equal(table.shN.detach()[:, 14, 2].long(), found % 4099)
    elsewhere = place[1:] != place[:-1]
    assert int(elsewhere.sum()) + 1 == min(rows, 2**20)  # 1,000,003 is odd: every place comes up
    assert bool((elsewhere | (found[1:] > found[:-1])).all())
    assert sum(native().measure_rows(table.means.detach())["descents"]) == 0


def test_reorder_leaves_the_image_alone() -> None:
    columns = random_columns(2_000, 9)
    camera = camera_of(random_twin_camera(2, 96, 64))
    table = table_of(columns, requires_grad=False)
    before = render(table, camera)[0].rgb.cpu()
    table.reorder()
    assert not torch.equal(table.means.detach().cpu(), columns["means"])
    after = render(table, camera)[0].rgb.cpu()
    assert torch.equal(before, after)  # no two depths are equal in this scene


def test_training_is_the_same_but_for_the_order_of_rows() -> None:
    """Without noise a reordered table takes the same steps; sums over pixels may be rounded in another order."""
    columns = random_columns(400, 3)
    cameras = [camera_of(random_twin_camera(seed, 64, 48)) for seed in range(3)]
    target = torch.rand(48, 64, 3, generator=torch.Generator().manual_seed(0))
    lrs = {"means": 1e-3, "scales": 1e-3, "opacities": 1e-2, "sh0": 1e-2, "quats": 1e-3, "shN": 1e-3}

    def train(reorder_at: int) -> dict[str, Tensor]:
        table = table_of(columns)
        adam = SplatAdam(table, lrs, eps=1e-8)
        for step in range(6):
            if step == reorder_at:
                table.reorder(adam)
            image = render(table, cameras[step % 3], optimizer=adam)[0].rgb
            ((image - target.to(image.device)) ** 2).mean().backward()
            adam.step()
        adam.flush()
        return {name: column.detach().cpu() for name, column in table.named_columns().items()}

    plain, reordered = train(-1), train(0)
    order = slow_order(columns["means"])
    for name in COLUMNS:
        difference = (reordered[name] - plain[name][order]).abs()
        assert float(difference.max()) < 1e-3, name
        assert float(difference.mean()) < 1e-6, name


def test_compact_keeps_rows_in_order_and_in_place() -> None:
    columns = random_columns(5_000, 8, degree=1)
    table, adam = trained(columns, capacity=6_000)
    keep = torch.rand(5_000, generator=torch.Generator().manual_seed(1)) < 0.6
    before = everything(table, adam)
    parameters, addresses = table.columns(), [column.data_ptr() for column in table.columns()]
    assert table.compact(keep, adam) == int(keep.sum()) == table.num_rows
    for old, new in zip(before, everything(table, adam), strict=True):
        assert torch.equal(new, old[keep])
    assert all(a is b for a, b in zip(parameters, table.columns(), strict=True))
    assert addresses == [column.data_ptr() for column in table.columns()]
    table.grow(6_000)
    adam.grow(6_000)
    for old, new in zip(before, everything(table, adam), strict=True):
        assert torch.equal(new[: int(keep.sum())], old[keep])
        assert not new[int(keep.sum()) :].any()  # what was given up comes back as zeros


@pytest.mark.parametrize("kept", [0, 5_000])
def test_compact_to_nothing_and_to_all(kept: int) -> None:
    columns = random_columns(5_000, 8, degree=0)
    table, adam = trained(columns)
    assert table.compact(torch.full((5_000,), kept > 0), adam) == kept
    assert table.num_rows == adam.last_step.shape[0] == kept
    if kept:
        assert torch.equal(table.means.detach().cpu(), columns["means"])


def test_misuse_is_explained() -> None:
    table, adam = trained(random_columns(20, 0))
    with pytest.raises(ValueError, match=r"keep is Float \[20\].*expected contiguous bool \[20\]"):
        table.compact(torch.ones(20))
    with pytest.raises(ValueError, match=r"keep is Bool \[19\]"):
        table.compact(torch.ones(19, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"shrink\(21\) on a table of 20 rows"):
        table.shrink(21)
    with pytest.raises(ValueError, match=r"shrink\(21\) on an optimizer of 20 rows"):
        adam.shrink(21)
    loss = (table.means * table.means).sum()
    table.reorder(adam)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


PROBE = """
import sys, torch, ns_mgpu_splat
sys.path.insert(0, {here!r})
ns_mgpu_splat.init()
from ns_mgpu_splat.device import native
from test_reorder import everything, random_columns, trained
table, adam = trained(random_columns(9_000, 5))
table.reorder(adam)
table.means.detach().neg_()
native().reorder(table.columns(), adam.state(), adam.other_rows(), 60_000)  # in slices
table.reorder(adam, deal=[(0, 2_560), (2_560, 7_680), (7_680, 9_000)], stripe=600)
table.compact(torch.rand(9_000, generator=torch.Generator().manual_seed(1)) < 0.7, adam)
torch.save(everything(table, adam), sys.argv[1])
"""


@pytest.mark.any_mesh
def test_the_order_does_not_depend_on_the_mesh(tmp_path: Path) -> None:
    """With the locality check on three shards, in processes of their own."""
    results = []
    for shards in (1, 3):
        devices = mesh_of(shards)
        environment = {**os.environ, "MGPU_DEVICES": devices, "MGPU_SHARD_THRESHOLD": "4096"}
        if devices.startswith("cpu"):
            environment["MGPU_CHECK_LOCALITY"] = "1"
        out = tmp_path / f"{shards}.pt"
        source = PROBE.format(here=str(Path(__file__).parent))
        done = subprocess.run(
            [sys.executable, "-c", source, str(out)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(torch.load(out, weights_only=True))
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)
