# SPDX-License-Identifier: Apache-2.0
"""Building the native module: cached, rebuilt when a source changes, safe for two processes, clear when it cannot be done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# builds in a tree of its own: one C file that needs nothing of torch, so that each build takes a moment
DRIVER = """
import sys
from pathlib import Path
from ns_mgpu_splat.device import build
build.source_root = lambda: Path(sys.argv[1])
try:
    module = build.load()
    print(module.__file__, module.answer())
except build.BuildError as error:
    sys.exit(f"BuildError: {error}")
"""
MODULE = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(kAnswer); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_mgpu", "", -1, methods};
__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit__mgpu() { return PyModule_Create(&module); }
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with one module, and an empty build cache beside it."""
    root = tmp_path / "cuda tree"  # a path with a space
    root.mkdir()
    (root / "answer.h").write_text("constexpr long kAnswer = 41;\n")
    (root / "module.cpp").write_text(MODULE)
    (root / "other.cpp").write_text("int other_file() { return 1; }\n")
    return root


def start(tree: Path, **changes: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "MGPU_CACHE": str(tree.parent / "cache"), **changes}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tree)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    out, err = process.communicate(timeout=100)
    return out.strip(), err, process.returncode


def test_a_second_start_loads_from_the_cache_and_says_nothing(tree: Path) -> None:
    out, err, code = finish(start(tree))
    assert (code, out.split()[-1]) == (0, "41"), err
    assert "2 of 2 files" in err  # progress
    assert "[2/2]" in err
    again, err, code = finish(start(tree))
    assert (again, err, code) == (out, "", 0)


def test_a_changed_header_rebuilds_what_includes_it_and_nothing_else(tree: Path) -> None:
    first, _, _ = finish(start(tree))
    (tree / "answer.h").write_text("constexpr long kAnswer = 42;\n")
    out, err, code = finish(start(tree))
    assert (code, out.split()[-1]) == (0, "42")
    assert "1 of 2 files" in err
    (tree / "answer.h").write_text("constexpr long kAnswer = 41;\n")
    assert finish(start(tree)) == (first, "", 0)  # the old build is still there


def test_two_processes_at_once_build_once(tree: Path) -> None:
    results = [finish(process) for process in [start(tree) for _ in range(3)]]
    assert [code for _, _, code in results] == [0, 0, 0], results
    assert len({out for out, _, _ in results}) == 1
    assert sum("2 of 2 files" in err for _, err, _ in results) == 1, results


def test_a_build_that_was_killed_does_not_harm_the_next(tree: Path) -> None:
    slow = tree.parent / "slow-g++"
    slow.write_text('#!/bin/sh\ncase "$*" in *--version*) ;; *) sleep 30;; esac\nexec g++ "$@"\n')
    slow.chmod(0o755)
    process = start(tree, CXX=str(slow))
    assert process.stderr is not None
    assert "building the native module" in process.stderr.readline()
    process.kill()
    process.communicate()
    out, err, code = finish(start(tree))
    assert (code, out.split()[-1]) == (0, "41"), err


def test_no_compiler_is_one_sentence_that_says_what_to_install(tree: Path) -> None:
    out, err, code = finish(start(tree, PATH="/nonexistent", CXX=""))  # CXX may name one by its whole path
    assert (out, code) == ("", 1)
    assert err.count("\n") == 1
    assert err.startswith("BuildError: No C++ compiler was found (tried g++, c++, clang++)")
    assert "install g++" in err


def test_an_error_in_a_source_names_the_file_and_the_log(tree: Path) -> None:
    (tree / "other.cpp").write_text("int other_file( { return 1; }\n")
    _, err, code = finish(start(tree))
    assert code == 1
    assert "BuildError: Compiling other.cpp failed; the whole log is " in err
    log = Path(err.split("the whole log is ")[1].splitlines()[0].rstrip(":"))
    assert "other.cpp:1" in log.read_text()


def test_a_cache_that_cannot_be_written_names_the_variable_to_set(tree: Path) -> None:
    (tree.parent / "cache").write_text("a file where the folder should be")
    _, err, code = finish(start(tree))
    assert code == 1
    assert "cannot be written" in err
    assert "MGPU_CACHE" in err


def test_importing_the_package_builds_and_registers_nothing() -> None:
    check = (
        "import sys, ns_mgpu_splat, torch\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "assert '_mgpu' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
