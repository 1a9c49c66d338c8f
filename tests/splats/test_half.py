# SPDX-License-Identifier: Apache-2.0
"""Half tables: shN in float16 and first moments in bfloat16, rounded stochastically; arithmetic in float32."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from splat_scenes import mesh_of
from test_optimizer import LRS, backward, camera, ring
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable, render
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.table import COLUMNS


@pytest.fixture(scope="module")
def device() -> torch.device:
    return ns_mgpu_splat.init()


def waiting(rows: int, *, exp_avg: float, exp_avg_sq: float, sh: float, seed: int = 3) -> SplatAdam:
    """A table of equal rows with equal moments, up to date with step 200."""
    columns = ring(rows, sh_degree=3)
    columns["shN"] = torch.full_like(columns["shN"], sh)
    adam = SplatAdam(SplatTable.from_columns(**columns, half=True), LRS, seed=seed)
    state = adam.state_dict()
    state["steps"] = 200
    state["seed"] = seed
    for name in COLUMNS:
        state["exp_avg"][name] = torch.full(columns[name].shape, exp_avg, dtype=torch.bfloat16)
        state["exp_avg_sq"][name] = torch.full(columns[name].shape, exp_avg_sq)
    adam.load_state_dict(state)
    return adam


def test_state_of_a_row_takes_504_bytes(device: torch.device) -> None:
    table = SplatTable(1000, half=True)
    adam = SplatAdam(table, LRS)
    assert table.shN.dtype == torch.float16
    total = sum(t.numel() * t.element_size() for t in (*table.columns(), *adam.state()))
    assert total == 504 * 1000


def test_rounding_is_right_on_average_and_to_a_neighbour(device: torch.device) -> None:
    """20 missed steps of 3,000 equal rows: every stored number is next to the exact one, and their mean is it."""
    m, v, sh = 1e-7, 1e-13, 0.1
    adam = waiting(3_000, exp_avg=m, exp_avg_sq=v, sh=sh)
    m = float(torch.tensor(m, dtype=torch.bfloat16))
    sh = float(torch.tensor(sh, dtype=torch.float16))
    exact = sh
    for step in range(1, 21):
        adam.step({"shN": 1e-5})
        correction = math.sqrt(1 - 0.999 ** (200 + step)) / (1 - 0.9 ** (200 + step))
        exact -= 1e-5 * correction * m * 0.9**step / (math.sqrt(v * 0.999**step) + 1e-15 * correction)
    adam.flush()
    for stored, want, unit in (
        (adam.table.shN, exact, 2.0**-14),
        (adam.exp_avg["shN"], m * 0.9**20, 2.0**-34),
        (adam.exp_avg["quats"], m * 0.9**20, 2.0**-34),
    ):
        values = stored.detach().cpu().double()
        assert len(values.unique()) == 2, "the two neighbours"
        assert float((values - want).abs().max()) < unit * 1.01
        assert abs(float(values.mean()) - want) < 5 * 0.5 * unit / math.sqrt(values.numel()) + 1e-6 * abs(
            want
        )


def flushed_bits(out: Path, devices: str) -> dict[str, Tensor]:
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[2]); from test_half import waiting\n"
        "import ns_mgpu_splat; ns_mgpu_splat.init()\n"
        "adam = waiting(500, exp_avg=1e-7, exp_avg_sq=1e-13, sh=0.1, seed=9)\n"
        "for _ in range(5): adam.step()\n"
        "adam.flush()\n"
        "torch.save({'shN': adam.table.shN.detach().cpu(), 'm': adam.exp_avg['means'].cpu()}, sys.argv[1])\n"
    )
    environment = {**os.environ, "MGPU_DEVICES": devices}
    command = [sys.executable, "-c", code, str(out), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out, weights_only=True)


@pytest.mark.any_mesh
def test_rounding_is_the_same_on_any_mesh(device: torch.device, tmp_path: Path) -> None:
    one, three = (flushed_bits(tmp_path / f"{n}.pt", mesh_of(n)) for n in (1, 3))
    for name in one:
        assert torch.equal(one[name], three[name]), name


def psnr_after(steps: int, *, half: bool, truth: SplatTable) -> float:
    columns = ring(60, sh_degree=3, seed=1)
    columns["shN"] = torch.zeros_like(columns["shN"])
    table = SplatTable.from_columns(**columns, half=half).requires_grad_(True)
    adam = SplatAdam(table, LRS, seed=5)
    views = [camera(angle) for angle in (0.0, 0.3, 1.5, 1.8, 3.1, 3.4)]
    with torch.no_grad():
        targets = [image.rgb for image in render(truth, views)]
    for step in range(steps):
        i = step % len(views)
        image = render(table, [views[i]], optimizer=adam)[0].rgb
        ((image - targets[i]) ** 2).mean().backward()
        adam.step()
    adam.flush()
    with torch.no_grad():
        images = [image.rgb for image in render(table, views)]
    errors = [float(((a - b) ** 2).mean()) for a, b in zip(images, targets, strict=True)]
    return -10 * math.log10(sum(errors) / len(errors))


def test_training_is_within_a_twentieth_of_a_decibel_of_float32(device: torch.device) -> None:
    truth = SplatTable.from_columns(**ring(60, sh_degree=3))
    full, half = (psnr_after(400, half=half, truth=truth) for half in (False, True))
    assert full > 18.0, "the scene was learnt"
    assert half > full - 0.05, f"{full:.3f} dB in float32, {half:.3f} dB in half"


@pytest.mark.usefixtures("deterministic")
def test_training_goes_on_from_a_file_bit_for_bit(device: torch.device, tmp_path: Path) -> None:
    table = SplatTable.from_columns(**ring(40, sh_degree=2), half=True).requires_grad_(True)
    adam = SplatAdam(table, LRS, noise_lr=10.0, seed=11)

    def train(table: SplatTable, adam: SplatAdam, steps: range) -> None:
        for step in steps:
            backward(table, adam, [camera(0.4 * step)], [step])
            adam.step()
        adam.flush()

    train(table, adam, range(5))
    torch.save(
        {
            "adam": adam.state_dict(),
            "columns": {n: c.detach().cpu() for n, c in table.named_columns().items()},
        },
        tmp_path / "state.pt",
    )
    train(table, adam, range(5, 9))
    loaded = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    assert loaded["adam"]["exp_avg"]["means"].dtype == torch.bfloat16
    other = SplatTable.from_columns(**ring(3, sh_degree=2, seed=9), half=True).requires_grad_(True)
    again = SplatAdam(other, LRS, noise_lr=10.0, seed=0)
    other.resize(40)
    other.write_rows(0, loaded["columns"])
    again.load_state_dict(loaded["adam"])
    assert other.half
    train(other, again, range(5, 9))
    for name in COLUMNS:
        assert torch.equal(table.named_columns()[name].cpu(), other.named_columns()[name].cpu()), name
        assert torch.equal(adam.exp_avg[name].cpu(), again.exp_avg[name].cpu()), name


def test_rows_move_and_grow_whole(device: torch.device) -> None:
    columns = ring(30, sh_degree=3)
    table = SplatTable.from_columns(**columns, half=True, capacity=50).requires_grad_(True)
    adam = SplatAdam(table, LRS)
    stored = table.shN.detach().cpu().clone()
    assert torch.equal(stored, columns["shN"].half())
    table.grow(50)
    adam.grow(50)
    native = ns_mgpu_splat.device.native()
    source, target = torch.tensor([4, 4, 20]), torch.tensor([30, 41, 49])
    adam.exp_avg["shN"].fill_(1.0)
    sources, targets = native.RowList(source, 50), native.RowList(target, 50)
    native.relocate(table.columns(), adam.state(), sources, targets, 0.005, adam.steps)
    now = table.shN.detach().cpu()
    assert torch.equal(now[target], stored[source])
    assert torch.equal(now[:30], stored)
    assert float(adam.exp_avg["shN"].cpu()[target].abs().max()) == 0.0
    table.compact(torch.arange(50) % 2 == 0, adam)
    assert torch.equal(table.shN.detach().cpu()[:15], stored[::2])
    assert adam.exp_avg["shN"].dtype == torch.bfloat16


def test_files_hold_what_the_table_holds(device: torch.device, tmp_path: Path) -> None:
    table = SplatTable.from_columns(**ring(20, sh_degree=3), half=True)
    table.to_ply(tmp_path / "half.ply")
    for half in (False, True):
        again = SplatTable.from_ply(tmp_path / "half.ply", half=half)
        assert again.half == half
        assert torch.equal(again.shN.detach().cpu().float(), table.shN.detach().cpu().float())
    huge = {**ring(2, sh_degree=1), "shN": torch.full((2, 3, 3), 1e6)}
    assert float(SplatTable.from_columns(**huge, half=True).shN.detach().cpu().max()) == 65504.0


def test_images_are_those_of_the_rounded_table(device: torch.device) -> None:
    columns = ring(50, sh_degree=3)
    half = SplatTable.from_columns(**columns, half=True).requires_grad_(True)
    columns["shN"] = columns["shN"].half().float()
    full = SplatTable.from_columns(**columns).requires_grad_(True)
    for table in (half, full):
        render(table, [camera(0.2)])[0].rgb.square().sum().backward()
    with torch.no_grad():
        a, b = (render(table, [camera(0.2)])[0].rgb.cpu() for table in (half, full))
    assert torch.equal(a, b)
    assert half.shN.grad is not None
    assert full.shN.grad is not None
    assert torch.allclose(half.shN.grad.cpu().float(), full.shN.grad.cpu(), rtol=1e-3, atol=1e-6)
