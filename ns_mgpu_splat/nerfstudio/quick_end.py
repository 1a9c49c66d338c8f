# SPDX-License-Identifier: Apache-2.0
"""The end of `ns-train`: Python took two seconds after the last line to look through a million objects for cycles."""

from __future__ import annotations

import atexit
import gc
from contextlib import suppress

from nerfstudio.utils import writer
from nerfstudio.utils.writer import TensorboardWriter


def end_quickly() -> None:
    """At the end of this process leave its objects to the system: the last thing asked of the garbage collector is nothing."""
    atexit.unregister(_leave_objects)  # once, however many trainers there are
    atexit.register(_leave_objects)


def _leave_objects() -> None:
    """What would be written when an object is collected is written first; then the collector forgets all objects that are."""
    for place in writer.EVENT_WRITERS:
        if isinstance(place, TensorboardWriter):
            with suppress(Exception):  # a full disk, say, has been told before
                place.tb_writer.flush()
    gc.freeze()
