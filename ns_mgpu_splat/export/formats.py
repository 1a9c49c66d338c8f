# SPDX-License-Identifier: Apache-2.0
"""File formats as streams: a header, then planes, each made of some columns of all rows. See `ply`, `splat` and `spz`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from ns_mgpu_splat.export.rows import Chunk
from ns_mgpu_splat.splats.table import COLUMNS


@dataclass(frozen=True)
class FileFacts:
    """What a header may want to know of a file.

    Attributes:
        count: rows. sh_degree: of the harmonics in it. reach: largest |coordinate|, offset subtracted.
        antialiased: trained with opacities that are dimmed for small Gaussians (Mip-Splatting).
        notes: sentences on origin and frame, for formats that have comments.
    """

    count: int
    sh_degree: int
    reach: float
    antialiased: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Plane:
    """A part of a file that holds some columns of all rows, row after row.

    Attributes:
        columns: names of the columns. encode: makes the bytes of a chunk of them.
        misfits: counts the rows of a chunk that come out visibly different, since the format cannot hold such a value.
    """

    columns: Sequence[str]
    encode: Callable[[Chunk], np.ndarray]
    misfits: Callable[[Chunk], int] = lambda _: 0


class Format(Protocol):
    """A file format.

    Attributes:
        suffix: of its files. most_rows: that a file can hold. highest_degree: of harmonics that it can hold.
        misfit: what rows have that a plane counts as misfits, for a sentence.
    """

    suffix: str
    misfit: str
    most_rows: int
    highest_degree: int

    def header(self, facts: FileFacts) -> bytes:
        """The bytes before the first plane."""

    def planes(self, facts: FileFacts) -> list[Plane]:
        """In the order in which they follow each other."""

    def most_bytes(self, facts: FileFacts) -> int:
        """Size of a file, or a bound of it where it is compressed."""

    def stream(self, file: BinaryIO) -> contextlib.AbstractContextManager[Stream]:
        """Where header and planes are written to; ends up in `file`."""


class Stream(Protocol):
    """Takes bytes in order."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append."""


@contextlib.contextmanager
def plain(file: BinaryIO) -> Iterator[Stream]:
    """A stream that is the file."""
    yield file


ALL = tuple(COLUMNS)
