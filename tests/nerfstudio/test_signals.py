# SPDX-License-Identifier: Apache-2.0
"""Runs that end early: by signals, for want of memory, by errors, by a loss that is no number. Each saves what can be
saved, says what that is, and says the command that goes on; the test types it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import scene
from lives import Life, Lives

from ns_mgpu_splat.nerfstudio import checkpoint


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> scene.Scene:
    root = tmp_path_factory.mktemp("signals") / "small town"
    return scene.write_nerfstudio(root, points=2000, images=4, width=48, height=36)


def options(town: scene.Scene, folder: Path, *more: object) -> list[object]:
    return [
        *("mgpu-splat", "--data", town.root, "--output-dir", folder, "--timestamp", "run"),
        *("--experiment-name", "tiny", "--vis", "tensorboard", "--viewer.quit-on-train-completion", True),
        *("--steps-per-eval-image", 0, *more),
    ]


def models_in(folder: Path) -> Path:
    return folder / "tiny" / "mgpu-splat" / "run" / "nerfstudio_models"


def said(life: Life) -> str:
    return " ".join(life.output.read_text().split())


def command_in(text: str, folder: Path) -> list[str]:
    """The words of the command line to go on that a run printed."""
    start = text.index("MGPU_DEVICES=cpu:1 ns-train mgpu-splat --load-dir")
    words = shlex.split(text[start:])
    last = (
        words.index("--steps-per-eval-image") + 2
    )  # all our command lines go on with their own options from there
    return words[2:last]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_the_printed_command_goes_on(
    number: signal.Signals, lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    life = lives.begin(options(town, tmp_path))
    life.wait_for_step()
    time.sleep(0.2)
    os.kill(life.pid, number)
    assert lives.end() == 128 + number
    text = said(life)
    assert "Traceback" not in text
    step = checkpoint.read(checkpoint.find(models_in(tmp_path)))["step"]
    assert step == life.steps()[-1]
    assert f"Stopped after step {step + 1:,}, which is saved" in text

    again = lives.begin([*command_in(text, tmp_path), "--max-num-iterations", step + 4])
    assert lives.end() == 0, said(again)
    assert again.steps() == [step + 1, step + 2, step + 3]


def test_a_terminal_that_goes_away_costs_no_step(lives: Lives, town: scene.Scene, tmp_path: Path) -> None:
    """As `ns-train | head`: the next line cannot be written, and what was trained is saved all the same."""
    often = ["--logging.steps-per-log", 1, "--max-num-iterations", 9000]
    life = lives.begin([*options(town, tmp_path, *often), "fault:terminal:12"])
    assert lives.end() == 1
    done = life.steps()
    assert 12 < len(done) < 9000, "it ends when the buffer of its output is full"
    assert checkpoint.read(checkpoint.find(models_in(tmp_path)))["step"] >= done[-1] - 1


def test_a_second_signal_ends_at_once(lives: Lives, town: scene.Scene, tmp_path: Path) -> None:
    """The step sleeps for ten minutes: nothing that waits for its end could answer."""
    life = lives.begin([*options(town, tmp_path), "fault:sleep:2"])
    life.wait_for_words("the step sleeps")
    os.kill(life.pid, signal.SIGINT)
    life.wait_for_words("Once more stops at once")
    time.sleep(0.3)
    assert Path("/proc", str(life.pid)).exists(), "the first one waits for the step"
    began = time.monotonic()
    os.kill(life.pid, signal.SIGTERM)
    assert lives.end() == -signal.SIGTERM
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("memory", "memory ran out. Shard 0 has no 3.1 GiB left"),
        ("native", "RuntimeError: blend: an illegal memory access"),
        ("image", "images/0003.png cannot be read. Step 6"),
    ],
)
def test_a_step_that_fails_saves_the_steps_before(
    fault: str, reason: str, lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    life = lives.begin([*options(town, tmp_path, "--steps-per-save", 4), f"fault:{fault}:6"])
    assert lives.end() == 1
    text = said(life)
    assert f"mgpu-splat: step 7 failed: {reason}" in text
    assert "Step 6 is saved" in text
    assert [step for step, _ in checkpoint.checkpoints(models_in(tmp_path))] == [5, 3], "the older one stays"
    assert ("Traceback" in text) == (fault == "native"), "only what nobody foresaw shows where it was"

    again = lives.begin([*command_in(text, tmp_path), "--max-num-iterations", 8])
    assert lives.end() == 0, said(again)
    assert again.steps() == [6, 7]


def test_a_failure_that_cannot_be_saved_names_what_is(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    life = lives.begin([*options(town, tmp_path, "--steps-per-save", 4), "fault:device:6"])
    assert lives.end() == 1
    text = said(life)
    assert "step 7 failed" in text
    assert "It could not be saved either" in text
    assert f"Step 4 is saved: {checkpoint.find(models_in(tmp_path))}" in text
    again = lives.begin([*command_in(text, tmp_path), "--max-num-iterations", 5])
    assert lives.end() == 0, said(again)
    assert again.steps() == [4]


@pytest.mark.parametrize("step", [5, 10])  # of a save, of numbers that are shown
def test_a_run_that_diverges_ends_and_keeps_its_checkpoint(
    step: int, lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """A loss that is no number ends the run before it is saved, or when its numbers are shown."""
    life = lives.begin([*options(town, tmp_path, "--steps-per-save", 3), f"fault:nan:{step}"])
    assert lives.end() == 1
    text = said(life)
    saved = [at for at, _ in checkpoint.checkpoints(models_in(tmp_path))]
    assert f"the loss of step {step + 1} is nan: training has diverged, and this is not saved" in text
    assert saved == [{5: 2, 10: 8}[step]]
    assert f"Step {saved[0] + 1} is saved" in text


def test_a_run_with_nothing_left_to_draw_ends_and_keeps_its_checkpoint(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """The loss stays finite: it is that of the background alone."""
    life = lives.begin([*options(town, tmp_path, "--steps-per-save", 4), "fault:bad-rows:5"])
    assert lives.end() == 1
    assert life.steps() == list(range(8))
    text = " ".join(said(life).split())
    assert re.search(
        r"mgpu-splat: after step 8 all [\d,]+ Gaussians have values that are not finite, which was not so after step 4: "
        r"nothing can be drawn, and this is not saved\. .* Step 4 is saved",
        text,
    )
    assert [at for at, _ in checkpoint.checkpoints(models_in(tmp_path))] == [3]


def test_a_run_with_some_bad_gaussians_says_so_once_and_goes_on(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    life = lives.begin(
        [*options(town, tmp_path, "--steps-per-save", 4, "--max-num-iterations", 14), "fault:half-bad:5"]
    )
    assert lives.end() == 0, said(life)
    text = " ".join(said(life).split())
    assert text.count("Gaussians have values that are not finite. They are not drawn") == 1


def test_a_disk_that_is_too_small_ends_before_the_first_step(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """2,000 Gaussians take 1.4 MB, and two checkpoints lie beside each other for a moment. The viewer had given an address."""
    viewer = ["--vis", "viewer", "--viewer.websocket-host", "127.0.0.1"]
    life = lives.begin([*options(town, tmp_path, *viewer), "fault:free:2000000"])
    assert lives.end() == 1
    assert life.steps() == []
    assert re.search(r"needs 2\.[78] MiB, but 1\.9 MiB are free there", said(life))
    assert "viser" not in said(life)
    assert "Traceback" not in said(life)


def test_a_disk_that_fills_up_is_said_and_costs_no_step(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """From step 6 on the kernel takes no file of more than 1 MB; a checkpoint has 1.4."""
    life = lives.begin(
        [*options(town, tmp_path, "--steps-per-save", 4, "--max-num-iterations", 10), "fault:limit:5"]
    )
    assert lives.end() == 1
    assert life.steps() == list(range(10))
    text = said(life)
    assert "Step 8 could not be saved; training goes on." in text
    assert f"mgpu-splat: {models_in(tmp_path)}/step-000000009.ckpt could not be written" in text
    assert "Step 4 is saved" in text
    assert "Traceback" not in text
    again = lives.begin([*command_in(text, tmp_path), "--max-num-iterations", 6])
    assert lives.end() == 0, said(again)
    assert again.steps() == [4, 5]


def test_a_signal_is_answered_in_an_evaluation(lives: Lives, town: scene.Scene, tmp_path: Path) -> None:
    """An evaluation of many images is left between two of them; the step before it is saved."""
    all_images = ["--pipeline.datamanager.dataparser.eval-mode", "all", "--steps-per-eval-all-images", 3]
    life = lives.begin([*options(town, tmp_path, *all_images), "fault:evaluation:0"])
    life.wait_for_words("evaluating")
    os.kill(life.pid, signal.SIGTERM)
    assert lives.end() == 128 + signal.SIGTERM, said(life)
    assert "The evaluation was left." in said(life)
    assert checkpoint.read(checkpoint.find(models_in(tmp_path)))["step"] == life.steps()[-1]
