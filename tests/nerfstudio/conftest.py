# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the plug-in's tests: the tiny scene, and a way to run Nerfstudio's commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import scene
from lives import Lives
from nerfstudio_tools import command, environment, forked, register_from_checkout, run_forked, train_many

register_from_checkout()


Tool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """The process that forks commands goes with the session."""
    with forked():
        yield


def finished(
    done: subprocess.CompletedProcess[str], tool: str, check: bool
) -> subprocess.CompletedProcess[str]:
    if check and done.returncode != 0:
        pytest.fail(f"{tool} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done


@pytest.fixture
def run_tool(tmp_path: Path) -> Tool:
    """Run a Nerfstudio tool to its end, in a fork of a process that has it imported; `check=False` to look at a failure."""

    def run(
        tool: str, *arguments: object, check: bool = True, timeout: float = 180, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return finished(run_forked(tool, list(map(str, arguments)), tmp_path, timeout, **env), tool, check)

    return run


@pytest.fixture
def run_command(tmp_path: Path) -> Tool:
    """Run a Nerfstudio tool as a user does, in an interpreter of its own: ten seconds more."""

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
        return finished(done, tool, check)

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


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    """Runs on one host shard that begin within a second, one after the other."""
    return Lives(tmp_path_factory.mktemp("lives"), forked())


@pytest.fixture(scope="session")
def trained(nerfstudio_folder: scene.Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.yml of a short run on the tiny scene."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--data", nerfstudio_folder.root, "--max-num-iterations", 600, "--schedule-steps", 600]
    options += ["--timestamp", "run", "--experiment-name", "tiny", "--pipeline.model.max-gaussians", 3000]
    options += ["--pipeline.model.warmup-length", 50, "--pipeline.model.refine-every", 50]
    options += ["--pipeline.model.sh-degree-interval", 200]
    options += ["--pipeline.model.background-color", "black"]  # as the scene's sky
    (result,) = train_many([options], folder)
    assert result["code"] == 0, result
    return folder / "tiny" / "mgpu-splat" / "run" / "config.yml"
