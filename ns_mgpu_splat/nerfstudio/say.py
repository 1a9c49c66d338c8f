# SPDX-License-Identifier: Apache-2.0
"""Sentences and tables for the terminal, no wider than it is: Nerfstudio's console takes 120 columns wherever it writes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from nerfstudio.utils.rich_utils import CONSOLE

from ns_mgpu_splat.nerfstudio.open_line import columns_of


def say(what: Any, **options: Any) -> None:
    """`CONSOLE.print`, broken between words where the terminal ends; in a log file as wide as Nerfstudio's lines."""
    CONSOLE.print(what, width=min(CONSOLE.width, columns_of(CONSOLE.file)), **options)


def say_facts(facts: Sequence[tuple[str, str]], whole: Collection[str] = ()) -> None:
    """Print names and what they are: in a terminal what does not fit goes on below its beginning, elsewhere each has one line.

    whole: names of what stays in one piece, as paths do, to be copied.
    """
    indent = max(len(name) for name, _ in facts) + 2
    width = max(1, columns_of(sys.stdout) - indent)
    for name, text in facts:
        if name not in whole:
            lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
            text = f"\n{'':{indent}}".join(lines)
        print(f"{name:<{indent}}{text}")
