# SPDX-License-Identifier: Apache-2.0
"""Words of sentences for people that more than one room says."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """A number with what it counts: 1 page, 2,048 pages."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
