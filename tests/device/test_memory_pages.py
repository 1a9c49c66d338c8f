# SPDX-License-Identifier: Apache-2.0
"""The CUDA flavour's page provider and heap of temporaries, on a machine without a GPU: tests/cuda/check_pages.cpp plays the
driver, refuses memory now and then, and compares contents, places and bytes after every step.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_headers import headers

pytestmark = pytest.mark.any_mesh
ROOT = Path(__file__).resolve().parents[2]
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
    compiler = shutil.which("g++")
    found = headers()
    if not compiler or not found:
        pytest.skip("needs g++ and CUDA's headers")
    out = tmp_path_factory.mktemp("pages") / "check_pages"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-DMGPU_CUDA=1"]
    subprocess.run(
        [compiler, *flags, f"-I{ROOT / 'cuda'}", f"-I{found[0]}", *SOURCES, "-o", str(out), "-lpthread"],
        cwd=ROOT,
        check=True,
    )
    return out


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_moves_and_refusals_lose_nothing(check_pages: Path, seed: int) -> None:
    done = subprocess.run([str(check_pages), str(seed), "200"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")
