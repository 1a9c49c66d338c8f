# SPDX-License-Identifier: Apache-2.0
"""A line in a terminal that is rewritten in place, and that whatever else is written there ends first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import IO, Any


class OpenLine:
    """The line of numbers. While it is open, `write` of standard output and error is replaced on the objects themselves: so
    messages of rich, of warnings and of log handlers that were made before begin on a line of their own, too.

    What is written past these objects (`os.write`, native code) is not seen.
    """

    def __init__(self) -> None:
        self._out: IO[str] | None = None  # where it is open
        self._watched: list[Any] = []
        self._rows = 0  # above the last one, where it is longer than the terminal is wide

    def rewrite(self, text: str) -> None:
        """Show `text`, of one line, in the place of what was shown; it stays open."""
        up = f"\033[{self._rows}A" if self._out is not None and self._rows else ""
        self._unwatch()
        self._out = sys.stdout
        self._out.write(f"\r{up}\033[J{text}")
        self._out.flush()
        self._rows = max(0, len(text) - 1) // columns_of(self._out)
        for stream in {id(each): each for each in (sys.stdout, sys.stderr)}.values():
            self._watch(stream)

    def end(self) -> None:
        """End the line, if it is open: what is written next stands below it."""
        out, self._out = self._out, None
        self._unwatch()
        if out is not None:
            out.write("\n")
            out.flush()

    def _watch(self, stream: Any) -> None:
        if stream is None or not stream.isatty() or "write" in getattr(stream, "__dict__", {}):
            return  # no terminal, or somebody else's replacement, which stays
        write: Callable[[str], int] = stream.write

        def ends_line_first(text: str) -> int:
            if text:
                self.end()
            return write(text)

        try:
            stream.write = ends_line_first
        except AttributeError:  # of a kind that does not let itself be watched
            return
        self._watched.append(stream)

    def _unwatch(self) -> None:
        watched, self._watched = self._watched, []
        for stream in watched:
            del stream.write


def columns_of(stream: IO[str]) -> int:
    """Columns of a terminal; where there is none, or it does not know, so many that no line takes a second row."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):  # a stream of somebody else's may have no `fileno`
        columns = 0
    return columns or 1 << 20
