# SPDX-License-Identifier: Apache-2.0
"""The CUDA flavour's kernels between shards, without a GPU: tests/cuda/played/check_exchange.cpp. The sources are compiled as
they are but for what C++ has no word for, launches, shared memory and two instructions of look_back.h."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from native_programs import ROOT, build_program

pytestmark = pytest.mark.any_mesh
PLAYED = ROOT / "tests" / "cuda" / "played"
SOURCES = (
    *(f"splat/{name}.cpp" for name in ("assign", "ranges", "curve", "transport", "exchange", "patches")),
    "mesh/mesh.cpp",
)
LAUNCH = re.compile(r"(\w+(?:<[\w, ]+>)?)<<<(.*?)>>>\(", re.S)
MANY = {
    "kSampledFrom = int64_t{1} << 17": "kSampledFrom = 512",
    "kManyFrom = int64_t{2 * 132} * kThreads * kManyRecords": "kManyFrom = 150",
}
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def without_launches(text: str) -> str:
    """kernel<<<shape>>>(...) as a call, dynamic shared memory as an array, a load and a store that other blocks see as plain
    ones."""
    text = DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(played::dynamic_shared);", text)
    text = LAUNCH.sub(r"played::play([&](const auto&... a) { \1(a...); }, \2)(", text)
    text = re.sub(r'asm volatile\("ld\.relaxed.*?\);', "value = *state;", text, flags=re.S)
    return re.sub(r'asm volatile\("st\.relaxed.*?\);', "*state = value;", text, flags=re.S)


def with_few_being_many(text: str) -> str:
    """Few records are played: so many are many."""
    found = [name for name in MANY if name in text]
    assert len(found) == 1
    assert text.count(found[0]) == 1
    return text.replace(found[0], MANY[found[0]])


@pytest.fixture(scope="module")
def check_exchange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("played")
    shutil.copytree(ROOT / "cuda", folder / "cuda")
    for path in [*(folder / "cuda" / "splat").glob("*.cu"), *(folder / "cuda" / "splat").glob("*.h")]:
        path.write_text(without_launches(path.read_text()))
    for name in ("assign.cu", "bin.cu"):
        path = folder / "cuda" / "splat" / name
        path.write_text(with_few_being_many(path.read_text()))
    # fibers jump between stacks, which _FORTIFY_SOURCE (Ubuntu's default) takes for an overrun
    flags = ["-O2", "-w", "-U_FORTIFY_SOURCE", "-DMGPU_CUDA=1"]
    flags += [f"-I{PLAYED / 'stub'}", f"-I{folder / 'cuda'}"]
    flags += ["-include", str(PLAYED / "cuda_on_host.h")]
    sources = [str(PLAYED / "check_exchange.cpp"), *(str(folder / "cuda" / name) for name in SOURCES)]
    return build_program(folder / "check_exchange", sources, flags)


def test_owners_have_what_meets_their_tiles_and_homes_what_comes_back(check_exchange: Path) -> None:
    done = subprocess.run([str(check_exchange)], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 17
    assert all(line.endswith(": 0 wrong") for line in lines)
