# SPDX-License-Identifier: Apache-2.0
"""Where the host's time goes: microseconds to issue small operators and a small training step, and torch's profile of it.

    MGPU_DEVICES=0,0,0,0 python benchmarks/host_time.py mgpu
    python benchmarks/host_time.py cuda        # to compare with, in a process of its own

On `mgpu`, operators on a plain CUDA tensor over the same memory are timed too: what they cost is not the backend's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn


def issue_time(run: Callable[[], object], wait: Callable[[], None], calls: int = 40) -> float:
    """Median microseconds for which a call keeps the host."""
    for _ in range(5):
        run()
    times: list[float] = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls * 1e6)
    wait()
    return statistics.median(times)


def operators(z: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Small operators without gradient, on a matrix of 16 x 4 and an image."""
    index = torch.arange(3, device=z.device)
    weight, bias = x.new_full((32, 3, 3, 3), 0.1), x.new_zeros(32)
    steps = [z.new_zeros(()) for _ in range(6)]
    y = torch.conv2d(x, weight, bias, padding=1)

    def convolution_backward() -> object:
        return torch.ops.aten.convolution_backward(
            y, x, weight, [32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )

    return {
        "empty": lambda: torch.empty(16, 4, device=z.device),
        "add": lambda: z + z,
        "add_": lambda: z.add_(z),
        "sum": lambda: z.sum(),
        "flip (its kernel makes the result)": lambda: z.flip(0),
        "index_select": lambda: z.index_select(0, index),
        "z[index]": lambda: z[index],
        "sort": lambda: z.sort(),
        "addmm": lambda: torch.addmm(z, z, z[:4]),
        "_foreach_add_ of six": lambda: torch._foreach_add_(steps, 1),
        "convolution": lambda: torch.conv2d(x, weight, bias, padding=1),
        "convolution_backward": convolution_backward,
    }


def main() -> None:
    """Print one line an operator, then the profile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=("mgpu", "cuda", "cpu"))
    parser.add_argument("--profile", action="store_true", help="torch's profile of the training step")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "mgpu":
        import ns_mgpu_splat

        ns_mgpu_splat.init()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    wait: Callable[[], None] = torch.accelerator.synchronize if device != "cpu" else lambda: None

    z, x = torch.rand(16, 4, device=device), torch.rand(1, 3, 16, 16, device=device)
    with torch.no_grad():
        for name, run in operators(z, x).items():
            print(f"{name:42s} {issue_time(run, wait):8.1f}")
        if device == "mgpu" and torch.cuda.is_available():
            alias = vars(torch)["mgpu"].as_cuda
            for name, run in operators(alias(z), alias(x)).items():
                print(f"{'CUDA alias: ' + name:42s} {issue_time(run, wait):8.1f}")

    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 3, 3, padding=1)]
    net = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def backward() -> None:
        (net(x) - x).square().mean().backward()

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    backward()
    for name, run in {"forward and backward": backward, "optimizer": optimizer.step, "step": step}.items():
        print(f"{name:42s} {issue_time(run, wait):8.1f}")
    if arguments.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            for _ in range(10):
                step()
            wait()
        print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=45))


if __name__ == "__main__":
    main()
