# SPDX-License-Identifier: Apache-2.0
"""Texts of `--help` as paragraphs: tyro shows the line breaks of our sources in the middle of sentences."""

from __future__ import annotations

from functools import wraps
from typing import Any


def join_lines() -> None:
    """Join the lines of our options' texts where tyro asks for them; those of other packages stay as they are."""
    import docstring_parser

    original = docstring_parser.parse_from_object
    if hasattr(original, "joins_lines"):
        return

    @wraps(original)
    def parse(obj: Any, *arguments: Any, **options: Any) -> Any:
        found = original(obj, *arguments, **options)
        if str(getattr(obj, "__module__", "")).startswith("ns_mgpu_splat."):
            for parameter in found.params:
                if parameter.description is not None:
                    parameter.description = " ".join(parameter.description.split())
        return found

    parse.joins_lines = True  # type: ignore[attr-defined]
    docstring_parser.parse_from_object = parse
