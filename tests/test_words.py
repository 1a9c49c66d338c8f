# SPDX-License-Identifier: Apache-2.0
"""Words that several rooms say, and that they say them alike."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ns_mgpu_splat.words import shown_bytes

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (712, "712 B"),
        (9523, "9.3 KiB"),
        (999.6 * 1024, "1.0 MiB"),
        (123 << 20, "123 MiB"),
        (5 << 29, "2.5 GiB"),
        (5 << 39, "2.5 TiB"),
    ],
)
def test_bytes_are_shown_for_people(count: float, text: str) -> None:
    assert shown_bytes(count) == text


def user_texts() -> Iterator[tuple[str, str]]:
    """What users read, with the file that it is in: pages, configurations, and texts in the package's code.

    Left out are tables of what was measured in decimal units (docs/benchmarks.md says so at its head).
    """
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").iterdir()):
        text = page.read_text(encoding="utf-8")
        if page.name == "device.md":
            text = text.partition("## Measured costs")[0]
        if page.name != "benchmarks.md":
            yield page.name, text
    for path in (ROOT / "ns_mgpu_splat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value


def test_sizes_are_in_powers_of_1024_everywhere() -> None:
    """The progress line and preflight say MiB; an export's last line said MB, and a full disk GB."""
    texts = list(user_texts())
    assert sum("MiB" in text for _, text in texts) > 10
    decimal = re.compile(r"\b[kKMGT]B\b(?!/s)")
    assert [(name, text) for name, text in texts if decimal.search(text)] == []
