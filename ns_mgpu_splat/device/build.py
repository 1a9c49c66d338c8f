# SPDX-License-Identifier: Apache-2.0
"""Build the native module (`cuda/`) for the installed torch, once, and load it from a cache afterwards.

Why not `torch.utils.cpp_extension.load`: it always starts ninja, rebuilds everything after a change of one header
flag, and says nothing while it works. Here objects are cached one by one under the hash of all they depend on.

Cache: `$MGPU_CACHE`, else `$XDG_CACHE_HOME/ns-mgpu-splat`, else `~/.cache/ns-mgpu-splat`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

MODULE_NAME = "_mgpu"
_KEEP_DAYS = 60  # objects and modules that nobody used for so long are removed after a build


class BuildError(RuntimeError):
    """The native module could not be built; the message says why and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """The compiler and the flags that go into every cache key."""

    compiler: str
    version: str
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    def key(self) -> str:
        """Text that changes whenever an object built with this toolchain may differ."""
        return "\n".join([self.version, *self.flags, torch.__version__, sysconfig.get_config_var("SOABI") or ""])


def source_root() -> Path:
    """Folder of the C++ and CUDA sources: `cuda/` of a checkout, or its copy inside an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package.parent / "cuda", package / "_cuda"):
        if (candidate / "module.cpp").is_file():
            return candidate
    raise BuildError(
        f"The C++ sources are missing: neither {package.parent / 'cuda'} nor {package / '_cuda'} has module.cpp. "
        "Reinstall ns-mgpu-splat."
    )


def cache_root() -> Path:
    """Folder that holds built modules and objects; see the module docstring for the order of choice."""
    if os.environ.get("MGPU_CACHE"):
        return Path(os.environ["MGPU_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ns-mgpu-splat"


def _cpu_flags() -> tuple[str, ...]:
    """AVX2 where this machine has it; part of the key, so a cache shared by unlike machines stays right."""
    try:
        words = set(re.search(r"^flags\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M).group(1).split())  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return ()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "bmi2", "f16c", "movbe"} <= words else ()


@functools.cache
def toolchain() -> Toolchain:
    """Find the C++ compiler and the flags for the installed torch.

    Raises: BuildError, in one sentence, where there is no compiler.
    """
    asked = os.environ.get("CXX")
    compiler = next((c for c in ([asked] if asked else ["g++", "c++", "clang++"]) if shutil.which(c.split()[0])), None)
    if compiler is None:
        raise BuildError(
            f"No C++ compiler was found ({'CXX=' + asked if asked else 'tried g++, c++, clang++'}); ns-mgpu-splat compiles a "
            "small native module once per torch version: install g++ 11 or newer (Debian and Ubuntu: apt install g++)."
        )
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    python_include = sysconfig.get_paths()["include"]
    if not Path(python_include, "Python.h").is_file():
        raise BuildError(
            f"Python.h is not in {python_include}; the native module needs Python's headers: install python3-dev "
            "(Debian and Ubuntu) or python3-devel (Fedora)."
        )
    torch_root = Path(torch.__file__).parent
    flags = (
        "-std=c++20",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        "-pthread",
        "-Wall",
        "-Wno-unknown-pragmas",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DTORCH_EXTENSION_NAME={MODULE_NAME}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        *_cpu_flags(),
        f"-isystem{torch_root / 'include'}",
        f"-isystem{torch_root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-isystem{python_include}",
        *os.environ.get("MGPU_CXXFLAGS", "").split(),
    )
    link = (f"-L{torch_root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", "-pthread")
    return Toolchain(compiler, version, flags, link)


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def _digest(path: Path, root: Path, seen: dict[Path, str]) -> str:
    """Hash of a source and, transitively, of the headers of ours that it includes."""
    pending, files = [path], set[Path]()
    while pending:
        current = pending.pop()
        if current in files:
            continue
        files.add(current)
        if current not in seen:
            seen[current] = current.read_text()
        for name in _INCLUDE.findall(seen[current]):
            found = next((p for p in (root / name, current.parent / name) if p.is_file()), None)
            if found is not None:
                pending.append(found.resolve())
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\n{seen[file]}\n".encode())
    return digest.hexdigest()


@contextmanager
def _locked(path: Path, say: bool) -> Iterator[None]:
    """Hold an exclusive lock on `path`; tell the user when somebody else has it."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say:
                _say("another process is building the native module; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"[mgpu-splat] {text}", file=sys.stderr, flush=True)


def _run(command: list[str], what: str, log: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(" ".join(command) + "\n\n" + done.stdout + done.stderr)
        errors = [line for line in done.stderr.splitlines() if "error" in line][:8] or done.stderr.splitlines()[-8:]
        raise BuildError(f"{what} failed; the whole log is {log}:\n  " + "\n  ".join(errors))


def build(*, verbose: bool = True) -> Path:
    """Build the native module if the cache lacks it, and return the path of the shared object.

    Safe when several processes call it at once (one builds, the others wait). Raises BuildError with the compiler's
    first errors and the path of the log.
    """
    root, tools = source_root(), toolchain()
    sources = sorted(root.rglob("*.cpp"))
    seen: dict[Path, str] = {}
    keys = {s: hashlib.sha256((tools.key() + _digest(s, root, seen)).encode()).hexdigest()[:24] for s in sources}
    whole = hashlib.sha256("".join(keys[s] for s in sources).encode()).hexdigest()[:16]
    tag = f"torch{torch.__version__.replace('+', '-')}-{sys.implementation.cache_tag}-{whole}"
    cache = cache_root()
    module = cache / "modules" / tag / f"{MODULE_NAME}.so"
    if module.is_file():
        os.utime(module)
        return module
    objects = cache / "objects"
    for folder in (objects, module.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock", verbose):
        if module.is_file():  # somebody else built it while we waited
            return module
        start = time.monotonic()
        missing = [s for s in sources if not (objects / f"{keys[s]}.o").is_file()]
        if verbose:
            _say(f"building the native module for torch {torch.__version__}: {len(missing)} of {len(sources)} files")

        def compile_one(source: Path) -> Path:
            target = objects / f"{keys[source]}.o"
            aside = target.with_suffix(f".{os.getpid()}.tmp.o")
            command = [*tools.compiler.split(), *tools.flags, f"-I{root}", "-c", str(source), "-o", str(aside)]
            try:
                _run(command, f"Compiling {source.relative_to(root)}", cache / "logs" / f"{source.stem}.log")
                os.replace(aside, target)
            finally:
                aside.unlink(missing_ok=True)
            return source

        jobs = int(os.environ.get("MAX_JOBS") or min(len(missing) or 1, os.cpu_count() or 1))
        # the largest first: they take longest, and would otherwise end alone
        missing.sort(key=lambda s: ("<torch/" in seen[s] or "<ATen/" in seen[s], s.stat().st_size), reverse=True)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            tasks = [pool.submit(compile_one, s) for s in missing]
            try:
                for count, task in enumerate(concurrent.futures.as_completed(tasks), 1):
                    name = task.result().relative_to(root)
                    if verbose:
                        _say(f"  [{count}/{len(missing)}] {name} ({time.monotonic() - start:.0f} s)")
            except BuildError:
                for task in tasks:
                    task.cancel()
                raise
        aside = module.with_suffix(f".{os.getpid()}.tmp")
        try:
            link = [*tools.compiler.split(), "-shared", *(str(objects / f"{keys[s]}.o") for s in sources), *tools.link_flags]
            _run([*link, "-o", str(aside)], "Linking the native module", cache / "logs" / "link.log")
            os.replace(aside, module)
        finally:
            aside.unlink(missing_ok=True)
        _prune(cache)
        if verbose:
            _say(f"built in {time.monotonic() - start:.0f} s: {module}")
    return module


def _prune(cache: Path) -> None:
    """Remove objects and modules that were not used for `_KEEP_DAYS` days."""
    limit = time.time() - _KEEP_DAYS * 86400
    for path in [*cache.glob("objects/*.o"), *cache.glob("modules/*/*.so")]:
        if path.stat().st_mtime < limit:
            path.unlink(missing_ok=True)


@functools.cache
def load() -> ModuleType:
    """Build the native module if needed and import it. It registers nothing with torch but its kernels."""
    path = build()
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """`mgpu-splat-build`: build ahead, for images and clusters where the first run should not compile."""
    parser = argparse.ArgumentParser(prog="mgpu-splat-build", description=main.__doc__)
    parser.add_argument("--clean", action="store_true", help="remove the whole cache first")
    arguments = parser.parse_args()
    if arguments.clean:
        shutil.rmtree(cache_root(), ignore_errors=True)
    try:
        print(build())
    except BuildError as error:
        sys.exit(f"mgpu-splat-build: {error}")


if __name__ == "__main__":
    main()
