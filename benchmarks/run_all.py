# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark of this folder in a process of its own; each prints a table and writes JSON to .bench/."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = ("render.py", "train_step.py", "device.py", "locality.py", "checkpoint.py")
HOST_MESHES = {"locality.py": "cpu:8"}  # else cpu:1
GPU_BENCHMARKS = ("fast_step.py", "memory.py")


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
    parser.add_argument("--gpu", action="store_true", help="on the GPUs of MGPU_DEVICES, default all of them")
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
    environment = dict(os.environ)
    mesh = os.environ.get("MGPU_DEVICES", "all GPUs" if arguments.gpu else "cpu:1")
    print(f"{machine()}, {time.strftime('%Y-%m-%d')}, MGPU_DEVICES={mesh}")
    failed = []
    for name in (*BENCHMARKS, *(GPU_BENCHMARKS if arguments.gpu else ())):
        target = arguments.output / name.replace(".py", ".json")
        print(f"\n== {name} ==", flush=True)
        command = [sys.executable, str(HERE / name), "--json", str(target)]
        if name == "fast_step.py" and arguments.peer_site:
            command += ["--peer", "gsplat", "--peer-site", str(arguments.peer_site)]
        if not arguments.gpu and "MGPU_DEVICES" not in os.environ:
            environment["MGPU_DEVICES"] = HOST_MESHES.get(name, "cpu:1")
        done = subprocess.run(command, env=environment)
        if done.returncode != 0:
            failed.append(name)
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'tables as JSON in ' + str(arguments.output)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
