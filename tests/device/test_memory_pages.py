# SPDX-License-Identifier: Apache-2.0
"""The CUDA flavour's page provider and heap of temporaries, on a machine without a GPU: tests/cuda/check_pages.cpp plays the
driver, refuses memory now and then, and compares contents, places and bytes after every step.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native_programs import build_program

pytestmark = pytest.mark.any_mesh
SOURCES = (
    "tests/cuda/check_pages.cpp",
    "cuda/memory/arena.cpp",
    "cuda/memory/provider_vmm_cuda.cpp",
    "cuda/memory/host_spare_cuda.cpp",
    "cuda/memory/buffer_cuda.cpp",
    "cuda/memory/tally.cpp",
    "cuda/mesh/mesh.cpp",
)


@pytest.fixture(scope="module")
def check_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-DMGPU_CUDA=1"]
    return build_program(tmp_path_factory.mktemp("pages") / "check_pages", SOURCES, flags)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_moves_and_refusals_lose_nothing(check_pages: Path, seed: int) -> None:
    done = subprocess.run([str(check_pages), str(seed), "200"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")
