# SPDX-License-Identifier: Apache-2.0
"""The first signal is a wish to stop, and what is tidied up at the end is not interrupted. With runs: test_signals.py."""

from __future__ import annotations

import signal

import pytest

from ns_mgpu_splat.nerfstudio import stop_signals

pytestmark = pytest.mark.any_mesh


def test_tidying_up_is_not_interrupted() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signals.no_interrupt():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_signal_shows_the_cursor_that_a_bar_has_hidden(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second one ends the process at once, and the shell was left without a cursor."""
    monkeypatch.setattr(stop_signals.os, "isatty", lambda _: True)
    wanted: list[int] = []
    with stop_signals.first_signal_stops(wanted.append):
        signal.raise_signal(signal.SIGINT)
    assert wanted == [signal.SIGINT]
    assert capfd.readouterr().out.startswith("\033[?25h\nStopping after this step")
