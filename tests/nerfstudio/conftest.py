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
from nerfstudio_tools import command, environment, register_from_checkout, train_many

register_from_checkout()


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


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Runs on one host shard that begin within a second, one after the other."""
    with Lives(tmp_path_factory.mktemp("lives"), environment()) as lives:
        yield lives


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
