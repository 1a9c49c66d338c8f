# SPDX-License-Identifier: Apache-2.0
"""Run the test suite in groups, each in a process of its own, and add up the counts.

One process has one mesh and one accelerator, so the same tests run several times with another MGPU_DEVICES. The last
line is the sum: `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
        return [
            # the tests of the CPU spine and those of GPUs alone, on every mesh
            *(Group(f"gpu {mesh}", ["-m", "not slow", *rooms], mesh, need) for mesh in meshes),
            Group(
                "gpu 0,0,0, managed",
                ["-m", "not slow", "tests/device"],
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
    fast = ["-m", "not slow and not gpu"]
    return [
        Group("device and splats, cpu:1", [*fast, "tests/device", "tests/splats"], "cpu:1"),
        Group("device and splats, cpu:3", [*fast, "tests/device", "tests/splats"], "cpu:3"),
        Group("partition, cpu:4", [*fast, "tests/partition"], "cpu:4"),
        Group(
            "everything else",
            [*fast, "tests", *(f"--ignore=tests/{room}" for room in ("device", "splats", "partition"))],
            None,
        ),
    ]


def run(group: Group, extra: list[str]) -> tuple[dict[str, int], int]:
    """Run one group; its output is shown as it comes. Returns the counts of pytest's last line and the exit code."""
    environment = {**os.environ, **group.environment}
    environment.pop("MGPU_DEVICES", None)
    if group.devices is not None:
        environment["MGPU_DEVICES"] = group.devices
    print(f"\n== {group.name} ==", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", *group.arguments, *extra]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.strip():
            last = line
    code = process.wait()
    counts = {
        word.rstrip("s"): int(count)
        for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    return counts, code


def main() -> int:
    """Exit code 0 only if every group passed and at least one test ran; with --gpu, skips for lack of a GPU fail too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true", help="tests marked slow")
    parser.add_argument(
        "--gpu", action="store_true", help="device and splat tests on meshes 0; 0,0,0; 0,0,0,0"
    )
    parser.add_argument("rest", nargs="*", help="more arguments for pytest")
    arguments, unknown = parser.parse_known_args()
    total = {"passed": 0, "failed": 0, "skipped": 0}
    failed = False
    start = time.monotonic()
    lines = []
    for group in groups(slow=arguments.slow, gpu=arguments.gpu):
        began = time.monotonic()
        counts, code = run(group, [*arguments.rest, *unknown])
        failed |= code not in (0, NOTHING_FOUND)
        total["passed"] += counts.get("passed", 0)
        bad = counts.get("failed", 0) + counts.get("error", 0)
        total["failed"] += bad or int(code not in (0, NOTHING_FOUND))  # a run that died has no counts
        total["skipped"] += counts.get("skipped", 0)
        lines.append(f"{group.name}: exit {code}, {counts}, {time.monotonic() - began:.0f} s")
    print("\n" + "\n".join(lines))
    print(f"suite took {time.monotonic() - start:.0f} s")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if failed or total["passed"] == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
