# SPDX-License-Identifier: Apache-2.0
"""Build the native module (`cuda/`) for the installed torch, once, and load it from a cache afterwards.

Two flavours come from one tree. `host` takes every `.cpp` but `*_cuda.cpp`; `cuda` takes every `.cpp` but
`*_host.cpp`, and every `.cu`. A `.cu` file includes no torch or Python header, so its object depends on nvcc and
the architectures alone and may be built on another machine.

Why not `torch.utils.cpp_extension.load`: it always starts ninja, rebuilds everything after a change of one flag, and
says nothing while it works. Here objects are cached one by one under the hash of all they depend on.

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
FLAVOURS = ("host", "cuda")
_KEEP_DAYS = 60  # objects and modules that nobody used for so long are removed after a build


LEAST_CAPABILITY = (8, 0)
"""Of a GPU: copies past the registers and tf32 products, which blending uses."""


class BuildError(RuntimeError):
    """The native module could not be built; the message says why and what to do."""


@dataclass(frozen=True)
class Compiler:
    """A compiler, its version line and the flags that go into every cache key."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    abi: str  # what else an object depends on: torch and Python, or nothing

    def key(self) -> str:
        """Text that changes whenever an object built with this compiler may differ.

        Search paths are left out: what is found there is named by `abi`.
        """
        return "\n".join([self.version, *(f for f in self.flags if not f.startswith("-isystem")), self.abi])


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
        found = re.search(r"^flags\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return ()
    words = set(found.group(1).split()) if found else set()
    return ("-march=x86-64-v3",) if {"avx2", "fma", "bmi2", "f16c", "movbe"} <= words else ()


def _version(command: tuple[str, ...]) -> str:
    lines = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout.splitlines() or [
        "unknown"
    ]
    return lines[0] if "nvcc" not in command[0] else lines[-1]


def _nvidia_wheels() -> Path:
    """Folder of the CUDA parts that torch's wheels bring along (headers of cuBLAS and others, libcudart)."""
    major = (torch.version.cuda or "13").split(".")[0]
    return Path(torch.__file__).parent.parent / "nvidia" / f"cu{major}"


@functools.cache
def cuda_home() -> Path:
    """Folder of the CUDA toolkit. Raises BuildError where there is none."""
    nvcc = shutil.which("nvcc")
    asked = os.environ.get("CUDA_HOME")
    for home in (
        Path(asked) if asked else None,
        Path(nvcc).resolve().parents[1] if nvcc else None,
        Path("/usr/local/cuda"),
    ):
        # a wrapper of nvcc on PATH has no headers beside it
        if (
            home is not None
            and (home / "bin" / "nvcc").is_file()
            and (home / "include" / "cuda_runtime.h").is_file()
        ):
            return home
    raise BuildError(
        "nvcc was not found (tried CUDA_HOME, PATH and /usr/local/cuda); the GPU flavour of ns-mgpu-splat compiles CUDA "
        f"code at first use: install the CUDA toolkit {torch.version.cuda or '13.0'}, or set MGPU_DEVICES=cpu:1."
    )


@functools.cache
def host_compiler(flavour: str = "host") -> Compiler:
    """Find the C++ compiler and the flags for the installed torch.

    Raises: BuildError, in one sentence, where there is no compiler.
    """
    asked = os.environ.get("CXX")
    tried = [asked] if asked else ["g++", "c++", "clang++"]
    found = next((c for c in tried if shutil.which(c.split()[0])), None)
    if found is None:
        raise BuildError(
            f"No C++ compiler was found ({'CXX=' + asked if asked else 'tried g++, c++, clang++'}); ns-mgpu-splat compiles "
            "a small native module once per torch version: install g++ 11 or newer (Debian and Ubuntu: apt install g++)."
        )
    python_include = sysconfig.get_paths()["include"]
    if not Path(python_include, "Python.h").is_file():
        raise BuildError(
            f"Python.h is not in {python_include}; the native module needs Python's headers: install python3-dev "
            "(Debian and Ubuntu) or python3-devel (Fedora)."
        )
    torch_include = Path(torch.__file__).parent / "include"
    includes = [torch_include, torch_include / "torch" / "csrc" / "api" / "include", Path(python_include)]
    defines = [
        f"-DTORCH_EXTENSION_NAME={MODULE_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    if flavour == "cuda":
        # the toolkit first: the wheels' headers lack some of its own
        includes += [cuda_home() / "include", _nvidia_wheels() / "include"]
        defines += ["-DMGPU_CUDA=1"]
    command = tuple(found.split())
    flags = (
        "-std=c++20",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        "-pthread",
        "-Wall",
        "-Wno-unknown-pragmas",
        *defines,
        *_cpu_flags(),
        *(f"-isystem{path}" for path in includes),
        *os.environ.get("MGPU_CXXFLAGS", "").split(),
    )
    abi = f"torch {torch.__version__}, {sysconfig.get_config_var('SOABI')}"
    return Compiler(command, _version(command), flags, abi)


@functools.cache
def cuda_compiler() -> Compiler:
    """nvcc and its flags. Architectures: `$MGPU_CUDA_ARCHS` (as in "90;100"), else those of the GPUs present that have what
    the kernels need (LEAST_CAPABILITY), else 90."""
    asked = os.environ.get("MGPU_CUDA_ARCHS")
    if asked:
        archs = sorted(set(asked.replace(",", ";").split(";")))
    elif torch.cuda.is_available():
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        archs = [f"{major}{minor}" for major, minor in sorted(found) if (major, minor) >= LEAST_CAPABILITY]
    else:
        archs = []
    archs = archs or ["90"]
    command = (str(cuda_home() / "bin" / "nvcc"),)
    flags = (
        "-std=c++20",
        "-O3",
        "-DMGPU_CUDA=1",
        "--expt-relaxed-constexpr",
        "--extended-lambda",
        "-lineinfo",
        "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread",
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
        *os.environ.get("MGPU_NVCCFLAGS", "").split(),
    )
    return Compiler(command, _version(command), flags, "")


def _loaded_cxx_runtime() -> list[str]:
    """The C++ runtime that torch runs on. Where the compiler has only a static one, a second copy would come into the
    module, and the two crash each other (streams and locales).
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    found = re.search(r"(/\S*/libstdc\+\+\.so\.6\S*)", maps)
    return [found.group(1)] if found else []


def _link_flags(flavour: str) -> list[str]:
    flags = [
        *_loaded_cxx_runtime(),
        f"-L{Path(torch.__file__).parent / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-ltorch_python",
        "-pthread",
    ]
    if flavour == "cuda":
        # the runtime that torch itself has loaded; the driver's functions are found through it
        places = [_nvidia_wheels() / "lib", cuda_home() / "lib64", cuda_home() / "lib"]
        runtime = next((so for place in places for so in sorted(place.glob("libcudart.so*"))), None)
        if runtime is None:
            raise BuildError(
                f"libcudart.so is in none of {', '.join(map(str, places))}: reinstall torch or the CUDA toolkit."
            )
        flags += ["-lc10_cuda", "-ltorch_cuda", str(runtime)]
    return flags


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


def _object_key(path: Path, compiler: Compiler, root: Path, seen: dict[Path, str]) -> str:
    """Name of a source's object in the cache; `seen` holds the texts of files already read."""
    return hashlib.sha256((compiler.key() + _digest(path, root, seen)).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Source:
    """One file to compile, with the compiler for it and the key of its object."""

    path: Path
    compiler: Compiler
    key: str
    heavy: bool  # includes torch's headers: compiles long, starts first


def _sources(flavour: str) -> list[Source]:
    if flavour not in FLAVOURS:
        raise ValueError(f"flavour is {flavour!r}, expected one of {FLAVOURS}.")
    root = source_root().resolve()
    other = "_cuda" if flavour == "host" else "_host"
    paths = [p for p in sorted(root.rglob("*.cpp")) if not p.stem.endswith(other)]
    if flavour == "cuda":
        paths += sorted(root.rglob("*.cu"))
    seen: dict[Path, str] = {}
    sources = []
    for path in paths:
        compiler = cuda_compiler() if path.suffix == ".cu" else host_compiler(flavour)
        key = _object_key(path, compiler, root, seen)
        heavy = (
            any(mark in seen[path] for mark in ("<torch/", "<ATen/", "<c10/", "<cub/"))
            or path.suffix == ".cu"
        )
        sources.append(Source(path, compiler, key, heavy))
    return sources


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
        errors = [line for line in done.stderr.splitlines() if "error" in line][
            :8
        ] or done.stderr.splitlines()[-8:]
        raise BuildError(f"{what} failed; the whole log is {log}:\n  " + "\n  ".join(errors))


def _compile(sources: list[Source], objects: Path, cache: Path, verbose: bool) -> None:
    """Compile what the object cache lacks, in parallel; `$MAX_JOBS` limits the number of compilers at work."""
    root = source_root()
    missing = sorted(
        (s for s in sources if not (objects / f"{s.key}.o").is_file()), key=lambda s: not s.heavy
    )

    def compile_one(source: Source) -> Path:
        target = objects / f"{source.key}.o"
        aside = target.with_suffix(f".{os.getpid()}.tmp.o")
        command = [
            *source.compiler.command,
            *source.compiler.flags,
            f"-I{root}",
            "-c",
            str(source.path),
            "-o",
            str(aside),
        ]
        try:
            name = source.path.relative_to(root)
            _run(command, f"Compiling {name}", cache / "logs" / f"{source.path.name}.log")
            if _object_key(source.path, source.compiler, source_root().resolve(), {}) != source.key:
                raise BuildError(
                    f"{name} or a header of it was edited while it was being compiled; start again."
                )
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
        return name

    start = time.monotonic()
    jobs = int(os.environ.get("MAX_JOBS") or min(len(missing) or 1, os.cpu_count() or 1))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(compile_one, source) for source in missing]
        try:
            for count, task in enumerate(concurrent.futures.as_completed(tasks), 1):
                name = task.result()
                if verbose:
                    _say(f"  [{count}/{len(missing)}] {name} ({time.monotonic() - start:.0f} s)")
        except BuildError:
            for task in tasks:
                task.cancel()
            raise


def build(flavour: str = "host", *, verbose: bool = True) -> Path:
    """Build one flavour of the native module if the cache lacks it, and return the path of the shared object.

    Safe when several processes call it at once (one builds, the others wait). Raises BuildError with the compiler's
    first errors and the path of the log.
    """
    sources = _sources(flavour)
    whole = hashlib.sha256("".join(s.key for s in sources).encode()).hexdigest()[:16]
    tag = f"{flavour}-torch{torch.__version__.replace('+', '-')}-{sys.implementation.cache_tag}-{whole}"
    cache = cache_root()
    module = cache / "modules" / tag / f"{MODULE_NAME}.so"
    if module.is_file():
        os.utime(module)
        return module
    objects = cache / "objects"
    try:
        for folder in (objects, module.parent):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"The build cache {cache} cannot be written ({error.strerror}); set MGPU_CACHE to a folder of yours."
        ) from error
    with _locked(cache / "lock", verbose):
        if module.is_file():  # somebody else built it while we waited
            return module
        start = time.monotonic()
        if verbose:
            left = sum(not (objects / f"{s.key}.o").is_file() for s in sources)
            _say(
                f"building the native module ({flavour}) for torch {torch.__version__}: {left} of {len(sources)} files"
            )
        _compile(sources, objects, cache, verbose)
        aside = module.with_suffix(f".{os.getpid()}.tmp")
        try:
            linker = host_compiler(flavour).command
            parts = [str(objects / f"{s.key}.o") for s in sources]
            command = [*linker, "-shared", *parts, *_link_flags(flavour), "-o", str(aside)]
            _run(command, "Linking the native module", cache / "logs" / "link.log")
            os.replace(aside, module)
        finally:
            aside.unlink(missing_ok=True)
        for source in sources:
            os.utime(objects / f"{source.key}.o")
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
def load(flavour: str = "host") -> ModuleType:
    """Build the native module if needed and import it. Only one flavour can be loaded into a process."""
    path = build(flavour)
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
    parser.add_argument(
        "--objects", action="store_true", help="compile the .cu files only, for use on another machine"
    )
    default = "cuda" if torch.cuda.is_available() else "host"
    parser.add_argument("--flavour", choices=FLAVOURS, default=default, help="default here: %(default)s")
    arguments = parser.parse_args()
    if arguments.clean:
        shutil.rmtree(cache_root(), ignore_errors=True)
    try:
        if arguments.objects:
            objects = cache_root() / "objects"
            objects.mkdir(parents=True, exist_ok=True)
            _compile(
                [s for s in _sources("cuda") if s.path.suffix == ".cu"], objects, cache_root(), verbose=True
            )
            print(objects)
        else:
            print(build(arguments.flavour))
    except BuildError as error:
        sys.exit(f"mgpu-splat-build: {error}")


if __name__ == "__main__":
    main()
