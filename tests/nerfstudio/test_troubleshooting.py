# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md has the sentences that the program says, and the options that it has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
MARK = "…"
HEADINGS = re.findall(r"^### (.*)$", PAGE.read_text(encoding="utf-8"), re.M)


def said(node: ast.AST) -> str | None:
    """A string of the source as it would be shown, with a mark for what is filled in; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else MARK for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # "a" + "b"
        parts = [said(node.left), said(node.right)]
        return "".join(part if part is not None else MARK for part in parts) if any(parts) else None
    return None


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    """All strings of the package."""
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in (ROOT / "ns_mgpu_splat").rglob("*.py")]
    return [text for tree in trees for node in ast.walk(tree) if (text := said(node))]


def fits(heading: str, sentence: str) -> bool:
    """Whether the fixed parts of a heading are in a sentence, in this order."""
    parts = [re.escape(part.strip()) for part in heading.split(MARK) if part.strip()]
    return re.search(".*".join(parts), sentence, re.S) is not None


@pytest.mark.parametrize("heading", HEADINGS)
def test_heading_is_what_the_program_says(heading: str, sentences: list[str]) -> None:
    assert any(fits(heading, sentence) for sentence in sentences)


def test_other_words_are_not_found(sentences: list[str]) -> None:
    assert len(HEADINGS) > 15
    assert not any(fits("… is lost, but … names it.", sentence) for sentence in sentences)


def test_options_that_are_named_exist() -> None:
    from ns_mgpu_splat.nerfstudio.config import mgpu_splat

    text = PAGE.read_text(encoding="utf-8") + (ROOT / "docs" / "captures.md").read_text(encoding="utf-8")
    options = set(re.findall(r"--(pipeline\.[a-z.-]+[a-z])", text))
    assert len(options) > 5
    for option in options:
        holder = mgpu_splat.config
        for name in option.replace("-", "_").split("."):
            assert hasattr(holder, name), f"--{option}"
            holder = getattr(holder, name)
