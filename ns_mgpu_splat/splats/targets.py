# SPDX-License-Identifier: Apache-2.0
"""Where finished files go: written aside, synced, then renamed, so that a file of the final name is whole or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ns_mgpu_splat.words import shown_bytes

_FREE_MARGIN = 1 << 20  # bytes left free: folders and the file system's own books take some


def writable_target(path: str | Path) -> Path:
    """Where to write, so that renaming a finished file over it does what a user means: links stay, devices live.

    Returns: `path` with links followed.
    Raises: OSError if the folder does not exist, or if `path` is there and no regular file (a folder, /dev/null, a pipe).
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {target.parent}. Make it, or give another path."
        )
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the path of a file in it.")
    if target.exists() and not target.is_file():
        raise OSError(
            f"{path} is a device or a pipe, which a finished file cannot replace. Give the path of a file."
        )
    return target


def check_room(path: Path, need: int) -> None:
    """Raise OSError if fewer than `need` bytes are free in the folder of `path`."""
    free = shutil.disk_usage(path.parent).free
    if need + _FREE_MARGIN > free:
        raise OSError(f"{path} needs {shown_bytes(need)}, but {path.parent} has {shown_bytes(free)} free.")


@contextlib.contextmanager
def whole_file(target: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """A file to write to that becomes `target` (of `writable_target`) when the block ends, and vanishes if it raises.

    Raises: FileExistsError if `overwrite` is false and `target` has come into being meanwhile.
    """
    aside = _aside(target)
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            aside.replace(target)
        else:
            _rename_to_new(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(target.parent)


@contextlib.contextmanager
def whole_folder(target: Path, *, replaceable: bool = False) -> Iterator[Path]:
    """A folder to fill that becomes `target` when the block ends, and vanishes if it raises.

    Args:
        target: may exist only if `replaceable`; then it is swapped for the new one and removed.
    """
    aside = _aside(target)
    before = aside.with_name(aside.name + ".before")
    aside.mkdir()
    try:
        yield aside
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(aside)
        if replaceable and target.exists():
            target.rename(before)
            try:
                aside.rename(target)
            except OSError:
                before.rename(target)
                raise
        elif target.exists():
            raise FileExistsError(f"{target} has come into being meanwhile; it was left as it is.")
        else:
            aside.rename(target)
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def _aside(target: Path) -> Path:
    """A name beside `target` for this process; leftovers of killed ones are removed."""
    for leftover in target.parent.glob(f".{_literal(target.name)}.*.tmp"):
        pid = leftover.name.split(".")[-2]
        if pid.isdigit() and not Path("/proc", pid).exists() and Path("/proc/self").exists():
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _literal(name: str) -> str:
    """`name` for a glob pattern that shall match nothing else."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _rename_to_new(aside: Path, target: Path) -> None:
    """Give `aside` the name `target` unless that is taken; there is no moment in between."""
    try:
        os.link(aside, target)
    except FileExistsError:
        raise FileExistsError(f"{target} has come into being meanwhile; it was left as it is.") from None
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(f"{target} has come into being meanwhile; it was left as it is.") from None
        aside.rename(target)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)  # the new name, too, survives a power cut
    finally:
        os.close(handle)
