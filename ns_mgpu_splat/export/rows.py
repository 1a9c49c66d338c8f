# SPDX-License-Identifier: Apache-2.0
"""Where exported rows come from: a count, and chunks of columns. Nothing here holds more than a chunk."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from ns_mgpu_splat.splats.table import COLUMNS, column_shapes

CHUNK_ROWS = 1 << 15  # 8 MB at degree 3: what is read is packed while it is in a cache
_MADV_DONTNEED = 4

Chunk = dict[str, np.ndarray]
"""Columns of some rows by name, float32, shaped as in a splat table."""


class RowSource(Protocol):
    """N Gaussians that can be read again and again, in order."""

    @property
    def num_rows(self) -> int:
        """N; may be 0."""

    @property
    def sh_degree(self) -> int:
        """Degree of the spherical harmonics, 0 to 3."""

    def chunks(self, columns: Sequence[str] = COLUMNS) -> Iterator[tuple[int, Chunk]]:
        """Chunks of at most `CHUNK_ROWS` rows, each with the number of its first row. They are read, never written, and
        only until the next one is asked for."""


class TensorRows:
    """Rows of tensors on the host. Those that are mapped files are let go chunk by chunk: memory stays constant."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """
        Args:
            parts: tables one after the other, of one SH degree: columns of a splat table by name, any float type;
                `opacities` may be (N, 1). Nobody writes to them while they are read.
        Raises: ValueError naming the column whose shape does not fit.
        """
        self._parts = [
            _checked(part, number if len(parts) > 1 else None) for number, part in enumerate(parts)
        ]
        degrees = {math.isqrt(part["shN"].shape[1] + 1) - 1 for part in self._parts}
        if len(degrees) > 1:
            raise ValueError(f"The parts have SH degrees {sorted(degrees)}; they must have one.")
        self.sh_degree = degrees.pop() if degrees else 0
        self.num_rows = sum(len(part["means"]) for part in self._parts)
        ranges = _file_ranges()
        self._mapped = [
            {name for name, column in part.items() if _is_mapped(column, ranges)} for part in self._parts
        ]

    def chunks(self, columns: Sequence[str] = COLUMNS) -> Iterator[tuple[int, Chunk]]:
        """See `RowSource`."""
        first = 0
        for part, mapped in zip(self._parts, self._mapped, strict=True):
            rows = len(part["means"])
            for begin in range(0, rows, CHUNK_ROWS):
                pieces = {name: part[name][begin : begin + CHUNK_ROWS] for name in columns}
                yield first + begin, {name: piece.float().numpy() for name, piece in pieces.items()}
                for name in mapped.intersection(columns):
                    _let_go(pieces[name])
            first += rows


def _checked(part: Mapping[str, Tensor], number: int | None) -> dict[str, Tensor]:
    where = "" if number is None else f" of part {number}"
    missing = [name for name in COLUMNS if name not in part]
    if missing:
        raise ValueError(f"Column {missing[0]}{where} is missing.")
    columns = {name: part[name].detach() for name in COLUMNS}
    rows = len(columns["means"])
    if columns["opacities"].shape == (rows, 1):
        columns["opacities"] = columns["opacities"].reshape(rows)
    rest = columns["shN"].shape[1] if columns["shN"].dim() == 3 else -1
    if rest not in (0, 3, 8, 15):
        raise ValueError(
            f"shN{where} is {list(columns['shN'].shape)}, expected [N, K, 3] with K = 0, 3, 8 or 15 (degree 0 to 3)."
        )
    for name, shape in column_shapes(rows, math.isqrt(rest + 1) - 1).items():
        if tuple(columns[name].shape) != shape:
            raise ValueError(
                f"{name}{where} is {list(columns[name].shape)}, expected {list(shape)} with N = {rows} as in means."
            )
    return columns


def _file_ranges() -> list[tuple[int, int]]:
    """Address ranges of this process that are files; empty where the kernel does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = []
    for words in (line.split(maxsplit=5) for line in lines):
        if len(words) == 6 and words[5].startswith("/"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            found.append((begin, end))
    return found


def _is_mapped(tensor: Tensor, ranges: list[tuple[int, int]]) -> bool:
    """Whether all of a tensor is in a mapped file, so that dropping its pages loses nothing."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and end > begin and any(a <= begin and end <= b for a, b in ranges)


def _let_go(piece: Tensor) -> None:
    """Drop the pages of a mapped file up to the end of this piece from this process; the file's cache keeps them.

    A wish: where the kernel refuses it, nothing is lost but memory.
    """
    page = mmap.PAGESIZE
    begin = piece.data_ptr() // page * page
    end = (piece.data_ptr() + piece.numel() * piece.element_size()) // page * page
    if end > begin:
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_DONTNEED))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
