# SPDX-License-Identifier: Apache-2.0
"""`mgpu-splat-info` on checkpoints of known contents: numbers by numpy, the picture by its colours, a sentence for each error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat.nerfstudio import checkpoint, info
from ns_mgpu_splat.nerfstudio.names import kColumnOf
from ns_mgpu_splat.partition import picture
from ns_mgpu_splat.partition.order import RowOrder
from ns_mgpu_splat.partition.picture import ShardLegend, View, draw, nice_length, palette
from ns_mgpu_splat.splats import SplatTable

CONFIG = """!!python/object:ns_mgpu_splat.nerfstudio.trainer.MgpuSplatTrainerConfig
_target: !!python/name:ns_mgpu_splat.nerfstudio.trainer.MgpuSplatTrainer ''
relative_model_dir: !!python/object/apply:pathlib.PosixPath
- nerfstudio_models
pipeline: !!python/object:ns_mgpu_splat.nerfstudio.pipeline.MgpuSplatPipelineConfig
  model: !!python/object:ns_mgpu_splat.nerfstudio.model.MgpuSplatModelConfig
    rasterize_mode: classic
"""


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def columns(rows: int, degree: int = 3, half: bool = False) -> dict[str, Tensor]:
    """A plane of 8 x 4 units with a few far rows."""
    generator = torch.Generator().manual_seed(0)
    means = torch.rand(rows, 3, generator=generator) * torch.tensor([8.0, 4.0, 0.1])
    means[:3] += 100.0
    rest = torch.zeros(rows, (degree + 1) ** 2 - 1, 3)
    return {
        "means": means,
        "quats": torch.ones(rows, 4),
        "scales": torch.full((rows, 3), -4.0),
        "opacities": torch.full((rows,), 2.0),
        "sh0": torch.zeros(rows, 3),
        "shN": rest.half() if half else rest,
    }


def write_run(folder: Path, values: dict[str, Tensor], step: int = 6_999, **more: Any) -> Path:
    """A run with this table; returns its config.yml."""
    pipeline = {f"_model.gauss_params.{name}": values[column] for name, column in kColumnOf.items()}
    state = {"format": 1, "step": step, "schedule_steps": 30_000, "pipeline": pipeline, **more}
    checkpoint.save(state, folder / "nerfstudio_models", step, True)
    config = folder / "config.yml"
    config.write_text(CONFIG)
    return config


def said(config: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert info.main([str(config), "--json", *options]) == 0
    out = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(out, parse_constant=refuse)


@pytest.mark.parametrize(("degree", "half", "total"), [(3, False, 712), (3, True, 504), (0, False, 172)])
def test_what_is_said_is_what_the_checkpoint_holds(
    degree: int, half: bool, total: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = columns(20_000, degree, half)
    found = said(write_run(tmp_path / "run", values, shards=["cuda:0", "cuda:1"]), capsys)
    assert (found["gaussians"], found["colours"]["sh_degree"], found["colours"]["half"]) == (
        20_000,
        degree,
        half,
    )
    assert (found["step"], found["schedule"]) == (7_000, 30_000)
    assert found["memory"]["bytes_per_gaussian"] == total
    assert found["memory"]["in_all"] == 20_000 * total
    assert sum(column[:1].nbytes for column in values.values()) == found["memory"]["to_render"]
    assert found["memory"]["to_train"] == total - found["memory"]["to_render"]
    means = values["means"].numpy()
    assert np.array(list(found["extent"].values())) == pytest.approx(
        np.stack([means.min(0), means.max(0)], 1)
    )
    assert (
        max(high for _, high in found["extent_of_99_percent"].values()) < 9
    )  # the rows far out are left out
    size = found["grid"]["voxel_size"]
    own = len(np.unique(np.floor(means / size), axis=0))  # of voxels in another place, so not just as many
    assert own / 2 < found["grid"]["voxels"] < 2 * own
    assert found["grid"]["gaussians_per_voxel"] == pytest.approx(20_000 / found["grid"]["voxels"])
    assert found["grid"]["gaussians_per_voxel"] >= 256
    assert found["grid"]["in_use"].startswith(("built-in", "fvdb"))
    assert 0.3 < found["order"]["out_of_order"] < 0.6  # random rows
    assert found["trained_on"] == ["cuda:0", "cuda:1"]
    assert [shard["name"] for shard in found["shards"]] == list(torch.mgpu.mesh().shards)
    assert sum(shard["gaussians"] for shard in found["shards"]) == 20_000
    assert found["not_finite"] == 0


def test_pages_are_those_of_a_table_of_this_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = columns(300_000, 0)
    found = said(write_run(tmp_path, values), capsys)
    table = SplatTable(300_000, sh_degree=0)
    pages = sum(len(torch.mgpu.placement(column.detach())) for column in table.columns() if column.numel())
    assert sum(shard["pages"] for shard in found["shards"]) == pages


def test_rows_in_order_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = SplatTable.from_columns(**columns(5_000, 0))
    table.reorder()
    sorted_columns = {name: column.detach().cpu() for name, column in table.named_columns().items()}
    found = said(write_run(tmp_path, sorted_columns), capsys)
    assert found["order"]["out_of_order"] == 0


@pytest.mark.parametrize("saved_in", ["stripes of this mesh", "stripes of another", "space"])
def test_it_says_which_layout_and_draws_rows_where_training_would_have_them(
    saved_in: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The picture's rows are those of a table that training deals, whatever the checkpoint's order was."""
    table, order = SplatTable.from_columns(**columns(20_000, 0)), RowOrder()
    shards = len(table.homes)
    if saved_in != "space":
        order = RowOrder(layout="stripes")
    order.keep(table)
    saved = order.state_dict()
    if saved_in == "stripes of another":
        saved["shards"] = shards + 1
    values = {name: column.detach().cpu() for name, column in table.named_columns().items()}
    config = write_run(tmp_path, values, strategy={"order": saved})
    found = said(config, capsys)["layout"]
    anew = saved_in != ("stripes of this mesh" if shards > 1 else "space")
    assert found["sorted_anew"] == anew
    assert found["kind"] == ("stripes" if shards > 1 else "space")
    assert found["stripes_of"] == (256 if shards > 1 else None)
    assert info.main([str(config)]) == 0
    lines = capsys.readouterr().out
    assert ("stripes of 256 Gaussians, dealt to the shards in turn" in lines) == (shards > 1)
    assert ("training would have the rows sorted anew" in lines) == anew
    trained = RowOrder(layout=found["kind"])
    trained.load_state_dict(saved)
    trained.begin(table)
    means, _ = info.Run(config)._places()
    assert torch.equal(means, table.means.detach().cpu())


@pytest.mark.parametrize("rows", [0, 1])
def test_a_run_of_nothing_and_of_one(rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path, {name: column[3 : 3 + rows] for name, column in columns(10, 1).items()})
    found = said(config, capsys, "--picture", str(tmp_path / "small.png"))
    assert found["gaussians"] == rows
    assert (found["extent"] is None) == (rows == 0)
    assert found["grid"]["voxels"] == rows
    assert info.main([str(config)]) == 0
    assert re.search(rf"^Gaussians +{rows}$", capsys.readouterr().out, re.MULTILINE)
    assert Image.open(tmp_path / "small.png").width > 1_000


def test_rows_that_are_not_finite_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = columns(3_000, 0)
    values["means"][7] = float("nan")
    values["means"][9, 1] = float("inf")
    found = said(write_run(tmp_path, values), capsys, "--picture", str(tmp_path / "p.png"))
    assert found["not_finite"] == 2
    assert max(high for _, high in found["extent"].values()) < 200


@pytest.mark.parametrize("half", [False, True])
def test_lines_and_json_say_the_same_under_the_same_names(
    half: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON had a config that the lines had not, and other names: `bytes_per_gaussian.columns` was "to render", an extent of
    rows was the sum of three sides in one and their mean in the other."""
    config = write_run(tmp_path, columns(3_000, 1, half), shards=["cuda:0", "cuda:1"])
    found = said(config, capsys, "--picture", str(tmp_path / "p.png"))
    assert info.main([str(config), "--picture", str(tmp_path / "p.png")]) == 0
    text = capsys.readouterr().out
    lines = {line.split("  ")[0].lower(): line for line in text.splitlines()}

    def words_of(name: str) -> str:
        return name.replace("_", " ")

    shards = {shard["name"] for shard in found["shards"]}
    assert set(lines) - shards == {words_of(name) for name in found} - {"schedule", "shards"}
    assert found["schedule"] == 30_000
    assert "schedule" in lines["step"]
    for name, value in found.items():
        for key, each in value.items() if isinstance(value, dict) else ():
            if isinstance(each, str):  # what it is called is what it is
                assert each in lines[words_of(name)]
            elif each is not None and name != "pages":  # "6 pages (12 MiB)" in the lines
                assert words_of(key) in lines[words_of(name)].lower(), key
    span = found["order"]["span_of_256_rows"]
    assert f"span of 256 rows: {span:.3g} an axis" in lines["order"]
    pages = found["pages"]
    assert f"{pages['number']} page" in lines["pages"]
    assert f"({pages['mib']} MiB)" in lines["pages"]
    assert pages["number"] == sum(shard["pages"] for shard in found["shards"])


def test_lines_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path / "2026-11-30_171121", columns(20_000))
    assert info.main(["--load-config", str(config.parent)]) == 0  # its folder will do
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step ") and "7,000 of a schedule of 30,000" in line for line in lines)
    assert any(
        "712 bytes per Gaussian: 236 to render, 476 to train; 13.6 MiB in all" in line for line in lines
    )
    assert any(line.startswith("grid ") and " voxels, voxel size " in line for line in lines)
    for shard in torch.mgpu.mesh().shards:
        assert sum(line.startswith(shard) for line in lines) == 1


def test_lines_end_where_the_terminal_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pages` had 154 columns in one of 80. A path stays in one piece, and without a terminal so does each line."""
    config = write_run(tmp_path / "a folder with so long a name that it goes beyond the end", columns(20_000))
    assert info.main([str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith(" ") for line in lines)
    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.say.columns_of", lambda _: 80)
    assert info.main([str(config)]) == 0
    broken = capsys.readouterr().out
    for line in broken.splitlines():
        assert len(line) <= 80 or line.split("  ")[0] in ("config", "checkpoint")
    indent = lines[0].index(str(config))
    assert broken.replace("\n" + " " * indent, " ").splitlines() == lines
    assert len(broken.splitlines()) > len(lines)


def test_the_shards_lines_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two shards with as many rows had "1 page (2 MiB to render)" and "6 pages (12 MiB)", and 3 MiB of rows each."""
    rows, mib = 60_000, 60_000 * 236 / 2**20
    assert info.main([str(write_run(tmp_path, columns(rows)))]) == 0
    lines = capsys.readouterr().out.splitlines()
    (said_of_all,) = (line for line in lines if line.startswith("pages "))
    pages, size, held = re.search(
        r"(\d+) pages \((\d+) MiB\) for ([\d.]+) MiB to render", said_of_all
    ).groups()
    assert (int(size), float(held)) == (2 * int(pages), pytest.approx(mib, abs=0.05))
    shards = torch.mgpu.mesh().shards
    assert ("on the shard whose row is in its middle" in said_of_all) == (len(shards) > 1)
    found = [
        re.search(r"([\d,]+) Gaussians: ([\d.]+) MiB to render; (\d+) pages? \((\d+) MiB\)$", line).groups()
        for line in lines
        if line.split()[0] in shards
    ]
    assert sum(int(each[0].replace(",", "")) for each in found) == rows
    assert sum(float(each[1]) for each in found) == pytest.approx(mib, abs=0.06 * len(shards))
    assert sum(int(each[2]) for each in found) == int(pages)
    assert all(int(each[3]) == 2 * int(each[2]) for each in found)


@pytest.mark.parametrize(("scale", "words"), [(0.125, "one is 8 capture units"), (None, "of unknown length")])
def test_lengths_have_a_unit(
    scale: float | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, columns(100))
    if scale is not None:
        world = {"transform": np.eye(4)[:3].tolist(), "scale": scale}
        (tmp_path / "dataparser_transforms.json").write_text(json.dumps(world))
    assert said(config, capsys)["lengths"]["capture_units"] == (None if scale is None else 1 / scale)
    assert info.main([str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        sum(
            line.startswith("lengths ") and line.endswith(f" in units of the scene; {words}")
            for line in lines
        )
        == 1
    )


def test_the_scale_bar_of_one_unit_is_singular() -> None:
    assert [picture._units(length) for length in (1.0, 0.5, 20.0)] == [
        "1 unit of the scene",
        "0.5 units of the scene",
        "20 units of the scene",
    ]


def test_the_picture_has_each_shards_colour_where_its_rows_are(tmp_path: Path) -> None:
    """Three shards side by side along x, drawn without a device."""
    values = columns(60_000, 0)
    order = values["means"][:, 0].argsort()
    means, opacities = values["means"][order], values["opacities"]
    homes = [(0, 20_000), (20_000, 40_000), (40_000, 60_000)]
    legend = [ShardLegend(f"cuda:{i}", 20_000, 9) for i in range(3)]
    image = draw(means, opacities, homes, legend, "three shards")
    picture.save(image, tmp_path / "three.png")
    pixels = np.asarray(Image.open(tmp_path / "three.png").convert("RGB")).astype(float)
    colors = palette(3) * 255
    top, left, wide = picture.MARGIN + 28, picture.MARGIN, picture.MAP
    for shard, at in enumerate((1 / 6, 1 / 2, 5 / 6)):
        x = left + int(at * wide)
        patch = pixels[top + 300 : top + 400, x - 40 : x + 40].reshape(-1, 3).mean(0)
        hue = patch / np.linalg.norm(patch)
        likeness = [float(hue @ color / np.linalg.norm(color)) for color in colors]
        assert int(np.argmax(likeness)) == shard
        assert likeness[shard] > 0.97
    swatches = [(pixels - color).__abs__().max(2).min() < 2 for color in colors]
    assert all(swatches)


def test_the_map_keeps_its_scale_whatever_a_few_far_points_do() -> None:
    points = np.random.default_rng(0).random((10_000, 2)) * [8, 4]
    view = View.around(points, 1_000)
    points[:20] = 1e9
    far = View.around(points, 1_000)
    assert far.scale == pytest.approx(view.scale, rel=0.05)
    assert view.height == pytest.approx(500, rel=0.05)
    index, inside = far.cell(np.array([[4.0, 2.0], [1e9, 0.0], [np.nan, 1.0]]))
    assert inside.tolist() == [True, False, False]
    row, column = divmod(int(index[0]), far.width)
    assert (row, column) == (pytest.approx(far.height / 2, abs=12), pytest.approx(far.width / 2, abs=12))


@pytest.mark.parametrize(
    ("most", "length"), [(1.0, 1.0), (9.99, 5.0), (0.034, 0.02), (5e4, 5e4), (19.0, 10.0)]
)
def test_scale_bars_are_round_numbers(most: float, length: float) -> None:
    assert nice_length(most) == pytest.approx(length)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 12])
def test_colours_of_shards_are_told_apart(count: int) -> None:
    colors = palette(count)
    assert colors.shape == (count, 3)
    assert colors.min() >= 0
    assert colors.max() <= 1
    apart = [np.abs(a - b).max() for i, a in enumerate(colors) for b in colors[:i]]
    assert not apart or min(apart) > 0.08


def test_each_error_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_run(tmp_path / "good", columns(100))
    other = tmp_path / "other.yml"
    other.write_text("a: 1\n")
    empty = tmp_path / "empty" / "config.yml"
    empty.parent.mkdir()
    empty.write_text(CONFIG)
    cut = write_run(tmp_path / "cut", columns(1_000))
    file = next((tmp_path / "cut" / "nerfstudio_models").iterdir())
    file.write_bytes(file.read_bytes()[:5_000])
    foreign = tmp_path / "foreign"
    write_run(foreign, columns(10))
    checkpoint.save(
        {"step": 1, "pipeline": {"_model.field": torch.zeros(3)}}, foreign / "nerfstudio_models", 9_999, True
    )
    for arguments, words in (
        ([tmp_path / "none.yml"], "none.yml cannot be read: No such file or directory"),
        ([tmp_path / "empty" / "nothing"], "cannot be read"),
        ([other], "other.yml is no config.yml of a training run"),
        ([empty], "has no checkpoint"),
        ([cut], "is cut short or damaged"),
        ([foreign / "config.yml"], "it is of another method"),
        ([good, "--picture", tmp_path / "x.gif"], "a picture ends in .png, .jpg or .webp"),
        ([good, "--picture", tmp_path / "none" / "x.png"], "x.png: No such file or directory"),
    ):
        assert info.main([str(argument) for argument in arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert words in err
        assert err.startswith("mgpu-splat-info: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err


def test_an_option_that_cannot_be_is_said_in_one_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Null ended in a traceback, or in other words than a wrong value."""
    config = write_run(tmp_path, columns(100))
    for lines, words in (
        ("reorder_decay: null", "reorder_decay to null, which it cannot be. It takes a number."),
        ("reorder_decay: often", "reorder_decay to 'often', which it cannot be. It takes a number."),
        ("layout: null", "layout to null, which it cannot be. It takes auto, space or stripes."),
        ("layout: heap", "layout to 'heap', which it cannot be. It takes auto, space or stripes."),
    ):
        config.write_text(f"{CONFIG}    {lines}\n")
        assert info.main([str(config)]) == 1
        assert capsys.readouterr().err == f"mgpu-splat-info: {config} sets pipeline.model.{words}\n"


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            {"version": 2, "seed": 1},
            "has a strategy of version 2, which this version of ns-mgpu-splat does not know",
        ),
        ("annealing", 'has the strategy "annealing", which this version of ns-mgpu-splat does not know'),
        ({"version": 1, "order": {"fresh": "very"}}, "the order of its rows what this version"),
        ({"version": 1, "order": "hilbert"}, "the order of its rows what this version"),
    ],
)
def test_a_strategy_of_another_version_is_named_with_what_to_do(
    strategy: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, columns(100), strategy=strategy)
    assert info.main([str(config)]) == 1
    said_of_it = capsys.readouterr().err
    assert f"Checkpoint {tmp_path / 'nerfstudio_models'}" in said_of_it
    assert words in said_of_it
    assert "Upgrade ns-mgpu-splat" in said_of_it
    assert said_of_it.count("\n") == 1


def test_small_values_of_another_kind_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, columns(100), shards=3)
    checkpoint.save(
        {**checkpoint.read(checkpoint.find(tmp_path / "nerfstudio_models")), "schedule_steps": "long"},
        tmp_path / "nerfstudio_models",
        7_000,
        True,
    )
    assert info.main([str(config)]) == 0
    lines = capsys.readouterr().out
    assert "trained on" not in lines
    assert "schedule" not in lines


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yml"
    if kind == "pipe":
        os.mkfifo(config)
    elif kind == "device":
        config.symlink_to("/dev/null")
    else:
        config.mkdir()
    assert info.main([str(config)]) == 1
    words = "is a folder. Give" if kind == "folder" else f"cannot be read: it is a {kind}, not a file."
    assert f"{config} {words}" in capsys.readouterr().err


def test_the_command_runs_without_a_gpu_on_any_mesh(tmp_path: Path) -> None:
    config = write_run(tmp_path, columns(400_000, 0))
    environment = {**os.environ, "MGPU_DEVICES": "cpu:3", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("MGPU_REQUIRE_GPU", None)
    done = subprocess.run(
        [sys.executable, "-m", "ns_mgpu_splat.nerfstudio.info", str(config), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shards = json.loads(done.stdout)["shards"]
    assert [shard["name"] for shard in shards] == ["cpu:0", "cpu:1", "cpu:2"]
    assert sum(shard["gaussians"] for shard in shards) == 400_000
    assert min(shard["pages"] for shard in shards) > 0
