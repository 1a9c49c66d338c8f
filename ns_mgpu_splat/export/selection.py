# SPDX-License-Identifier: Apache-2.0
"""Which rows go out: finite ones, those in a box, the most important ones. Takes one bit a row, whatever a row holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ns_mgpu_splat.export.frame import Frame
from ns_mgpu_splat.export.rows import RowSource
from ns_mgpu_splat.splats.ply import finite_rows

Box = tuple[float, float, float, float, float, float]
"""x0, y0, z0, x1, y1, z1 of an axis-aligned box, borders included."""

Progress = Callable[[int], None]
"""Told how many rows more have been gone through."""

_HALF_BITS = 16  # an importance is ranked by its upper, then by its lower 16 bits


@dataclass
class Selection:
    """Rows to export, one bit each, and why the others stay behind.

    Attributes:
        count: rows to export. not_finite, outside, unimportant: rows that are not, by reason.
        bits: (ceil(N / 8),) uint8, highest bit first.
    """

    bits: np.ndarray
    count: int = 0
    not_finite: int = 0
    outside: int = 0
    unimportant: int = 0

    def get(self, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) as (rows,) bool."""
        first = begin // 8
        bits = np.unpackbits(self.bits[first : -(-end // 8)])
        return bits[begin - 8 * first : end - 8 * first].astype(bool)

    def set(self, begin: int, keep: np.ndarray) -> None:
        """Overwrite rows from `begin` on."""
        first, end = begin // 8, begin + len(keep)
        bits = np.unpackbits(self.bits[first : -(-end // 8)])
        bits[begin - 8 * first : end - 8 * first] = keep
        self.bits[first : -(-end // 8)] = np.packbits(bits)


def select(
    rows: RowSource,
    frame: Frame,
    crop: Box | None,
    max_splats: int | None,
    progress: Progress = lambda _: None,
) -> Selection:
    """Find the rows to export.

    A row with a value that is not finite, in whatever column, stays behind. So does one whose mean lies outside `crop`,
    which is in `frame` (its offset not subtracted). Of the others `max_splats` stay, the most important ones.
    """
    selection = Selection(np.zeros(-(-rows.num_rows // 8), dtype=np.uint8))
    for begin, chunk in rows.chunks():
        count = len(chunk["means"])
        keep = finite_rows(chunk)
        if keep is None:
            keep = np.ones(count, dtype=bool)
        finite = int(keep.sum())
        selection.not_finite += count - finite
        if crop is not None:
            with np.errstate(invalid="ignore"):  # of rows that are not finite
                positions = frame.positions(chunk["means"])
            keep &= ((positions >= crop[:3]) & (positions <= crop[3:])).all(axis=1)
            selection.outside += finite - int(keep.sum())
        selection.count += int(keep.sum())
        selection.set(begin, keep)
        progress(count)
    if max_splats is not None and selection.count > max_splats:
        _thin(rows, selection, max_splats)
    return selection


def importance(scales: np.ndarray, opacities: np.ndarray) -> np.ndarray:
    """How much a Gaussian is worth keeping, (rows,) float32: the log of opacity * (ab + bc + ca).

    a, b and c are its standard deviations: the sum of their products goes with the area that a Gaussian covers, seen from far
    and averaged over directions. Its volume would call the flat Gaussians of walls worthless.

    Args:
        scales: (rows, 3), logs. opacities: (rows,), logits.
    """
    s = scales.astype(np.float64)
    area = np.logaddexp(np.logaddexp(s[:, 0] + s[:, 1], s[:, 1] + s[:, 2]), s[:, 2] + s[:, 0])
    return (area - np.logaddexp(0.0, -opacities.astype(np.float64))).astype(np.float32)


def _thin(rows: RowSource, selection: Selection, keep_count: int) -> None:
    """Keep the `keep_count` most important rows; of equal ones, the first. Exact, in two walks over histograms."""
    upper = _histogram(rows, selection, lambda rank: rank >> _HALF_BITS)
    high, above = _threshold(upper, keep_count)
    lower = _histogram(
        rows,
        selection,
        lambda rank: rank[(rank >> _HALF_BITS) == high] & np.uint32((1 << _HALF_BITS) - 1),
    )
    low, equal_above = _threshold(lower, keep_count - above)
    limit = np.uint32((high << _HALF_BITS) | low)
    ties = keep_count - above - equal_above  # rows of just this importance that stay
    for begin, chunk in rows.chunks(("scales", "opacities")):
        keep = selection.get(begin, begin + len(chunk["scales"]))
        members = np.flatnonzero(keep)
        rank = _rank(chunk["scales"][members], chunk["opacities"][members])
        equal = rank == limit
        stay = (rank > limit) | (equal & (np.cumsum(equal) <= ties))
        ties -= int((equal & stay).sum())
        keep[members[~stay]] = False
        selection.set(begin, keep)
    selection.unimportant = selection.count - keep_count
    selection.count = keep_count


def _rank(scales: np.ndarray, opacities: np.ndarray) -> np.ndarray:
    """Importances as uint32 of the same order: floats sort by their bits once negative ones are turned over."""
    bits = importance(scales, opacities).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


def _histogram(rows: RowSource, selection: Selection, part: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    counts = np.zeros(1 << _HALF_BITS, dtype=np.int64)
    for begin, chunk in rows.chunks(("scales", "opacities")):
        keep = selection.get(begin, begin + len(chunk["scales"]))
        rank = _rank(chunk["scales"][keep], chunk["opacities"][keep])
        counts += np.bincount(part(rank), minlength=len(counts))
    return counts


def _threshold(counts: np.ndarray, wanted: int) -> tuple[int, int]:
    """The bin in which the `wanted`-th value from above lies, and how many values lie in the bins above it."""
    from_above = np.cumsum(counts[::-1])
    position = int(np.searchsorted(from_above, wanted))
    above = int(from_above[position - 1]) if position else 0
    return len(counts) - 1 - position, above


@dataclass
class Survey:
    """What the selected rows occupy, in the frame, offset not subtracted.

    Attributes:
        low, high: (3,) float64 corners of the box around all means; infinite and swapped if there are none.
    """

    low: np.ndarray = field(default_factory=lambda: np.full(3, np.inf))
    high: np.ndarray = field(default_factory=lambda: np.full(3, -np.inf))
    count: int = 0

    def add(self, positions: np.ndarray) -> None:
        """Take in positions (rows, 3)."""
        if len(positions):
            self.low = np.minimum(self.low, positions.min(axis=0))
            self.high = np.maximum(self.high, positions.max(axis=0))
            self.count += len(positions)
