# SPDX-License-Identifier: Apache-2.0
"""Run Nerfstudio's commands: as a user would, each a new interpreter, or in forks of one that has imported everything."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from forked import DEFAULTS, ENTRY, Forked, Hung

import ns_mgpu_splat

STAND_INS = Path(ns_mgpu_splat.__file__).parent / "nerfstudio" / "without_mesh_tools"


def command(tool: str, *arguments: object) -> list[str]:
    """The command line of a Nerfstudio tool with this interpreter; the same entry point as the installed script."""
    start = f"import sys; sys.argv[0] = {tool!r}; from {ENTRY[tool]} import entrypoint; entrypoint()"
    return [sys.executable, "-c", start, *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """The environment for a new interpreter: DEFAULTS, changes, and stand-ins for mesh tools that lack."""
    paths = [os.environ.get("PYTHONPATH", ""), *([str(STAND_INS)] if mesh_tools_are_missing() else [])]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, **DEFAULTS, **changes}


def register_from_checkout() -> None:
    """Where the package is on PYTHONPATH only and not installed, tell Nerfstudio by its own variables what an installed
    package's entry points say."""
    if entry_points(group="nerfstudio.method_configs", name="mgpu-splat"):
        return
    text = (Path(ns_mgpu_splat.__file__).parents[1] / "pyproject.toml").read_text()
    for group in ("method_configs", "dataparser_configs"):
        _, _, rest = text.partition(f'[project.entry-points."nerfstudio.{group}"]')
        pairs = re.findall(r'^(\S+) = "(\S+)"$', rest.partition("\n[")[0], re.M)
        os.environ[f"NERFSTUDIO_{group.upper()}"] = ",".join(f"{name}={place}" for name, place in pairs)


@functools.cache
def mesh_tools_are_missing() -> bool:
    """Whether this machine cannot import all that Nerfstudio's exporter imports (a system library may lack)."""
    check = "from ns_mgpu_splat.nerfstudio.exporter import *; print(make_mesh_tools_optional())"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1] != "()"


@functools.cache
def forked() -> Forked:
    """The process that forks, of this session; conftest.py ends it."""
    return Forked({**os.environ, **DEFAULTS})


def run_forked(
    kind: str, words: list[Any], folder: Path, timeout: float = 180, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run an order (forked.py) to its end in `folder`; what it has said is in the result."""
    order = {"kind": kind, "words": words, "cwd": str(folder), "env": {**os.environ, **DEFAULTS, **env}}
    with tempfile.TemporaryDirectory() as said:
        output, errors = Path(said) / "stdout", Path(said) / "stderr"
        try:
            forked().start(order, output, errors)
            code = forked().wait(timeout)
        except Hung as hung:
            pytest.fail(f"{kind} {words}: {hung}\n{output.read_text()[-4000:]}\n{errors.read_text()[-8000:]}")
        return subprocess.CompletedProcess([kind, *words], code, output.read_text(), errors.read_text())


def train_many(runs: list[list[object]], folder: Path, timeout: float = 300, **env: str) -> list[dict]:
    """Run `ns-train mgpu-splat ...` command lines in one process; results as of driver.py, with "said", what a run
    printed, and "out", what all of them did."""
    common = ["--vis", "tensorboard", "--viewer.quit-on-train-completion", "True", "--output-dir", folder]
    lines = [["mgpu-splat", *map(str, common), *map(str, run)] for run in runs]
    done = run_forked("driver", lines, folder, timeout, **env)
    if done.returncode != 0:
        pytest.fail(f"the driver ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    said = done.stdout.split("\n@@ run\n")[1:-1]
    results = json.loads(done.stdout.strip().splitlines()[-1])
    return [{**r, "said": text, "out": done.stdout} for r, text in zip(results, said, strict=True)]
