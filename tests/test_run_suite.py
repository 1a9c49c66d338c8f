# SPDX-License-Identifier: Apache-2.0
"""run_suite.py: its exit code and its last line, of runs that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import run_suite

PASSED, FAILED, DIED, EMPTY = ({"passed": 9}, 0), ({"passed": 8, "failed": 1}, 1), ({}, -11), ({}, 5)


@pytest.mark.parametrize("command", [[], ["--slow"], ["--gpu"]])
@pytest.mark.parametrize(
    ("last", "code"),
    [(PASSED, 0), (FAILED, 1), (DIED, 1), (EMPTY, 0)],
    ids=["passed", "failed", "died", "empty"],
)
def test_only_a_suite_without_a_fault_ends_with_0(
    command: list[str],
    last: tuple[dict[str, int], int],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A last group that finds no test is no fault, unless there was none at all."""
    monkeypatch.setattr(run_suite, "gpu_count", lambda: 2)
    groups = run_suite.groups(slow="--slow" in command, gpu="--gpu" in command)
    ends = iter([*[PASSED] * (len(groups) - 1), last])
    monkeypatch.setattr(run_suite, "run", lambda group, extra: next(ends))
    monkeypatch.setattr(sys, "argv", ["run_suite.py", *command])
    nothing_ran = last == EMPTY and len(groups) == 1
    assert run_suite.main() == (1 if nothing_ran else code)
    passed = 9 * (len(groups) - 1) + last[0].get("passed", 0)
    assert capsys.readouterr().out.splitlines()[-1] == f"{passed} passed, {int(code != 0)} failed, 0 skipped"


def test_groups_name_paths_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_suite, "gpu_count", lambda: 2)
    for options in ({}, {"slow": True}, {"gpu": True}):
        for group in run_suite.groups(**{"slow": False, "gpu": False} | options):
            paths = [word for word in group.arguments if word.startswith("tests")]
            paths += [word.split("=")[1] for word in group.arguments if word.startswith("--ignore")]
            assert all((run_suite.ROOT / path).exists() for path in paths), group.name
