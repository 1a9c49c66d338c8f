# SPDX-License-Identifier: Apache-2.0
"""Time refinements of a splat table: MCMC relocation and growth, part by part.

    python benchmarks/densify.py [--rows 1000000 10000000] [--degree 3] [--json FILE]

Every 20th row is dead, every row has missed 100 steps, and the table grows by 5 %. Times are medians of wall-clock
times between two waits for the device; floors are bytes at the speed of a large copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import ns_mgpu_splat
from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.densify import McmcStrategy
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.table import SplatTable

BYTES_PER_S = 4.3e12  # of an H200
MIN_OPACITY = 0.005
LRS = {"means": 1e-4, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}


class Clock:
    """Collects times by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Take the time of what follows, between two waits for the device."""
        torch.mgpu.synchronize()  # type: ignore[attr-defined]
        begin = time.perf_counter()
        yield
        torch.mgpu.synchronize()  # type: ignore[attr-defined]
        self.times.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))

    def median(self, name: str) -> float:
        """In ms."""
        return statistics.median(self.times[name])


def make(rows: int, degree: int, capacity: int) -> tuple[SplatTable, SplatAdam]:
    """A table with random rows, every 20th of them dead, and its optimizer."""
    table = SplatTable(rows, sh_degree=degree, capacity=capacity)
    with torch.no_grad():
        for column in table.columns():
            column.detach().normal_()
        table.opacities.detach()[::20] = -9.0
    adam = SplatAdam(table, LRS)
    for name in adam.exp_avg:
        adam.exp_avg[name].normal_(std=1e-3)
        adam.exp_avg_sq[name].fill_(1e-6)
    return table, adam


def miss_steps(adam: SplatAdam, count: int = 100) -> None:
    """Steps that see no row."""
    for _ in range(count):
        adam.step()


def row_bytes(table: SplatTable) -> int:
    """Of the parameters of one row."""
    return sum(4 * column.numel() // max(table.num_rows, 1) for column in table.columns())


def mcmc(rows: int, degree: int, rounds: int) -> dict[str, Any]:
    """One table, refined `rounds` times as a whole and as often in parts."""
    capacity = int(rows * 1.05 ** (2 * rounds + 3)) + 1
    table, adam = make(rows, degree, capacity)
    strategy = McmcStrategy(capacity, refine_start=0, refine_every=1)
    clock, step = Clock(), 0
    for i in range(rounds + 1):  # the first one pays for memory and module loading
        miss_steps(adam)
        step += 1
        with clock("whole" if i else "first"):
            report = strategy.post_step(table, adam, step)
    for _ in range(rounds):
        old, target = table.num_rows, int(table.num_rows * 1.05)
        miss_steps(adam)
        with clock("flush"):
            adam.flush()
        with torch.no_grad():
            table.opacities.detach()[::20] = -9.0
        columns = [column.detach() for column in table.columns()]
        with clock("dead rows"):
            dead = native().dead_rows(columns, MIN_OPACITY)
        step += 1
        with clock("sample"):
            sources = native().sample_rows(columns, MIN_OPACITY, len(dead), 0, 2 * step)
        with clock("relocate"):
            native().relocate(columns, adam.state(), sources, dead, MIN_OPACITY, adam.steps)
        with clock("sample to add"):
            sources = native().sample_rows(columns, MIN_OPACITY, target - old, 0, 2 * step + 1)
        del columns  # growth refuses columns that somebody else holds
        with clock("grow"):
            table.grow(target)
            adam.grow(target)
        columns = [column.detach() for column in table.columns()]
        to = native().RowList.consecutive(old, target)
        with clock("copy to new"):
            native().relocate(columns, adam.state(), sources, to, MIN_OPACITY, adam.steps)
        del columns
    size, moved = row_bytes(table), len(dead)
    floors = {
        "flush": 6 * size * old,
        "dead rows": 44 * old,
        "sample": 2 * 44 * old,
        "relocate": (size * 2 + 4 * size) * moved,
        "sample to add": 2 * 44 * old,
        "copy to new": (size * 2 + 4 * size) * (target - old),
    }
    out = {"rows": rows, "report": report, "whole": clock.median("whole"), "first": clock.median("first")}
    print(
        f"MCMC, {rows:,} rows, degree {degree}: whole refinement {out['whole']:.3f} ms (the first {out['first']:.1f})"
    )
    for name in clock.times:
        if name in ("whole", "first"):
            continue
        floor = 1e3 * floors[name] / BYTES_PER_S if name in floors else float("nan")
        out[name] = clock.median(name)
        print(f"    {name:<14} {out[name]:8.3f} ms   floor {floor:7.3f}")
    return out


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--degree", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ns_mgpu_splat.init()
    results = {"mcmc": [mcmc(rows, arguments.degree, arguments.rounds) for rows in arguments.rows]}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
