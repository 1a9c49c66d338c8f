# SPDX-License-Identifier: Apache-2.0
"""Time operators on `mgpu` beside the plain device: CUDA for shards on GPUs, the CPU for shards on the host.

Each side is a process of its own (autograd on CUDA tensors is dead where `mgpu` is registered); both get ready first, and
then measure in turn, A B A B, so that what else the machine does falls on both. Prints one line a measurement: the better
of the two medians of each side, and plain / mgpu in per cent.

    python benchmarks/device.py [--devices 0,0,0,0] [--json FILE] [--mebibytes 1024] [--lock FILE]
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]

Run = tuple[Callable[[], object], int]  # what to time, and how many of it between two waits


def mgpu() -> Any:
    """`torch.mgpu`, which is there once the device is registered."""
    return vars(torch)["mgpu"]


def median(run: Callable[[], object], wait: Callable[[], None], seconds: float, inner: int) -> float:
    """Median time of one run in microseconds; `inner` runs between two waits."""
    run()
    wait()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        for _ in range(inner):
            run()
        wait()
        times.append((time.perf_counter() - start) / inner * 1e6)
    return statistics.median(times)


def large(device: str, mebibytes: int) -> dict[str, Run]:
    """Operands of `mebibytes` each."""
    count = mebibytes * (1 << 18)
    x = torch.rand(count // 64, 64, device=device)
    y = torch.rand(count // 64, 64, device=device)
    out = torch.empty_like(x)
    index = torch.randperm(count // 64, device=device)[: count // 256]
    quarter = y[: index.numel()]
    mask = x[:, 0] > 0.5
    weight = torch.rand(64, 64, device=device)
    parameter = nn.Parameter(torch.rand_like(x))
    parameter.grad = y
    optimizer = torch.optim.Adam([parameter], lr=1e-4, fused=True)
    runs: dict[str, Callable[[], object]] = {
        "add_": lambda: x.add_(y),
        "add out=": lambda: torch.add(x, y, out=out),
        "add": lambda: x + y,
        "exp": lambda: y.exp(),
        "mul scalar": lambda: x * 2.0,
        "mul_ scalar": lambda: out.mul_(1.0),
        "sum": lambda: x.sum(),
        "sum of rows": lambda: x.sum(1),
        "sum of columns": lambda: x.sum(0),
        "amax": lambda: x.amax(),
        "copy_": lambda: out.copy_(x),
        "to half": lambda: x.half(),
        "fill_": lambda: out.fill_(1.0),
        "uniform_": lambda: out.uniform_(),
        "normal_": lambda: out.normal_(),
        "index_select of a quarter": lambda: x.index_select(0, index),
        "x[index] of a quarter": lambda: x[index],
        "x[index] = of a quarter": lambda: out.index_put_((index,), quarter),
        "index_add_ of a quarter": lambda: out.index_add_(0, index, quarter),
        "gather of columns": lambda: torch.gather(x, 1, torch.zeros_like(x[:, :1], dtype=torch.int64)),
        "x[mask]": lambda: x[mask],
        "cat": lambda: torch.cat([x, y]),
        "linear": lambda: x @ weight,
        "_foreach_add_": lambda: torch._foreach_add_([x, out], [y, y]),
        "fused Adam": optimizer.step,
    }
    return {f"{name}, {mebibytes} MiB": (run, 1) for name, run in runs.items()}


def small(device: str) -> dict[str, Run]:
    """Operators that cost nothing but the way to them."""
    x = torch.rand(16, 4, device=device)
    y = torch.rand(16, 4, device=device)
    w = torch.rand(4, 4, device=device)
    index = torch.arange(4, device=device)
    p = nn.Parameter(torch.rand(16, 4, device=device))
    runs: dict[str, Callable[[], object]] = {
        "add": lambda: x + y,
        "add_": lambda: x.add_(y),
        "exp": lambda: x.exp(),
        "sum": lambda: x.sum(),
        "matmul": lambda: x @ w,
        "index_select": lambda: x.index_select(0, index),
        "view": lambda: x.view(4, 16),
        "slice": lambda: x[2:5],
        "empty": lambda: torch.empty(16, 4, device=device),
        "zeros": lambda: torch.zeros(16, 4, device=device),
        "copy_": lambda: x.copy_(y),
        "cat": lambda: torch.cat([x, y]),
        "item": lambda: x.sum().item(),
        "forward and backward of p.exp().sum()": lambda: p.exp().sum().backward(),
    }
    return {f"{name}, 256 B": (run, 200) for name, run in runs.items()}


def training(device: str) -> dict[str, Run]:
    """A step of a small convolution net."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 3, 3, padding=1),
    ).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step_on(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()

    images = torch.rand(4, 3, 128, 128).to(device)
    tiny = images[:1, :, :16, :16].contiguous()
    return {
        "step of a convolution net": (lambda: step_on(images), 1),
        "10 steps, one wait": (lambda: step_on(images), 10),
        "10 steps on 16x16, one wait": (lambda: step_on(tiny), 10),
    }


def memory() -> dict[str, Callable[[], object]]:
    """What only `mgpu` does: growing and moving 1 GiB. Each is timed once."""
    rows = 1 << 22
    x = mgpu().reserve((rows, 64), 2 * rows)
    shards = len(mgpu().mesh().shards)
    x.fill_(1.0)
    return {
        "grow 1 GiB by 100 MiB": lambda: mgpu().grow(x, rows + rows // 10),
        "move 1 GiB to the host": lambda: mgpu().to_host(x),
        "move 1 GiB back": lambda: mgpu().to_device(x),
        "move 1 GiB to the last shard": lambda: mgpu().place(x, shards - 1),
        "move one page": lambda: mgpu().to_host(x, [100]),
        "give caches back": mgpu().empty_cache,
        "empty of 4 GiB, fresh pages": lambda: torch.empty(1 << 32, dtype=torch.uint8, device="mgpu"),
        "empty of 4 GiB, kept pages": lambda: torch.empty(1 << 32, dtype=torch.uint8, device="mgpu"),
    }


def serve(name: str, mebibytes: int, seconds: float) -> None:
    """One side: get ready, say so, and then time what the other process asks for, line by line."""
    if name == "mgpu":
        import ns_mgpu_splat

        ns_mgpu_splat.init()
        wait: Callable[[], None] = mgpu().synchronize
    else:
        wait = torch.cuda.synchronize if name == "cuda" else lambda: None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    runs = {**small(name), **training(name), **large(name, mebibytes)}
    once = memory() if name == "mgpu" else {}
    for run, inner in runs.values():
        for _ in range(3 if inner > 1 else 1):
            run()
    wait()
    print(json.dumps([[*runs], [*once]]), flush=True)
    for line in sys.stdin:
        wanted = line.strip()
        if wanted in runs:
            run, inner = runs[wanted]
            taken = median(run, wait, seconds, inner)
        else:
            start = time.perf_counter()
            once[wanted]()
            wait()
            taken = (time.perf_counter() - start) * 1e6
        print(taken, flush=True)


class Side:
    """The process of one side."""

    def __init__(self, name: str, options: list[str], devices: str) -> None:
        environment = {**os.environ, "MGPU_DEVICES": devices, "PYTHONPATH": python_path()}
        command = [sys.executable, __file__, "--side", name, *options]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> Any:
        """The next line that it prints."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmarks/device.py: a side ended with exit code {self.process.wait()}")
        return json.loads(line)

    def time(self, wanted: str) -> float:
        """Microseconds of one measurement."""
        assert self.process.stdin
        self.process.stdin.write(wanted + "\n")
        self.process.stdin.flush()
        return float(self.answer())

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


def python_path() -> str:
    """With this checkout, which is not installed on a GPU machine, first."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> None:
    """Run both sides in turn and print them side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", help="mesh; default: MGPU_DEVICES")
    parser.add_argument(
        "--mebibytes", type=int, help="size of a large operand; default 1024, or 64 on the host"
    )
    parser.add_argument("--seconds", type=float, default=0.15, help="for one measurement")
    parser.add_argument("--only", default="", help="measurements whose name contains this")
    parser.add_argument("--lock", type=Path, help="hold this file's lock while measuring")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--side", choices=("mgpu", "cuda", "cpu"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    devices = (
        arguments.devices or os.environ.get("MGPU_DEVICES") or ("0" if torch.cuda.is_available() else "cpu:1")
    )
    mebibytes = arguments.mebibytes or (64 if devices.startswith("cpu") else 1024)
    if arguments.side:
        serve(arguments.side, mebibytes, arguments.seconds)
        return
    plain = "cpu" if devices.startswith("cpu") else "cuda"
    options = ["--mebibytes", str(mebibytes), "--seconds", str(arguments.seconds)]
    sides = {name: Side(name, options, devices) for name in (plain, "mgpu")}
    _ = sides[plain].answer()
    runs, once = sides["mgpu"].answer()
    results: dict[str, dict[str, float]] = {plain: {}, "mgpu": {}}
    if arguments.lock:
        held = arguments.lock.open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
    began = time.monotonic()
    for wanted in runs:
        if arguments.only not in wanted:
            continue
        for _turn in range(2):
            for name, side in sides.items():
                best = min(side.time(wanted), results[name].get(wanted, float("inf")))
                results[name][wanted] = best
    if not arguments.only:
        for wanted in once:
            results["mgpu"][wanted] = sides["mgpu"].time(wanted)
    took = time.monotonic() - began
    if arguments.lock:
        held.close()
    for side in sides.values():
        side.end()
    print(f"{'operator':40s} {plain + ' us':>11s} {'mgpu us':>11s} {'more us':>9s} {plain + '/mgpu':>10s}")
    for name, time_us in results["mgpu"].items():
        other = results[plain].get(name)
        if other is None:
            print(f"{name:40s} {'':11s} {time_us:11.1f}")
        else:
            print(f"{name:40s} {other:11.1f} {time_us:11.1f} {time_us - other:9.1f} {other / time_us:10.1%}")
    print(f"measured for {took:.0f} s")
    if arguments.json:
        machine = (
            torch.cuda.get_device_name() if plain == "cuda" else platform.processor() or platform.machine()
        )
        head = {"machine": machine, "torch": torch.__version__, "devices": devices, "unit": "microseconds"}
        arguments.json.write_text(json.dumps({**head, **results}, indent=1))


if __name__ == "__main__":
    main()
