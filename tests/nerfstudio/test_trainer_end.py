# SPDX-License-Identifier: Apache-2.0
"""How a run ends: what is saved, in which order, when something goes wrong at its edges."""

from __future__ import annotations

import contextlib
import copy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from nerfstudio.engine.trainer import Trainer
from nerfstudio.utils import writer
from nerfstudio.utils.writer import TensorboardWriter

from ns_mgpu_splat.data.images import ImageError
from ns_mgpu_splat.nerfstudio.checkpoint import CheckpointError
from ns_mgpu_splat.nerfstudio.config import mgpu_splat
from ns_mgpu_splat.nerfstudio.console import ProgressWriter, ProgressWriterConfig
from ns_mgpu_splat.nerfstudio.pipeline import EvaluationStopped
from ns_mgpu_splat.nerfstudio.step_clock import StepClock
from ns_mgpu_splat.nerfstudio.steps import StepResult
from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer

STEPS = 3


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def trainer(events: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MgpuSplatTrainer:
    """A trainer whose model and data are stand-ins that write down what is asked of them."""
    trainer = MgpuSplatTrainer.__new__(MgpuSplatTrainer)
    trainer.config = copy.deepcopy(mgpu_splat.config)
    trainer.config.max_num_iterations = STEPS
    trainer.config.viewer.quit_on_train_completion = True
    trainer.pipeline, trainer.train_lock = MagicMock(), threading.RLock()
    trainer.pipeline.datamanager.eval_dataset = [0]
    trainer.pipeline.get_average_eval_image_metrics = lambda step: events.append("evaluate") or {"psnr": 30.0}
    trainer.base_dir, trainer.checkpoint_dir, trainer.callbacks = tmp_path, tmp_path, []
    trainer.training_state, trainer.stop_training, trainer._stop_signal = "training", False, None
    trainer._start_step, trainer._saved_step, trainer.viewer_state = 0, None, None
    trainer._unlogged, trainer._clock, trainer._whole_step = [], StepClock(), -1
    monkeypatch.setattr(trainer, "_init_viewer_state", lambda: None)
    monkeypatch.setattr(trainer, "_signals", contextlib.nullcontext)
    monkeypatch.setattr(trainer, "_choose_steps", lambda: None)
    monkeypatch.setattr(trainer, "_check_rows", lambda step: None)
    for module in ("trainer", "step_clock"):
        monkeypatch.setattr(f"ns_mgpu_splat.nerfstudio.{module}.synchronise", lambda: None)
    monkeypatch.setattr(trainer, "_one_step", lambda step: events.append(f"step {step}"))
    trainer.optimizers = MagicMock()
    trainer.optimizers.state.return_value = {}
    trainer.optimizers.table.pending = []

    def save(state: dict[str, Any], folder: Path, step: int, keep: bool) -> Path:
        events.append(f"save {step}")
        return folder / "x.ckpt"

    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.checkpoint.save", save)
    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.trainer.shard_names", lambda: ("cpu:0",))
    monkeypatch.setattr("nerfstudio.utils.writer.put_dict", lambda **_: None)
    monkeypatch.setattr("nerfstudio.utils.writer.put_time", lambda **_: None)
    monkeypatch.setattr(Trainer, "_after_train", lambda self: self.save_checkpoint(self.step))
    return trainer


def test_the_last_step_is_saved_once_and_before_it_is_evaluated(
    trainer: MgpuSplatTrainer, events: list[str]
) -> None:
    trainer.train()
    assert events == ["step 0", "step 1", "step 2", "save 2", "evaluate"]


def test_a_run_that_has_all_its_steps_does_not_say_that_it_trained(
    trainer: MgpuSplatTrainer, events: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer._start_step, trainer._saved_step = STEPS, STEPS - 1
    trainer.train()
    assert events == ["evaluate"]
    said = capsys.readouterr().out
    assert "nothing to train" in said
    assert "Trained" not in said


def test_the_numbers_of_the_last_step_are_read_and_nothing_is_said_after_its_line(
    trainer: MgpuSplatTrainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every 10th step and of the last: its line would have the loss of an earlier one."""
    end = trainer.config.max_num_iterations = 24
    trainer._written, trainer._pictures, trainer._native = 0.0, MagicMock(), None
    trainer._evaluation_due, trainer._save_due = None, False
    trainer.pipeline.datamanager.get_train_rays_per_batch = lambda: 100
    trainer.pipeline.datamanager.bring_images = lambda first, count: iter(())
    monkeypatch.setattr(trainer, "_one_step", MgpuSplatTrainer._one_step.__get__(trainer))
    monkeypatch.setattr(
        trainer,
        "train_iteration",
        lambda step: StepResult(lambda: {"main_loss": step / 100}, lambda _: {"psnr": float(step)}),
    )
    line = ProgressWriter(ProgressWriterConfig())
    monkeypatch.setattr(writer, "EVENT_WRITERS", [line])
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    monkeypatch.setattr(writer, "GLOBAL_BUFFER", {"max_iter": end, "steps_per_log": 10, "events": {}})
    read: list[int] = []
    put = trainer._put_numbers
    monkeypatch.setattr(trainer, "_put_numbers", lambda *words: read.append(words[0]) or put(*words))
    trainer.train()
    assert read == [0, 10, 20, 23]
    said = capsys.readouterr().out.splitlines()
    numbers = [number for number, each in enumerate(said) if each.startswith("step ")]
    assert said[numbers[-1]] == "step 24/24  loss 0.2300"
    assert said[numbers[-1] + 1].startswith("Trained 24 steps in ")


def test_a_failing_evaluation_costs_no_run(
    trainer: MgpuSplatTrainer, events: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(step: int) -> None:
        raise ImageError("held_out.png cannot be read: it is cut short")

    trainer.pipeline.get_average_eval_image_metrics = fail
    trainer.train()
    assert events[-1] == "save 2"
    assert "held_out.png cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(
    "ending", ["a signal that steps saw", "Ctrl-C while it says how long", "Ctrl-C twice"]
)
def test_an_end_after_the_last_step_is_said_and_is_no_error(
    ending: str,
    trainer: MgpuSplatTrainer,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C in the milliseconds after the last save ended in the traceback of an evaluation that was stopped."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def stopped(step: int) -> None:
        raise EvaluationStopped

    answers: list[object] = []
    monkeypatch.setattr(
        "ns_mgpu_splat.nerfstudio.trainer.let_interrupts_end", lambda: answers.append("at once")
    )
    if ending == "a signal that steps saw":
        trainer.pipeline.get_average_eval_image_metrics = stopped
    else:
        monkeypatch.setattr(trainer, "_say_how_long", interrupted)
    if ending == "Ctrl-C twice":  # the second has no words and no traceback: it is the system's
        monkeypatch.setattr(
            "ns_mgpu_splat.nerfstudio.trainer.say", lambda *_, **__: events.append(str(answers))
        )
    trainer.train()
    assert events[3] == "save 2"
    if ending == "Ctrl-C twice":
        assert events[4:] == ["['at once']"]
    else:
        assert f"Ended. Step 3 is saved in {trainer.checkpoint_dir}." in capsys.readouterr().out


@pytest.mark.parametrize("start", [0, 2])
def test_a_stop_before_the_first_step_saves_nothing(
    trainer: MgpuSplatTrainer, events: list[str], start: int
) -> None:
    """A checkpoint of step -1 would have a name that no tool reads."""
    trainer._start_step, trainer._stop_signal = start, signal.SIGTERM
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 128 + signal.SIGTERM
    assert events == []


def test_a_stop_on_a_full_disk_ends_with_a_sentence(
    trainer: MgpuSplatTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise CheckpointError("step-000000000.ckpt needs 2.0 GiB")

    def step_and_stop(step: int) -> None:
        trainer._stop_signal = signal.SIGINT

    monkeypatch.setattr(trainer, "_one_step", step_and_stop)
    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.checkpoint.save", full)
    with pytest.raises(SystemExit, match=r"mgpu-splat: step-000000000\.ckpt needs 2\.0 GiB"):
        trainer.train()


@pytest.mark.parametrize(
    ("vis", "words"), [("wandb", "wandb login"), ("viewer+comet", "COMET_API_KEY"), ("tensorboard", None)]
)
def test_a_service_without_its_key_is_named_and_other_faults_are_not(vis: str, words: str | None) -> None:
    """Raised by the package's own code, as theirs are."""
    package = {"wandb": "wandb", "viewer+comet": "comet_ml"}.get(vis, "elsewhere")
    config = copy.deepcopy(mgpu_splat.config)
    config.vis = vis  # type: ignore[assignment]
    trainer = MgpuSplatTrainer.__new__(MgpuSplatTrainer)
    trainer.config = config
    namespace = {"__name__": f"{package}.online"}
    exec("def connect(*_):\n    raise ValueError('No key.\\nA page of advice.')", namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "setup", namespace["connect"])
        patch.setattr("ns_mgpu_splat.nerfstudio.checkpoint.check_folder", lambda _: None)
        trainer.checkpoint_dir, trainer._start_step, trainer._whole_step = Path(), 0, -1
        with pytest.raises(SystemExit if words else ValueError) as ended:
            trainer.setup()
    if words:
        assert f"--vis {vis}: No key. " in str(ended.value)
        assert words in str(ended.value)


def test_ctrl_c_before_the_first_step_leaves_no_folder_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    config = copy.deepcopy(mgpu_splat.config)
    config.output_dir, config.experiment_name, config.timestamp = tmp_path / "out", "town", "run"
    config.save_config()
    trainer = MgpuSplatTrainer.__new__(MgpuSplatTrainer)
    trainer.config, trainer._start_step, trainer._whole_step = config, 0, -1
    trainer.checkpoint_dir = config.get_checkpoint_dir()
    monkeypatch.setattr(Trainer, "setup", interrupted)
    with pytest.raises(SystemExit) as ended:
        trainer.setup()
    assert ended.value.code == 130
    assert "nothing to save" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_run_says_that_it_replaces_the_checkpoints_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = SimpleNamespace(_loaded=None, checkpoint_dir=tmp_path)  # all that it looks at
    MgpuSplatTrainer._load_checkpoint(run)
    assert "earlier run" not in capsys.readouterr().out
    (tmp_path / "step-000000010.ckpt").touch()
    MgpuSplatTrainer._load_checkpoint(run)
    assert "holds checkpoints of an earlier run" in " ".join(capsys.readouterr().out.split())


def test_the_interpreter_ends_without_looking_for_garbage_once_numbers_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two seconds in which nothing seemed to happen after the last line."""
    at_exit: list[Any] = []
    done: list[str] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    config = copy.deepcopy(mgpu_splat.config)
    config.output_dir, config.experiment_name = tmp_path, "town"
    MgpuSplatTrainer(config)
    place = TensorboardWriter.__new__(TensorboardWriter)
    place.tb_writer = MagicMock()
    place.tb_writer.flush.side_effect = lambda: done.append("flush")
    monkeypatch.setattr(writer, "EVENT_WRITERS", [place, MagicMock()])
    monkeypatch.setattr("gc.freeze", lambda: done.append("freeze"))
    (leave,) = at_exit
    leave()
    assert done == ["flush", "freeze"]
    place.tb_writer.flush.side_effect = OSError("no space left")
    leave()
    assert done[2:] == ["freeze"], "trouble at the end is no traceback"


ENDING = """
import atexit, sys, time

def slow():
    print("ending", flush=True)
    time.sleep(30)
    raise RuntimeError("a real error")

import nerfstudio.configs.base_config  # first: nerfstudio.utils.writer and it import each other
from ns_mgpu_splat.nerfstudio.quick_end import let_interrupts_end

sys.argv = [sys.argv[1]]
atexit.register(slow)
let_interrupts_end()
"""


@pytest.mark.parametrize("command", ["/usr/bin/ns-train", "my_program.py"])
def test_ctrl_c_while_the_interpreter_ends_is_silent_in_the_command(command: str) -> None:
    """ "Exception ignored in atexit callback" and torch's or Python's own lines stood below "Ended. Step 30 is saved"."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDING, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    if command.endswith("ns-train"):
        assert (process.returncode, said) == (-signal.SIGINT, "")
    else:  # a program of somebody else's has Python's answer
        assert "KeyboardInterrupt" in said


@pytest.mark.parametrize("ending", ["the last step", "a stop", "an error"])
def test_the_end_of_training_lets_interrupts_end_the_command(
    ending: str, trainer: MgpuSplatTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["ns-train"])
    place = TensorboardWriter.__new__(TensorboardWriter)
    place.tb_writer = MagicMock()
    monkeypatch.setattr(writer, "EVENT_WRITERS", [place])

    def fail(step: int) -> None:
        raise RuntimeError("the device is lost")

    if ending == "a stop":
        trainer._start_step, trainer._stop_signal = 2, signal.SIGTERM
    if ending == "an error":
        monkeypatch.setattr(trainer, "_one_step", fail)
    expected = {"a stop": pytest.raises(SystemExit), "an error": pytest.raises(RuntimeError, match="is lost")}
    try:
        with expected.get(ending, contextlib.nullcontext()):
            trainer.train()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert place.tb_writer.flush.called, "the next signal leaves no time for it"
    finally:
        signal.signal(signal.SIGINT, before)
