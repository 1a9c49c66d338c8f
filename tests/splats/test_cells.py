# SPDX-License-Identifier: Apache-2.0
"""Culling by cells leaves no record out: the same records, bit for bit, as without cells, whoever wrote the table."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from splat_scenes import camera_of, random_columns, random_twin_camera
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatTable, render, train_step
from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.densify import McmcStrategy
from ns_mgpu_splat.splats.optimizer import SplatAdam

LRS = {"means": 2e-2, "scales": 2e-2, "quats": 1e-2, "opacities": 5e-2, "sh0": 1e-2, "shN": 1e-3}
SIZE = 96, 64


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def cameras(*seeds: int) -> list[Camera]:
    """Cameras near the origin, turned by a quarter each."""
    made = []
    for seed in seeds:
        twin = random_twin_camera(seed, *SIZE)
        angle = seed * math.pi / 2
        turn = torch.eye(4, dtype=twin.viewmat.dtype)
        turn[0, 0] = turn[2, 2] = math.cos(angle)
        turn[0, 2], turn[2, 0] = math.sin(angle), -math.sin(angle)
        made.append(camera_of(twin, (twin.viewmat @ turn).float()))
    return made


def scene(rows: int, *, seed: int = 3, odd: bool = True) -> dict[str, Tensor]:
    """Rows all around the origin; some are not finite, or huge."""
    columns = random_columns(rows, seed)
    g = torch.Generator().manual_seed(seed + 100)
    columns["means"] = torch.randn(rows, 3, generator=g) * torch.tensor([6.0, 3.0, 6.0])
    columns["scales"] = columns["scales"] - 1.0
    if odd and rows > 100:
        columns["means"][7, 1] = math.nan
        columns["means"][50, 0] = math.inf
        columns["scales"][11, 2] = math.nan
        columns["scales"][12] = -math.inf
        columns["scales"][60] = 3.0
        columns["means"][61] = -300.0
        columns["opacities"][13] = math.nan
    return columns


def table_with_cells(
    columns: dict[str, Tensor], *, ordered: bool = True, capacity: int | None = None
) -> SplatTable:
    """A table that has cells from its second frame on, however small."""
    table = SplatTable.from_columns(**columns, capacity=capacity).requires_grad_(True)
    if ordered:
        table.reorder()
    table.cells.least_rows = 0
    return table


def frame_of(table: SplatTable, views: list[Camera], adam: SplatAdam | None, cells: Any) -> Any:
    state, history = (None, None) if adam is None else (adam.state(), adam.history)
    arguments = [view.arguments() for view in views]
    return native().splat_forward(
        table.columns(), state, history, arguments, None, False, 3, False, cells=cells
    )[0]


def culled_frame(table: SplatTable, views: list[Camera], adam: SplatAdam | None = None) -> Any:
    """A frame by cells; the first of a table has none yet."""
    frame = frame_of(table, views, adam, table.cells)
    return frame if sum(frame.counts()["cells"]) else frame_of(table, views, adam, table.cells)


def assert_same_records(
    table: SplatTable, views: list[Camera], adam: SplatAdam | None = None
) -> dict[str, Any]:
    """By cells, and without; returns the counts by cells."""
    by_cells, plain = culled_frame(table, views, adam), frame_of(table, views, adam, None)
    counts = by_cells.counts()
    assert table.num_rows == 0 or sum(counts["cells"]) > 0, "this frame had no cells"
    assert plain.counts()["cells"] == [0] * len(counts["cells"])
    for mine, other in zip(by_cells.records(), plain.records(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu())
    return counts


def homes(rows: int) -> list[tuple[int, int]]:
    """Rows of each shard: equal chunks."""
    shards = len(shard_names())
    chunk = -(-rows // shards)
    return [(min(chunk * s, rows), min(chunk * (s + 1), rows)) for s in range(shards)]


def shard_names() -> tuple[str, ...]:
    return vars(torch)["mgpu"].mesh().shards


@pytest.mark.parametrize(
    ("rows", "ordered", "seeds"),
    [
        *((rows, True, (2, 3, 0, 1)) for rows in (0, 1, 17, 257)),
        *((20_000, ordered, seeds) for ordered in (True, False) for seeds in ((0,), (1,), (2, 3, 0, 1))),
    ],
)
def test_records_are_the_same_with_and_without_cells(
    rows: int, ordered: bool, seeds: tuple[int, ...]
) -> None:
    table = table_with_cells(scene(rows), ordered=ordered)
    counts = assert_same_records(table, cameras(*seeds))
    shards = len(counts["cells"])
    assert sum(counts["visible"]) > 0 or rows < 100
    assert all(kept <= cells for kept, cells in zip(counts["cells_kept"], counts["cells"], strict=True))
    assert rows / 256 <= sum(counts["cells"]) < rows / 256 + shards + 1 or rows == 0
    assert sum(counts["visible"]) <= sum(counts["candidates"])
    if rows == 20_000 and len(seeds) == 1:
        share = sum(counts["cells_kept"]) / sum(counts["cells"])
        assert share < 0.85 if ordered else share > 0.9
        assert sum(counts["candidates"]) <= 256 * sum(counts["cells_kept"])


def test_boxes_hold_their_rows() -> None:
    """The oracle is the columns themselves, read row by row."""
    table = table_with_cells(scene(3_000))
    culled_frame(table, cameras(0))
    boxes = iter(table.cells.boxes())
    means, scales = table.means.detach().cpu(), table.scales.detach().cpu()
    for begin, end in homes(3_000):
        for first in range(begin, end, 256):
            rows = slice(first, min(end, first + 256))
            finite = means[rows].isfinite().all(1) & scales[rows].isfinite().all(1)
            inside, sizes = means[rows][finite], scales[rows][finite]
            low, size, high = next(boxes).split([3, 1, 4])
            assert torch.equal(low, inside.amin(0))
            assert torch.equal(high[:3], inside.amax(0))
            assert size.item() == sizes.max().item()
    assert next(boxes, None) is None


def test_a_broken_box_loses_records() -> None:
    """The comparison above notices a box that does not hold its rows."""
    table = table_with_cells(scene(3_000))
    views = cameras(0)
    assert_same_records(table, views)
    boxes = table.cells.boxes()
    boxes[:, 0:3] = boxes[:, 4:7] = 1e4
    table.cells.plant_boxes(boxes)
    with pytest.raises(AssertionError):
        assert_same_records(table, views)


@pytest.mark.parametrize("column", ["means", "scales"])
def test_writes_in_place_are_noticed(column: str) -> None:
    columns = scene(2_000, odd=False)
    columns["means"][:, 0] += 200.0  # beside the camera
    columns["means"][:, 2] += 40.0
    columns["opacities"][:] = 2.0
    table, views = table_with_cells(columns), cameras(0)
    counts = assert_same_records(table, views)
    assert sum(counts["visible"]) == 0
    with torch.no_grad():
        if column == "means":
            table.means[123:130] = torch.tensor([0.0, 0.0, 4.0])
        else:
            table.scales[123:130] = 5.0
    assert sum(assert_same_records(table, views)["visible"]) > 0
    built = table.cells.built
    table.means.data[200] = torch.tensor([0.0, 0.0, 3.0], device=table.means.device)  # behind autograd's back
    table.cells.forget()
    assert_same_records(table, views)
    assert table.cells.built == built + 1


def far_and_near(rows: int) -> tuple[SplatTable, list[Camera], Tensor]:
    table = table_with_cells(scene(rows))
    target = torch.rand(SIZE[1], SIZE[0], 3, generator=torch.Generator().manual_seed(1)).to("mgpu")
    return table, cameras(0, 1, 2, 3), target


@pytest.mark.parametrize("noise_lr", [0.0, 20.0])
@pytest.mark.parametrize("views", [1, 2])
def test_boxes_follow_steps_and_cover_missed_ones(noise_lr: float, views: int) -> None:
    """Rows move by whole cells; those that a camera does not see miss steps. All rows are measured once."""
    table, all_views, target = far_and_near(6_000)
    adam = SplatAdam(table, LRS, noise_lr=noise_lr, opacity_reg=0.05)
    measured = []
    for step in range(12):
        chosen = [all_views[(step // 3 + v) % 4] for v in range(views)]
        report = train_step(table, adam, chosen, [target] * views)
        measured.append(sum(report.culled["cells"]) > 0)
        assert_same_records(table, all_views, adam)
        assert_same_records(table, all_views[step % 4 : step % 4 + 1], adam)
    assert all(measured[2:])
    assert table.cells.built <= (3 if noise_lr else 1)  # again where the opacities' drift outgrows its bound
    built = table.cells.built
    adam.flush()
    assert_same_records(table, all_views, adam)
    assert_same_records(table, all_views)  # and as the viewer renders
    assert table.cells.built == built + 1


def test_steps_through_autograd_keep_boxes() -> None:
    table, views, target = far_and_near(3_000)
    adam = SplatAdam(table, LRS)
    for step in range(8):
        image = render(table, views[step % 4], optimizer=adam)[0].rgb
        (image - target).square().mean().backward()
        adam.step()
        assert_same_records(table, views, adam)
    assert table.cells.built == 1


def test_boxes_hold_the_rows_that_a_step_wrote() -> None:
    table, views, target = far_and_near(3_000)
    adam = SplatAdam(table, LRS, noise_lr=20.0)
    for step in range(6):
        train_step(table, adam, views[step % 2], target)
    boxes = iter(table.cells.boxes())
    means, scales = table.means.detach().cpu(), table.scales.detach().cpu()
    finite = means.isfinite().all(1) & scales.isfinite().all(1)
    assert table.cells.built > 0
    for begin, end in homes(3_000):
        for first in range(begin, end, 256):
            rows = slice(first, min(end, first + 256))
            box, inside = next(boxes), means[rows][finite[rows]]
            assert (box[0:3] <= inside).all()
            assert (inside <= box[4:7]).all()
            assert (scales[rows][finite[rows]] <= box[3]).all()


def test_plain_optimizers_are_not_slowed_by_measuring() -> None:
    """A table that is written before each render is walked row by row, as without cells."""
    table, views, target = far_and_near(1_000)
    with torch.no_grad():
        for column in table.columns():
            column.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(-10, 10)
    adam = torch.optim.Adam(list(table.columns()), lr=1e-3)
    for _ in range(5):
        adam.zero_grad()
        (render(table, views[0])[0].rgb - target).square().mean().backward()
        adam.step()
    assert table.cells.built == 0
    assert_same_records(table, views)
    assert table.cells.built == 1
    adam.step()
    assert_same_records(table, views)
    assert table.cells.built == 2


def test_densification_compaction_and_growth() -> None:
    columns = scene(2_000, odd=False)
    columns["opacities"][::5] = -9.0  # dead
    table = table_with_cells(columns, capacity=4_000)
    views = cameras(0, 1, 2, 3)
    target = torch.rand(SIZE[1], SIZE[0], 3, generator=torch.Generator().manual_seed(1)).to("mgpu")
    adam = SplatAdam(table, LRS, noise_lr=5.0)
    strategy = McmcStrategy(3_000, refine_start=0, refine_every=4, min_opacity=0.005)
    rows = []
    for step in range(12):
        train_step(table, adam, views[step % 4], target)
        strategy.post_step(table, adam, step)
        rows.append(table.num_rows)
        assert_same_records(table, views, adam)
    assert rows[-1] > rows[0]
    table.reorder(adam)
    assert_same_records(table, views, adam)
    table.compact(torch.arange(table.num_rows) % 3 > 0, adam)
    assert_same_records(table, views, adam)
    table.shrink(900)
    adam.shrink(900)
    table.grow(1_500)
    adam.grow(1_500)
    with torch.no_grad():
        table.means[900:] = torch.tensor([0.0, 0.0, 4.0])
        table.quats[900:] = 1.0
    assert sum(assert_same_records(table, views, adam)["visible"]) > 600


def test_images_and_updates_are_the_same_bits() -> None:
    """A whole run with cells and without: columns and moments, bit for bit."""
    outcomes = []
    for enabled in (True, False):
        table, views, target = far_and_near(3_000)
        table.cells.enabled = enabled
        adam = SplatAdam(table, LRS, noise_lr=5.0)
        for step in range(10):
            train_step(table, adam, views[step % 4], target)
        image = render(table, views[1], optimizer=adam)[0].rgb.detach().cpu()
        adam.flush()
        assert (table.cells.built > 0) == enabled
        outcomes.append([image, *(t.detach().cpu() for t in (*table.columns(), *adam.state()))])
    if shard_names()[0].startswith("cuda"):
        pytest.skip("gradients of the way back are summed by atomics")
    for mine, other in zip(*outcomes, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.any_mesh
def test_all_of_this_on_three_shards_with_the_locality_check() -> None:
    if os.environ.get("MGPU_CELLS_NESTED"):
        pytest.skip("this is the run on three shards")
    here, chosen = Path(__file__), "seeds or follow or hold or densification or images"
    devices = "0,0,0" if shard_names()[0].startswith("cuda") else "cpu:3"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, str(here)],
        env={**os.environ, "MGPU_DEVICES": devices, "MGPU_CHECK_LOCALITY": "1", "MGPU_CELLS_NESTED": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
