# SPDX-License-Identifier: Apache-2.0
"""Checks of plain numbers, for arguments that would otherwise fail deep inside, or make a whole table NaN."""

from __future__ import annotations

import math
import operator
from typing import Any

LARGEST_SEED = 2**64 - 1  # native seeds have 64 bits and no sign


def whole_number(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int. Raises ValueError naming the argument if it is no whole number of this range: 1.5, "a", True."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name} is {value!r}, expected a whole number{_range(least, most)}.")
    return number


def seed_number(name: str, value: Any) -> int:
    """A seed as an int. Raises ValueError for one that 64 bits do not hold."""
    return whole_number(name, value, 0, LARGEST_SEED)


def finite_number(name: str, value: Any, least: float | None = None, most: float | None = None) -> float:
    """`value` as a float. Raises ValueError naming the argument if it is no number of this range: NaN, infinity, None."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if (
        not math.isfinite(number)
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        raise ValueError(f"{name} is {value!r}, expected a finite number{_range(least, most)}.")
    return number


def _range(least: float | None, most: float | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {most}"
    return f" of at least {least}" if most is None else f" from {least} to {most}"
