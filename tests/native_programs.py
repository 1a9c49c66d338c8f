# SPDX-License-Identifier: Apache-2.0
"""Programs of tests/cuda that need no GPU: how tests build them from parts of the CUDA flavour."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from ns_mgpu_splat.device import build

ROOT = Path(__file__).resolve().parents[1]


def build_program(
    out: Path, sources: Iterable[str], flags: Iterable[str] = (), *, cuda_headers: bool = True
) -> Path:
    """Compile `sources`, named from the root of the checkout, to `out`; skips the test where that cannot be done."""
    compiler, found = shutil.which("g++"), headers() if cuda_headers else []
    if not compiler or (cuda_headers and not found):
        pytest.skip("needs g++ and CUDA's headers" if cuda_headers else "needs g++")
    includes = [f"-I{ROOT / 'cuda'}", *(f"-I{folder}" for folder in found[:1])]
    command = [compiler, "-std=c++20", *flags, *includes, *sources, "-o", str(out), "-lpthread"]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def headers() -> list[str]:
    """Folders in which cuda.h is: of a toolkit, or of the wheels that torch comes with."""
    places = [Path("/usr/local/cuda/include")]
    for find in (build.cuda_home, build._nvidia_wheels):
        try:
            places.append(find() / "include")
        except build.BuildError:
            continue
    return [
        str(place)
        for place in places
        if (place / "cuda_runtime_api.h").is_file() and (place / "cuda.h").is_file()
    ]
