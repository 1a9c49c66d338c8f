# SPDX-License-Identifier: Apache-2.0
"""The line of numbers in a pseudo-terminal, as a small model of a terminal shows it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from ns_mgpu_splat.nerfstudio.open_line import OpenLine

PROGRAM = """
import logging, sys, warnings
logging.basicConfig(format="%(message)s")  # its handler keeps the stream that it was made with
import nerfstudio.configs.base_config
from nerfstudio.utils import writer
from nerfstudio.utils.rich_utils import CONSOLE
from ns_mgpu_splat.nerfstudio.console import ProgressWriter, ProgressWriterConfig

writer.GLOBAL_BUFFER = {"max_iter": 90, "steps_per_log": 10, "events": {}}
line = ProgressWriter(ProgressWriterConfig())
def numbers(step):
    writer.EVENT_STORAGE.clear()
    writer.put_scalar(name="Train Loss", scalar=0.25, step=step)
    line.write_stats_log(step)
for step, message in enumerate((
    lambda: None,
    lambda: print("printed"),
    lambda: CONSOLE.print("of rich"),
    lambda: logging.getLogger("some").warning("logged"),
    lambda: warnings.warn("warned"),
    lambda: sys.stderr.write("by hand\\n"),
    lambda: None,
)):
    numbers(10 * step)
    message()
    print("", end="")  # nothing is no message
line.finish(69)
print("below")
assert "write" not in vars(sys.stdout) and "write" not in vars(sys.stderr)
"""


def shown(program: str, columns: int) -> list[str]:
    """The lines of a terminal of this width after a program has run in it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 100, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=follower, stderr=follower)
    os.close(follower)
    said = b""
    try:
        while piece := os.read(leader, 65536):
            said += piece
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert process.wait(60) == 0, said.decode()
    return screen(said.decode(), columns)


def screen(said: str, columns: int) -> list[str]:
    """A terminal that knows what is used here: line ends, wrapping, up, clear to the end, colours (left out)."""
    rows, row, column = [""], 0, 0
    for code, letter in re.findall(r"\033\[([0-9;]*[A-Za-z])|(.)", said, re.S):
        if code.endswith("A"):
            row -= int(code[:-1])
        elif code in ("J", "K"):
            del rows[row + 1 :]
            rows[row] = rows[row][:column]
        elif letter == "\r":
            column = 0
        elif letter:
            if letter == "\n" or column == columns:
                row, column = row + 1, 0
                rows.extend([""] * (row + 1 - len(rows)))
            if letter != "\n":
                rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
                column += 1
    return [line.rstrip() for line in rows]


@pytest.mark.any_mesh
def test_every_message_stands_on_a_line_of_its_own() -> None:
    """Messages stood behind the numbers, on the same line."""
    text = "\n".join(shown(PROGRAM, 200))
    assert re.sub(r"<string>:\d+: UserWarning: ", "", text).splitlines() == [
        "step 11/90  loss 0.2500",
        "printed",
        "step 21/90  loss 0.2500",
        "of rich",
        "step 31/90  loss 0.2500",
        "logged",
        "step 41/90  loss 0.2500",
        "warned",
        "step 51/90  loss 0.2500",
        "by hand",
        "step 70/90  at step 61:  loss 0.2500",
        "below",
    ]


LONG = """
from ns_mgpu_splat.nerfstudio.open_line import OpenLine
line = OpenLine()
print("above")
for text in ("one, " * 9 + "end", "two, " * 3, "3" * 16, "4" * 17, "five"):
    line.rewrite(text)
line.rewrite("six, " * 9 + "end")
print("below")
"""


@pytest.mark.any_mesh
def test_a_line_longer_than_the_terminal_is_wide_is_rewritten_as_a_whole() -> None:
    """Each rewriting left the rows above the last one behind."""
    lines = shown(LONG, 16)
    assert lines[:5] == ["above", "six, six, six, s", "ix, six, six, si", "x, six, six, end", "below"]


@pytest.mark.any_mesh
def test_a_terminal_that_does_not_know_its_width_is_not_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero columns counted as one, and each line cleared as many rows above it as it had letters."""
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    line = OpenLine()
    line.rewrite("one, two, three")
    line.rewrite("four")
    line.end()
    assert out.getvalue() == "\r\033[Jone, two, three\r\033[Jfour\n"


SENTENCES = """
from ns_mgpu_splat.nerfstudio.say import say
say("Each of these words stands in one row, which ends where the terminal does, and not at Nerfstudio's 120 columns.")
say("[bold]but/a/path/stays/whole/whatever/the/width[/bold]", soft_wrap=True)
"""


@pytest.mark.any_mesh
def test_sentences_are_broken_between_words_where_the_terminal_ends() -> None:
    lines = shown(SENTENCES, 40)
    assert lines[:3] == [
        "Each of these words stands in one row,",
        "which ends where the terminal does, and",
        "not at Nerfstudio's 120 columns.",
    ]
    assert "".join(lines[3:]).startswith("but/a/path/stays/whole/whatever/the/width")


@pytest.mark.any_mesh
def test_a_dumb_terminal_gets_lines() -> None:
    program = PROGRAM.replace(
        "import logging, sys, warnings", "import logging, os, sys, warnings; os.environ['TERM'] = 'dumb'"
    )
    assert "step 1/90  loss 0.2500" in shown(program, 80)[0]


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1
