# SPDX-License-Identifier: Apache-2.0
"""`mgpu-splat-export` as a command: what it refuses and says, that files are whole or absent, and what memory it takes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import saved_runs
import torch

from ns_mgpu_splat.export import TensorRows
from ns_mgpu_splat.nerfstudio import export_command
from ns_mgpu_splat.nerfstudio.names import kColumnOf

COMMAND = [sys.executable, "-m", "ns_mgpu_splat.nerfstudio.export_command"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run of 60 rows in a folder of its own."""
    transform = np.hstack([np.eye(3), [[1.0], [2.0], [3.0]]])
    return saved_runs.write_run(
        tmp_path / "run", saved_runs.random_columns(60, 1), transform=transform, scale=0.5
    )


def beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_line_says_path_count_size_and_what_was_dropped(
    config: Path, run_export: Callable[..., str], tmp_path: Path
) -> None:
    line = run_export(config, tmp_path / "a b.ply")
    size = (tmp_path / "a b.ply").stat().st_size
    assert line == (
        f"Wrote {tmp_path / 'a b.ply'}: 60 Gaussians, {size / 1024:.1f} KiB, SH degree 1, frame nerfstudio; dropped none.\n"
    )
    assert beside(tmp_path) == ["a b.ply", "run"], "nothing is left beside it"


def test_nothing_is_overwritten_without_being_asked(
    config: Path, run_export: Callable[..., str], tmp_path: Path
) -> None:
    output = tmp_path / "splats.ply"
    output.write_text("mine")
    line = run_export(config, output, fails=True)
    assert f"{output} is there already. Add --overwrite" in line
    assert output.read_text() == "mine"
    run_export(config, output, "--overwrite")
    assert len(saved_runs.read_ply(output)["means"]) == 60


def test_a_file_that_came_meanwhile_stays(
    config: Path, run_export: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, chunks = tmp_path / "splats.ply", TensorRows.chunks

    def slow(self: TensorRows, *columns: object):
        output.write_text("someone else's")
        return chunks(self, *columns)

    monkeypatch.setattr(TensorRows, "chunks", slow)
    assert "has come into being meanwhile" in run_export(config, output, fails=True)
    assert output.read_text() == "someone else's"
    assert beside(tmp_path) == ["run", "splats.ply"]


@pytest.mark.parametrize("tiles", [(), ("--tile-size", "1")])
def test_what_fails_half_way_leaves_what_was_there(
    tiles: tuple[str, ...],
    config: Path,
    run_export: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "splats.ply"
    run_export(config, output, *tiles)
    before = beside(tmp_path / "splats") if tiles else output.read_bytes()
    chunks, calls = TensorRows.chunks, []

    def failing(self: TensorRows, *columns: object):
        for piece in chunks(self, *columns):
            calls.append(piece)
            if len(calls) > 12:  # the third walk, which writes
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield piece

    monkeypatch.setattr(TensorRows, "chunks", failing)
    line = run_export(config, output, *tiles, "--overwrite", fails=True)
    assert "cannot be written: No space left on device" in line
    assert (beside(tmp_path / "splats") if tiles else output.read_bytes()) == before
    assert beside(tmp_path) == ["run", "splats" if tiles else "splats.ply"]


def test_a_full_disk_is_found_before_writing(
    config: Path, run_export: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    for suffix in (".ply", ".splat", ".spz"):
        for tiles in ((), ("--tile-size", 1)):
            line = run_export(config, tmp_path / f"splats{suffix}", *tiles, fails=True)
            assert line.rstrip().endswith(" has 1.0 KiB free.")
    assert beside(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("splats.obj", r"should end in one of .ply, .splat, .spz"),
        ("splats", "should end in one of"),
        ("absent/splats.ply", "there is no folder"),
        ("folder.ply", "is a folder"),
        ("pipe.ply", "is a device or a pipe"),
    ],
)
@pytest.mark.parametrize("tiles", [(), ("--tile-size", "1")])
def test_a_place_that_is_none_is_refused(
    name: str, what: str, tiles: tuple[str, ...], config: Path, run_export: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "folder.ply").mkdir()
    os.mkfifo(tmp_path / "pipe.ply")
    assert what in run_export(config, tmp_path / name, *tiles, "--overwrite", fails=True)
    assert beside(tmp_path) == ["folder.ply", "pipe.ply", "run"]
    assert (tmp_path / "pipe.ply").is_fifo()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--max-splats", "0"], "--max-splats is 0"),
        (["--tile-size", "nan"], "--tile-size is nan"),
        (["--tile-size", "-2"], "--tile-size is -2"),
        (["--crop", "0", "0", "nan", "1", "1", "1"], "--crop has z from nan"),
    ],
)
def test_impossible_options_are_named(
    options: list[str], what: str, config: Path, run_export: Callable[..., str], tmp_path: Path
) -> None:
    assert what in run_export(config, tmp_path / "splats.ply", *options, fails=True)


def test_a_crop_box_may_be_written_in_any_way_numbers_are(
    config: Path, run_export: Callable[..., str], tmp_path: Path
) -> None:
    line = run_export(config, tmp_path / "a.ply", "--crop", "-1e3", "-.5e1", "-inf", "1e3", "5", "inf")
    assert "60 Gaussians" in line


def test_a_run_that_cannot_be_opened_is_named(run_export: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "splats.ply"
    columns = saved_runs.random_columns(20, 1)

    def refused(config: Path, *options: object) -> str:
        return run_export(config, output, *options, fails=True)

    config = saved_runs.write_run(tmp_path / "run", columns)
    folder = config.parent / "nerfstudio_models"
    assert "config.yml" in refused(tmp_path / "run")
    assert "absent.yml cannot be read: No such file" in refused(tmp_path / "absent.yml")
    (tmp_path / "a.yml").write_text("a: [1")
    assert "no valid YAML" in refused(tmp_path / "a.yml")
    (tmp_path / "b.yml").write_text("just: options")
    assert "no config.yml of a training run" in refused(tmp_path / "b.yml")
    preset = Path(__file__).parents[2] / "configs" / "small.yml"
    assert f"{preset} is no config.yml of a training run." in refused(preset)
    (tmp_path / "c.yml").write_bytes(b"\xff\xfe\x00\x81")
    assert "c.yml cannot be read: it is no text" in refused(tmp_path / "c.yml")
    os.mkfifo(tmp_path / "d.yml")
    assert "d.yml cannot be read: it is a pipe, not a file." in refused(tmp_path / "d.yml")
    text = config.read_text()
    for value, shown in (("null", "null"), ("sharp", "'sharp'")):
        config.write_text(text.replace("rasterize_mode: classic", f"rasterize_mode: {value}"))
        words = f"sets pipeline.model.rasterize_mode to {shown}, which it cannot be. It takes classic or antialiased."
        assert words in refused(config)
    config.write_text(text)
    assert "dataparser_transforms.json cannot be read" in refused(config, "--frame", "world")
    os.mkfifo(config.parent / "dataparser_transforms.json")
    assert "it is a pipe, not a file" in refused(config, "--frame", "world")
    (config.parent / "dataparser_transforms.json").unlink()
    (config.parent / "dataparser_transforms.json").write_text('{"transform": [[1, 0], [0, 1]], "scale": 1}')
    assert "dataparser_transforms.json is damaged" in refused(config, "--frame", "world")
    path = next(folder.iterdir())
    state = torch.load(path)
    del state["pipeline"]["_model.gauss_params.quats"]
    torch.save(state, path)
    assert "no quats, so it is of another method" in refused(config)
    path.write_bytes(path.read_bytes()[:2000])
    assert "cut short" in refused(config)
    path.unlink()
    assert "has no checkpoint" in refused(config)
    assert not output.exists()


def test_a_moved_run_and_a_folder_of_another_name_are_found(
    config: Path, run_export: Callable[..., str], tmp_path: Path
) -> None:
    shutil.move(config.parent, tmp_path / "elsewhere")
    config = tmp_path / "elsewhere" / "config.yml"
    run_export(config, tmp_path / "a.ply")
    (config.parent / "nerfstudio_models").rename(config.parent / "models")
    config.write_text(config.read_text().replace("- nerfstudio_models", "- models"))
    run_export(config, tmp_path / "b.ply")
    assert (tmp_path / "a.ply").read_bytes() == (tmp_path / "b.ply").read_bytes()


def test_a_configs_objects_are_not_made(config: Path, run_export: Callable[..., str], tmp_path: Path) -> None:
    attack = f"""data: !!python/object/apply:os.system ["touch {tmp_path}/owned"]\n"""
    config.write_text(config.read_text().replace("data: null\n", attack))
    run_export(config, tmp_path / "splats.ply")
    assert not (tmp_path / "owned").exists()


def test_names_of_columns_are_the_models() -> None:
    from ns_mgpu_splat.splats.table import COLUMNS

    assert sorted(kColumnOf.values()) == sorted(COLUMNS)


def test_the_world_says_its_offset(run_export: Callable[..., str], tmp_path: Path) -> None:
    transform = np.hstack([np.eye(3), [[-1e5], [-2e5], [0.0]]])
    config = saved_runs.write_run(tmp_path, saved_runs.random_columns(9, 0), transform=transform)
    line = run_export(config, tmp_path / "splats.ply", "--frame", "world")
    assert "frame world, offset to add 100000 200000 0; dropped none." in line
    comments = saved_runs.ply_comments(tmp_path / "splats.ply")
    assert comments == [
        "Generated by ns-mgpu-splat",
        "frame: world",
        "offset to add to coordinates: 100000 200000 0",
    ]


def test_help_speaks_of_gaussians_as_all_else_does() -> None:
    """It said "splats"; what is left are names: of the command, of a format, of an option."""
    words = export_command.parser().format_help().replace("--max-splats", "").replace(".splat", "").split()
    assert "Gaussians" in words
    assert not [word for word in words if "splat" in word.lower() and "mgpu-splat" not in word]


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [action.help for action in export_command.parser()._actions]
    assert all(texts)
    assert len(set(texts)) == len(texts)
    with pytest.raises(SystemExit, match="0"):
        export_command.main(["--help"])
    assert "docs/export.md" in capsys.readouterr().out


def big_run(folder: Path, rows: int) -> Path:
    columns = saved_runs.random_columns(rows)
    return saved_runs.write_run(folder, columns)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_and_says_so(number: int, tmp_path: Path) -> None:
    config = big_run(tmp_path / "run", 400_000)
    process = subprocess.Popen(
        [*COMMAND, "--load-config", str(config), "--output", str(tmp_path / "splats.spz")],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".splats.spz.*")):  # it has begun to write
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "mgpu-splat-export: interrupted; nothing was written.\n"
    assert beside(tmp_path) == ["run"]


def test_leftovers_of_killed_exports_are_removed(
    config: Path, run_export: Callable[..., str], tmp_path: Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f".splats.ply.{ended.pid}.tmp").write_text("half")
    (tmp_path / f".splats.ply.{os.getppid()}.tmp").write_text("at work")
    run_export(config, tmp_path / "splats.ply")
    assert beside(tmp_path) == [f".splats.ply.{os.getppid()}.tmp", "run", "splats.ply"]


PROBE = """
import json, re, sys
from pathlib import Path
from ns_mgpu_splat.nerfstudio import export_command, saved_run
def kilobytes(name): return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # importing torch has a peak of its own: forget it
before = kilobytes("VmRSS")
code = export_command.main(sys.argv[1:])
print(json.dumps([code, (kilobytes("VmHWM") - before) * 1024]))
"""


@pytest.mark.parametrize(
    "options", [("x.ply",), ("x.spz", "--max-splats", "100000"), ("x.splat", "--tile-size", "1")]
)
def test_memory_does_not_grow_with_the_rows(options: tuple[str, ...], tmp_path: Path) -> None:
    """500,000 rows are 118 MB in the checkpoint; a chunk and its copies are some 35."""
    config = big_run(tmp_path / "run", 500_000)
    name, *others = options
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROBE,
            "--load-config",
            str(config),
            "--output",
            str(tmp_path / name),
            *others,
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    code, extra = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert extra < 70e6, f"{extra / 1e6:.0f} MB"


def test_y_up_is_written_and_said(config: Path, run_export: Callable[..., str], tmp_path: Path) -> None:
    assert "frame nerfstudio;" in run_export(config, tmp_path / "a.ply")
    assert "frame nerfstudio, y up;" in run_export(config, tmp_path / "b.ply", "--y-up")
    a, b = (saved_runs.read_ply(tmp_path / f"{name}.ply") for name in "ab")
    assert np.allclose(b["means"], a["means"][:, [0, 2, 1]] * [1, 1, -1], atol=1e-6)
    assert not np.allclose(b["shN"], a["shN"])
