# SPDX-License-Identifier: Apache-2.0
"""Sentences and tables for the terminal, no wider than it is: Nerfstudio's console takes 120 columns wherever it writes."""

from __future__ import annotations

from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE

from ns_mgpu_splat.nerfstudio.open_line import columns_of


def say(what: Any, **options: Any) -> None:
    """`CONSOLE.print`, broken between words where the terminal ends; in a log file as wide as Nerfstudio's lines."""
    CONSOLE.print(what, width=min(CONSOLE.width, columns_of(CONSOLE.file)), **options)
