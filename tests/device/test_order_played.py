# SPDX-License-Identifier: Apache-2.0
"""Who waits for whom on several GPUs, without one: tests/cuda/check_order.cpp plays the runtime and keeps account of what comes
behind what. On GPUs: test_order_gpu.py, test_apart.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from native_programs import build_program

pytestmark = pytest.mark.any_mesh
MESH = [f"cuda/mesh/{name}.cpp" for name in ("mesh", "gate", "fork_join_cuda", "lanes_cuda")]


@pytest.fixture(scope="module")
def check_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = ["tests/cuda/check_order.cpp", *MESH]
    return build_program(tmp_path_factory.mktemp("order") / "check_order", sources, ["-O1", "-DMGPU_CUDA=1"])


@pytest.mark.parametrize("threads", ["", "0", "shards"])
def test_exchanges_and_operators_come_behind_all_that_was_given(check_order: Path, threads: str) -> None:
    """Three threads of random operators on GPUs 0, 1, 2 and on 0, 0, 0 apart, launched by one thread or by several."""
    environment = {**os.environ, "MGPU_LAUNCH_THREADS": threads}
    done = subprocess.run(
        [str(check_order), "1", "300"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n0 wrong\n"), done.stdout
