# SPDX-License-Identifier: Apache-2.0
"""Runs of `ns-train` that can be killed and begun again quickly: importing Nerfstudio takes ten seconds, a fork does not.

As a module: `Lives`, for tests. As a program: the process that has imported everything; it reads a JSON line
{"arguments", "steps", "output"} for each life, forks, answers with the child's process number, and with its wait status
once it has ended. The child appends the number of each step that it has finished to the file `steps`. An argument
"fault:KIND:NUMBER" is no option of ns-train, but says what goes wrong (`break_something`).
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SECONDS = 120  # a life that says nothing for so long hangs


@dataclass
class Life:
    """One run, in its own process."""

    pid: int
    steps_file: Path
    output: Path

    def steps(self) -> list[int]:
        """The steps that it has finished, in order."""
        text = self.steps_file.read_text() if self.steps_file.exists() else ""
        return [int(line) for line in text.split("\n")[:-1]]

    def wait_for_step(self) -> None:
        """Wait until it has finished its first step."""
        deadline = time.monotonic() + SECONDS
        while not self.steps_file.exists() or self.steps_file.stat().st_size == 0:
            assert Path("/proc", str(self.pid)).exists(), self.output.read_text()[-3000:]
            assert time.monotonic() < deadline, self.output.read_text()[-3000:]
            time.sleep(0.01)


class Lives:
    """Starts runs one after the other. Use as a context manager."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.count = folder, environment, 0
        self.living: Life | None = None

    def __enter__(self) -> Lives:
        self.parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            cwd=self.folder,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.parent.kill()
        self.parent.wait()

    def begin(self, arguments: list[object]) -> Life:
        """Start `ns-train` with these arguments; a life that a failed test has left is ended first."""
        self.stop()
        self.count += 1
        steps, output = (self.folder / f"life-{self.count}.{kind}" for kind in ("steps", "log"))
        output.touch()
        line = {"arguments": [str(a) for a in arguments], "steps": str(steps), "output": str(output)}
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(json.dumps(line) + "\n")
        self.parent.stdin.flush()
        self.living = Life(int(self.parent.stdout.readline()), steps, output)
        return self.living

    def end(self) -> int:
        """Wait for the life that was begun: its exit code, negative for a signal."""
        assert self.parent.stdout is not None
        status = os.waitstatus_to_exitcode(int(self.parent.stdout.readline()))
        self.living = None
        return status

    def stop(self) -> None:
        """End what still lives."""
        if self.living is not None:
            os.kill(self.living.pid, signal.SIGKILL)
            self.end()


def live(line: dict) -> None:
    """In the child: run, and leave without what the parent has registered to do at its end."""
    output = os.open(line["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    steps = os.open(line["steps"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    iteration = MgpuSplatTrainer.train_iteration

    def counted(self: MgpuSplatTrainer, step: int):
        result = iteration(self, step)
        os.write(steps, f"{step}\n".encode())
        return result

    MgpuSplatTrainer.train_iteration = counted  # type: ignore[method-assign]
    arguments = [a for a in line["arguments"] if not a.startswith("fault:")]
    for fault in set(line["arguments"]) - set(arguments):
        _, kind, number = fault.split(":")
        break_something(kind, int(number))
    sys.argv = ["ns-train", *arguments]
    code = 1
    try:
        result = run(arguments)
        print(result["text"], flush=True)
        code = int(result["code"])
    finally:
        sys.stdout.flush()
        os._exit(code)


def break_something(kind: str, number: int) -> None:
    """Let a thing go wrong: in step `number`, or with `number` bytes of free disk."""
    if kind == "free":
        checkpoint.shutil.disk_usage = lambda _: type("usage", (), {"free": number})  # type: ignore[assignment]
        return
    if kind == "evaluation":
        score = MgpuSplatModel.get_image_metrics_and_images

        def slow(self: MgpuSplatModel, *arguments: object):
            print("evaluating", flush=True)
            time.sleep(0.5)
            return score(self, *arguments)

        MgpuSplatModel.get_image_metrics_and_images = slow  # type: ignore[method-assign]
        return
    iteration = MgpuSplatTrainer.train_iteration

    def broken(self: MgpuSplatTrainer, step: int):
        if step == number:
            if kind == "memory":
                raise torch.OutOfMemoryError("Shard 0 has no 3.1 GiB left")
            if kind == "native":
                raise RuntimeError("blend: an illegal memory access")
            if kind == "image":
                raise ImageError("images/0003.png cannot be read")
            if kind == "terminal":
                reader, pipe = os.pipe()
                os.close(reader)
                os.dup2(pipe, 1)
            if kind == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
            if kind == "nan":
                return StepResult(lambda: {"main_loss": math.nan}, lambda _: {})
            if kind in ("bad-rows", "half-bad"):  # no Gaussian can be drawn any more, or every second one
                table = self.pipeline.model.table
                with torch.no_grad():
                    table.means[:: 2 if kind == "half-bad" else 1] = math.nan
                    table.cells.forget()
            if kind == "sleep":
                time.sleep(600)
            if kind == "device":  # all that follows fails, too
                self.optimizers.flush = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
                raise RuntimeError("the device is lost")
        return iteration(self, step)

    MgpuSplatTrainer.train_iteration = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    # what libraries print while they are imported is no answer: Nerfstudio says which methods it finds in its variables
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch
    from driver import run

    from ns_mgpu_splat.data.images import ImageError
    from ns_mgpu_splat.nerfstudio import checkpoint
    from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel
    from ns_mgpu_splat.nerfstudio.steps import StepResult
    from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer

    for text in sys.stdin:
        child = os.fork()
        if child == 0:
            live(json.loads(text))
        print(child, file=answers, flush=True)
        print(os.waitpid(child, 0)[1], file=answers, flush=True)
