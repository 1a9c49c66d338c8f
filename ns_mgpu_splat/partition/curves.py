# SPDX-License-Identifier: Apache-2.0
"""Codes of cells along the Morton and the Hilbert curve in torch operators; the same as cuda/math/hilbert.h gives."""

from __future__ import annotations

import torch
from torch import Tensor

CURVE_BITS = 21
"""Bits of a coordinate; a code has three times as many."""


def _spread(x: Tensor) -> Tensor:
    """The low 21 bits of x, two zeros between neighbours."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        x = (x | x << shift) & mask
    return x


def morton_codes(cells: Tensor) -> Tensor:
    """(N,) int64 of cells (N, 3), int64 in 0 to 2^21 - 1; x has the lowest bit."""
    x, y, z = cells.unbind(1)
    return _spread(x) | _spread(y) << 1 | _spread(z) << 2


def hilbert_codes(cells: Tensor) -> Tensor:
    """(N,) int64 of cells (N, 3), int64 in 0 to 2^21 - 1.

    Skilling's curve (AIP Conf. Proc. 707, 381, 2004): cells with consecutive codes share a face.
    """
    axes = [axis.clone() for axis in cells.unbind(1)]
    for bit in reversed(range(1, CURVE_BITS)):
        lower = (1 << bit) - 1
        for axis in range(3):
            # set, the bit inverts x's lower bits; clear, it exchanges them with x's
            chosen = -(axes[axis] >> bit & 1)
            change = (chosen | (axes[0] ^ axes[axis])) & lower
            axes[0] = axes[0] ^ change
            axes[axis] = axes[axis] ^ (change & ~chosen)
    code = _spread(axes[0]) << 2 | _spread(axes[1]) << 1 | _spread(axes[2])
    for shift in (1, 2, 4, 8, 16, 32):  # from Gray code
        code = code ^ code >> shift
    return code


def codes_of(ijk: Tensor, curve: str) -> Tensor:
    """(N,) int64 codes of voxels (N, 3), any integers, counted from their least corner, as fvdb.Grid does.

    Args:
        ijk: (N, 3), integers; N may be 0.
        curve: "morton" or "hilbert".
    Raises: ValueError if the voxels span more than 2^21 along an axis: a code would not tell them apart.
    """
    if ijk.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=ijk.device)
    least = ijk.amin(0).to(torch.int64)
    span = int((ijk.amax(0).to(torch.int64) - least).max()) + 1
    if span > 1 << CURVE_BITS:
        raise ValueError(
            f"{curve} codes have 21 bits an axis, and the voxels span {span:,} along one. Use a larger voxel_size, or leave "
            "far points out."
        )
    function = morton_codes if curve == "morton" else hilbert_codes
    pieces = [function(piece.to(torch.int64) - least) for piece in ijk.split(1 << 20)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
