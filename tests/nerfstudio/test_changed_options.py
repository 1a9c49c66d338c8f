# SPDX-License-Identifier: Apache-2.0
"""Going on with other options than the run that saved the checkpoint is said, in one line; with the same, nothing is."""

from __future__ import annotations

import copy
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from ns_mgpu_splat.nerfstudio.changed_options import changed_options, other_options_note
from ns_mgpu_splat.nerfstudio.config import mgpu_splat
from ns_mgpu_splat.nerfstudio.saved_run import RunError, read_options
from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer
from ns_mgpu_splat.nerfstudio.trainer_config import MgpuSplatTrainerConfig

pytestmark = pytest.mark.any_mesh  # no mesh is started


def begun(folder: Path) -> MgpuSplatTrainerConfig:
    """A run with options of its own, as ns-train writes it down."""
    config = copy.deepcopy(mgpu_splat.config)
    config.output_dir, config.experiment_name, config.timestamp = folder, "town", "run"
    config.data = config.pipeline.datamanager.data = folder / "town"
    config.pipeline.datamanager.dataparser.downscale_factor = 2
    config.pipeline.model.max_gaussians = 300_000
    config.optimizers["means"]["optimizer"].lr = 1e-5
    config.save_config()
    return config


def going_on(folder: Path) -> MgpuSplatTrainerConfig:
    """The command line of a user who gives --data and --load-dir alone."""
    config = copy.deepcopy(mgpu_splat.config)
    config.output_dir, config.experiment_name, config.timestamp = folder, "town", "next"
    config.data = config.pipeline.datamanager.data = folder / "town"
    config.load_dir = folder / "town" / "mgpu-splat" / "run" / "nerfstudio_models"
    return config


def test_options_that_were_not_given_again_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(tmp_path)
    config = going_on(tmp_path)
    config.save_config()
    assert "other options" not in capsys.readouterr().out, "it would stand below the dump of all options"
    said = config.other_options or ""
    assert "--pipeline.datamanager.dataparser.downscale-factor None (was 2)" in said
    assert "--pipeline.model.max-gaussians 1000000 (was 300000)" in said
    assert "--optimizers.means.optimizer.lr" in said
    assert "(was 1e-05)" in said
    run = config.load_dir.parent
    assert said.endswith(
        f" To go on with all of that run's: --load-config {run / 'config.yml'} --load-dir {config.load_dir}"
    )
    assert said.count("(was ") == 3


@pytest.mark.parametrize("option", ["load_dir", "load_checkpoint"])
def test_they_are_the_last_that_is_said_of_a_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Between the page of options and "Saving config" the line was overlooked."""
    begun(tmp_path)
    config = going_on(tmp_path)
    path = config.load_dir / "step-000000059.ckpt"
    if option == "load_checkpoint":
        config.load_dir, config.load_checkpoint = None, path
    config.save_config()
    capsys.readouterr()
    run: Any = SimpleNamespace(config=config, _start_step=60, pipeline=MagicMock())
    run.pipeline.model.num_points = 1500
    run._loaded = {"path": path, "schedule_steps": config.schedule_steps}
    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.trainer.shard_names", lambda: ("cpu:0",))
    MgpuSplatTrainer._load_checkpoint(run)
    resuming, options = capsys.readouterr().out.splitlines()
    assert resuming == f"Resuming after step 60 with 1,500 Gaussians from {path}."
    assert options.startswith("This run has other options than the one it goes on from: ")
    assert options == config.other_options


@pytest.mark.parametrize("option", ["load_dir", "load_checkpoint"])
def test_what_is_printed_can_be_typed(tmp_path: Path, option: str) -> None:
    """A shell's own splitting gives the paths back, whatever is in their names."""
    folder = tmp_path / "mein Test's"
    begun(folder)
    config = going_on(folder)
    config.pipeline.datamanager.data = folder / "other $town"
    models = config.load_dir
    path = models if option == "load_dir" else models / "step-000000059.ckpt"
    config.load_dir, config.load_checkpoint = None, None
    setattr(config, option, path)
    note = other_options_note(config) or ""
    command = note.partition("To go on with all of that run's: ")[2]
    flag = "--" + option.replace("_", "-")
    assert shlex.split(command) == ["--load-config", str(models.parent / "config.yml"), flag, str(path)]
    assert f"--data {shlex.quote(str(folder / 'other $town'))} (was " in note


def test_the_file_that_a_folder_s_name_wants_can_be_typed(tmp_path: Path) -> None:
    run = begun(tmp_path / "mein Test").get_base_dir()
    with pytest.raises(RunError) as refused:
        read_options(run)
    assert f"Give --load-config {shlex.quote(str(run / 'config.yml'))}." in str(refused.value)


def test_a_run_with_the_same_options_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data folder may be written otherwise: relative, through a link, with the file's name, or in the other place."""
    first = begun(tmp_path)
    saved = read_options(first.get_base_dir() / "config.yml")
    (tmp_path / "link").symlink_to(tmp_path / "town")
    monkeypatch.chdir(tmp_path)
    assert changed_options(first, saved) == []
    data = first.pipeline.datamanager
    for path in (Path("town"), tmp_path / "link", Path("town/transforms.json"), Path("link/../town")):
        data.data = path
        assert changed_options(first, saved) == []
    data.data, data.dataparser.data = None, Path("town")
    assert changed_options(first, saved) == []
    data.data = Path("elsewhere")
    assert changed_options(first, saved) == [("data", tmp_path / "town", Path("elsewhere"))]


def test_all_options_together_come_with_the_config(tmp_path: Path) -> None:
    first = begun(tmp_path)
    run = first.get_base_dir()
    config = MgpuSplatTrainerConfig(
        **{
            **vars(copy.deepcopy(mgpu_splat.config)),
            "load_config": run / "config.yml",
            "load_dir": run / "nerfstudio_models",
        }
    )
    assert config.pipeline.model.max_gaussians == 300_000
    assert other_options_note(config) is None


def test_six_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    begun(tmp_path)
    config = going_on(tmp_path)
    model = config.pipeline.model
    model.sh_degree, model.half, model.warmup_length, model.refine_every = 1, True, 7, 9
    model.rasterize_mode = "antialiased"
    note = other_options_note(config) or ""
    assert note.count("(was ") == 6
    assert " and 2 more. To go on" in note
    assert "\n" not in note


def test_an_older_run_had_the_default_of_a_newer_option(tmp_path: Path) -> None:
    first = begun(tmp_path)
    saved = read_options(first.get_base_dir() / "config.yml")
    del saved["pipeline"]["datamanager"]["dataparser"]["orientation_method"]
    assert changed_options(first, saved) == []
    first.pipeline.datamanager.dataparser.orientation_method = "down"
    assert changed_options(first, saved) == [
        ("pipeline.datamanager.dataparser.orientation-method", "up", "down")
    ]


@pytest.mark.parametrize(
    "text", [None, "", "pipeline: [", "pipeline: 3\n", "pipeline:\n  model: 4\noptimizers: x\n", "\0",
     "pipeline: !!int x", "pipeline: !!bool x", "pipeline: !!timestamp x", "pipeline: 2020-99-99", f"pipeline: {'[' * 3000}"],
)  # fmt: skip
def test_a_config_that_cannot_be_read_says_nothing(text: str | None, tmp_path: Path) -> None:
    config = going_on(tmp_path)
    os.makedirs(config.load_dir)
    if text is not None:
        (config.load_dir.parent / "config.yml").write_text(text)
    assert other_options_note(config) is None
    config.load_dir = None
    assert other_options_note(config) is None


@pytest.mark.parametrize("path", ["~nobody-of-this-name/town", "a\0b"])
def test_a_saved_path_that_means_nothing_is_another_one(path: str, tmp_path: Path) -> None:
    first = begun(tmp_path)
    saved = read_options(first.get_base_dir() / "config.yml")
    saved["pipeline"]["datamanager"]["data"] = path.split("/")
    assert [option for option, *_ in changed_options(first, saved)] == ["data"]
