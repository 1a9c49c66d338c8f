# SPDX-License-Identifier: Apache-2.0
"""The progress line."""

from __future__ import annotations

import nerfstudio.configs.base_config  # noqa: F401 - first: the writer alone is a circular import
import pytest
from nerfstudio.utils import writer

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
