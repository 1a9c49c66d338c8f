# SPDX-License-Identifier: Apache-2.0
"""Small text files that a command line names: read only where they are files, since a pipe would be waited for, for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

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
