# SPDX-License-Identifier: Apache-2.0
"""The demo as the terminal treats it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from ns_mgpu_splat import demo


def test_ctrl_c_waits_for_the_command_to_save_what_it_has(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    child = f"import pathlib, time; time.sleep(0.9); pathlib.Path({str(saved)!r}).touch()"
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        demo._run(sys.executable, "-c", child)
    assert saved.is_file()
