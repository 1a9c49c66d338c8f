# SPDX-License-Identifier: Apache-2.0
"""What tensorboard's files are made of, quickly: events of numbers and pictures, and the checksum of whatever is written.

Nerfstudio asks for a protobuf that is pure Python from Python 3.11 on, and tensorboard takes its checksum (CRC-32C) byte by
byte in Python: half a millisecond for the numbers of a step, and a third of a second for a picture, in a thread that keeps the
training loop from Python's interpreter meanwhile.
"""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

kPolynomial = 0x82F63B78  # of CRC-32C, lowest power in the highest bit
kPiece = 512  # bytes of which the sum is taken at once


def event_of(step: int, numbers: Mapping[str, float]) -> bytes:
    """A serialised `tensorboard.Event` (event.proto) with a `simple_value` for each name, and the present time."""
    return _event(step, (_tag(name) + struct.pack("<f", number) for name, number in numbers.items()))


def picture_event_of(step: int, name: str, picture: NDArray[np.uint8]) -> bytes:
    """A serialised `tensorboard.Event` with a picture (H, W, 3), as a PNG that takes a third of the usual time and more room."""
    png = io.BytesIO()
    Image.fromarray(picture).save(png, format="PNG", compress_level=1)
    height, width, channels = picture.shape
    sizes = b"\x08" + _varint(height) + b"\x10" + _varint(width) + b"\x18" + _varint(channels)
    return _event(step, [_field(1, name.encode()) + _field(4, sizes + _field(4, png.getvalue()))])


def _event(step: int, values: Iterable[bytes]) -> bytes:
    """An `Event` of the present time with a `Summary` of these values."""
    summary = b"".join(_field(1, value) for value in values)
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + _field(5, summary)


@cache
def _tag(name: str) -> bytes:
    """A `Summary.Value` up to its number: field 1, the tag, and the key of field 2, a float."""
    return _field(1, name.encode()) + b"\x15"


def _field(number: int, content: bytes) -> bytes:
    """A field of protobuf's wire type 2: key, length, content."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """An integer, seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def masked_crc32c(data: bytes) -> int:
    """The checksum of TFRecord files: CRC-32C, turned and shifted. Takes 4 bytes or more.

    The sum is linear over bits: that of a piece is the exclusive or of what each of its bytes adds where it stands, and
    NumPy takes it of all pieces at once, without the interpreter's lock.
    """
    table, ahead = _tables()
    padded = np.zeros(-(-len(data) // kPiece) * kPiece, dtype=np.intp)  # zeros before the data add nothing
    bytes_ = padded[len(padded) - len(data) :]
    bytes_[:] = np.frombuffer(data, dtype=np.uint8)
    bytes_[:4] ^= 0xFF  # the sum begins with all bits set
    pieces = padded.reshape(-1, kPiece)
    pieces += np.arange(0, kPiece * 256, 256)
    total = 0
    for piece in np.bitwise_xor.reduce(table.take(pieces), axis=1).tolist():
        a, b, c, d = total.to_bytes(4, "little")  # as if it stood in the piece's first bytes
        total = piece ^ ahead[0][a] ^ ahead[1][b] ^ ahead[2][c] ^ ahead[3][d]
    total ^= 0xFFFFFFFF
    return ((total >> 15 | total << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _tables() -> tuple[NDArray[np.uint32], list[list[int]]]:
    """What a byte of a value adds at a place of a piece, [place * 256 + value]; the same of the first four as lists."""
    one, polynomial = np.uint32(1), np.uint32(kPolynomial)
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = (first >> one) ^ (first & one) * polynomial
    table = np.empty((kPiece, 256), dtype=np.uint32)
    table[-1] = first  # no byte follows
    for place in range(kPiece - 2, -1, -1):
        table[place] = (table[place + 1] >> 8) ^ first[table[place + 1] & 0xFF]
    return table.reshape(-1), table[:4].tolist()
