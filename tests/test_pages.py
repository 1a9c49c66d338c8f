# SPDX-License-Identifier: Apache-2.0
"""README and docs/: links lead somewhere, each page is in the README's table, commands have the options they show."""

from __future__ import annotations

import argparse
import copy
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "configs" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as web pages of it have them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} leads to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} leads to {target}"


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"](docs/{p.name})" not in text] == []


def commands() -> Iterator[tuple[str, list[str]]]:
    """The command lines of all pages: page and words, without variables before them and what comes behind `#`."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(
                    line.replace("<", "(").replace(">", ")").replace("(", "_").replace(")", "_"),
                    comments=True,
                )
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words:
                    yield page.name, words


def test_commands_have_the_options_that_the_pages_show(tmp_path: Path) -> None:
    import tyro

    from ns_mgpu_splat.data.city import cli
    from ns_mgpu_splat.nerfstudio import export_command, info
    from ns_mgpu_splat.nerfstudio.config import mgpu_splat

    parsers: dict[str, argparse.ArgumentParser] = {
        "mgpu-splat-export": export_command.parser(),
        "mgpu-splat-info": info.parser(),
        "mgpu-splat-city": cli.parser(),
    }
    seen = []
    for page, words in commands():
        name, *rest = words
        if name in parsers:
            parsers[name].parse_args(rest)
        elif words[:2] in (["ns-train", "mgpu-splat"], ["ns-train", "mgpu-splat-big"]):
            rest = [str(ROOT / w) if w.startswith("configs/") else w for w in words[2:]]
            if "config.yml" in " ".join(rest) or "..." in rest:
                continue  # of a run that is not there
            kind = tyro.conf.FlagConversionOff[type(mgpu_splat.config)]  # as ns-train parses
            tyro.cli(kind, default=copy.deepcopy(mgpu_splat.config), args=rest)
        else:
            continue
        seen.append((page, name))
    assert len(seen) > 15
    assert {name for _, name in seen} == {*parsers, "ns-train"}
