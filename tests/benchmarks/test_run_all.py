# SPDX-License-Identifier: Apache-2.0
"""run_all.py: what `make bench` and `make bench-gpu` start, without starting it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import run_all


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Commands and meshes; none is run, and those of locality.py fail."""
    found: list[tuple[list[str], str]] = []

    def start(command: list[str], env: dict[str, str]) -> Any:
        found.append((command[1:], env["MGPU_DEVICES"]))
        return subprocess.CompletedProcess(command, int("locality" in command[1]))

    monkeypatch.setattr(run_all, "machine", str)  # it may ask the system, by a process of its own
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.delenv("MGPU_DEVICES", raising=False)
    monkeypatch.delenv("MGPU_PEER_SITE", raising=False)
    return found


@pytest.mark.parametrize("gpu", [False, True])
def test_every_script_is_there_and_knows_its_options(
    gpu: bool, started: list[tuple[list[str], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--output", str(tmp_path), *["--gpu"] * gpu])
    assert run_all.main() == 1, "locality.py failed"
    for (script, *options), mesh in started:
        text = Path(script).read_text()
        assert all(f'"{option}"' in text for option in options if option.startswith("--")), script
        assert mesh.startswith("cpu:") != gpu, script
    files = [command[command.index("--json") + 1] for command, _ in started]
    assert len(set(files)) == len(files), "one file for each"


def test_a_mesh_that_is_asked_for_is_that_of_all(
    started: list[tuple[list[str], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--output", str(tmp_path), "--gpu"])
    monkeypatch.setenv("MGPU_DEVICES", "0,1")
    run_all.main()
    assert {mesh for _, mesh in started} == {"0,1"}
