# SPDX-License-Identifier: Apache-2.0
"""The end of `ns-train`: Python took two seconds after the last line to look through a million objects for cycles, and a Ctrl-C
in these was told as a traceback of whatever was being ended ("Exception ignored in ...").
"""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import threading
from contextlib import suppress
from pathlib import PurePath

from nerfstudio.utils import writer
from nerfstudio.utils.writer import TensorboardWriter

kCommands = ("ns-train", "train.py")  # the second is `python -m nerfstudio.scripts.train`


def end_quickly() -> None:
    """At the end of this process leave its objects to the system: the last thing asked of the garbage collector is nothing."""
    atexit.unregister(_leave_objects)  # once, however many trainers there are
    atexit.register(_leave_objects)


def let_interrupts_end() -> None:
    """The run is over and saved: from here on Ctrl-C ends `ns-train` at once, by the system's own answer, in silence.

    Only in that command: a program that trains by this package goes on afterwards, with interrupts of its own.
    """
    if PurePath(sys.argv[0] if sys.argv else "").name not in kCommands:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _write_numbers()


def _leave_objects() -> None:
    """What would be written when an object is collected is written first; then the collector forgets all objects that are."""
    _write_numbers()
    gc.freeze()


def _write_numbers() -> None:
    for place in writer.EVENT_WRITERS:
        if isinstance(place, TensorboardWriter):
            with suppress(Exception):  # a full disk, say, has been told before
                place.tb_writer.flush()
