# SPDX-License-Identifier: Apache-2.0
"""Time operators on `mgpu` beside the plain device: CUDA for shards on GPUs, the CPU for shards on the host.

Each side runs in a process of its own (autograd on CUDA tensors is dead where `mgpu` is registered). Prints one line a
measurement: medians, and plain / mgpu in per cent.

    python benchmarks/device.py [--devices 0,0,0,0] [--json FILE] [--mebibytes 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


def mgpu() -> Any:
    """`torch.mgpu`, which is there once the device is registered."""
    return vars(torch)["mgpu"]


def medians(run: Callable[[], object], wait: Callable[[], None], seconds: float, inner: int = 1) -> float:
    """Median time of one run in microseconds; `inner` runs between two waits."""
    for _ in range(3):
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


def large(device: str, wait: Callable[[], None], mebibytes: int, seconds: float) -> dict[str, float]:
    """Operands of `mebibytes` each, in microseconds."""
    count = mebibytes * (1 << 18)
    x = torch.rand(count // 64, 64, device=device)
    y = torch.rand(count // 64, 64, device=device)
    out = torch.empty_like(x)
    index = torch.randperm(count // 64, device=device)[: count // 256]
    runs: dict[str, Callable[[], object]] = {
        "add_": lambda: x.add_(y),
        "add out=": lambda: torch.add(x, y, out=out),
        "exp": lambda: x.exp(),
        "mul scalar": lambda: x * 2.0,
        "sum": lambda: x.sum(),
        "sum of rows": lambda: x.sum(1),
        "sum of columns": lambda: x.sum(0),
        "amax": lambda: x.amax(),
        "copy_": lambda: out.copy_(x),
        "to half": lambda: x.half(),
        "fill_": lambda: out.fill_(1.0),
        "uniform_": lambda: out.uniform_(),
        "index_select of a quarter": lambda: x.index_select(0, index),
        "cat": lambda: torch.cat([x, y]),
        "_foreach_add_": lambda: torch._foreach_add_([x, out], [y, y]),
    }
    times = {f"{name}, {mebibytes} MiB": medians(run, wait, seconds) for name, run in runs.items()}
    parameter = nn.Parameter(x)
    parameter.grad = y
    optimizer = torch.optim.Adam([parameter], lr=1e-4, fused=True)
    times[f"fused Adam, {mebibytes} MiB"] = medians(optimizer.step, wait, seconds)
    return times


def small(device: str, wait: Callable[[], None], seconds: float) -> dict[str, float]:
    """Operators that cost nothing but the way to them, in microseconds."""
    x = torch.rand(16, 4, device=device)
    y = torch.rand(16, 4, device=device)
    w = torch.rand(4, 4, device=device)
    runs: dict[str, Callable[[], object]] = {
        "add": lambda: x + y,
        "add_": lambda: x.add_(y),
        "exp": lambda: x.exp(),
        "sum": lambda: x.sum(),
        "matmul": lambda: x @ w,
        "view": lambda: x.view(4, 16),
        "slice": lambda: x[2:5],
        "empty": lambda: torch.empty(16, 4, device=device),
        "zeros": lambda: torch.zeros(16, 4, device=device),
        "copy_": lambda: x.copy_(y),
        "cat": lambda: torch.cat([x, y]),
        "item": lambda: x.sum().item(),
    }
    return {f"{name}, 256 B": medians(run, wait, seconds, inner=200) for name, run in runs.items()}


def training(device: str, wait: Callable[[], None], seconds: float) -> dict[str, float]:
    """A step of a small convolution net, in microseconds."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 3, 3, padding=1),
    ).to(device)
    x = torch.rand(4, 3, 128, 128).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()

    return {"step of a convolution net": medians(step, wait, seconds)}


def memory() -> dict[str, float]:
    """What only `mgpu` does, in microseconds: growing and moving 1 GiB."""
    rows = 1 << 22
    x = mgpu().reserve((rows, 64), 2 * rows)
    shards = len(mgpu().mesh().shards)
    x.fill_(1.0)
    mgpu().synchronize()
    times: dict[str, float] = {}

    def once(name: str, run: Callable[[], object]) -> None:
        start = time.perf_counter()
        run()
        mgpu().synchronize()
        times[name] = (time.perf_counter() - start) * 1e6

    once("grow 1 GiB by 100 MiB", lambda: mgpu().grow(x, rows + rows // 10))
    once("move 1 GiB to the host", lambda: mgpu().to_host(x))
    once("move 1 GiB back", lambda: mgpu().to_device(x))
    once("move 1 GiB to the last shard", lambda: mgpu().place(x, shards - 1))
    once("move one page", lambda: mgpu().to_host(x, [100]))
    once("give caches back", mgpu().empty_cache)
    once("empty of 4 GiB, fresh pages", lambda: torch.empty(1 << 32, dtype=torch.uint8, device="mgpu"))
    once("empty of 4 GiB, kept pages", lambda: torch.empty(1 << 32, dtype=torch.uint8, device="mgpu"))
    return times


def side(name: str, mebibytes: int, seconds: float) -> dict[str, float]:
    """All measurements of one side: `mgpu`, `cuda` or `cpu`."""
    if name == "mgpu":
        import ns_mgpu_splat

        ns_mgpu_splat.init()
        wait: Callable[[], None] = mgpu().synchronize
    else:
        wait = torch.cuda.synchronize if name == "cuda" else lambda: None
    times = {
        **small(name, wait, seconds / 4),
        **training(name, wait, seconds),
        **large(name, wait, mebibytes, seconds),
    }
    return {**times, **memory()} if name == "mgpu" else times


def main() -> None:
    """Run both sides and print them side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", help="mesh; default: MGPU_DEVICES")
    parser.add_argument(
        "--mebibytes", type=int, help="size of a large operand; default 1024, or 64 on the host"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for one measurement")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--side", choices=("mgpu", "cuda", "cpu"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    devices = (
        arguments.devices or os.environ.get("MGPU_DEVICES") or ("0" if torch.cuda.is_available() else "cpu:1")
    )
    mebibytes = arguments.mebibytes or (64 if devices.startswith("cpu") else 1024)
    if arguments.side:
        arguments.json.write_text(json.dumps(side(arguments.side, mebibytes, arguments.seconds)))
        return
    results: dict[str, dict[str, float]] = {}
    plain = "cpu" if devices.startswith("cpu") else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        for name in (plain, "mgpu"):
            file = Path(folder, name)
            options = [
                "--side",
                name,
                "--json",
                str(file),
                "--mebibytes",
                str(mebibytes),
                "--seconds",
                str(arguments.seconds),
            ]
            root = str(Path(__file__).resolve().parents[1])  # not installed on a GPU machine
            environment = {**os.environ, "MGPU_DEVICES": devices, "PYTHONPATH": root}
            subprocess.run([sys.executable, __file__, *options], env=environment, check=True)
            results[name] = json.loads(file.read_text())
    print(f"{'operator':34s} {plain + ' us':>11s} {'mgpu us':>11s} {'more us':>9s} {plain + '/mgpu':>10s}")
    for name, time_us in results["mgpu"].items():
        other = results[plain].get(name)
        if other is None:
            print(f"{name:34s} {'':11s} {time_us:11.1f}")
        else:
            print(f"{name:34s} {other:11.1f} {time_us:11.1f} {time_us - other:9.1f} {other / time_us:10.1%}")
    if arguments.json:
        machine = (
            torch.cuda.get_device_name() if plain == "cuda" else platform.processor() or platform.machine()
        )
        head = {"machine": machine, "torch": torch.__version__, "devices": devices, "unit": "microseconds"}
        arguments.json.write_text(json.dumps({**head, **results}, indent=1))


if __name__ == "__main__":
    main()
