# SPDX-License-Identifier: Apache-2.0
"""Tiles: every row in the one cube it lies in, an index that tells the truth, a folder that is whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import saved_runs

from ns_mgpu_splat.export import write as write

ROWS = 400


@pytest.mark.parametrize("at_once", [128, 3])
@pytest.mark.parametrize("suffix", [".ply", ".splat", ".spz"])
def test_each_row_is_in_the_tile_it_lies_in(
    suffix: str, at_once: int, run_export: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_FILES_AT_ONCE", at_once)
    columns = saved_runs.random_columns(ROWS, 1)
    columns["means"][0] = 0.0  # on the border of eight tiles
    columns["scales"][7, 1] = float("nan")
    config = saved_runs.write_run(tmp_path, columns)
    line = run_export(config, tmp_path / f"town{suffix}", "--tile-size", 1.5)
    index = json.loads((tmp_path / "town" / "index.json").read_text())
    assert f"Wrote {tmp_path / 'town' / 'index.json'}: 399 Gaussians, {len(index['tiles'])} tiles" in line
    read = {".ply": saved_runs.read_ply, ".splat": saved_runs.read_splat, ".spz": saved_runs.read_spz}[suffix]
    good = np.flatnonzero(np.arange(ROWS) != 7)
    means = columns["means"].double().numpy()
    cells = np.floor(means / 1.5).astype(int)
    seen = 0
    for tile in index["tiles"]:
        members = [row for row in good if (cells[row] == tile["cell"]).all()]
        content = read(tmp_path / "town" / tile["file"])
        tolerance = 1e-6 if suffix == ".spz" else 0
        assert len(content["means"]) == tile["count"] == len(members) > 0
        assert np.abs(content["means"] - means[members]).max() <= tolerance, "its rows, in their order"
        assert np.allclose(tile["bounds"], [means[members].min(0), means[members].max(0)], rtol=0, atol=0)
        assert tile["cube"] == [[c * 1.5 for c in tile["cell"]], [(c + 1) * 1.5 for c in tile["cell"]]]
        assert tile["bytes"] == (tmp_path / "town" / tile["file"]).stat().st_size
        if suffix == ".ply":
            assert np.array_equal(content["shN"], columns["shN"].numpy()[members])
        if suffix == ".spz":  # planes of a tile belong together
            assert np.abs(content["scales"] - columns["scales"].numpy()[members]).max() < 0.04
        seen += len(members)
    assert seen == index["count"] == 399
    assert index["frame"] == "nerfstudio"
    assert len(list((tmp_path / "town").iterdir())) == len(index["tiles"]) + 1
    assert np.allclose(index["bounds"], [means[good].min(0), means[good].max(0)])


def test_tiles_lie_in_the_world_and_files_have_its_offset(
    run_export: Callable[..., str], tmp_path: Path
) -> None:
    columns = saved_runs.random_columns(60, 0)
    transform = np.hstack([np.eye(3), [[-700_000.0], [-5_000_000.0], [-50.0]]])
    config = saved_runs.write_run(tmp_path, columns, transform=transform, scale=0.02)
    run_export(config, tmp_path / "town.ply", "--frame", "world", "--tile-size", 100)
    index = json.loads((tmp_path / "town" / "index.json").read_text())
    assert index["offset"] == [700_000.0, 5_000_000.0, 50.0]
    for tile in index["tiles"]:
        path = tmp_path / "town" / tile["file"]
        world = saved_runs.read_ply(path)["means"].astype(np.float64) + index["offset"]
        assert (world >= np.array(tile["cube"][0]) - 1e-4).all()
        assert (world <= np.array(tile["cube"][1]) + 1e-4).all()
        assert "offset to add to coordinates: 700000 5000000 50" in saved_runs.ply_comments(path)


def test_a_folder_of_tiles_is_replaced_whole_when_asked(
    run_export: Callable[..., str], tmp_path: Path
) -> None:
    config = saved_runs.write_run(tmp_path, saved_runs.random_columns(60, 0))
    run_export(config, tmp_path / "town.ply", "--tile-size", 0.5)
    before = sorted(path.name for path in (tmp_path / "town").iterdir())
    line = run_export(config, tmp_path / "town.ply", "--tile-size", 50, fails=True)
    assert "holds tiles already. Add --overwrite" in line
    assert sorted(path.name for path in (tmp_path / "town").iterdir()) == before
    run_export(config, tmp_path / "town.ply", "--tile-size", 50, "--overwrite")
    after = sorted(path.name for path in (tmp_path / "town").iterdir())
    assert len(after) <= 9 < len(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yml", "nerfstudio_models", "town"]


def test_a_folder_that_holds_other_things_is_never_replaced(
    run_export: Callable[..., str], tmp_path: Path
) -> None:
    config = saved_runs.write_run(tmp_path, saved_runs.random_columns(60, 0))
    (tmp_path / "town").mkdir()
    (tmp_path / "town" / "thesis.txt").write_text("years of work")
    arguments = (config, tmp_path / "town.ply", "--tile-size", 5, "--overwrite")
    assert "is or holds something else" in run_export(*arguments, fails=True)
    (tmp_path / "town" / "thesis.txt").rename(tmp_path / "thesis.txt")
    run_export(*arguments)  # an empty folder is in nobody's way
    (tmp_path / "thesis.txt").rename(tmp_path / "town" / "thesis.txt")
    assert "is or holds something else" in run_export(*arguments, fails=True)
    assert (tmp_path / "town" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("size", "what"), [(1e-3, "more than 50 files"), (1e-9, "beyond a million"), (0, "above 0")]
)
def test_a_size_that_makes_too_many_tiles_is_refused(
    size: float, what: str, run_export: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ns_mgpu_splat.export import tiles

    monkeypatch.setattr(tiles, "_MOST_TILES", 50)
    config = saved_runs.write_run(tmp_path, saved_runs.random_columns(60, 0))
    assert what in run_export(config, tmp_path / "town.ply", "--tile-size", size, fails=True)
    assert not (tmp_path / "town").exists()


def test_a_file_with_too_many_rows_for_its_format_is_refused_and_tiles_of_them_are_not(
    run_export: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write.SpzFormat, "most_rows", 399)
    config = saved_runs.write_run(tmp_path, saved_runs.random_columns(400, 0))
    line = run_export(config, tmp_path / "town.spz", fails=True)
    assert "400 Gaussians are more than one .spz file can hold. Give --max-splats, or a --tile-size." in line
    line = run_export(config, tmp_path / "town.spz", "--tile-size", 1e4, "--crop", 0, -9, -9, 9, 9, 9)
    assert "4 tiles" in line
    run_export(config, tmp_path / "town.spz", "--max-splats", 399)
