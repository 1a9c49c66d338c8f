# SPDX-License-Identifier: Apache-2.0
"""The splat table: shapes, growth in place, resizing, making one from points."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable
from ns_mgpu_splat.splats.table import COLUMNS, column_shapes


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def cloud(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, 3)), generator.integers(0, 256, (rows, 3), dtype=np.uint8)


@pytest.mark.parametrize("sh_degree", [0, 1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17])
def test_any_number_of_points_gives_finite_rows(rows: int, sh_degree: int) -> None:
    points, colors = cloud(rows)
    table = SplatTable.from_points(points, colors, sh_degree=sh_degree)
    assert table.num_rows == len(table) == rows
    assert table.sh_degree == sh_degree
    for name, shape in column_shapes(rows, sh_degree).items():
        column = table.named_columns()[name]
        assert tuple(column.shape) == shape
        assert column.dtype == torch.float32
        assert bool(column.isfinite().all()), name


def test_points_become_gaussians_of_their_colour() -> None:
    """Colour through the constant harmonic: SH + 0.5, as the 3DGS convention has it."""
    points, colors = cloud(50)
    table = SplatTable.from_points(points, colors, opacity=0.5)
    assert np.allclose(table.means.detach().cpu(), points, atol=1e-6)
    shown = table.sh0.detach().cpu().numpy() / (2 * math.sqrt(math.pi)) + 0.5
    assert np.allclose(shown, colors / 255.0, atol=1e-6)
    assert float(table.shN.detach().abs().sum()) == 0.0
    assert torch.allclose(table.opacities.detach().cpu().sigmoid(), torch.tensor(0.5))
    assert torch.allclose(table.quats.detach().cpu().norm(dim=1), torch.tensor(1.0))
    scales = table.scales.detach().cpu()
    assert torch.equal(scales[:, 0], scales[:, 2])
    floats = SplatTable.from_points(torch.from_numpy(points), torch.from_numpy(colors / 255.0).float())
    assert torch.allclose(floats.sh0.detach().cpu(), table.sh0.detach().cpu(), atol=1e-6)
    grey = SplatTable.from_points(points)
    assert float(grey.sh0.detach().abs().max()) == 0.0


def test_cap_is_kept_at_once_and_announced(caplog: pytest.LogCaptureFixture) -> None:
    points, colors = cloud(5_000)
    with caplog.at_level(logging.WARNING, logger="ns_mgpu_splat"):
        table = SplatTable.from_points(points, colors, max_gaussians=700)
    assert table.num_rows == table.capacity == 700
    assert [record.message for record in caplog.records] == [
        "the seed cloud has 5,000 points: thinned evenly to the cap of 700 Gaussians"
    ]
    rows = {tuple(row) for row in points.astype(np.float32).tolist()}
    assert {tuple(row) for row in table.means.tolist()} <= rows
    caplog.clear()
    assert SplatTable.from_points(points, max_gaussians=5_000).num_rows == 5_000
    assert not caplog.records


def test_growth_is_in_place_and_new_rows_are_zero() -> None:
    points, colors = cloud(17)
    table = SplatTable.from_points(points, colors, max_gaussians=5_000).requires_grad_(True)
    before = [column.detach().cpu().clone() for column in table.columns()]
    parameters = table.columns()
    addresses = [column.data_ptr() for column in parameters]
    for rows in (18, 2_000, 5_000):
        table.grow(rows)
        assert table.num_rows == rows
        for old, parameter, address, column in zip(
            before, parameters, addresses, table.columns(), strict=True
        ):
            assert column is parameter
            assert column.data_ptr() == address
            assert column.requires_grad
            assert column.is_contiguous()
            assert torch.equal(column.detach().cpu()[:17], old)
            assert float(column.detach()[17:].abs().sum()) == 0.0
    with pytest.raises(
        ValueError, match="cannot grow to 5,001 rows in place: it was made with capacity=5,000"
    ):
        table.grow(5_001)
    with pytest.raises(ValueError, match=r"use shrink\(\)"):
        table.grow(3)


@pytest.mark.parametrize(
    ("rows", "capacity"), [(5, None), (17, None), (40, None), (200, None), (30, 400), (0, None)]
)
def test_resize_keeps_parameters_and_the_rows_that_fit(rows: int, capacity: int | None) -> None:
    points, colors = cloud(17)
    table = SplatTable.from_points(points, colors, capacity=64)
    before = [column.detach().cpu().clone() for column in table.columns()]
    parameters = table.columns()
    table.resize(rows, capacity=capacity)
    assert table.num_rows == rows
    assert table.capacity == (capacity or max(rows, 64))
    kept = min(rows, 17)
    for old, parameter, column in zip(before, parameters, table.columns(), strict=True):
        assert column is parameter
        assert torch.equal(column.detach().cpu()[:kept], old[:kept])
        assert float(column.detach()[kept:].abs().sum()) == 0.0
    table.grow(table.capacity)


def test_columns_are_copied_in_order() -> None:
    table = SplatTable.from_points(*cloud(9))
    columns = {name: column.detach().cpu().double() for name, column in table.named_columns().items()}
    again = SplatTable.from_columns(**columns)
    assert tuple(again.named_columns()) == COLUMNS
    for a, b in zip(table.columns(), again.columns(), strict=True):
        assert torch.equal(a.detach().cpu(), b.detach().cpu())
        assert a.data_ptr() != b.data_ptr()
    del columns["shN"]
    assert SplatTable.from_columns(**columns).sh_degree == 0
    assert "9 rows of 9, SH degree 3" in repr(table)


def test_wrong_inputs_are_named() -> None:
    columns = {
        name: column.detach().cpu()
        for name, column in SplatTable.from_points(*cloud(9)).named_columns().items()
    }
    with pytest.raises(
        ValueError, match=r"quats is \[9, 3\], expected \[9, 4\] with N = 9 as in means. Order is w, x, y, z"
    ):
        SplatTable.from_columns(**{**columns, "quats": torch.zeros(9, 3)})
    with pytest.raises(ValueError, match=r"shN is \[9, 4, 3\], expected \[N, K, 3\]"):
        SplatTable.from_columns(**{**columns, "shN": torch.zeros(9, 4, 3)})
    with pytest.raises(ValueError, match="sh_degree is 4"):
        SplatTable(3, sh_degree=4)
    with pytest.raises(ValueError, match="capacity is 2, but the table has 3 rows"):
        SplatTable(3, capacity=2)
    with pytest.raises(ValueError, match=r"opacity is 1\.5"):
        SplatTable.from_points(np.zeros((3, 3)), opacity=1.5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_copies_keep_capacity_and_flags_and_grow(copied: Callable[[SplatTable], SplatTable]) -> None:
    table = SplatTable.from_points(torch.rand(7, 3), sh_degree=1, capacity=50)
    table.requires_grad_(True).means.requires_grad_(False)
    other = copied(table)
    assert other.capacity == 50
    assert [c.requires_grad for c in other.columns()] == [False] + [True] * 5
    other.grow(40)
    assert other.num_rows == 40
    assert table.num_rows == 7
    for name, column in table.named_columns().items():
        grown = getattr(other, name)
        assert grown.data_ptr() != column.data_ptr()
        assert torch.equal(grown[:7].cpu(), column.cpu())
        assert not grown[7:].any()


def test_impossible_caps_and_degrees_are_named() -> None:
    points = torch.rand(7, 3)
    for cap in (-1, 1.5):
        with pytest.raises(ValueError, match=f"max_gaussians is {cap}"):
            SplatTable.from_points(points, max_gaussians=cap)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sh_degree is 4"):
        SplatTable.from_points(points, sh_degree=4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_rows_are_counted_whatever_is_wrong_with_them(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ns_mgpu_splat.splats.table.COUNT_ROWS", 7)  # several pieces
    table = SplatTable.from_points(*cloud(30))
    assert table.count_bad_rows() == 0
    with torch.no_grad():
        table.means[3, 1] = value
        table.means[3, 2] = value
        table.quats[29, 0] = value
        table.opacities[7] = value
        table.scales[8] = value
        table.sh0[1] = value  # seen in the loss
    assert table.count_bad_rows() == 4
    assert SplatTable(0, sh_degree=0).count_bad_rows() == 0


def test_numbers_whose_sum_is_too_large_are_no_bad_rows() -> None:
    table = SplatTable.from_points(*cloud(30))
    with torch.no_grad():
        table.means.fill_(3e38)
    assert table.count_bad_rows() == 0
