# SPDX-License-Identifier: Apache-2.0
"""Commands of Nerfstudio in processes of their own that begin at once: importing it takes ten seconds, a fork does not.

As a module: `Forked`, for tests. As a program: a process that has imported everything. It reads an order as a JSON line,
forks, answers with the child's process number, and with its wait status once it has ended. Orders name a `kind` and its
`words`: one of Nerfstudio's commands, `driver` (several command lines, driver.py), `life` (lives.py), `step_stats`
(step_stats.py), or, for test_forked.py, `state` and `sleep`.

A fork copies one thread only: whatever lock another one holds then stays locked in the child for ever. So the process that
forks has one thread: it imports, and computes nothing; the pool of numpy's linear algebra, which begins with its import,
is held to one (OPENBLAS_NUM_THREADS). The native module is loaded by the children. test_forked.py asks for all that.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

DEFAULTS = {"MGPU_DEVICES": "cpu:1", "COLUMNS": "200"}  # of the environment: one host shard, wide lines
ENTRY = {
    "ns-train": "nerfstudio.scripts.train",
    "ns-eval": "nerfstudio.scripts.eval",
    "ns-render": "nerfstudio.scripts.render",
    "ns-export": "nerfstudio.scripts.exporter",
    "ns-viewer": "nerfstudio.scripts.viewer.run_viewer",
}
IMPORTED = (
    *ENTRY.values(),
    "torch.utils.tensorboard",
    "driver",
    "lives",
    "step_stats",
    *(f"ns_mgpu_splat.nerfstudio.{name}" for name in ("trainer", "model", "datamanager", "config")),
)


class Hung(AssertionError):
    """A command did not end in time; its threads have said on its stderr where they were, and it was killed."""


class Forked:
    """The process that forks, and at most one command at work. Starts when it is first used; use as a context manager."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment | {"OPENBLAS_NUM_THREADS": "1"}
        self.process: subprocess.Popen[bytes] | None = None
        self.child: int | None = None
        self.unread = b""

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop()
            self.process.kill()
            self.process.wait()

    def start(self, order: dict[str, Any], output: Path, errors: Path | None = None) -> int:
        """Begin a command; what a failed test has left is ended first. Returns the process number.

        Args:
            order: kind, words, cwd, env (all of it).
            output, errors: where stdout and stderr go; None: stderr, too, goes to `output`.
        """
        seconds = 120.0
        if self.process is None:
            seconds = 900.0  # if it has to build the native module
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self.environment,
                bufsize=0,
            )
        self.stop()
        files = {"stdout": str(output), "stderr": None if errors is None else str(errors)}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order | files).encode() + b"\n")
        self.child = int(self._answer(seconds))
        return self.child

    def wait(self, seconds: float) -> int:
        """Wait for the end of the command: its exit code, negative for a signal. Raises Hung."""
        assert self.child is not None
        try:
            status = int(self._answer(seconds))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGUSR1)
            time.sleep(1)
            self.stop()
            raise Hung(f"no end after {seconds:g} s") from None
        self.child = None
        return os.waitstatus_to_exitcode(status)

    def stop(self) -> None:
        """End what is still at work."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody asked
                os.kill(self.child, signal.SIGKILL)
            self._answer(60)
            self.child = None

    def _answer(self, seconds: float) -> bytes:
        assert self.process is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self.unread:
            if not select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            got = self.process.stdout.read(4096)
            assert got, f"the process that forks has ended: {self.process.wait()}"
            self.unread += got
        line, _, self.unread = self.unread.partition(b"\n")
        return line


def other_threads() -> list[str]:
    """Names of this process's threads but the first."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            names.append((task / "comm").read_text().strip())
    return names


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however it does: no run is left behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def obey(order: dict[str, Any]) -> NoReturn:
    """In the child: become the command, to its end as the interpreter's."""
    end_with_parent()
    out = os.open(order["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    err = out
    if order["stderr"] is not None:
        err = os.open(order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(file, number)
    faulthandler.register(signal.SIGUSR1)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    kind, words = order["kind"], order["words"]
    if kind == "life":
        import_module("lives").live(order)
    elif kind == "driver":
        import_module("driver").drive(words)
    elif kind == "step_stats":
        import_module("step_stats").print_stats(*words)
    elif kind == "state":
        native = any(name.endswith("_mgpu") for name in sys.modules)
        cuda = import_module("torch.cuda")._is_in_bad_fork()
        print(json.dumps({"threads": order["threads"], "native": native, "cuda": cuda}))
    elif kind == "sleep":  # for the tests of this file
        time.sleep(float(words[0]))
    else:
        sys.argv = [kind, *words]
        import_module("ns_mgpu_splat.nerfstudio.tools").watch(kind)  # as config.py does in a command
        import_module(ENTRY[kind]).entrypoint()
    sys.exit(0)


def orders() -> Iterator[str]:
    """Lines of stdin, one at a time: nothing of the next is in the child's memory."""
    while line := sys.stdin.readline():
        yield line


def serve() -> None:
    """Import, then fork for each order."""
    end_with_parent()
    # what libraries print while they are imported is no answer: Nerfstudio says which methods it finds in its variables
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_module("ns_mgpu_splat.nerfstudio.exporter").make_mesh_tools_optional()
    for name in IMPORTED:
        import_module(name)
    import_module("driver").parse(["mgpu-splat", "--data", "x"])  # half a second less in each child
    # where nobody has built it yet (on a GPU machine the other flavour is): a minute that is no part of any run's time
    import_module("ns_mgpu_splat.device.build").build("host")
    threads = other_threads()
    for text in orders():
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            answers.close()
            obey(json.loads(text) | {"threads": threads})
        print(child, file=answers, flush=True)
        with contextlib.suppress(ChildProcessError):
            print(os.waitpid(child, 0)[1], file=answers, flush=True)


if __name__ == "__main__":
    serve()
