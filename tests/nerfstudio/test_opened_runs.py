# SPDX-License-Identifier: Apache-2.0
"""Nerfstudio's tools with a --load-config that cannot be used end in one sentence; a run whose folder was moved opens."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scene
import torch
import yaml
from nerfstudio_tools import train_many

from ns_mgpu_splat.nerfstudio import checkpoint, text_files
from ns_mgpu_splat.nerfstudio.patches import write_ply
from ns_mgpu_splat.nerfstudio.tools import (
    config_argument,
    kTools,
    speaker,
    watch,
    why_not_opened,
    why_not_written,
)

ROOT = Path(__file__).parents[2]


def edited(trained: Path, folder: Path, **changes: object) -> Path:
    """The config.yml of a run, changed, in another folder."""
    loaded = yaml.load(trained.read_text(), Loader=yaml.Loader)
    for name, value in changes.items():
        *path, last = name.split("__")
        holder = loaded
        for part in path:
            holder = getattr(holder, part)
        setattr(holder, last, value)
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(yaml.dump(loaded))
    return folder / "config.yml"


@pytest.mark.parametrize(
    "case",
    [
        "absent",
        "folder",
        "a run's folder",
        "a preset",
        "no YAML",
        "a text",
        "foreign",
        "unknown class",
        "no checkpoint",
        "photographs gone",
        "empty checkpoints",
        "null for a choice",
        "a wrong choice",
        "null for a folder",
    ],
)
def test_a_config_that_cannot_be_used_ends_in_one_sentence(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    config, words = tmp_path / "config.yml", ""
    if case == "absent":
        words = f"{config} cannot be read: No such file or directory"
    elif case == "folder":
        (tmp_path / "empty").mkdir()
        config, words = tmp_path / "empty", "is a folder. Give the config.yml of a run in it."
    elif case == "a run's folder":
        config, words = trained.parent, f"is a folder. Give --load-config {trained}."
    elif case == "a preset":
        config, words = ROOT / "configs" / "small.yml", "small.yml is no config.yml of a training run"
    elif case == "no YAML":
        config.write_text("a: [1, 2\nb: }")
        words = "is no valid YAML: line 2, column 2: expected ',' or ']', but got ':'"
    elif case == "a text":
        config.write_text("hello")
        words = "is no config.yml of a training run"
    elif case == "foreign":
        config, words = (
            edited(trained, tmp_path / "run", method_name="waterfall"),
            "the method waterfall, which is not",
        )
    elif case == "unknown class":
        text = trained.read_text().replace(
            "nerfstudio.model.MgpuSplatModelConfig", "nerfstudio.model.OldConfig"
        )
        config.write_text(text)
        words = "written by another version"
    elif case == "no checkpoint":
        config = edited(trained, tmp_path / "run", output_dir=tmp_path / "nowhere")
        words = "has no checkpoint"
    elif case == "null for a choice":
        config = edited(trained, tmp_path / "run", pipeline__model__layout=None)
        words = f"{config} sets pipeline.model.layout to null, which it cannot be. It takes auto, space or stripes."
    elif case == "a wrong choice":
        config = edited(trained, tmp_path / "run", pipeline__model__strategy="heap")
        words = (
            f"{config} sets pipeline.model.strategy to 'heap', which it cannot be. It takes mcmc or default."
        )
    elif case == "null for a folder":
        config = edited(trained, tmp_path / "run", relative_model_dir=None)
        words = f"{config} sets relative_model_dir to null, which it cannot be. It takes a path."
    elif case == "empty checkpoints":
        config = edited(trained, tmp_path / "run", output_dir=tmp_path / "nowhere")
        (tmp_path / "run" / "nerfstudio_models").mkdir()
        words = "has no checkpoint"
    else:
        config = edited(trained, tmp_path / "run", pipeline__datamanager__data=Path("lost/town"))
        words = "ns-eval: lost/town does not exist. That is where the photographs of this run were, seen from the folder in "
        words += f"which it was started, and not from {tmp_path}: call this tool from there"
    monkeypatch.chdir(tmp_path)
    said = end_of_opening(config, monkeypatch)
    assert said is not None, "a traceback"
    assert words in said
    assert "\n" not in said
    assert said.endswith((".", ".ckpt"))


def end_of_opening(config: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What a user of `ns-eval` reads where it ends before its work: None for a traceback, "" if it does not end there."""
    from nerfstudio.utils import eval_utils

    import ns_mgpu_splat
    from ns_mgpu_splat.nerfstudio import patches

    ns_mgpu_splat.init()
    patches.apply()
    monkeypatch.setattr(sys, "argv", ["ns-eval", "--load-config", str(config)])
    try:
        eval_utils.eval_setup(config)
    except SystemExit as end:
        return str(end.code)
    except Exception as error:
        return why_not_opened(config, error, error.__traceback__)
    return ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "a: [1, 2\n",
            "line 2, column 1: expected ',' or ']', but got the end of the file (while parsing a flow sequence that begins in "
            "line 1)",
        ),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: \x00", "character 4: special characters are not allowed"),
    ],
)
def test_what_is_wrong_with_yaml_is_said_with_its_place(text: str, words: str) -> None:
    """PyYAML's text has `in "<unicode string>"` and a caret, which means nothing in one line."""
    with pytest.raises(yaml.YAMLError) as found:
        yaml.safe_load(text)
    assert text_files.yaml_problem(found.value) == words


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/venv/bin/ns-train", "mgpu-splat"),
        ("/venv/bin/ns-eval", "ns-eval"),
        ("ns-viewer", "ns-viewer"),
        ("/lib/ns_mgpu_splat/nerfstudio/exporter.py", "ns-export"),
        ("/venv/bin/mgpu-splat-info", "mgpu-splat-info"),
        ("my_training.py", "mgpu-splat"),
    ],
)
def test_a_tool_speaks_under_its_own_name(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [command])
    assert speaker() == name


def test_a_tool_says_it_and_shows_no_traceback(run_command: Callable, tmp_path: Path) -> None:
    done = run_command("ns-eval", "--load-config=none.yml", check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "ns-eval: none.yml cannot be read: No such file or directory. ns-train says where it writes a run's config.yml."
    )


@pytest.mark.parametrize("tool", kTools)
def test_a_tool_does_not_wait_for_a_pipe(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Nerfstudio discovers the method, which is before the tool reads the file."""
    config = tmp_path / "config.yml"
    os.mkfifo(config)
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{tool}", "--load-config", str(config)])
    with pytest.raises(SystemExit) as ended:
        watch()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"{tool}: {config} cannot be read: it is a pipe, not a file. ns-train says where it writes a run's config.yml.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--output-path", "{}/file/scores.json"],
            "{}/file cannot be written (Not a directory). Choose another --output-path.",
        ),
        (
            ["--output_dir={}/file"],
            "{}/file cannot be written (Not a directory). Choose another --output-dir.",
        ),
        (["--output-dir", "elsewhere"], None),
        (["--load-config", "{}/file"], None),
    ],
)
def test_a_place_for_results_that_cannot_be_written_is_said_without_a_traceback(
    arguments: list[str], words: str | None, tmp_path: Path
) -> None:
    """`ns-eval --output-path` below what is no folder ended in Nerfstudio's traceback."""
    file = tmp_path / "file"
    error = NotADirectoryError(errno.ENOTDIR, "Not a directory", str(file))
    given = [each.format(tmp_path) for each in arguments]
    assert why_not_written(error, given) == (words and words.format(tmp_path))
    assert why_not_written(ValueError("another fault"), given) is None


def test_ns_export_says_in_a_sentence_why_its_file_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk was a sentence below a traceback."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ns-export"])
    columns = {"x": np.zeros(3, np.float32)}
    usage = type("usage", (), {"free": 100})
    with monkeypatch.context() as full:
        full.setattr("ns_mgpu_splat.splats.targets.shutil.disk_usage", lambda _: usage)
        with pytest.raises(SystemExit) as ended:
            write_ply(str(tmp_path / "splat.ply"), 3, columns)
    assert str(ended.value).startswith(f"ns-export: {tmp_path / 'splat.ply'} needs ")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        SystemExit, match=r"ns-export: .*nowhere/splat\.ply cannot be written: there is no folder"
    ):
        write_ply(str(tmp_path / "nowhere" / "splat.ply"), 3, columns)


def test_errors_that_the_file_does_not_explain_keep_their_traceback(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("another fault")

    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.pipeline.start_device", broken)
    assert end_of_opening(trained, monkeypatch) is None
    with pytest.raises(FileNotFoundError) as other:
        Path("none.yml").read_text()
    assert why_not_opened(Path("none.yml"), other.value, other.tb) is None, (
        "it was not the run that was opened"
    )


def test_a_moved_run_is_read_where_its_config_is_now(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its former folder is there no more."""
    from nerfstudio.utils.eval_utils import eval_setup

    here = tmp_path / "archive" / "my run"
    shutil.copytree(trained.parent, here)
    edited(trained, tmp_path / "changed", output_dir=tmp_path / "gone")
    shutil.copy(tmp_path / "changed" / "config.yml", here)
    assert end_of_opening(here / "config.yml", monkeypatch) == ""
    config, pipeline, path, _ = eval_setup(here / "config.yml")
    assert path.parent == here / "nerfstudio_models"
    assert config.get_base_dir() == here, "the viewer's log goes there"
    saved = checkpoint.read(checkpoint.find(trained.parent / "nerfstudio_models"))
    assert torch.equal(pipeline.model.means.cpu(), saved["pipeline"]["_model.gauss_params.means"])
    assert not (tmp_path / "gone").exists()


def test_the_legacy_viewer_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nerfstudio.utils.eval_utils import eval_setup
    from nerfstudio.viewer_legacy.server.viewer_state import ViewerLegacyState

    config, pipeline, _, _ = eval_setup(trained)
    with pytest.raises(SystemExit, match="viewer_legacy shows no Gaussians"):
        ViewerLegacyState(config.viewer, log_filename=Path(), datapath=Path(), pipeline=pipeline)


def test_a_preset_that_asks_for_the_legacy_viewer_is_refused(tmp_path: Path) -> None:
    from test_config import parse_command_line

    (tmp_path / "a.yml").write_text("vis: viewer_legacy\n")
    with pytest.raises(SystemExit, match="sets vis to 'viewer_legacy'"):
        parse_command_line("--load-config", str(tmp_path / "a.yml"))


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["--load-config", "a b.yml"], "a b.yml"),
        (["gaussian-splat", "--load_config=x.yml", "--y", "1"], "x.yml"),
        (["--load-config"], None),
        (["--output-path", "x.json"], None),
    ],
)
def test_the_config_is_found_on_the_command_line(words: list[str], path: str | None) -> None:
    assert config_argument(words) == (None if path is None else Path(path))


def test_a_run_that_comes_to_nothing_leaves_no_folder(nerfstudio_folder: scene.Scene, tmp_path: Path) -> None:
    """Whatever it was; what was there before stays, and so does a run that has taken a step."""
    bad = tmp_path / "bad"
    shutil.copytree(nerfstudio_folder.root, bad)
    next(iter(sorted((bad / "images").iterdir()))).write_bytes(b"")
    short = ["--max-num-iterations", 2, "--schedule-steps", 2, "--pipeline.model.max-gaussians", 200]
    out = tmp_path / "out"
    out.mkdir()
    kept = out / "kept" / "mgpu-splat" / "run"
    kept.mkdir(parents=True)
    (kept / "notes.txt").write_text("mine")
    results = train_many(
        [
            ["--data", bad, "--experiment-name", "images"],
            [
                "--data",
                nerfstudio_folder.root,
                "--experiment-name",
                "checkpoint",
                "--load-dir",
                tmp_path / "none",
            ],
            ["--data", bad, "--experiment-name", "kept", "--timestamp", "run"],
            ["--data", nerfstudio_folder.root, "--experiment-name", "good", "--timestamp", "run", *short],
        ],
        out,
    )
    assert [result["code"] for result in results] == [1, 1, 1, 0]
    assert sorted(path.name for path in out.iterdir()) == ["good", "kept"]
    assert (kept / "notes.txt").read_text() == "mine"
    assert (out / "good" / "mgpu-splat" / "run" / "config.yml").is_file()


def test_two_runs_of_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copy

    from nerfstudio.configs import experiment_config

    from ns_mgpu_splat.nerfstudio.config import mgpu_splat

    class Clock(experiment_config.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: object = None) -> Clock:
            return cls(2026, 5, 17, 12, 0, 0)

    monkeypatch.setattr(experiment_config, "datetime", Clock)
    folders = []
    for _ in range(3):
        config = copy.deepcopy(mgpu_splat.config)
        config.output_dir, config.experiment_name = tmp_path, "town"
        config.set_timestamp()
        config.save_config()
        folders.append(config.get_base_dir())
        saved = yaml.load((folders[-1] / "config.yml").read_text(), Loader=yaml.Loader)
        assert saved.get_base_dir() == folders[-1]
        assert not [name for name in vars(saved) if name.startswith("_") and name != "_target"]
    assert [f.name for f in folders] == ["2026-05-17_120000", "2026-05-17_120000-2", "2026-05-17_120000-3"]
    again = copy.deepcopy(mgpu_splat.config)
    again.output_dir, again.experiment_name, again.timestamp = tmp_path, "town", "2026-05-17_120000"
    again.set_timestamp()
    again.save_config()
    assert again.get_base_dir() == folders[0], "a name that was asked for is kept"
