# SPDX-License-Identifier: Apache-2.0
"""Run Nerfstudio's commands as a user would, in processes of their own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ns_mgpu_splat.nerfstudio.exporter import STAND_IN

ENTRY = {
    "ns-train": "nerfstudio.scripts.train",
    "ns-eval": "nerfstudio.scripts.eval",
    "ns-render": "nerfstudio.scripts.render",
    "ns-export": "nerfstudio.scripts.exporter",
    "ns-viewer": "nerfstudio.scripts.viewer.run_viewer",
}


def command(tool: str, *arguments: object) -> list[str]:
    """The command line of a Nerfstudio tool with this interpreter; the same entry point as the installed script."""
    start = f"import sys; sys.argv[0] = {tool!r}; from {ENTRY[tool]} import entrypoint; entrypoint()"
    return [sys.executable, "-c", start, *map(str, arguments)]


def environment(**changes: str) -> dict[str, str]:
    """The environment for a tool: one host shard unless said otherwise, wide lines, open3d or the stand-in for it."""
    paths = [os.environ.get("PYTHONPATH", ""), *([str(STAND_IN)] if open3d_is_missing() else [])]
    # before the site's packages, which may hold an open3d that cannot be imported
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "MGPU_DEVICES": "cpu:1", "COLUMNS": "200", **changes}


@functools.cache
def open3d_is_missing() -> bool:
    """Whether this machine cannot import open3d, or not without a system library that it lacks."""
    try:
        import open3d  # noqa: F401
    except (ImportError, OSError):
        return True
    return False


def train_many(runs: list[list[object]], folder: Path, timeout: float = 300, **env: str) -> list[dict]:
    """Run `ns-train mgpu-splat ...` command lines in one process; results as of driver.py, and "out" for messages."""
    common = ["--vis", "tensorboard", "--viewer.quit-on-train-completion", "True", "--output-dir", folder]
    lines = [["mgpu-splat", *map(str, common), *map(str, run)] for run in runs]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "driver.py"), json.dumps(lines)],
        cwd=folder,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        pytest.fail(f"the driver ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return [{**result, "out": done.stdout} for result in json.loads(done.stdout.strip().splitlines()[-1])]
