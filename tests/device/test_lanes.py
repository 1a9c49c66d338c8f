# SPDX-License-Identifier: Apache-2.0
"""The threads that launch for several GPUs (cuda/mesh/lanes.h), without a GPU: tests/cuda/check_lanes.cpp."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_programs import build_program

SOURCES = (
    "tests/cuda/check_lanes.cpp",
    "cuda/mesh/lanes_cuda.cpp",
    "cuda/mesh/gate.cpp",
    "cuda/mesh/mesh.cpp",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """check_lanes, with a stub in place of CUDA's runtime."""
    flags = ["-O2", "-Wall", "-Itests/cuda/without_cuda", "-DMGPU_CUDA=1"]
    return build_program(tmp_path_factory.mktemp("lanes") / "check_lanes", SOURCES, flags, cuda_headers=False)


def output_of(program: Path, threads: str) -> str:
    """What it prints with this MGPU_LAUNCH_THREADS."""
    environment = {**os.environ, "MGPU_LAUNCH_THREADS": threads}
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=100)
    return done.stdout


def test_lanes_share_work_errors_and_context(program: Path) -> None:
    assert output_of(program, "shards") == "0 wrong\n"


def test_one_thread_if_that_is_wanted(program: Path) -> None:
    """Then there is one lane whatever the mesh, which check_lanes, having asked for as many as shards, calls wrong."""
    assert "3 lanes: another number of them was asked for" in output_of(program, "0")
