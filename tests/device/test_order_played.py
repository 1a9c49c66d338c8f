# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom on several GPUs, without one: tests/cuda/check_order.cpp plays the runtime and keeps account of what comes
behind what. On GPUs: test_order_gpu.py, test_apart.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_headers import headers

pytestmark = pytest.mark.any_mesh
ROOT = Path(__file__).resolve().parents[2]
MESH = [f"cuda/mesh/{name}.cpp" for name in ("mesh", "gate", "fork_join_cuda", "lanes_cuda")]


@pytest.fixture(scope="module")
def check_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    found = headers()
    if not compiler or not found:
        pytest.skip("needs g++ and CUDA's headers")
    out = tmp_path_factory.mktemp("order") / "check_order"
    flags = ["-std=c++20", "-O1", "-DMGPU_CUDA=1", f"-I{ROOT / 'cuda'}", f"-I{found[0]}"]
    command = [compiler, *flags, "tests/cuda/check_order.cpp", *MESH, "-o", str(out), "-lpthread"]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


@pytest.mark.parametrize("threads", ["", "0", "shards"])
def test_exchanges_and_operators_come_behind_all_that_was_given(check_order: Path, threads: str) -> None:
    """Three threads of random operators on GPUs 0, 1, 2 and on 0, 0, 0 apart, launched by one thread or by several."""
    environment = {**os.environ, "MGPU_LAUNCH_THREADS": threads}
    done = subprocess.run(
        [str(check_order), "1", "300"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 wrong\n"), done.stdout
