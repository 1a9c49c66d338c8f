# SPDX-License-Identifier: Apache-2.0
"""The progress line."""

from __future__ import annotations

import nerfstudio.configs.base_config  # noqa: F401 - first: the writer alone is a circular import
import pytest
from nerfstudio.utils import writer
from nerfstudio.utils.writer import EventName

from ns_mgpu_splat.nerfstudio.console import ProgressWriter, ProgressWriterConfig
from ns_mgpu_splat.nerfstudio.step_clock import StepClock


def test_a_resumed_run_shows_its_own_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nerfstudio stores the configuration as step 0 and hands over the oldest step that it has stored."""
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    monkeypatch.setattr(writer, "GLOBAL_BUFFER", {"max_iter": 90, "steps_per_log": 10, "events": {}})
    writer.put_config(name="config", config_dict={}, step=0)
    writer.put_scalar(name="Train Loss", scalar=0.25, step=60)
    ProgressWriter(ProgressWriterConfig()).write_stats_log(0)
    assert capsys.readouterr().out.split("  ")[:2] == ["step 61/90", "loss 0.2500\n"]


def test_numbers_of_an_earlier_step_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held-out view that was measured at step 501 stood in all lines up to 1,001 as if it was of their step."""
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    monkeypatch.setattr(writer, "GLOBAL_BUFFER", {"max_iter": 1205, "steps_per_log": 10, "events": {}})
    line = ProgressWriter(ProgressWriterConfig())

    def log(step: int, held_out: float | None = None) -> None:
        writer.put_scalar(name="Train Loss", scalar=0.25, step=step)
        writer.put_dict(
            name="Train Metrics Dict", scalar_dict={"psnr": 20.0, "memory_mib/shard_0": 3.0}, step=step
        )
        writer.put_scalar(name=EventName.ETA.value, scalar=7.0, step=step)
        if held_out is not None:
            writer.put_dict(name="Eval Images Metrics", scalar_dict={"psnr": held_out}, step=step)
        line.write_stats_log(step)
        writer.EVENT_STORAGE.clear()

    log(490)
    assert line.line(490).split("  ")[1:] == ["loss 0.2500", "PSNR 20.00 dB", "memory 3 MiB", "0:07 left"]
    log(500, 17.5)
    assert "one held-out view 17.50 dB  " in line.line(500)
    log(510)
    assert "one held-out view 17.50 dB (step 501)  " in line.line(510)
    writer.put_dict(name="Eval Images Metrics Dict (all images)", scalar_dict={"psnr": 19.25}, step=600)
    log(600)
    assert "all held-out views 19.25 dB  " in line.line(600)
    log(1200)
    assert "all held-out views 19.25 dB (step 601)  " in line.line(1200)
    last = line.line(1203)  # a run that was stopped: this step's numbers were not read
    assert last.split("  ")[:3] == ["step 1,204/1,205", "at step 1,201:", "loss 0.2500"]


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_follows_the_last_line_and_no_step_lies_beyond_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nerfstudio writes the time of the whole run as of step max_iter, after the final evaluation: with more than ten seconds
    since the last line "step 241/240" stood below the end."""
    clock = Clock()
    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.console.time.monotonic", clock)
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    monkeypatch.setattr(writer, "GLOBAL_BUFFER", {"max_iter": 240, "steps_per_log": 10, "events": {}})
    line = ProgressWriter(ProgressWriterConfig())

    def write_out() -> str:
        line.write_stats_log(writer.EVENT_STORAGE[0]["step"])
        writer.EVENT_STORAGE.clear()
        return capsys.readouterr().out

    for step in (0, 10, 239):
        clock.now += 11.0
        writer.put_scalar(name="Train Loss", scalar=step / 1000, step=step)
        writer.put_scalar(name="Train Iter / Sec", scalar=90.0, step=step)
        writer.put_scalar(name=EventName.ETA.value, scalar=7.0, step=step)
        said = write_out()
        if step == 239:
            assert said == "", "it would be said twice"
        else:
            assert said == f"step {step + 1}/240  loss {step / 1000:.4f}  90.00 steps/s  0:07 left\n"
    line.finish(239)
    assert capsys.readouterr().out == "step 240/240  loss 0.2390\n"
    clock.now += 11.0
    writer.put_dict(name="Eval Images Metrics Dict (all images)", scalar_dict={"psnr": 20.0}, step=239)
    writer.put_scalar(name=EventName.TOTAL_TRAIN_TIME.value, scalar=12.0, step=240)
    assert write_out() == ""
    line.finish(239)
    assert capsys.readouterr().out == ""


def test_the_time_of_a_run_is_of_no_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever writes it out before the last line."""
    monkeypatch.setattr(writer, "EVENT_STORAGE", [])
    monkeypatch.setattr(writer, "GLOBAL_BUFFER", {"max_iter": 240, "steps_per_log": 10, "events": {}})
    writer.put_scalar(name="Train Loss", scalar=0.25, step=230)
    writer.put_scalar(name=EventName.TOTAL_TRAIN_TIME.value, scalar=12.0, step=240)
    ProgressWriter(ProgressWriterConfig()).write_stats_log(230)
    assert "241" not in capsys.readouterr().out


def test_every_step_counts_the_same_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of rates gave the first step as much weight as the ten after it: 87.9 steps/s, where 20 took 0.16 s."""
    clock = Clock()
    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.step_clock.time.perf_counter", clock)
    monkeypatch.setattr("ns_mgpu_splat.nerfstudio.step_clock.synchronise", lambda: None)
    laps = StepClock(window=3)
    laps.start(60)
    clock.now += 0.5
    assert laps.lap(60) == pytest.approx(0.5)
    clock.now += 1.0
    assert laps.lap(70) == pytest.approx(1.5 / 11)
    with laps.stopped():
        clock.now += 100.0
    clock.now += 0.9
    assert laps.lap(79) == pytest.approx(2.4 / 20)
    assert laps.total(79) == (20, pytest.approx(102.4), pytest.approx(20 / 2.4)), "the same rate"
    clock.now += 1.0
    assert laps.lap(89) == pytest.approx(2.9 / 29), "the first lap is out of the window"
    laps.start(0)
    clock.now += 0.25
    assert laps.lap(0) == pytest.approx(0.25)
