# SPDX-License-Identifier: Apache-2.0
"""The progress line."""

from __future__ import annotations

import nerfstudio.configs.base_config  # noqa: F401 - first: the writer alone is a circular import
import pytest
from nerfstudio.utils import writer
from nerfstudio.utils.writer import EventName

from ns_mgpu_splat.nerfstudio.console import ProgressWriter, ProgressWriterConfig


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
    log(1200)
    last = line.line(1204)  # the last step is in no tenth: its numbers were not measured
    assert last.split("  ")[:3] == ["step 1,205/1,205", "at step 1,201:", "loss 0.2500"]
    assert "left" not in last
