# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the plug-in's tests: the tiny scene, and a way to run Nerfstudio's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import scene

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
    """The environment for a tool: one host shard unless said otherwise, wide lines."""
    return {**os.environ, "MGPU_DEVICES": "cpu:1", "COLUMNS": "200", **changes}


@pytest.fixture
def run_tool(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Nerfstudio tool to its end; `check=False` to look at a failure."""

    def run(
        tool: str, *arguments: object, check: bool = True, timeout: float = 180, **env: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command(tool, *arguments),
            cwd=tmp_path,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{tool} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done

    return run


@pytest.fixture(scope="session")
def nerfstudio_folder(tmp_path_factory: pytest.TempPathFactory) -> scene.Scene:
    """The tiny scene as a Nerfstudio folder; read-only."""
    return scene.write_nerfstudio(tmp_path_factory.mktemp("captures") / "tiny town", images=13, points=1500)


@pytest.fixture(scope="session")
def colmap_folder(tmp_path_factory: pytest.TempPathFactory) -> scene.Scene:
    """The tiny scene as a binary COLMAP folder; read-only."""
    return scene.write_colmap(tmp_path_factory.mktemp("captures") / "colmap", images=9)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real photographs (MGPU_TEST_DATA); skips where they are absent."""
    folder = Path(os.environ.get("MGPU_TEST_DATA", "../shared/data")).resolve()
    if not (folder / "brighton_small").is_dir():
        pytest.skip(f"{folder} has no real photographs (MGPU_TEST_DATA)")
    return folder


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


@pytest.fixture(scope="session")
def trained(nerfstudio_folder: scene.Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.yml of a short run on the tiny scene."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--data", nerfstudio_folder.root, "--max-num-iterations", 600, "--schedule-steps", 600]
    options += ["--timestamp", "run", "--experiment-name", "tiny", "--pipeline.model.max-gaussians", 3000]
    options += ["--pipeline.model.warmup-length", 50, "--pipeline.model.refine-every", 50]
    options += ["--pipeline.model.sh-degree-interval", 200]
    (result,) = train_many([options], folder)
    assert result["code"] == 0, result
    return folder / "tiny" / "mgpu-splat" / "run" / "config.yml"
