# SPDX-License-Identifier: Apache-2.0
"""`kill -9` at random moments of a run that saves often: each resume works, and nothing is lost that was saved.

Oracles: zip checksums and torch's reader for the files; the run that nobody killed for what comes out in the end.
"""

from __future__ import annotations

import os
import random
import signal
import time
import zipfile
from pathlib import Path

import pytest
import scene
import torch
from lives import Life, Lives

from ns_mgpu_splat.nerfstudio import checkpoint

SAVE_EVERY = 5
MODEL = "--pipeline.model."
# growth and moves fall between the kills; 12,000 rows are 8 MB, so that a save lasts long enough to be hit
OPTIONS: list[object] = [
    *("--vis", "tensorboard", "--viewer.quit-on-train-completion", True, "--eval-at-end", False),
    *("--experiment-name", "tiny", "--steps-per-eval-image", 0, "--steps-per-eval-all-images", 0),
    *("--schedule-steps", 3000, "--steps-per-save", SAVE_EVERY, f"{MODEL}max-gaussians", 12_000),
    *(f"{MODEL}warmup-length", 5, f"{MODEL}refine-every", 7, f"{MODEL}background-color", "random"),
]


def kill_somewhere(life: Life, folder: Path, dice: random.Random) -> str:
    """Kill it at a random moment: while it starts, while it trains, or within a save. Returns which."""
    kind = dice.choices(("start", "training", "save"), (1, 4, 5))[0]
    if kind == "start":
        time.sleep(dice.uniform(0, 1.5))
    else:
        life.wait_for_step()
        if kind == "training":
            time.sleep(dice.uniform(0, 0.6))
        else:
            life.wait_for(lambda: any(folder.glob(f".step-*.{life.pid}")), pause=0.0005)
            time.sleep(dice.uniform(0, 0.03))
    os.kill(life.pid, signal.SIGKILL)
    return kind


def newest_step(models: Path) -> int:
    """Of the newest checkpoint, which must be whole; -1 if there is none yet."""
    there = checkpoint.checkpoints(models)
    if not there:
        return -1
    step, path = there[0]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, path
    assert checkpoint.read(path)["step"] == step
    return step


def survive(kills: int, seed: int, lives: Lives, folder: Path) -> None:
    data = scene.write_nerfstudio(folder / "data", points=10_000, images=4, width=48, height=36).root
    dice = random.Random(seed)
    run = folder / "tiny" / "mgpu-splat" / "killed"
    models = run / "nerfstudio_models"
    common: list[object] = ["mgpu-splat", "--data", data, "--output-dir", folder, *OPTIONS]
    killed: list[object] = [*common, "--timestamp", "killed"]
    moments, saved = [], -1
    for turn in range(kills + 1):
        resume = ["--load-dir", models] if saved >= 0 else []
        last = turn == kills
        end = saved + 1 + 3 * SAVE_EVERY if last else 1_000_000
        life = lives.begin([*killed, *resume, "--max-num-iterations", end])
        if not last:
            moments.append(kill_somewhere(life, run, dice))
        code = lives.end()
        assert code == (0 if last else -signal.SIGKILL), life.output.read_text()[-3000:]
        steps = life.steps()
        if steps:
            assert steps == list(range(saved + 1, steps[-1] + 1)), "it went on where the save was"
            stray = [p for p in run.glob(".step-*") if not p.name.endswith(f".{life.pid}")]
            assert not stray, "what earlier kills left is removed at the start"
        before, saved = saved, newest_step(models)
        assert saved >= before
        done = steps[-1] if steps else before
        assert done - saved <= SAVE_EVERY, "more is lost than since the last save"
    assert "save" in moments
    assert not list(run.glob(".step-*"))

    reference = lives.begin([*common, "--timestamp", "whole", "--max-num-iterations", saved + 1])
    assert lives.end() == 0, reference.output.read_text()[-3000:]
    expected = checkpoint.read(checkpoint.find(run.parent / "whole" / "nerfstudio_models"))
    found = checkpoint.read(checkpoint.find(models))
    assert found["step"] == expected["step"] == saved
    assert_same(found["pipeline"], expected["pipeline"])
    assert_same(found["optimizers"], expected["optimizers"])
    print(
        f"{kills} kills ({', '.join(f'{moments.count(k)} in {k}' for k in sorted(set(moments)))}), {saved + 1} steps"
    )


def assert_same(found: dict, expected: dict) -> None:
    """All tensors bit for bit, all numbers equal."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[name], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def test_a_run_survives_kills(lives: Lives, tmp_path: Path) -> None:
    survive(4, 1, lives, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_survives_fifty_kills(lives: Lives, tmp_path: Path) -> None:
    survive(50, 2, lives, tmp_path)
