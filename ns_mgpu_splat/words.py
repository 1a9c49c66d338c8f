# SPDX-License-Identifier: Apache-2.0
"""Words of sentences for people that more than one room says."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """A number with what it counts: 1 page, 2,048 pages."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def shown_bytes(count: float) -> str:
    """`count` bytes for people: 712 B, 9.3 MiB, 1.5 GiB; in the units of the progress line, of pages and of options in GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.95 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
