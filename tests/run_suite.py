# SPDX-License-Identifier: Apache-2.0
"""Run the test suite in groups, each in a process of its own, and add up the counts.

One process has one mesh and one accelerator, so the same tests run several times with another MGPU_DEVICES. The groups of
the fast suite run side by side, as many as there are cores; what a group prints is shown in one piece when it has ended.
The last line is the sum: `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = (  # of tests/nerfstudio, so that the rest of it can run beside them
    "test_exposure_runs.py",
    "test_kill.py",
    "test_resume.py",
    "test_signals.py",
    "test_train.py",
)
# each shard of one GPU counts as a GPU of its own, with a queue for each stream; benchmarks/gpu_round.py takes it from here
APART = {"MGPU_TEST_APART": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
MOST_AT_ONCE = 6  # groups; each takes up to 3 GB of memory
NOTHING_FOUND = (
    5  # pytest's exit code: no room but those named has tests of the kind (all runs together must have some)
)


@dataclass(frozen=True)
class Group:
    """One run of pytest: a name, what to collect, and the mesh it runs on."""

    name: str
    arguments: list[str]
    devices: str | None
    environment: dict[str, str] = field(default_factory=dict)


def gpu_count() -> int:
    """GPUs of this machine, without taking a context on them here."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout or 0)


def groups(*, slow: bool, gpu: bool) -> list[Group]:
    """The runs of one command; see the Makefile for what each command is for."""
    if gpu:
        rooms = [room for room in ("tests/device", "tests/splats") if (ROOT / room).is_dir()]
        need = {"MGPU_REQUIRE_GPU": "1"}
        meshes = ["0", "0,0,0", "0,0,0,0", *(["0,1"] if gpu_count() > 1 else [])]
        again = "not slow and not any_mesh"
        return [
            # the tests of the CPU spine and those of GPUs alone, on every mesh
            Group(f"gpu {meshes[0]}", ["-m", "not slow", *rooms], meshes[0], need),
            *(Group(f"gpu {mesh}", ["-m", again, *rooms], mesh, need) for mesh in meshes[1:]),
            # the order between GPUs, on one; and again with one of them late
            *(
                Group(
                    f"gpu 0,0,0, apart{', late' if late else ''}",
                    ["-m", again, *rooms],
                    "0,0,0",
                    need | APART | late,
                )
                for late in ({}, {"MGPU_TEST_LATE_GPU": "8:300"})
            ),
            Group(
                "gpu 0,0,0, managed",
                ["-m", again, "tests/device"],
                "0,0,0",
                {**need, "MGPU_MEMORY": "managed"},
            ),
            Group(
                "gpu 0, managed: memory",
                [
                    "tests/device/test_gpu.py",
                    *(str(path) for path in sorted(ROOT.glob("tests/device/test_memory*.py"))),
                ],
                "0",
                {**need, "MGPU_MEMORY": "managed"},
            ),
            Group(
                "gpu 0,0,0,0: partition",
                ["-m", "not slow", "tests/partition"],
                "0,0,0,0",
                {**need, "MGPU_PLACEMENT_TEST": "200000 320 208 4 8"},  # on 8 shards, too
            ),
            Group(
                "gpu, elsewhere", ["-m", "gpu", "tests", *(f"--ignore={room}" for room in rooms)], "0", need
            ),
        ]
    if slow:
        return [Group("slow", ["-m", "slow and not gpu", "tests"], None)]
    fast, again = ["-m", "not slow and not gpu"], ["-m", "not slow and not gpu and not any_mesh"]
    rooms = ("device", "splats", "partition", "nerfstudio")
    runs = [f"tests/nerfstudio/{name}" for name in RUNS]
    # the longest first: while one of them runs, the others run beside it
    return [
        Group("nerfstudio: runs", [*fast, *runs], None),
        Group("device and splats, cpu:1", [*fast, "tests/device", "tests/splats"], "cpu:1"),
        Group("nerfstudio", [*fast, "tests/nerfstudio", *(f"--ignore={run}" for run in runs)], None),
        Group("device and splats, cpu:3", [*again, "tests/device", "tests/splats"], "cpu:3"),
        Group("everything else", [*fast, "tests", *(f"--ignore=tests/{room}" for room in rooms)], None),
        Group("partition, cpu:4", [*fast, "tests/partition"], "cpu:4"),
    ]


@dataclass(frozen=True)
class Result:
    """How a group ended: counts by "passed", "failed", "error", "skipped", exit code of pytest, seconds."""

    name: str
    counts: dict[str, int]
    code: int
    seconds: float = 0


class Run:
    """A group at work.

    Args:
        group: what runs. extra: more arguments for pytest.
        threads: of OpenMP, and so of torch and of the native module; None: as the environment says.
        live: show its output as it comes.
    """

    def __init__(self, group: Group, extra: list[str], threads: int | None, live: bool) -> None:
        self.group, self.live, self.began = group, live, time.monotonic()
        self.lines: list[str] = []
        environment = {**os.environ, **group.environment}
        environment.pop("MGPU_DEVICES", None)
        if group.devices is not None:
            environment["MGPU_DEVICES"] = group.devices
        if threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            environment.setdefault("OMP_WAIT_POLICY", "passive")  # a core that waits is another group's
        cache = re.sub(r"\W+", "-", group.name)  # what failed last, for --last-failed
        command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir=.pytest_cache/{cache}"]
        print(f"\n== {group.name} ==" if live else f"{group.name}: begun", flush=True)
        self.process = subprocess.Popen(
            [*command, *group.arguments, *extra],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if self.live:
                print(line, end="", flush=True)

    def ended(self) -> bool:
        """Whether it has; then its output is shown."""
        if self.process.poll() is None:
            return False
        self.reader.join(10)  # a process that the tests have left behind may hold the pipe
        self.show()
        return True

    def show(self) -> None:
        """Print what it has said, if that was not done as it came."""
        if not self.live:
            print(f"\n== {self.group.name} ==\n{''.join(self.lines)}", end="", flush=True)

    def result(self) -> Result:
        """Of a group that has ended; the counts are those of pytest's last line."""
        last = next((line for line in reversed(self.lines) if line.strip()), "")
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
        counts = {word.rstrip("s"): int(count) for count, word in found}
        return Result(self.group.name, counts, self.process.returncode, time.monotonic() - self.began)


def run_all(
    groups: list[Group], extra: list[str], jobs: int = 1, threads: int | None = None
) -> Iterator[Result]:
    """Run the groups, up to `jobs` of them at once, begun in order; how each ended, as they end."""
    waiting, running = list(groups), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Run(waiting.pop(0), extra, threads, live=jobs == 1))
            time.sleep(0.1)
            for run in [r for r in running if r.ended()]:
                running.remove(run)
                yield run.result()
    finally:  # interrupted: what was found so far is shown
        try:
            for run in running:
                run.process.send_signal(signal.SIGINT)
            for run in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(20)
        finally:  # interrupted once more: at once
            for run in running:
                run.process.kill()
        for run in running:
            run.reader.join(10)
            run.show()


def interrupt(*_: Any) -> None:
    """SIGTERM, and SIGHUP of a closed terminal, end the suite as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> int:
    """Exit code 0 only if every group passed and at least one test ran; with --gpu, skips for lack of a GPU fail too."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--slow", action="store_true", help="tests marked slow")
    parser.add_argument(
        "--gpu", action="store_true", help="device and splat tests on meshes 0; 0,0,0; 0,0,0,0"
    )
    parser.add_argument(
        "--jobs", type=int, help="groups at once; by default as many as cores, and one of --slow and --gpu"
    )
    arguments, more = parser.parse_known_args()  # what is left is pytest's, in its order
    cores = len(os.sched_getaffinity(0))
    jobs = arguments.jobs or (1 if arguments.slow or arguments.gpu else min(cores, MOST_AT_ONCE))
    total = {"passed": 0, "failed": 0, "skipped": 0}
    failed = False
    start = time.monotonic()
    lines = []
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # under nohup it is ignored
        signal.signal(signal.SIGHUP, interrupt)
    todo = groups(slow=arguments.slow, gpu=arguments.gpu)
    # two at least: what several threads of a shard can do wrong is to be found
    threads = None if jobs == 1 else max(2, cores // jobs)
    for end in run_all(todo, more, jobs, threads):
        bad = end.counts.get("failed", 0) + end.counts.get("error", 0)
        died = end.code not in (0, NOTHING_FOUND)
        failed |= died
        total["passed"] += end.counts.get("passed", 0)
        total["failed"] += bad or int(died)  # a run that died has no counts
        total["skipped"] += end.counts.get("skipped", 0)
        lines.append(f"{end.name}: exit {end.code}, {end.counts}, {end.seconds:.0f} s")
    print("\n" + "\n".join(lines))
    print(f"suite took {time.monotonic() - start:.0f} s")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if failed or total["passed"] == 0 else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
