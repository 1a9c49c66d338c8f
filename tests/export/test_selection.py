# SPDX-License-Identifier: Apache-2.0
"""Which rows go out: against masks and sorts over whole arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import saved_runs
import torch
from torch import Tensor

from ns_mgpu_splat.export import Frame, TensorRows
from ns_mgpu_splat.export.selection import importance, select

ROWS = 300


def area_times_opacity(columns: dict[str, Tensor]) -> np.ndarray:
    a, b, c = columns["scales"].double().exp().numpy().T
    return (a * b + b * c + c * a) * columns["opacities"].double().sigmoid().numpy()


def kept_rows(path: Path, columns: dict[str, Tensor]) -> list[int]:
    """Numbers of the rows in a .ply, in its order, found by their means."""
    number = {row.tobytes(): i for i, row in enumerate(columns["means"].numpy())}
    return [number[row.tobytes()] for row in np.ascontiguousarray(saved_runs.read_ply(path)["means"])]


def test_only_rows_that_are_not_finite_are_dropped_and_counted(
    run_export: Callable[..., str], tmp_path: Path
) -> None:
    columns = saved_runs.random_columns(ROWS)
    columns["opacities"][0] = -40.0  # invisible, but a value like any other
    columns["sh0"][1] = 3e38  # its sum overflows
    columns["sh0"][2] = 3e38
    broken = {"means": 4, "quats": 100, "scales": 101, "opacities": 102, "sh0": 250, "shN": 299}
    for number, (name, row) in enumerate(broken.items()):
        columns[name][row].view(-1)[-1] = [float("nan"), float("inf"), -float("inf")][number % 3]
    config = saved_runs.write_run(tmp_path, columns)
    expected = [row for row in range(ROWS) if row not in broken.values()]
    for degree in (3, 0):  # a row that is broken in a band that is left out is broken all the same
        line = run_export(config, tmp_path / "splats.ply", "--sh-degree", degree, "--overwrite")
        assert "294 Gaussians" in line
        assert "dropped 6 with values that are not finite." in line
        columns_in = {**columns, "means": columns["means"].nan_to_num(9.0)}
        assert kept_rows(tmp_path / "splats.ply", columns_in) == expected


def test_a_run_without_a_finite_row_is_an_error(run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(20)
    columns["scales"][:] = float("nan")
    line = run_export(saved_runs.write_run(tmp_path, columns), tmp_path / "splats.ply", fails=True)
    assert "None of the 20 Gaussians has finite values" in line
    assert not (tmp_path / "splats.ply").exists()
    empty = saved_runs.write_run(tmp_path / "empty", saved_runs.random_columns(0))
    assert "no Gaussian" in run_export(empty, tmp_path / "splats.ply", fails=True)


def test_crop_is_in_the_frame_that_is_written(run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(ROWS)
    far = np.array([500_000.0, 4_000_000.0, 100.0])  # so far that the file has an offset
    transform = np.hstack([np.eye(3)[[1, 2, 0]], -(np.eye(3)[[1, 2, 0]] @ far)[:, None]])
    config = saved_runs.write_run(tmp_path, columns, transform=transform, scale=0.1)
    world = (columns["means"].double().numpy() / 0.1) @ np.eye(3)[[1, 2, 0]] + far
    for frame, positions, box in (
        ("nerfstudio", columns["means"].double().numpy(), [-0.5, -1e3, -np.inf, 1.0, 0.7, np.inf]),
        ("world", world, [*(far - np.array([5, 9, 30])), *(far + np.array([11, 1e6, 4]))]),
    ):
        inside = ((positions >= box[:3]) & (positions <= box[3:])).all(1)
        line = run_export(
            config, tmp_path / f"{frame}.ply", "--frame", frame, "--crop", *(repr(float(v)) for v in box)
        )
        assert f"dropped {ROWS - inside.sum()} outside the crop box." in line
        read = saved_runs.read_ply(tmp_path / f"{frame}.ply")
        assert 20 < len(read["means"]) == inside.sum() < ROWS
        assert np.array_equal(read["opacities"], columns["opacities"].numpy()[inside])


def test_an_empty_crop_box_says_where_the_splats_are(run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(50)
    columns["means"][:, 0] = torch.linspace(2, 3, 50)
    config = saved_runs.write_run(tmp_path, columns)
    line = run_export(config, tmp_path / "splats.ply", "--crop", -1, -1, -1, 1, 1, 1, fails=True)
    assert "No Gaussian lies in the --crop box" in line
    assert "x 2 to 3" in line
    line = run_export(config, tmp_path / "splats.ply", "--crop", 1, 0, 0, -1, 1, 1, fails=True)
    assert "--crop has x from 1 to -1" in line


@pytest.mark.parametrize("count", [1, 7, 150, 299, 300, 1000])
def test_the_most_important_rows_stay_in_their_order(
    count: int, run_export: Callable[..., str], tmp_path: Path
) -> None:
    columns = saved_runs.random_columns(ROWS, 1)
    line = run_export(saved_runs.write_run(tmp_path, columns), tmp_path / "splats.ply", "--max-splats", count)
    best = np.sort(np.argsort(-area_times_opacity(columns), kind="stable")[:count])
    assert kept_rows(tmp_path / "splats.ply", columns) == best.tolist()
    less = ROWS - min(count, ROWS)
    assert line.rstrip().endswith(f"dropped {less} less important." if less else "dropped none.")


@pytest.mark.parametrize("count", [1, 20, 99])
def test_of_equally_important_rows_the_first_stay(
    count: int, run_export: Callable[..., str], tmp_path: Path
) -> None:
    columns = saved_runs.random_columns(100, 0)
    columns["scales"][:], columns["opacities"][:] = -3.0, 0.5
    columns["opacities"][60] = 2.0
    columns["opacities"][61] = float("nan")
    columns["opacities"][5] = -1.0
    run_export(saved_runs.write_run(tmp_path, columns), tmp_path / "splats.ply", "--max-splats", count)
    order = [60, *(row for row in range(100) if row not in (5, 60, 61)), 5]
    assert kept_rows(tmp_path / "splats.ply", columns) == sorted(order[:count])


def test_a_limit_counts_what_the_other_rules_leave() -> None:
    columns = saved_runs.random_columns(ROWS)
    columns["shN"][::3, 2, 1] = float("nan")
    box = (-1.0, -1.0, -1.0, 1.0, 1.0, 1.0)
    rows = TensorRows([columns])
    chosen = select(rows, Frame(), box, 40)
    good = torch.isfinite(columns["shN"]).flatten(1).all(1) & (columns["means"].abs() <= 1).all(1)
    rank = np.where(good, area_times_opacity(columns), -1.0)
    expected = np.sort(np.argsort(-rank, kind="stable")[:40])
    assert np.flatnonzero(chosen.get(0, ROWS)).tolist() == expected.tolist()
    assert chosen.count == 40
    assert (chosen.not_finite, chosen.outside) == (100, 200 - int(good.sum()))
    assert chosen.unimportant == int(good.sum()) - 40


def test_importance_takes_extreme_values() -> None:
    scales = np.array([[0, 0, 0], [-300, -300, -300], [80, 80, 80], [-40, 5, 5]], dtype=np.float32)
    opacities = np.array([0.0, 100.0, -300.0, 10.0], dtype=np.float32)
    expected = [np.log(1.5), -600 + np.log(3), 160 + np.log(3) - 300, 10.0]
    assert np.allclose(importance(scales, opacities), expected, atol=1e-3)


def test_rows_may_come_in_parts_of_any_size() -> None:
    columns = saved_runs.random_columns(50)
    cuts = [0, 0, 3, 30, 50]
    parts = [{n: c[a:b] for n, c in columns.items()} for a, b in itertools.pairwise(cuts)]
    whole, parted = TensorRows([columns]), TensorRows(parts)
    assert (parted.num_rows, parted.sh_degree) == (50, 3)
    assert [begin for begin, _ in parted.chunks()] == [0, 3, 16, 29, 30, 43]
    for name in columns:
        got = np.concatenate([chunk[name] for _, chunk in parted.chunks([name])])
        assert np.array_equal(got, np.concatenate([chunk[name] for _, chunk in whole.chunks([name])]))
    a, b = (select(rows, Frame(), None, 20) for rows in (whole, parted))
    assert np.array_equal(a.get(0, 50), b.get(0, 50))


def test_parts_that_do_not_fit_are_named() -> None:
    columns = saved_runs.random_columns(5)
    with pytest.raises(ValueError, match=r"quats is \[4, 4\], expected \[5, 4\]"):
        TensorRows([{**columns, "quats": columns["quats"][:4]}])
    with pytest.raises(ValueError, match=r"SH degrees \[1, 3\]"):
        TensorRows([columns, saved_runs.random_columns(5, 1)])
    with pytest.raises(ValueError, match="Column sh0 of part 1 is missing"):
        TensorRows([columns, {n: c for n, c in columns.items() if n != "sh0"}])
