# SPDX-License-Identifier: Apache-2.0
"""The drivers of benchmarks/*_variants.py, which no other check builds on a machine without a GPU, keep up with cuda/."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = sorted((ROOT / "benchmarks").glob("*_stage.cu"))
NVCC = shutil.which(
    "nvcc",
    path=os.pathsep.join([str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"), os.defpath]),
)


def test_there_are_drivers() -> None:
    assert DRIVERS


@pytest.mark.skipif(NVCC is None, reason="needs CUDA's compiler: nvcc, in CUDA_HOME/bin or on the path")
@pytest.mark.parametrize("driver", DRIVERS, ids=lambda path: path.stem)
def test_a_stage_driver_compiles(driver: Path, tmp_path: Path) -> None:
    flags = [
        "-std=c++20",
        "-O0",
        "--expt-relaxed-constexpr",
        "--extended-lambda",
        "-Icuda",
        "-DMGPU_CUDA=1",
        "-arch=sm_90",
    ]
    command = [str(NVCC), *flags, "-ptx", str(driver), "-o", str(tmp_path / "driver.ptx")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stage", ["forward", "step"])
def test_every_variant_still_finds_the_text_it_replaces(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    variants = __import__("variants")
    for name, variant in __import__(f"{stage}_variants").VARIANTS.items():
        text = (ROOT / "cuda" / "splat" / variant.file).read_text()
        assert variants.replaced(text, variant.replacements, f"{variant.file} ({name})") != text
