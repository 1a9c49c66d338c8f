# SPDX-License-Identifier: Apache-2.0
"""Runs of `ns-train` that can be killed and begun again quickly, as forks (forked.py), and in which a thing goes wrong.

The child appends the number of each step that it has finished to the file `steps`. An argument "fault:KIND:NUMBER" is no
option of ns-train, but says what goes wrong (`break_something`).
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import DEFAULTS, Forked, Hung

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

    def wait_for(self, what: Callable[[], bool], pause: float = 0.01) -> None:
        """Wait until something is so, looking every `pause` seconds; the test fails where that does not come."""
        deadline = time.monotonic() + SECONDS
        while not what():
            assert Path("/proc", str(self.pid)).exists(), f"it has ended\n{self.output.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"waited in vain\n{self.output.read_text()[-3000:]}"
            time.sleep(pause)

    def wait_for_step(self) -> None:
        """Wait until it has finished its first step."""
        self.wait_for(lambda: self.steps_file.exists() and self.steps_file.stat().st_size > 0)

    def wait_for_words(self, words: str) -> None:
        """Wait until it has said this."""
        self.wait_for(lambda: words in self.output.read_text())


class Lives:
    """Starts runs one after the other, on one host shard."""

    def __init__(self, folder: Path, forked: Forked) -> None:
        self.folder, self.forked, self.count = folder, forked, 0

    def begin(self, arguments: list[object]) -> Life:
        """Start `ns-train` with these arguments."""
        self.count += 1
        steps, output = (self.folder / f"life-{self.count}.{kind}" for kind in ("steps", "log"))
        output.touch()
        order = {
            "kind": "life",
            "words": [str(a) for a in arguments],
            "steps": str(steps),
            "cwd": str(self.folder),
            "env": {**os.environ, **DEFAULTS},
        }
        self.living = Life(self.forked.start(order, output), steps, output)
        return self.living

    def end(self) -> int:
        """Wait for the life that was begun: its exit code, negative for a signal."""
        try:
            return self.forked.wait(SECONDS)
        except Hung as hung:
            raise Hung(f"{hung}\n{self.living.output.read_text()[-9000:]}") from None


def live(order: dict[str, Any]) -> None:
    """In the child: run, and leave at once, without the interpreter's end."""
    from driver import run

    from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer

    steps = os.open(order["steps"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    iteration = MgpuSplatTrainer.train_iteration

    def counted(self: MgpuSplatTrainer, step: int):
        result = iteration(self, step)
        os.write(steps, f"{step}\n".encode())
        return result

    MgpuSplatTrainer.train_iteration = counted  # type: ignore[method-assign]
    arguments = [a for a in order["words"] if not a.startswith("fault:")]
    for fault in set(order["words"]) - set(arguments):
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
    import torch

    from ns_mgpu_splat.data.images import ImageError
    from ns_mgpu_splat.nerfstudio import checkpoint
    from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel
    from ns_mgpu_splat.nerfstudio.steps import StepResult
    from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer

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
                print("the step sleeps", flush=True)
                time.sleep(600)
            if kind == "device":  # all that follows fails, too
                self.optimizers.flush = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
                raise RuntimeError("the device is lost")
        return iteration(self, step)

    MgpuSplatTrainer.train_iteration = broken  # type: ignore[method-assign]
