# SPDX-License-Identifier: Apache-2.0
"""One round on a GPU machine: build, time, check. Everything goes to files in a folder; a short table is printed last.

    python benchmarks/gpu_round.py FOLDER [--seconds S] [STEP ...]

Steps: build; timing, each alone on the first GPU: stages, fast, peer (gsplat in $MGPU_PEER_SITE), caliterra, export (of what
that trained), memory, bench, whole (tests that take all memory); checks, four at a time a GPU, on the first one after all
timing: splats, device, apart (both again, each shard of one GPU counting as a GPU of its own), partition, managed, opinfo,
large, sanitize.
`device=0,0,0` is a step on that mesh alone, of one GPU unless it names two. Without steps: all. GPU time is dear: a run
that takes too long is ended, what does not fit into S seconds is left out and said so, and a run that fails does not stop
the others.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from run_suite import APART

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
STEPS = (
    *("build", "stages", "fast", "peer", "caliterra", "export", "memory", "bench", "whole"),
    *("splats", "device", "apart", "partition", "managed", "opinfo", "large", "sanitize"),
)
TOGETHER = 4  # checks at a time on a GPU: many processes on one GPU take turns, and all are slow
NEED = {"MGPU_REQUIRE_GPU": "1", "OMP_NUM_THREADS": "2"}  # the host's part of many tests at a time
METHODS = {"NERFSTUDIO_METHOD_CONFIGS": "mgpu-splat=ns_mgpu_splat.nerfstudio.config:mgpu_splat"}


@dataclass(frozen=True)
class Run:
    """One process."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    limit: int = 100
    """Seconds it may take."""
    kind: str = "check"
    """build (all at once, first), alone (in turn) or check (some at a time, last)."""
    shown: int = 1
    """Lines of its output in the table."""
    root: Path = ROOT
    """The checkout that it runs in and imports from."""

    @property
    def every_gpu(self) -> bool:
        """Whether its mesh names more than one GPU."""
        return len(set(self.environment.get("MGPU_DEVICES", "0").split(","))) > 1


def tests(name: str, arguments: list[str], mesh: str, limit: int, **environment: str) -> Run:
    """A run of pytest on a mesh."""
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", "--tb=short"]
    wanted = ["-m", "not slow and not whole_gpu", *arguments]  # of two -m the later counts
    return Run(f"{name} {mesh}", [*command, *wanted], {"MGPU_DEVICES": mesh, **NEED, **environment}, limit)


def runs_of(step: str, folder: Path, gpus: int) -> list[Run]:
    """The runs of one step."""
    kind, _, mesh = step.partition("=")
    every = ",".join(map(str, range(gpus)))
    meshes = [mesh] if mesh else ["0", "0,0,0", "0,0,0,0", *([every] if gpus > 1 else [])]
    stages, kept = folder / "stages", folder / "caliterra"
    database = "tests/device/test_gpu.py::test_operators_give_plain_cudas_values_and_gradients"
    elsewhere = [f"--deselect={database}", "--ignore=tests/device/test_apart.py"]  # with their own steps
    one = {"MGPU_DEVICES": mesh or "0"}
    if kind == "build":
        build = [PYTHON, "-m", "ns_mgpu_splat.device.build", "--flavour"]
        return [
            Run("build cuda", [*build, "cuda"], limit=200, kind="build"),
            Run("build host", [*build, "host"], limit=200, kind="build"),
            Run(
                "build stages",
                ["bash", "tests/cuda/build.sh", str(stages)],
                {"JOBS": "8"},
                200,
                "build",
            ),
        ]
    if kind == "stages":
        check = f"{stages}/check_stages"
        return [
            Run("stages", [check, "check"], limit=60, kind="alone"),
            Run("stages, apart", [check, "apart"], APART, 90),
            Run("stages, apart, late", [check, "apart", "8", "300"], APART, 180),
        ]
    if kind in ("fast", "peer"):
        command = [PYTHON, "benchmarks/fast_step.py", "--json", str(folder / f"{kind}.json")]
        if kind == "fast":
            return [Run("fast step", command, one, 60, "alone", 24)]
        site = os.environ.get("MGPU_PEER_SITE")
        peer = [*command, "--quick", "--only", "times", "--peer", "gsplat", "--peer-site", site or ""]
        return [Run("fast step, gsplat", peer, one, 150, "alone", 30)] if site else []
    if kind == "caliterra":
        command = [PYTHON, "benchmarks/caliterra.py", "--steps", "7000", "--seeds", "42", "43", "44"]
        return [
            Run(
                "caliterra",
                [*command, "--keep", str(kept), "--json", str(folder / "caliterra.json")],
                {**one, **METHODS},
                240,
                "alone",
                10,
            )
        ]
    if kind == "memory":
        command = [PYTHON, "benchmarks/memory.py", "--only", "growth,moves,pool,files"]
        return [Run("memory", command, {**one, "MGPU_BENCH_FOLDER": str(folder)}, 90, "alone", 30)]
    if kind == "bench":
        command = [PYTHON, "benchmarks/device.py", "--seconds", "0.05", "--devices", mesh or "0,0,0,0"]
        return [Run("operators", command, limit=60, kind="alone", shown=60)]
    if kind == "splats":
        return [
            tests("splats", ["tests/splats", "--ignore=tests/splats/test_large_gpu.py"], m, 240)
            for m in meshes
        ]
    if kind == "device":
        return [tests("device", ["tests/device", *elsewhere], m, 240) for m in meshes]
    if kind == "apart":
        rooms = {
            "splats": ["--timeout=120", "tests/splats", "--ignore=tests/splats/test_large_gpu.py"],
            "device": ["--timeout=120", "tests/device", f"--deselect={database}"],
        }
        late = {"MGPU_TEST_LATE_GPU": "8:300"}
        return [
            tests("apart", ["--timeout=120", "tests/device/test_apart.py"], "0", 300),
            *(
                tests(
                    f"apart{', late' if more else ''}: {room}",
                    arguments,
                    mesh or "0,0,0",
                    400,
                    **APART,
                    **more,
                )
                for more in ({}, late)
                for room, arguments in rooms.items()
            ),
        ]
    if kind == "partition":
        sizes = "200000 320 208 4 8"  # rows, image, shards
        return [tests("partition", ["tests/partition"], mesh or "0,0,0,0", 240, MGPU_PLACEMENT_TEST=sizes)]
    if kind == "whole":
        alone = ["tests/device", "-m", "whole_gpu"]
        return [
            replace(tests("whole", alone, m, 90), kind="alone") for m in ([mesh] if mesh else ["0", "0,0,0"])
        ]
    if kind == "managed":
        chosen = [mesh] if mesh else ["0", "0,0,0"]
        return [tests("managed", ["tests/device", *elsewhere], m, 240, MGPU_MEMORY="managed") for m in chosen]
    if kind == "opinfo":
        return [tests("opinfo", ["--timeout=0", "-s", database], mesh or "0,0,0", 300)]
    if kind == "large":
        return [
            tests("large", ["tests/splats/test_large_gpu.py"], m, 120)
            for m in ([mesh] if mesh else ["0", "0,0,0"])
        ]
    if kind == "sanitize":
        return [
            Run(tool, ["bash", "tests/sanitize.sh", str(stages)], {"TOOLS": tool}, 250, shown=8)
            for tool in ("memcheck", "racecheck")
        ]
    if kind == "export":
        script = (
            f"config={kept}/caliterra/mgpu-splat/seed-42/config.yml; "
            f"{PYTHON} -m nerfstudio.scripts.eval --load-config $config --output-path {folder}/eval.json && "
            f"{PYTHON} -m ns_mgpu_splat.nerfstudio.exporter gaussian-splat --load-config $config --output-dir {folder}/ply && "
            f"ls -l {folder}/ply && head -c 300 {folder}/eval.json"
        )
        return [Run("eval and export", ["bash", "-c", script], {**one, **METHODS}, 120, "alone", 12)]
    raise SystemExit(f"gpu_round: there is no step {step!r}; there are {', '.join(STEPS)}.")


def execute(run: Run, folder: Path, end: float, gpu: int | None = None) -> tuple[list[str], bool]:
    """Run it on one GPU or seeing all, within its limit and before `end`; its lines of the table, and whether it failed."""
    left = end - time.monotonic()
    if left < 5:
        return [f"{run.name:22s} left out: no time"], True
    start = time.monotonic()
    log = folder / (re.sub(r"[^A-Za-z0-9]+", "_", run.name) + ".txt")
    path = ":".join(part for part in (str(run.root), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **run.environment}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    with log.open("w") as out:
        try:
            code = subprocess.run(
                run.command,
                cwd=run.root,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=min(run.limit, left),
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        except OSError as error:
            out.write(str(error))
            code = 127
    output = log.read_text(errors="replace")
    written = [line for line in output.splitlines() if line.strip()]
    lines = [
        f"{run.name:22s} exit {code} {time.monotonic() - start:5.0f} s  {written[-1][:90] if written else ''}"
    ]
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", output, re.M)
    bad = [line[:150] for line in written if line.startswith(("BAD ", "FAIL "))]
    lines += [f"    {line}" for line in [*failed[:12], *bad[:12]]]
    if run.shown > 1:
        lines += written[-run.shown :]
    elif code and not failed and not bad:
        lines += [f"    {line[:160]}" for line in written[-6:]]
    return lines, code != 0


def execute_all(runs: Iterable[Run], folder: Path, end: float, gpus: int) -> tuple[list[str], int]:
    """Builds first, then timing on the first GPU beside checks on the others; the table, and how many runs failed."""
    runs = list(runs)
    slots: SimpleQueue[int] = SimpleQueue()  # of GPUs, for checks

    def give(gpu: int) -> None:
        for _ in range(TOGETHER):
            slots.put(gpu)

    def check(run: Run) -> tuple[list[str], bool]:
        gpu = slots.get()
        try:
            return execute(run, folder, end, None if run.every_gpu else gpu)
        finally:
            slots.put(gpu)

    def time_in_turn() -> list[tuple[list[str], bool]]:
        try:
            return [execute(run, folder, end, 0) for run in runs if run.kind == "alone"]
        finally:
            give(0)

    for gpu in range(1, gpus):
        give(gpu)
    with ThreadPoolExecutor(TOGETHER * max(gpus, 1) + 4) as pool:
        results = list(
            pool.map(lambda run: execute(run, folder, end), (r for r in runs if r.kind == "build"))
        )
        timing = pool.submit(time_in_turn)
        checks = [pool.submit(check, run) for run in runs if run.kind == "check"]
        results += [*timing.result(), *(future.result() for future in checks)]
    return [line for lines, _ in results for line in lines], sum(failed for _, failed in results)


def main() -> int:
    """Run the steps; 0 if all went well."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where all output goes")
    parser.add_argument("steps", nargs="*", default=STEPS, help="which steps, in this order")
    parser.add_argument("--seconds", type=float, default=3600, help="end the round after so long")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    gpus = torch.cuda.device_count()
    runs = [run for step in arguments.steps for run in runs_of(step, folder, gpus)]
    lines, failures = execute_all(runs, folder, end, gpus)
    (folder / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
