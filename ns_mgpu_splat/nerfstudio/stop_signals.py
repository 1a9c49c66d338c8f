# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and the loss of the terminal: the first one is a wish to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

kShowCursor = "\033[?25h"


@contextmanager
def no_interrupt() -> Iterator[None]:
    """In here Ctrl-C does nothing: for a last few milliseconds of tidying up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def first_signal_stops(stop: Callable[[int], None]) -> Iterator[None]:
    """In here the first signal is said and handed to `stop`; the next one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]

    def handle(number: int, frame: Any) -> None:
        stop(number)
        for each in before:  # the kernel's own answer: at once, whatever this process is doing
            signal.signal(each, signal.SIG_DFL)
        # not through a file object: the signal may have come in the middle of its write
        said = "\nStopping after this step, with a checkpoint. Once more stops at once, without.\n"
        with suppress(
            OSError
        ):  # and the cursor, which a bar may have hidden: the next signal leaves no time for it
            os.write(1, (kShowCursor * os.isatty(1) + said).encode())

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
