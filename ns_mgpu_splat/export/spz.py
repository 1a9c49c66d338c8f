# SPDX-License-Identifier: Apache-2.0
"""`.spz` of Niantic, version 3: about a tenth of a `.ply`, all harmonics, every attribute in its own plane, in one gzip.

Written from the format's description (https://github.com/nianticlabs/spz, README, MIT), because the libraries that write it
hold the whole cloud in memory. Quantisation, rounded to nearest:

    position   24 bits a coordinate, with as many fractional bits as the farthest splat leaves (the header says how many)
    opacity    8 bits                               colour   8 bits over sh0 from -3.33 to 3.33
    scale      1/16 of a log, from -10 to 5.94      rotation smallest three components, 9 bits and a sign each
    harmonics  1/16 for degree 1, 1/8 for degrees 2 and 3, from -1 to 0.99 (the reference's default)
"""

from __future__ import annotations

import contextlib
import math
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from ns_mgpu_splat.export.formats import FileFacts, Plane, Stream
from ns_mgpu_splat.export.rows import Chunk
from ns_mgpu_splat.export.splat import sigmoid, to_byte, unit_quats

_MAGIC, _VERSION, _ANTIALIASED = 0x5053474E, 3, 1
_LARGEST_FIXED = (1 << 23) - 1
_MOST_FRACTIONAL_BITS = 20  # a millionth of a unit: finer than float32 has around 16
_GZIP_LEVEL = 4  # level 6 takes four times as long and makes files 2 % smaller


class SpzFormat:
    """See the module's text."""

    suffix = ".spz"
    misfit = (
        "a size outside of e^-10 to e^5.9 units, which .spz cannot hold: another --frame has another unit"
    )
    most_rows = 2**32 - 1
    highest_degree = 3

    def header(self, facts: FileFacts) -> bytes:
        """16 bytes."""
        flags = _ANTIALIASED if facts.antialiased else 0
        bits = fractional_bits(facts.reach)
        return struct.pack("<IIIBBBB", _MAGIC, _VERSION, facts.count, facts.sh_degree, bits, flags, 0)

    def planes(self, facts: FileFacts) -> list[Plane]:
        """One for each attribute."""
        steps = float(1 << fractional_bits(facts.reach))
        planes = [
            Plane(("means",), lambda chunk: positions(chunk["means"], steps)),
            Plane(("opacities",), lambda chunk: to_byte(sigmoid(chunk["opacities"]) * 255.0)),
            Plane(("sh0",), lambda chunk: to_byte(chunk["sh0"] * (0.15 * 255.0) + 127.5)),
            Plane(("scales",), lambda chunk: to_byte((chunk["scales"] + 10.0) * 16.0), out_of_range),
            Plane(("quats",), lambda chunk: rotations(chunk["quats"])),
        ]
        return [*planes, Plane(("shN",), harmonics)] if facts.sh_degree else planes

    def most_bytes(self, facts: FileFacts) -> int:
        """Without compression, and what deflate adds at worst."""
        raw = 16 + facts.count * (20 + 3 * ((facts.sh_degree + 1) ** 2 - 1))
        return raw + raw // 1000 + 64

    @contextlib.contextmanager
    def stream(self, file: BinaryIO) -> Iterator[Stream]:
        """A gzip stream, without a time in it: the same Gaussians give the same file."""
        gzip = _Gzip(file)
        yield gzip
        gzip.finish()


class _Gzip:
    """Compresses what it is given into a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(self._deflate.compress(data))

    def finish(self) -> None:
        self._file.write(self._deflate.flush())


def fractional_bits(reach: float) -> int:
    """Bits behind the point, so that 24 bits with a sign hold coordinates up to `reach`.

    Raises: ValueError if even whole units do not fit.
    """
    if not reach <= _LARGEST_FIXED:
        raise ValueError(
            f"A Gaussian lies at {reach:g}, and .spz holds coordinates up to {_LARGEST_FIXED:,}. Leave it out with --crop, or "
            "export a .ply."
        )
    if reach == 0:
        return _MOST_FRACTIONAL_BITS
    bits = min(_MOST_FRACTIONAL_BITS, math.floor(math.log2(_LARGEST_FIXED / reach)))
    return max(bits, 0)


def positions(means: np.ndarray, steps: float) -> np.ndarray:
    """(rows, 3, 3) bytes: coordinates in units of 1 / steps, 24 bits with a sign, lowest byte first."""
    fixed = np.clip(np.rint(means.astype(np.float64) * steps), -_LARGEST_FIXED, _LARGEST_FIXED).astype("<i4")
    return np.ascontiguousarray(fixed).view(np.uint8).reshape(-1, 3, 4)[:, :, :3].copy()


def out_of_range(chunk: Chunk) -> int:
    """Rows whose largest size is below the range, or above it. That only a thin side of a Gaussian is below does not show."""
    largest = chunk["scales"].max(axis=1)
    return int(((largest < -10.5) | (largest > 6.0)).sum())


def rotations(quats: np.ndarray) -> np.ndarray:
    """(rows,) uint32: place of the largest of x, y, z, w in the upper two bits, then the other three in that order.

    Each is a sign and 9 bits of its size in units of sqrt(1/2) / 511. The largest is made positive, and left out.
    """
    xyzw = unit_quats(quats)[:, [1, 2, 3, 0]]
    rows = np.arange(len(xyzw))
    largest = np.abs(xyzw).argmax(axis=1)
    xyzw = np.where(xyzw[rows, largest][:, None] < 0, -xyzw, xyzw)
    others = np.array([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])[largest]
    small = np.take_along_axis(xyzw, others, axis=1)
    size = np.minimum(np.rint(np.abs(small) * (511 * math.sqrt(2))), 511).astype(np.uint32)
    code = size | (np.signbit(small).astype(np.uint32) << 9)
    packed = (largest.astype(np.uint32) << 30) | (code[:, 0] << 20) | (code[:, 1] << 10) | code[:, 2]
    return packed.astype("<u4")


def harmonics(chunk: Chunk) -> np.ndarray:
    """(rows, K, 3) bytes: 128 + 128 c, rounded to multiples of 8 for degree 1 and of 16 above."""
    values = chunk["shN"]
    step = np.full((values.shape[1], 1), 16.0, dtype=np.float32)
    step[:3] = 8.0
    nearest = np.rint((values * 128.0 + 128.0) / step) * step
    return np.clip(nearest, 0, 255).astype(np.uint8)
