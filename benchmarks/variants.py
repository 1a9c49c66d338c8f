# SPDX-License-Identifier: Apache-2.0
"""What forward_variants.py and step_variants.py share: variants of the stages' sources, compiled and linked side by side.

A variant is the tree's cuda/ with some text replaced; a text that is not there any more fails by name: mend or drop it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
ARCH = os.environ.get("MGPU_CUDA_ARCHS", "90")
NVCC = [str(CUDA / "bin/nvcc"), f"-gencode=arch=compute_{ARCH},code=sm_{ARCH}"]
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--extended-lambda",
    "-lineinfo",
    "-DMGPU_CUDA=1",
]


@dataclass(frozen=True)
class Variant:
    """Texts of one file under cuda/splat that are replaced, and what is compiled again for it."""

    file: str = ""
    sources: tuple[str, ...] = ()
    replacements: list[tuple[str, str]] = field(default_factory=list)


def run(command: list[str], seconds: float | None = None) -> str:
    """Standard output; an error shows what the command said, or that it took longer than `seconds`."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)}: not done in {seconds:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def chosen(only: list[str] | None, known: Iterable[str]) -> list[str]:
    """The base and those of `known` that `only` names; all without it. Exits naming a variant that there is not."""
    names = ["base", *known]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        sys.exit(f"no variant {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if only is None or name == "base" or name in only]


def replaced(text: str, pairs: Iterable[tuple[str, str]], source: str) -> str:
    """`text` with each pair's first replaced by its second; every first must be there."""
    for old, new in pairs:
        if old not in text:
            raise ValueError(f"{source} has changed; not found any more: {old!r}")
        text = text.replace(old, new)
    return text


def build(folder: Path, driver: str, variants: Mapping[str, Variant]) -> None:
    """Two executables a variant: FOLDER/DRIVER_NAME, of benchmarks/DRIVER_stage.cu, and FOLDER/check_NAME, check_stages."""
    objects = folder / "stages"
    run(["bash", "tests/cuda/build.sh", str(objects)])
    main = str(objects / "drivers" / f"{driver}_stage.cu.o")

    def one(name: str) -> None:
        variant = variants[name]
        tree = folder / name
        skipped = {"check_stages.cpp.o", *(f"{source}.cu.o" for source in variant.sources)}
        parts = [str(path) for path in objects.glob("*.o") if path.name not in skipped]
        if variant.file:
            shutil.copytree(ROOT / "cuda", tree, dirs_exist_ok=True)
            path = tree / "splat" / variant.file
            path.write_text(replaced(path.read_text(), variant.replacements, f"{variant.file} ({name})"))
        for source in variant.sources:
            parts.append(str(folder / f"{name}_{source}.o"))
            run(
                [*NVCC, *NVCC_FLAGS, f"-I{tree}", "-c", str(tree / "splat" / f"{source}.cu"), "-o", parts[-1]]
            )
        for what, first in ((driver, main), ("check", str(objects / "check_stages.cpp.o"))):
            run([*NVCC, first, *parts, "-o", str(folder / f"{what}_{name}"), "-lpthread"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, variants))
