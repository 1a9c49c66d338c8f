# SPDX-License-Identifier: Apache-2.0
"""`.splat` of antimatter15's viewer: 32 bytes a row, colours of degree 0 in 8 bits, no header.

Layout (https://github.com/antimatter15/splat, MIT): position 3 float32, standard deviations 3 float32, colour and opacity
4 uint8, quaternion wxyz 4 uint8 as 128 + 128 q. Rounded to nearest: half a step is 1/510 of a colour or an opacity, and
1/256 of a quaternion's component (1/128 at exactly 1). Sizes are cut at e^44 = 1.3e19 units: readers square them in float32.
"""

from __future__ import annotations

import contextlib
from typing import BinaryIO

import numpy as np

from ns_mgpu_splat.export.formats import FileFacts, Plane, Stream, plain
from ns_mgpu_splat.export.rows import Chunk
from ns_mgpu_splat.splats.seed import SH_C0

_LARGEST_LOG_SIZE = 44.0  # its square is still a float32
_ROW = np.dtype([("position", "<f4", 3), ("scale", "<f4", 3), ("color", "u1", 4), ("rotation", "u1", 4)])


class SplatFormat:
    """See the module's text."""

    suffix = ".splat"
    misfit = "a size above 10^19 units, whose square readers of .splat cannot hold"
    most_rows = 2**63 - 1
    highest_degree = 0

    def header(self, facts: FileFacts) -> bytes:
        """None."""
        return b""

    def planes(self, facts: FileFacts) -> list[Plane]:
        """One, of whole rows."""
        return [Plane(("means", "quats", "scales", "opacities", "sh0"), encode, too_large)]

    def most_bytes(self, facts: FileFacts) -> int:
        """Exact."""
        return facts.count * _ROW.itemsize

    def stream(self, file: BinaryIO) -> contextlib.AbstractContextManager[Stream]:
        """The file."""
        return plain(file)


def encode(chunk: Chunk) -> np.ndarray:
    """(rows,) of 32 bytes each."""
    out = np.empty(len(chunk["means"]), dtype=_ROW)
    out["position"] = chunk["means"]
    out["scale"] = np.exp(np.minimum(chunk["scales"], _LARGEST_LOG_SIZE))
    out["color"][:, :3] = to_byte((0.5 + SH_C0 * chunk["sh0"]) * 255.0)
    out["color"][:, 3] = to_byte(sigmoid(chunk["opacities"]) * 255.0)
    out["rotation"] = to_byte(unit_quats(chunk["quats"]) * 128.0 + 128.0)
    return out


def too_large(chunk: Chunk) -> int:
    """Rows with a size that is cut."""
    return int((chunk["scales"].max(axis=1) > _LARGEST_LOG_SIZE).sum())


def to_byte(values: np.ndarray) -> np.ndarray:
    """Nearest of 0 to 255."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-logits)); never overflows."""
    return 0.5 + 0.5 * np.tanh(0.5 * logits)


def unit_quats(quats: np.ndarray) -> np.ndarray:
    """Of length 1; a zero quaternion becomes no rotation, as in the operators' limit."""
    length = np.linalg.norm(quats, axis=1, keepdims=True)
    out = quats / np.where(length > 0, length, 1)
    out[length[:, 0] == 0, 0] = 1
    return out
