# SPDX-License-Identifier: Apache-2.0
"""What a run needs is known before it takes anything. Oracles: tensors that were really made, files really written."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import scene
import torch

import ns_mgpu_splat
from ns_mgpu_splat.data import memory
from ns_mgpu_splat.nerfstudio import preflight
from ns_mgpu_splat.nerfstudio.config import mgpu_splat
from ns_mgpu_splat.nerfstudio.preflight import Demand, PreflightError, Shard, plan

GB = 10**9
DEMAND = Demand(
    seeds=500_000,
    cap=1_000_000,
    sh_degree=3,
    half=False,
    largest_view=1920 * 1080,
    images=100 * 1920 * 1080 * 3,
    largest_image=1920 * 1080 * 3,
    host_cache=8 * GB,
    device_cache=4 * GB,
)
GPUS = tuple(Shard(f"cuda:{i}", 80 * GB) for i in range(4))


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_bytes_of_a_row_are_those_of_the_tensors(degree: int, half: bool) -> None:
    table = ns_mgpu_splat.SplatTable(1000, sh_degree=degree, half=half)
    optimizer = ns_mgpu_splat.SplatAdam(table, {})
    tensors = [
        *table.columns(),
        *optimizer.exp_avg.values(),
        *optimizer.exp_avg_sq.values(),
        optimizer.last_step,
    ]
    assert preflight.row_bytes(degree, half) == sum(t.element_size() * t.numel() for t in tensors) / 1000


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_bytes_of_an_exported_row_are_those_of_a_file(degree: int, tmp_path: Path) -> None:
    sizes = []
    for rows in (100, 300):
        ns_mgpu_splat.SplatTable(rows, sh_degree=degree).to_ply(tmp_path / "a.ply")
        sizes.append((tmp_path / "a.ply").stat().st_size)
    assert preflight.ply_bytes(degree) == (sizes[1] - sizes[0]) / 200


def test_a_cap_that_fits_is_kept() -> None:
    assert plan(DEMAND, GPUS).cap == 1_000_000


def test_auto_fills_the_memory_and_no_more() -> None:
    found = plan(dataclasses.replace(DEMAND, cap="auto"), GPUS)
    assert 0.6 * 80 * GB < found.on_shard(found.cap) < 0.85 * 80 * GB
    more = plan(dataclasses.replace(DEMAND, cap="auto"), (*GPUS, *GPUS))
    assert more.cap > 1.9 * found.cap


def test_the_shard_with_the_least_memory_decides() -> None:
    uneven = (*GPUS[:3], Shard("cuda:3", 8 * GB))
    found = plan(dataclasses.replace(DEMAND, cap="auto"), uneven)
    assert found.on_shard(found.cap) < 8 * GB


def test_a_cap_that_does_not_fit_is_lowered_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(dataclasses.replace(DEMAND, cap=2_000_000_000), GPUS)
    assert found.cap == found.fitting < 2_000_000_000
    preflight.announce(found)
    said = " ".join(capsys.readouterr().out.split())
    assert "max-gaussians 2,000,000,000 does not fit" in said
    assert f"The cap is {found.cap:,} now" in said


@pytest.mark.parametrize("shards", [("cpu:0",), ("cuda:0", "cuda:1", "cuda:2", "cuda:3")])
def test_what_a_run_needs_fits_into_a_terminal_of_80_columns(
    shards: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was up to 90 columns wide, and the terminal broke each line where it ended."""
    demand = dataclasses.replace(DEMAND, images=159 << 20, host_cache=int(11.3 * 2**30))
    found = plan(demand, tuple(Shard(name, 140 * GB) for name in shards))
    said = {}
    for columns in (80, 44, 1 << 20):  # the last is no terminal
        monkeypatch.setattr("ns_mgpu_splat.nerfstudio.say.columns_of", lambda _, columns=columns: columns)
        preflight.announce(found)
        said[columns] = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert max(map(len, said[columns])) <= columns
    assert said[80] == said[1 << 20]
    assert [line.split("  ")[0] for line in said[80]] == [
        "What this run needs",
        "Gaussians",
        "memory of each shard" if len(shards) > 1 else "memory on cpu:0",
        "images",
        "a checkpoint",
        "an exported .ply",
    ]
    narrow = [
        line for line in said[44] if line.startswith(" ")
    ]  # a second row begins below the first one's figures
    assert narrow
    assert len({len(line) - len(line.lstrip()) for line in narrow}) == 1


def test_images_on_the_host_take_from_a_host_shard_and_not_from_a_gpu() -> None:
    many = dataclasses.replace(DEMAND, cap="auto", images=1000 * GB, host_cache=40 * GB, device_cache=0)
    host, gpu = (plan(many, (Shard(name, 80 * GB),)) for name in ("cpu:0", "cuda:0"))
    assert gpu.cap - host.cap == pytest.approx(40 * GB / preflight.row_bytes(3), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "not even 1,000 Gaussians fit"),
        ({"resumed": 5_000_000, "largest_view": 100}, "the checkpoint's 5,000,000 Gaussians need"),
    ],
)
def test_what_cannot_fit_is_refused_with_figures_and_a_way_out(changes: dict, words: str) -> None:
    demand = dataclasses.replace(DEMAND, images=0, device_cache=0, host_cache=0, **changes)
    with pytest.raises(PreflightError, match=words) as refused:
        plan(demand, (Shard("cpu:0", GB // 4),))
    assert "MGPU_DEVICES" in str(refused.value)
    assert "238 MiB is free on cpu:0" in str(refused.value)


def test_a_run_is_refused_before_the_table_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene.write_nerfstudio(tmp_path / "data", images=3, points=50)
    monkeypatch.setattr(preflight, "available_memory", lambda: 1 << 20)
    config = copy.deepcopy(mgpu_splat.config.pipeline)
    config.datamanager.data = made.root

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the model was made though it cannot fit")

    monkeypatch.setattr(ns_mgpu_splat.SplatTable, "from_points", fail)
    if torch.mgpu.mesh().shards[0].startswith("cuda"):
        pytest.skip("the memory of a GPU cannot be made to look small")
    with pytest.raises(SystemExit, match="There is too little memory"):
        config.setup(device="mgpu", test_mode="val")


def test_auto_trains_with_the_cap_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = scene.write_nerfstudio(tmp_path / "data", images=3, points=50)
    config = copy.deepcopy(mgpu_splat.config.pipeline)
    config.datamanager.data, config.model.max_gaussians = made.root, "auto"
    model = config.setup(device="mgpu", test_mode="val").model
    assert model.cap > 1_000_000
    assert model.table.capacity == model.cap
    assert model.num_points == 50
    assert f"at most {model.cap:,}, as many as fit" in " ".join(capsys.readouterr().out.split())


def test_available_memory_is_a_containers_where_that_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = memory.available_memory()
    assert 0 < free < 1 << 50
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    monkeypatch.setattr(memory, "kCgroup", tmp_path)
    assert memory.available_memory() == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > 400_000


def test_a_tool_loads_a_run_that_was_trained_with_auto(tmp_path: Path) -> None:
    made = scene.write_nerfstudio(tmp_path / "data", images=3, points=50)
    config = copy.deepcopy(mgpu_splat.config.pipeline)
    config.datamanager.data, config.model.max_gaussians = made.root, "auto"
    model = copy.deepcopy(config).setup(device="mgpu", test_mode="val").model
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    loaded = config.setup(device="mgpu", test_mode="inference").model
    loaded.load_state_dict(state)
    assert loaded.num_points == 50
    assert torch.equal(loaded.table.means.cpu(), state["gauss_params.means"])
