# SPDX-License-Identifier: Apache-2.0
"""Rules about source files that no linter knows: SPDX line, formatting of C++, no torch header in `.cu`, no value read
through a reference of another type, file size, names of test files, which room may import which."""

from __future__ import annotations

import ast
import re
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
    "cuda/mesh/gate",
    "cuda/mesh/lanes",
    "cuda/memory/buffer",
    "cuda/memory/locality",
)
# docs/architecture.md, "Rooms": what a room of the package may import besides itself; what is for type checkers alone is free
MAY_IMPORT = {
    "device": set[str](),
    "partition": {"device"},
    "splats": {"device", "partition"},
    "data": set[str](),
    "export": {"device", "partition", "splats"},
}


def rooms_imported(path: Path) -> set[str]:
    """The package's rooms that a Python file imports when it runs, in functions too."""
    found = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if parts == ["ns_mgpu_splat"]:
                found |= {alias.name for alias in node.names}
            elif parts[0] == "ns_mgpu_splat":
                found.add(parts[1])
        if isinstance(node, ast.Import):
            found |= {
                parts[1]
                for a in node.names
                if (parts := a.name.split("."))[0] == "ns_mgpu_splat" and parts[1:]
            }
        pending.extend(ast.iter_child_nodes(node))
    return found & {*MAY_IMPORT, "nerfstudio"}


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
        room = name.split("/")[1] if name.startswith("ns_mgpu_splat/") and name.count("/") > 1 else ""
        if path.suffix == ".py" and room in MAY_IMPORT:
            found += [
                f"{name} imports {other}, and {room} must not: docs/architecture.md, Rooms."
                for other in sorted(rooms_imported(path) - MAY_IMPORT[room] - {room})
            ]
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
        if path.suffix in CXX:
            found += [
                f"{name}:{number} reads a value through a reference of another type, which the compiler may take for unset: "
                "std::bit_cast."
                for number, line in enumerate(path.read_text().splitlines(), 1)
                if re.search(r"reinterpret_cast<[^<>]*&>", line)
            ]
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
