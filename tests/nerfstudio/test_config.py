# SPDX-License-Identifier: Apache-2.0
"""The entry point is light, every option explains itself, rates are plain floats, the image order needs no state."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
import tyro
from tyro._docstrings import get_field_docstring

from ns_mgpu_splat.nerfstudio.config import mgpu_splat, mgpu_splat_big
from ns_mgpu_splat.nerfstudio.datamanager import epoch_order
from ns_mgpu_splat.nerfstudio.schedule import DecayConfig


def test_importing_the_entry_point_loads_nothing_native_and_no_table_of_methods() -> None:
    program = (
        "import sys, torch\n"
        "from ns_mgpu_splat.nerfstudio.config import mgpu_splat\n"
        "bad = [m for m in sys.modules if m in ('nerfstudio.configs.method_configs', 'nerfstudio.scripts.exporter')\n"
        "       or m.startswith('ns_mgpu_splat.splats') or m.endswith('._mgpu') or m == '_mgpu']\n"
        "assert not bad, bad\n"
        "assert torch.utils.backend_registration._privateuse1_backend_name == 'privateuseone'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_method_is_registered_under_its_name() -> None:
    from nerfstudio.plugins.registry import discover_methods

    if not entry_points(group="nerfstudio.method_configs", name="mgpu-splat"):
        pytest.skip("the package is not installed, only on PYTHONPATH: it has no entry points")
    methods, _ = discover_methods()
    assert methods["mgpu-splat"].method_name == "mgpu-splat"
    assert methods["mgpu-splat-big"].method_name == "mgpu-splat-big"
    assert mgpu_splat.description


def test_the_big_method_takes_presets_over_its_own_defaults(tmp_path: Path) -> None:
    big = mgpu_splat_big.config
    assert big.pipeline.model.max_gaussians > mgpu_splat.config.pipeline.model.max_gaussians
    preset = tmp_path / "preset.yml"
    preset.write_text("schedule_steps: 123\npipeline: {model: {max_gaussians: 77}}\n")
    asked = dataclasses.replace(
        copy.deepcopy(big), load_config=preset.with_suffix(".yaml"), max_num_iterations=9
    )  # the file is there, with the other ending
    assert (asked.schedule_steps, asked.pipeline.model.max_gaussians, asked.max_num_iterations) == (
        123,
        77,
        9,
    )
    assert big.pipeline.model.max_gaussians == 5_000_000


def test_every_shown_option_has_a_text_of_its_own() -> None:
    texts: dict[str, str] = {}

    def visit(config: object) -> None:
        cls = type(config)
        hints = get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            suppressed = tyro.conf.Suppress in getattr(hints[field.name], "__metadata__", ()) or any(
                "Suppress" in repr(m) for m in getattr(hints[field.name], "__metadata__", ())
            )
            owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
            value = getattr(config, field.name)
            if field.name.startswith("_") or suppressed:
                continue
            if owner.__module__.startswith("ns_mgpu_splat"):
                text = get_field_docstring(cls, field.name, ())
                where = f"{owner.__name__}.{field.name}"
                assert text, f"{where} has no help text"
                assert len(text.split()) >= 2, where
                assert "\n" not in text, f"{where} is shown with the line breaks of the source"
                assert texts.setdefault(text, where) == where, f"{where} repeats the text of {texts[text]}"
            if dataclasses.is_dataclass(value) and type(value).__module__.startswith("ns_mgpu_splat"):
                visit(value)

    visit(mgpu_splat.config)
    visit(mgpu_splat.config.optimizers["means"]["optimizer"])
    visit(mgpu_splat.config.optimizers["means"]["scheduler"])
    assert len(texts) > 50


def test_rates_decay_from_first_to_last_and_are_python_floats() -> None:
    decay = DecayConfig(lr_final=1e-6, warmup_steps=0)
    assert decay.rate(0, 1e-4, 100) == pytest.approx(1e-4)
    assert decay.rate(50, 1e-4, 100) == pytest.approx(1e-5)
    assert decay.rate(100, 1e-4, 100) == pytest.approx(1e-6)
    assert decay.rate(1000, 1e-4, 100) == pytest.approx(1e-6)
    assert DecayConfig(lr_final=1e-6, warmup_steps=10).rate(0, 1e-4, 100) == 0
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = DecayConfig(lr_final=1e-5).setup().get_scheduler(optimizer, 1e-3, schedule_steps=10)
    optimizer.step()
    scheduler.step()
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_each_epoch_sees_every_image_once_in_another_order() -> None:
    orders = [epoch_order(42, epoch, 20) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(20))
    assert not np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[1], epoch_order(42, 1, 20))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_gaussians", 0),
        ("sh_degree", 4),
        ("ssim_lambda", 1.5),
        ("grow_factor", 0.9),
        ("grow_factor", math.inf),
        ("refine_every", 0),
        ("min_opacity", 1.0),
        ("noise_lr", math.nan),
        ("opacity_reg", math.nan),
        ("scale_reg", -1.0),
        ("densify_grad_thresh", math.nan),
        ("densify_size_thresh", -1.0),
        ("cull_alpha_thresh", 0.5),
        ("reset_alpha_every", 0),
    ],
)
def test_impossible_options_are_refused_with_their_name(option: str, value: float) -> None:
    from ns_mgpu_splat.nerfstudio.model import MgpuSplatModelConfig

    with pytest.raises(SystemExit, match=option.replace("_", "-")):
        MgpuSplatModelConfig(**{option: value})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--machine.seed", "-1"], "--machine.seed is -1"),
        (["--logging.steps-per-log", "0"], "--logging.steps-per-log is 0"),
        (["--gradient-accumulation-steps", "splats", "0"], "--gradient-accumulation-steps splats 0"),
        (["--optimizers.means.optimizer.lr", "nan"], "--optimizers.means.optimizer.lr is nan"),
        (["--optimizers.means.scheduler.lr-final", "0"], "--optimizers.means.scheduler.lr-final is 0"),
        (["--max-num-iterations", "0"], "--max-num-iterations must be at least 1"),
        (["--pipeline.datamanager.max-thread-workers", "-1"], "max-thread-workers is -1"),
        (["--pipeline.datamanager.image-cache-gib", "nan"], "image-cache-gib is nan"),
    ],
)
def test_impossible_options_of_a_run_are_refused_with_their_name(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)):
        parse_command_line(*words)


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def parse_command_line(*arguments: str):
    import copy

    config = copy.deepcopy(mgpu_splat.config)
    return tyro.cli(type(config), default=config, args=list(arguments))


@pytest.mark.parametrize("name", ["small", "drone", "city"])
def test_presets_set_their_options(name: str) -> None:
    import yaml

    path = CONFIGS / f"{name}.yml"
    config = parse_command_line("--load-config", str(path))
    options = yaml.safe_load(path.read_text())
    assert config.load_config is None
    assert config.max_num_iterations == options["max_num_iterations"] != 30_001
    assert config.pipeline.model.max_gaussians == options["pipeline"]["model"]["max_gaussians"]


def test_the_command_line_wins_over_a_preset() -> None:
    config = parse_command_line("--load-config", str(CONFIGS / "small.yml"), "--max-num-iterations", "11")
    assert config.max_num_iterations == 11
    assert config.schedule_steps == 7000


def test_what_is_typed_wins_also_where_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    method = "--pipeline.datamanager.dataparser.orientation-method"
    words = ["--load-config", str(CONFIGS / "drone.yml")]
    assert parse_command_line(*words).pipeline.datamanager.dataparser.orientation_method == "down"
    for typed in ([method, "up"], [f"{method.replace('-method', '_method')}=up"]):
        monkeypatch.setattr("sys.argv", ["ns-train", "mgpu-splat", *words, *typed])
        config = parse_command_line(*words, *typed)
        assert config.pipeline.datamanager.dataparser.orientation_method == "up"
        assert config.max_num_iterations != 30_001


def test_a_preset_with_an_unknown_option_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("pipeline: {model: {max_gausians: 5}}\n")
    with pytest.raises(SystemExit, match=r"a\.yml sets pipeline\.model\.max_gausians"):
        parse_command_line("--load-config", str(tmp_path / "a.yml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_iterations: many", "sets max_num_iterations to 'many'"),
        ("max_num_iterations: 1.5", "sets max_num_iterations to 1.5"),
        ("max_num_iterations: true", "sets max_num_iterations to True"),
        ("max_num_iterations: {a: 1}", "sets max_num_iterations to {'a': 1}"),
        ("vis: nothing", "sets vis to 'nothing'"),
        ("pipeline: 3", "sets pipeline to 3"),
        ("pipeline: {model: {max_gaussians: most}}", "sets pipeline.model.max_gaussians to 'most'"),
        ("pipeline: {model: {lpips: 1}}", "sets pipeline.model.lpips to 1"),
        ("pipeline: {datamanager: {image_cache_gib: -1}}", "image-cache-gib is -1, it must be at least 0"),
        ("pipeline: {datamanager: {data: 5}}", "sets pipeline.datamanager.data to 5"),
        ("- a\n- b", "holds no options"),
    ],
)
def test_a_preset_with_an_impossible_value_is_refused_with_it(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.yml").write_text(text)
    with pytest.raises(SystemExit, match=re.escape(words)):
        parse_command_line("--load-config", str(tmp_path / "a.yml"))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("layout", None, "layout to null, which it cannot be. It takes auto, space or stripes."),
        ("layout", "heap", "layout to 'heap', which it cannot be. It takes auto, space or stripes."),
        ("strategy", None, "strategy to null, which it cannot be. It takes mcmc or default."),
        ("reorder_decay", None, "reorder_decay to null, which it cannot be. It takes a number."),
        (
            "max_gaussians",
            None,
            "max_gaussians to null, which it cannot be. It takes a whole number or auto.",
        ),
        ("half", None, "half to null, which it cannot be. It takes true or false."),
        ("camera_optimizer", None, "camera_optimizer to null, which it cannot be. See ns-train"),
    ],
)
def test_null_and_a_wrong_value_are_refused_in_one_form_whichever_file_has_them(
    tmp_path: Path, option: str, value: object, words: str
) -> None:
    """A preset, and the config.yml of an earlier run, whose values nobody looked at."""
    import yaml

    config = copy.deepcopy(mgpu_splat.config)
    setattr(config.pipeline.model, option, value)
    preset, run = tmp_path / "preset.yml", tmp_path / "config.yml"
    preset.write_text(yaml.dump({"pipeline": {"model": {option: value}}}))
    run.write_text(yaml.dump(config))
    for path in (preset, run):
        with pytest.raises(SystemExit, match=re.escape(f"mgpu-splat: {path} sets pipeline.model.{words}")):
            parse_command_line("--load-config", str(path))


def test_the_values_of_a_run_are_looked_at_as_those_of_a_command_line(tmp_path: Path) -> None:
    import yaml

    config = copy.deepcopy(mgpu_splat.config)
    config.pipeline.model.reorder_decay = 0.5
    (tmp_path / "config.yml").write_text(yaml.dump(config))
    with pytest.raises(SystemExit, match=r"reorder-decay is 0\.5, it must be above 1"):
        parse_command_line("--load-config", str(tmp_path / "config.yml"))
    config.pipeline.model.reorder_decay = 1.5
    config.optimizers["means"]["optimizer"].lr = None
    config.optimizers["means"]["scheduler"] = None
    config.gradient_accumulation_steps = {"splats": None}
    for part, words in (
        ("optimizers", "sets optimizers.means.optimizer.lr to null, which it cannot be. It takes a number."),
        ("gradient_accumulation_steps", "sets gradient_accumulation_steps to {'splats': None}"),
    ):
        (tmp_path / "config.yml").write_text(yaml.dump(config))
        with pytest.raises(SystemExit, match=re.escape(words)):
            parse_command_line("--load-config", str(tmp_path / "config.yml"))
        setattr(config, part, copy.deepcopy(getattr(mgpu_splat.config, part)))


@pytest.mark.parametrize("method", [mgpu_splat, mgpu_splat_big])
def test_all_defaults_may_be(method: object) -> None:
    import yaml

    from ns_mgpu_splat.nerfstudio.presets import first_wrong_value

    config = method.config  # type: ignore[attr-defined]
    assert first_wrong_value(config, "config.yml") is None
    assert first_wrong_value(yaml.load(yaml.dump(config), Loader=yaml.Loader), "config.yml") is None


def test_a_config_that_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yml")
    (tmp_path / "folder.yml").mkdir()
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00\x81")
    for name, words in (
        ("pipe", "it is a pipe, not a file"),
        ("folder", "it is a folder"),
        ("binary", "it is no text"),
    ):
        with pytest.raises(SystemExit, match=rf"{name}\.yml cannot be read: {words}"):
            parse_command_line("--load-config", str(tmp_path / f"{name}.yml"))


def test_a_preset_takes_values_as_yaml_writes_them(tmp_path: Path) -> None:
    text = "output-dir: here\npipeline: {model: {max_gaussians: auto, scale_reg: 0}, "
    text += "datamanager: {data: town, image_cache_gib: 2}}"
    (tmp_path / "a.yml").write_text(text)
    config = parse_command_line("--load-config", str(tmp_path / "a.yml"))
    assert (config.output_dir, config.pipeline.datamanager.data) == (Path("here"), Path("town"))
    assert config.pipeline.model.max_gaussians == "auto"
    assert (config.pipeline.model.scale_reg, config.pipeline.datamanager.image_cache_gib) == (0, 2)


def test_downscaling_is_an_option_without_a_subcommand() -> None:
    config = parse_command_line("--data", "x", "--pipeline.datamanager.dataparser.downscale-factor", "2")
    assert config.pipeline.datamanager.dataparser.downscale_factor == 2


def test_the_page_about_configs_has_every_option_of_every_file_with_its_value() -> None:
    import yaml

    root = Path(__file__).parents[2]
    rows = {}
    for line in (root / "docs" / "configs.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):
            rows[cells[0].strip("`").replace(": ", ".")] = cells[1:]
    files = ("small", "drone", "city")

    def options(tree: dict, before: str = "") -> dict[str, object]:
        flat: dict[str, object] = {}
        for name, value in tree.items():
            path = f"{before}{name}"
            flat |= options(value, path + ".") if isinstance(value, dict) else {path: value}
        return flat

    values = {name: options(yaml.safe_load((root / "configs" / f"{name}.yml").read_text())) for name in files}
    short = {
        name: {
            k.removeprefix("pipeline.datamanager.").removeprefix("pipeline.model."): v
            for k, v in found.items()
        }
        for name, found in values.items()
    }
    assert set(rows) == set().union(*short.values()), "the page and the files name the same options"
    for option, cells in rows.items():
        said = [cell or None for cell in cells[:3]]
        assert said == [None if option not in short[f] else str(short[f][option]) for f in files], option


def test_a_run_that_was_saved_before_an_option_came_has_its_default() -> None:
    import yaml

    config = copy.deepcopy(mgpu_splat.config)
    config.pipeline.model.sh_degree = 1
    for holder, name in (
        (config, "logging"),
        (config.pipeline, "datamanager"),
        (config.pipeline.model, "camera_optimizer"),
        (config.pipeline.model, "half"),
    ):
        vars(holder).pop(name)
    loaded = yaml.load(yaml.dump(config), Loader=yaml.Loader)
    default = mgpu_splat.config
    assert loaded.logging == default.logging
    assert loaded.pipeline.datamanager == default.pipeline.datamanager
    assert loaded.pipeline.model.camera_optimizer == default.pipeline.model.camera_optimizer
    assert loaded.pipeline.model.half is False
    assert loaded.pipeline.model.sh_degree == 1
    assert loaded == dataclasses.replace(loaded)
