# SPDX-License-Identifier: Apache-2.0
"""What the formats hold, read back by readers of their own: all bits of a .ply, half a step of quantisation of the others."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import plyfile
import pytest
import saved_runs
import torch
from torch import Tensor

from ns_mgpu_splat import SplatTable
from ns_mgpu_splat.export.spz import fractional_bits


def as_numpy(columns: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: column.float().numpy() for name, column in columns.items()}


def same_rotation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| by component once both have length 1 and the sign of b."""
    a, b = (q / np.linalg.norm(q, axis=1, keepdims=True) for q in (a, b))
    return np.abs(a * np.sign((a * b).sum(1, keepdims=True)) - b)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_ply_keeps_every_bit(degree: int, half: bool, run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(100, degree, half=half)
    run_export(saved_runs.write_run(tmp_path, columns), tmp_path / "splats.ply")
    read = saved_runs.read_ply(tmp_path / "splats.ply")
    for name, column in as_numpy(columns).items():
        assert np.array_equal(read[name], column), name


def test_ply_has_the_bytes_of_the_tables_own_writer(run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(40)
    run_export(saved_runs.write_run(tmp_path, columns), tmp_path / "a.ply")
    SplatTable.from_columns(**columns).to_ply(tmp_path / "b.ply")
    a, b = (plyfile.PlyData.read(str(tmp_path / f"{name}.ply"))["vertex"] for name in "ab")
    assert a.data.dtype == b.data.dtype
    assert a.data.tobytes() == b.data.tobytes()
    assert (tmp_path / "a.ply").stat().st_size > a.data.nbytes


@pytest.mark.parametrize(("kept", "properties"), [(0, 17), (1, 26), (2, 41), (3, 62)])
def test_a_lower_degree_keeps_the_lower_bands(
    kept: int, properties: int, run_export: Callable[..., str], tmp_path: Path
) -> None:
    columns = saved_runs.random_columns(30)
    line = run_export(saved_runs.write_run(tmp_path, columns), tmp_path / "splats.ply", "--sh-degree", kept)
    assert f"SH degree {kept}" in line
    read = saved_runs.read_ply(tmp_path / "splats.ply")
    assert np.array_equal(read["shN"], columns["shN"][:, : (kept + 1) ** 2 - 1].numpy())
    data = plyfile.PlyData.read(str(tmp_path / "splats.ply"))["vertex"].data
    assert data.dtype.itemsize == 4 * properties


def test_splat_is_within_half_a_step(run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(200)
    columns["quats"][0] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # 256 does not fit in a byte
    columns["opacities"][1] = -200.0
    columns["scales"][2] = 100.0  # beyond float32
    columns["scales"][3, 1] = 60.0  # a float32, but its square is none
    line = run_export(saved_runs.write_run(tmp_path, columns), tmp_path / "splats.splat")
    assert "SH degree 0" in line
    assert "2 Gaussians have a size above 10^19 units" in run_export.warning  # type: ignore[attr-defined]
    read, given = saved_runs.read_splat(tmp_path / "splats.splat"), as_numpy(columns)
    assert np.array_equal(read["means"], given["means"].astype(np.float64))
    usual = ~np.isin(np.arange(200), (2, 3))
    assert np.allclose(read["sizes"][usual], np.exp(given["scales"][usual].astype(np.float64)), rtol=1e-6)
    assert np.isfinite(read["sizes"].astype(np.float32) ** 2).all()
    rgb = np.clip(0.5 + 0.28209479177387814 * given["sh0"], 0, 1)
    assert np.abs(read["rgb"] - rgb).max() <= 0.5 / 255 + 1e-6
    assert np.abs(read["alpha"] - sigmoid(given["opacities"])).max() <= 0.5 / 255 + 1e-6
    unit = given["quats"] / np.linalg.norm(given["quats"], axis=1, keepdims=True)
    assert (
        np.abs(read["quats"] - unit)[1:].max() <= 0.5 / 128 + 1 / 128 + 1e-6
    )  # 1 / 128 where a component is near 1
    assert np.median(np.abs(read["quats"] - unit)) <= 0.5 / 128


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_spz_is_within_half_a_step(degree: int, run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(150, degree)
    columns["sh0"].clamp_(-3.3, 3.3)
    columns["quats"][:5] = torch.tensor(
        [[1.0, 0, 0, 0], [0, -1, 0, 0], [1, 1, 1, 1], [0, 0, 0, -2], [0, 1, 0, -1]]
    )
    config = saved_runs.write_run(tmp_path, columns, antialiased=degree == 1)
    run_export(config, tmp_path / "splats.spz")
    read, given = saved_runs.read_spz(tmp_path / "splats.spz"), as_numpy(columns)
    step = 0.5 ** float(read["fraction"])
    assert step < 1e-6, "coordinates of a few units leave all 20 bits behind the point"
    assert np.abs(read["means"] - given["means"]).max() <= step / 2 + 1e-9
    assert np.abs(read["alpha"] - sigmoid(given["opacities"])).max() <= 0.5 / 255 + 1e-6
    assert np.abs(read["sh0"] - given["sh0"]).max() <= 0.5 / 255 / 0.15 + 1e-5
    assert np.abs(read["scales"] - np.clip(given["scales"], -10, 5.9375)).max() <= 0.5 / 16 + 1e-6
    # half a step of sqrt(1/2) / 511 in three components; the fourth makes up for them
    assert same_rotation(read["quats"], given["quats"]).max() <= 4 * 0.5**0.5 / 511
    assert np.median(same_rotation(read["quats"], given["quats"])) <= 0.5**0.5 / 511 / 2
    sh_n = np.clip(given["shN"], -1, 255 / 128 - 1)
    assert read["shN"].shape == sh_n.shape
    if degree:
        assert np.abs(read["shN"] - sh_n)[:, :3].max() <= 0.5 * 8 / 128 + 1e-6
    if degree > 1:
        assert np.abs(read["shN"] - sh_n)[:, 3:].max() <= 0.5 * 16 / 128 + 1e-6
    assert read["flags"] == (1 if degree == 1 else 0)


def test_the_same_rows_make_the_same_spz(run_export: Callable[..., str], tmp_path: Path) -> None:
    config = saved_runs.write_run(tmp_path, saved_runs.random_columns(50))
    for name in "ab":
        run_export(config, tmp_path / f"{name}.spz")
    assert (tmp_path / "a.spz").read_bytes() == (tmp_path / "b.spz").read_bytes()
    with gzip.open(tmp_path / "a.spz") as file:
        assert len(file.read()) == 16 + 50 * 65


@pytest.mark.parametrize("reach", [0.0, 1e-9, 1.0, 7.99999, 8.0, 4000.0, 2048.0, 8388607.0])
def test_fractional_bits_are_the_most_that_24_bits_hold(reach: float) -> None:
    bits = fractional_bits(reach)
    assert reach * 2**bits <= 2**23 - 1
    assert bits == 20 or reach * 2 ** (bits + 1) > 2**23 - 1


def test_a_splat_beyond_what_spz_holds_is_named(run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(20)
    columns["means"][3, 1] = -1e7
    config = saved_runs.write_run(tmp_path, columns)
    line = run_export(config, tmp_path / "splats.spz", fails=True)
    assert "lies at 1e+07" in line
    assert "--crop" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yml", "nerfstudio_models"]
    run_export(config, tmp_path / "splats.spz", "--crop", -9, -9, -9, 9, 9, 9)
    assert len(saved_runs.read_spz(tmp_path / "splats.spz")["means"]) == 19


def test_sizes_that_spz_cannot_hold_are_said(run_export: Callable[..., str], tmp_path: Path) -> None:
    columns = saved_runs.random_columns(40, 0)
    columns["scales"].clamp_(-9, 5)
    columns["scales"][4] = -12.0
    columns["scales"][5, 2] = -12.0  # a thin one
    columns["scales"][6, 0] = 7.0
    config = saved_runs.write_run(tmp_path, columns)
    run_export(config, tmp_path / "splats.spz")
    assert "2 Gaussians have a size outside of e^-10 to e^5.9 units" in run_export.warning  # type: ignore[attr-defined]
    run_export(config, tmp_path / "splats.ply")
    assert run_export.warning == ""  # type: ignore[attr-defined]
