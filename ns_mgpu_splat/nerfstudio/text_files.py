# SPDX-License-Identifier: Apache-2.0
"""Small text files that a command line names: read only where they are files, since a pipe would be waited for, for ever; and
what is wrong with YAML in them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import yaml

_kKinds = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
)


def why_no_file(path: Path) -> str | None:
    """What stands at a path that is no regular file, in a few words; None for a file, and where nothing is."""
    try:
        return _why_no_file(path.stat().st_mode)
    except (OSError, ValueError):  # reading it will say
        return None


def _why_no_file(mode: int) -> str | None:
    return next((f"{kind}, not a file" for is_kind, kind in _kKinds if is_kind(mode)), None)


def read_text(path: Path) -> str:
    """The text of a file, which must be a regular one in UTF-8. Raises OSError, whose `strerror` says what is wrong."""
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK
    )  # a pipe would not open before somebody writes to it
    try:
        why = _why_no_file(os.fstat(descriptor).st_mode)
        if why is not None:
            raise OSError(errno.EINVAL, why, str(path))
        with open(descriptor, encoding="utf-8", closefd=False) as file:
            return file.read()
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "it is no text", str(path)) from None
    finally:
        os.close(descriptor)


def yaml_problem(error: Exception) -> str:
    """What PyYAML found wrong in a text, in a line: where, and what. PyYAML's own shows the place with a caret under it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem is not None:
        mark, begin = error.problem_mark, error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        since = f" that begins in line {begin.line + 1}" if begin is not None else ""
        context = f" ({error.context}{since})" if error.context else ""
        text = f"{where}{error.problem}{context}".replace("'<stream end>'", "the end of the file")
    elif isinstance(error, yaml.reader.ReaderError):
        text = f"character {error.position + 1}: {error.reason}"
    else:
        text = str(error)
    return " ".join(text.split())
