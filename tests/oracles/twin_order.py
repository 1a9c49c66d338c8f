# SPDX-License-Identifier: Apache-2.0
"""The order of rows, slowly: the cube around means, cells and Skilling's Hilbert curve, in Python's numbers.

Holds for any rows. Skilling's algorithm is written as in the paper (AIP Conf. Proc. 707, 381, 2004), on transposed
coordinates, which shares nothing with the code under test but the curve.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

BITS = 21
FAR_ROWS = 1000


def hilbert_code(cell: tuple[int, int, int] | list[int], bits: int = BITS) -> int:
    """AxestoTranspose of the paper, then the bits of the three words, one of each in turn."""
    x = list(cell)
    top = 1 << (bits - 1)
    q = top
    while q > 1:
        p = q - 1
        for i in range(3):
            if x[i] & q:
                x[0] ^= p
            else:
                t = (x[0] ^ x[i]) & p
                x[0] ^= t
                x[i] ^= t
        q >>= 1
    x[1] ^= x[0]
    x[2] ^= x[1]
    t = 0
    q = top
    while q > 1:
        if x[2] & q:
            t ^= q - 1
        q >>= 1
    x = [value ^ t for value in x]
    code = 0
    for bit in reversed(range(bits)):
        for value in x:
            code = code << 1 | (value >> bit & 1)
    return code


def _bin_edges(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each float32: the least and the greatest float32 with its sign, exponent and first two bits of the mantissa."""
    bits = values.astype(np.float32).view(np.uint32)
    inner, outer = bits & np.uint32(0xFFE00000), bits | np.uint32(0x001FFFFF)
    negative = (bits >> 31) == 1
    low = np.where(negative, outer, inner).astype(np.uint32).view(np.float32)
    high = np.where(negative, inner, outer).astype(np.uint32).view(np.float32)
    return low.astype(np.float64), high.astype(np.float64)


def cube_of(points: np.ndarray) -> tuple[list[float], float]:
    """Low corner and side of the cube around finite points (N, 3), N > 0, float32 values."""
    low, high = points.min(0).astype(np.float64), points.max(0).astype(np.float64)
    skip = len(points) // FAR_ROWS
    inner_low, inner_high = [], []
    for axis in range(3):
        ordered = np.sort(points[:, axis])
        inner_low.append(max(low[axis], _bin_edges(ordered[skip : skip + 1])[0][0]))
        inner_high.append(min(high[axis], _bin_edges(ordered[len(ordered) - 1 - skip :][:1])[1][0]))
    margin = max(0.0, *(b - a for a, b in zip(inner_low, inner_high, strict=True)))
    corner = [max(low[a], inner_low[a] - margin) for a in range(3)]
    extent = max(min(high[a], inner_high[a] + margin) - corner[a] for a in range(3))
    if extent == 0:
        return [float(c) for c in corner], 0.0
    step = 2.0 ** (math.frexp(extent)[1] - 4)
    return [math.floor(c / step) * step for c in corner], (math.ceil(extent / step) + 1) * step


def slow_keys(means: Tensor) -> list[int]:
    """The key of each row; 2^63 for rows that are not finite."""
    points = means.float().numpy()
    finite = np.isfinite(points).all(1)
    if not finite.any():
        return [1 << 63] * len(points)
    corner, side = cube_of(points[finite])
    cells_per_unit = 2**BITS / side if side else 0.0
    keys = []
    for row, point in enumerate(points):
        if not finite[row]:
            keys.append(1 << 63)
            continue
        places = [(float(point[a]) - corner[a]) * cells_per_unit for a in range(3)]
        keys.append(hilbert_code([int(min(max(place, 0), 2**BITS - 1)) for place in places]))
    return keys


def slow_order(means: Tensor) -> list[int]:
    """Row numbers by key, then by number."""
    keys = slow_keys(means)
    return sorted(range(len(keys)), key=lambda row: (keys[row], row))
