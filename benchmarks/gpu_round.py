# SPDX-License-Identifier: Apache-2.0
"""One round on a GPU machine: build, check, time. Everything goes to files in a folder; a short table is printed last.

    python benchmarks/gpu_round.py FOLDER [STEP ...]

Steps, in this order unless chosen: build, smoke, device (tests on meshes of one GPU, and of all), managed, opinfo, bench.
`device=0,0,0` is the step on that mesh alone. A step that takes too long is ended; the others go on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable

SMOKE = """
import time, torch, logging
logging.basicConfig(level=logging.INFO)
import ns_mgpu_splat
start = time.time(); ns_mgpu_splat.init(); print('init', round(time.time() - start, 2), 's', torch.mgpu.mesh())
x = torch.arange(10., device='mgpu'); print((x * 2 + 1).sum().item())
w = torch.randn(64, 64, device='mgpu', requires_grad=True)
(w @ w).relu().sum().backward(); print('grad', w.grad.norm().item())
big = torch.rand(1 << 26, device='mgpu'); print('placement', torch.mgpu.placement(big).unique().tolist())
print('sum', (big * 2).sum().item(), torch.mgpu.memory_stats())
conv = torch.nn.Conv2d(3, 8, 3).to('mgpu'); conv(torch.randn(2, 3, 16, 16, device='mgpu')).sum().backward()
torch.mgpu.synchronize(); print('smoke ok')
"""


Run = tuple[str, list[str], dict[str, str], int]  # name, command, environment, seconds it may take


def steps(gpus: int, step: str) -> list[Run]:
    """The runs of one step."""
    kind, _, mesh = step.partition("=")
    every = ",".join(map(str, range(gpus)))
    meshes = [mesh] if mesh else ["0,0,0", *([every] if gpus > 1 else []), "0", "0,0,0,0"]
    database = "tests/device/test_gpu.py::test_operators_give_plain_cudas_values_and_gradients"
    tests = [PYTHON, "-m", "pytest", "-q", "--timeout=60", "--maxfail=25", "--tb=short", "-m", "not slow"]
    # in two processes: a crash in one leaves the other; free memory is compared in the first alone
    halves = {
        "gpu": [*tests, "tests/device/test_gpu.py", f"--deselect={database}"],
        "rest": [*tests, "tests/device", "--ignore=tests/device/test_gpu.py"],
    }
    need = {"MGPU_REQUIRE_GPU": "1"}
    if kind == "build":
        command = [PYTHON, "-m", "ns_mgpu_splat.device.build", "--flavour"]
        return [
            (f"build {flavour}", [*command, flavour], {}, 300)
            for flavour in ([mesh] if mesh else ["cuda", "host"])
        ]
    if kind == "smoke":
        return [
            (
                f"smoke {mesh} {memory}",
                [PYTHON, "-c", SMOKE],
                {"MGPU_DEVICES": mesh, "MGPU_MEMORY": memory},
                60,
            )
            for mesh in ([mesh] if mesh else dict.fromkeys(["0", every]))
            for memory in ("vmm", "managed")
        ]
    if kind in ("device", "managed"):
        memory = {"MGPU_MEMORY": "managed"} if kind == "managed" else {}
        return [
            (f"{kind} {mesh} {half}", command, {"MGPU_DEVICES": mesh, **memory, **need}, 150)
            for mesh in (meshes if kind == "device" else [mesh or "0,0,0"])
            for half, command in halves.items()
        ]
    if kind == "opinfo":
        options = ["--timeout=0", "-s", database]
        return [("opinfo", [*tests, *options], {"MGPU_DEVICES": mesh or "0,0,0", **need}, 300)]
    if kind == "bench":
        command = [PYTHON, "benchmarks/device.py", "--seconds", "0.15", "--devices"]
        chosen = [mesh] if mesh else list(dict.fromkeys(["0,0,0,0", every]))
        return [(f"bench {mesh}", [*command, mesh], {}, 120) for mesh in chosen]
    raise SystemExit(f"gpu_round: there is no step {step!r}")


def main() -> int:
    """Run the steps; 0 if all went well."""
    import torch

    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    lines: list[str] = []
    bad = 0
    with (folder / "log.txt").open("w") as log:
        for step in chosen or ["build", "smoke", "device", "managed", "opinfo", "bench"]:
            for name, command, environment, limit in steps(gpus, step):
                print(f"\n==== {name}", file=log, flush=True)
                start = time.monotonic()
                try:
                    done = subprocess.run(
                        command,
                        cwd=ROOT,
                        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        timeout=limit,
                    )
                    output, code = done.stdout, done.returncode
                except subprocess.TimeoutExpired as late:
                    output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
                    code = 124
                print(output, file=log, flush=True)
                bad += code != 0
                tail = [line for line in output.splitlines() if line.strip()][-1:] or [""]
                failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", output, re.M)
                lines.append(f"{name:22s} exit {code} {time.monotonic() - start:5.0f} s  {tail[0][:90]}")
                lines += [f"    {test}" for test in failed[:12]]
                if code and not failed:
                    lines += [f"    {line[:160]}" for line in output.splitlines()[-6:]]
                if step.startswith("bench"):
                    lines += output.splitlines()
                if step.startswith("opinfo"):
                    lines += [
                        line[:150]
                        for line in output.splitlines()
                        if line.startswith("FAIL ") or "operators" in line
                    ][:30]
    print("\n".join(lines))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
