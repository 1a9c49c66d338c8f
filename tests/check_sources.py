# SPDX-License-Identifier: Apache-2.0
"""Rules about source files that no linter knows: SPDX line, formatting of C++, no torch header in `.cu`, file size,
names of test files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CXX = (".h", ".cpp", ".cu")
LARGEST = 1_000_000
# no torch or Python header: these files are shared with nvcc, and must compile there and on older torch alike
TORCH_FREE = (
    "cuda/math/",
    "cuda/mesh/mesh",
    "cuda/mesh/fork_join",
    "cuda/memory/buffer",
    "cuda/memory/locality",
)


def tracked() -> list[Path]:
    """Files that git knows, and new ones it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in out.splitlines() if (ROOT / line).is_file()]


def problems() -> list[str]:
    """One sentence for each broken rule."""
    found = []
    files = tracked()
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if path.stat().st_size > LARGEST:
            found.append(
                f"{name} has {path.stat().st_size:,} bytes; files over {LARGEST:,} do not belong here."
            )
        if path.suffix in (".py", *CXX):
            head = path.read_text().splitlines()[:2]
            if not any("SPDX-License-Identifier: Apache-2.0" in line for line in head):
                found.append(f"{name} does not start with its SPDX-License-Identifier line.")
        torch_free = path.suffix == ".cu" or (
            path.suffix in CXX
            and (name.startswith(TORCH_FREE) or (name.startswith("cuda/splat/") and "_host" in name))
        )
        if torch_free and any(
            mark in path.read_text() for mark in ("<torch/", "<ATen/", "<c10/", "<Python.h>", "pybind11")
        ):
            found.append(
                f"{name} includes a torch or Python header; glue belongs in cuda/backend or a bindings file."
            )
    first: dict[str, str] = {}
    for path in files:
        if path.name.startswith("test_") and path.suffix == ".py":
            name = path.relative_to(ROOT).as_posix()
            other = first.setdefault(path.name, name)
            if other != name:
                found.append(
                    f"{name} has the name of {other}: pytest imports test files by name. Rename one."
                )
    sources = [str(p) for p in files if p.suffix in CXX]
    formatter = shutil.which("clang-format", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if formatter is None:
        found.append("clang-format is not installed: pip install -e '.[dev]'.")
    elif sources:
        done = subprocess.run([formatter, "--dry-run", "-Werror", *sources], capture_output=True, text=True)
        if done.returncode != 0:
            names = sorted({line.split(":")[0] for line in done.stderr.splitlines() if ": error:" in line})
            found += [f"{Path(n).relative_to(ROOT)} is not formatted: make format." for n in names]
    return found


if __name__ == "__main__":
    for sentence in problems():
        print(sentence)
    sys.exit(1 if problems() else 0)
