# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks behind docs/benchmarks.md, each in a process of its own; each prints a table and writes JSON to .bench/.

With --gpu on the meshes that the tables there name: one GPU, or several shards of it. MGPU_DEVICES, if it is set, is the
mesh of all.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """One benchmark: its script, the mesh it runs on unless MGPU_DEVICES is set, options, and what sets its file apart."""

    script: str
    devices: str
    options: tuple[str, ...] = ()
    suffix: str = ""

    def json(self, folder: Path) -> Path:
        """Where its figures go."""
        return folder / (Path(self.script).stem + self.suffix + ".json")


HOST_RUNS = (
    Run("render.py", "cpu:1"),
    Run("train_step.py", "cpu:1"),
    Run("device.py", "cpu:1"),
    Run("locality.py", "cpu:8"),
    Run("checkpoint.py", "cpu:1"),
)
LOCALITY = ("--splats", "2000000", "--images", "40", "--size", "1280x720")
GPU_RUNS = (
    Run("render.py", "0"),
    Run("train_step.py", "0"),
    Run("fast_step.py", "0"),
    Run("caliterra.py", "0", ("--seeds", "42", "43", "44")),
    Run("device.py", "0,0,0,0"),
    Run("memory.py", "0"),
    Run("checkpoint.py", "0"),
    Run("row_order.py", "0", ("--table", "10000000")),
    Run("locality.py", "0", ("--tables", "machinery", "visibility", *LOCALITY)),
    Run("locality.py", ",".join("0" * 8), ("--tables", "links", *LOCALITY), "-links"),
)


def machine() -> str:
    """One line that names this machine: processor, cores, memory."""
    model = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def main() -> int:
    """Exit code 0 if every benchmark ran to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="those for GPUs")
    parser.add_argument(
        "--output", type=Path, default=HERE.parent / ".bench", help="folder for the JSON files"
    )
    parser.add_argument(
        "--peer-site",
        type=Path,
        default=os.environ.get("MGPU_PEER_SITE"),
        help="folder with gsplat 1.5.3, to be measured beside fast_step.py; default $MGPU_PEER_SITE",
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    mesh = os.environ.get("MGPU_DEVICES", "as named below")
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}, MGPU_DEVICES={mesh}")
    failed = []
    for run in GPU_RUNS if arguments.gpu else HOST_RUNS:
        environment = {"MGPU_DEVICES": run.devices, **os.environ}
        print(
            f"\n== {' '.join((run.script, *run.options))}, mesh {environment['MGPU_DEVICES']} ==", flush=True
        )
        command = [sys.executable, str(HERE / run.script), *run.options]
        command += ["--json", str(run.json(arguments.output))]
        if run.script == "fast_step.py" and arguments.peer_site:
            command += ["--peer", "gsplat", "--peer-site", str(arguments.peer_site)]
        done = subprocess.run(command, env=environment)
        if done.returncode != 0:
            failed.append(run.json(arguments.output).stem)
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'tables as JSON in ' + str(arguments.output)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
