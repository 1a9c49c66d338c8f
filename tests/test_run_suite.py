# SPDX-License-Identifier: Apache-2.0
"""run_suite.py: its exit code and its last line, of runs that are made up."""

from __future__ import annotations

import subprocess
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
    results = (run_suite.Result(group.name, *end) for group, end in zip(groups, ends, strict=True))
    monkeypatch.setattr(run_suite, "run_all", lambda *_: results)
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


def test_every_file_is_in_a_group_and_in_one_only_unless_meshes_differ() -> None:
    groups = run_suite.groups(slow=False, gpu=False)
    files = sorted((run_suite.ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 80
    for file in files:
        name = file.relative_to(run_suite.ROOT).as_posix()
        holders = []
        for group in groups:
            ignored = [word.split("=")[1] for word in group.arguments if word.startswith("--ignore")]
            named = [word for word in group.arguments if word.startswith("tests")]
            if name.startswith(tuple(named)) and not name.startswith(tuple(ignored or ["nothing"])):
                holders.append(group)
        assert holders, name
        assert len({group.devices for group in holders}) == len(holders), name


def test_what_needs_no_mesh_of_its_own_runs_on_the_first_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_suite, "gpu_count", lambda: 2)
    for gpu in (False, True):
        groups = [g for g in run_suite.groups(slow=False, gpu=gpu) if "tests/splats" in g.arguments]
        assert len(groups) >= 2
        assert ["not any_mesh" in " ".join(g.arguments) for g in groups] == [
            False,
            *[True] * (len(groups) - 1),
        ]


def test_groups_side_by_side_are_shown_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each waits for a file that the other makes: they do run at once."""
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / f"test_{name}.py").write_text(
            "import pathlib, time\n"
            "def test_it():\n"
            f"    pathlib.Path('{name}').touch()\n"
            "    for _ in range(600):\n"
            f"        print('{name} waits', flush=True)\n"
            f"        if pathlib.Path('{other}').exists(): return\n"
            "        time.sleep(0.1)\n"
            "    assert False\n"
        )
    monkeypatch.setattr(run_suite, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    groups = [run_suite.Group(name, ["-s", f"test_{name}.py"], None) for name in ("one", "two")]
    ends = list(run_suite.run_all(groups, [], jobs=2, threads=2))
    assert sorted(end.name for end in ends) == ["one", "two"]
    assert all((end.counts, end.code) == ({"passed": 1}, 0) for end in ends)
    shown = capsys.readouterr().out
    for end, text in zip(ends, shown.split("\n== ")[1:], strict=True):
        assert text.startswith(f"{end.name} ==\n{end.name} waits")
        assert sum(f"{name} waits" in text for name in ("one", "two")) == 1


def test_a_second_ctrl_c_leaves_no_group_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn:
        def __init__(self, group: run_suite.Group, *_: object, **__: object) -> None:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)",
                ]
            )
            begun.append(self.process)

        def ended(self) -> bool:
            raise KeyboardInterrupt

    begun: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(run_suite, "Run", Stubborn)
    monkeypatch.setattr(subprocess.Popen, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(run_suite.run_all([run_suite.Group(name, [], None) for name in "ab"], [], jobs=2))
    monkeypatch.undo()
    assert [process.wait(10) < 0 for process in begun] == [True, True]
