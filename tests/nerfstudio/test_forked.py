# SPDX-License-Identifier: Apache-2.0
"""The process that forks commands (forked.py): it can do so safely, and its commands end as those of a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import DEFAULTS, Hung
from nerfstudio_tools import forked, run_forked


def test_nothing_but_one_thread_is_copied(tmp_path: Path) -> None:
    """A lock that another thread holds at the fork is held for ever in the child."""
    done = run_forked("state", [], tmp_path)
    found = json.loads(done.stdout)
    assert found["threads"] == [], "begun while libraries were imported"
    assert not found["native"], "the native module has a pool of threads"
    assert not found["cuda"], "CUDA cannot be used in a child once the parent has"


def test_ends_are_those_of_the_interpreter(run_tool: Callable, tmp_path: Path) -> None:
    said = run_tool("ns-train", "mgpu-splat", "--data", tmp_path / "none", check=False)
    assert said.returncode == 1
    assert said.stderr.startswith(f"mgpu-splat: {tmp_path / 'none'} does not exist.")
    assert said.stderr.count("\n") == 1
    usage = run_tool("ns-eval", check=False)
    assert usage.returncode == 2
    assert "--load-config" in usage.stderr


def test_what_hangs_is_ended_and_says_where_it_was(tmp_path: Path) -> None:
    order = {"kind": "sleep", "words": ["600"], "cwd": str(tmp_path), "env": DEFAULTS}
    forked().start(order, tmp_path / "out")
    began = time.monotonic()
    with pytest.raises(Hung, match=r"no end after 0.2 s"):
        forked().wait(0.2)
    assert time.monotonic() - began < 20
    assert "in obey" in (tmp_path / "out").read_text()
    forked().start(order, tmp_path / "next")  # ended as soon as another one begins
    forked().start(order | {"words": ["0"]}, tmp_path / "last")
    assert forked().wait(30) == 0
    pid = forked().start(order, tmp_path / "killed")
    os.kill(pid, signal.SIGTERM)
    assert forked().wait(30) == -signal.SIGTERM
