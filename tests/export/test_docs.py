# SPDX-License-Identifier: Apache-2.0
"""The commands and the snippet of docs/export.md do what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import saved_runs

from ns_mgpu_splat.export import FORMATS
from ns_mgpu_splat.export.formats import FileFacts
from ns_mgpu_splat.nerfstudio import export_command

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's run, in the current folder."""
    monkeypatch.chdir(tmp_path)
    columns = saved_runs.random_columns(300)
    columns["means"] *= 0.5
    transform = np.hstack([np.eye(3)[[1, 2, 0]], [[1.0], [2.0], [3.0]]])
    folder = tmp_path / "outputs" / "town" / "mgpu-splat" / "run"
    saved_runs.write_run(folder, columns, transform=transform, scale=0.01)
    return tmp_path


def test_every_command_of_the_page_works(town: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if not line.startswith("#")]
    assert len(lines) == 7
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "mgpu-splat-export"
        assert export_command.main(words[1:]) == 0, capsys.readouterr().err
    written = {path.name for path in town.iterdir()} - {"outputs"}
    assert written == {
        "town.ply", "town_world.ply", "town.spz", "small.ply", "centre.ply", "light.splat", "town-tiles",
    }  # fmt: skip


def test_the_index_has_the_keys_of_the_page(town: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = (json.loads(block) for block in blocks("json"))
    command = next(line for block in blocks("bash") for line in block.splitlines() if "--tile-size" in line)
    assert export_command.main(shlex.split(command)[1:]) == 0
    index = json.loads((town / "town-tiles" / "index.json").read_text())
    assert list(index) == list(shown)
    assert list(index["tiles"][0]) == list(shown["tiles"][0])


def test_the_snippet_runs(town: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = blocks("python")
    exec(compile(snippet, "docs/export.md", "exec"), {})
    count, size, unimportant = capsys.readouterr().out.split()
    assert (count, unimportant) == ("50", "50")
    assert int(size) == (town / "random.spz").stat().st_size


def test_the_page_knows_every_format_and_option() -> None:
    options = {
        o for action in export_command.parser()._actions for o in action.option_strings if o[:2] == "--"
    }
    assert not {
        word for word in [*FORMATS, *(options - {"--help"})] if f"`{word}" not in PAGE and word not in PAGE
    }


def test_sizes_on_the_page_and_in_the_help_are_those_of_the_formats() -> None:
    def per_row(suffix: str, degree: int) -> int:
        facts = [FileFacts(count, degree, 1.0) for count in (10_000, 20_000)]
        small, large = (FORMATS[suffix].most_bytes(fact) for fact in facts)
        return round((large - small) / 10_000)

    ply = [per_row(".ply", degree) for degree in (3, 2, 1, 0)]
    assert f"| {', '.join(map(str, ply))} (SH degree 3, 2, 1, 0) |" in PAGE
    text = " ".join(action.help or "" for action in export_command.parser()._actions)
    assert [f"{size} " in text for size in ply] == [True] * 4
    assert f"{per_row('.spz', 3)} to {per_row('.spz', 0)} before gzip" in PAGE
    assert f"| `.splat` | {per_row('.splat', 0)} |" in PAGE
