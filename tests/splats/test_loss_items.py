# SPDX-License-Identifier: Apache-2.0
"""What the CUDA flavour's loss deals to the blocks of a GPU, without one: tests/cuda/check_items.cpp plays the blocks and counts
which pixels and centres come out.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native_programs import build_program

pytestmark = pytest.mark.any_mesh
SOURCES = (
    "tests/cuda/check_items.cpp",
    "cuda/splat/loss_items.cpp",
    "cuda/splat/patches.cpp",
    "cuda/splat/tile_owners.cpp",
    "cuda/splat/curve.cpp",
)


@pytest.fixture(scope="module")
def check_items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["-O1", "-g", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    out = tmp_path_factory.mktemp("items") / "check_items"
    return build_program(out, SOURCES, flags, cuda_headers=False)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_pixel_and_every_centre_comes_out_once(check_items: Path, seed: int) -> None:
    done = subprocess.run([str(check_items), str(seed), "40"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "0 failures\n"
