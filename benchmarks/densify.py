# SPDX-License-Identifier: Apache-2.0
"""Time refinements of a splat table: MCMC relocation and growth, default densification, a reordering; part by part.

    python benchmarks/densify.py [--rows 1000000 10000000] [--degree 3] [--json FILE]

Every 20th row is dead, every row has missed 100 steps, and the table grows by 5 % (and is shrunk again). Times are
medians of wall-clock times between two waits for the device; floors are bytes at the speed of a large copy.
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
from ns_mgpu_splat.splats.densify import DefaultStrategy, McmcStrategy
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


def show(title: str, clock: Clock, floors: dict[str, float]) -> dict[str, Any]:
    """Print the parts beside their floors in bytes; returns milliseconds by part."""
    print(title)
    for name in clock.times:
        floor = f"floor {1e3 * floors[name] / BYTES_PER_S:7.3f}" if name in floors else ""
        print(f"    {name:<22} {clock.median(name):8.3f} ms   {floor}")
    return {name: clock.median(name) for name in clock.times}


def mcmc(rows: int, degree: int, rounds: int) -> dict[str, Any]:
    """Refine a table as a whole, and in parts."""
    target = int(rows * 1.05)
    table, adam = make(rows, degree, target)
    strategy = McmcStrategy(target, refine_start=0, refine_every=1)
    clock, step = Clock(), 0

    def again() -> None:
        table.shrink(rows)
        adam.shrink(rows)
        with torch.no_grad():
            table.opacities.detach()[::20] = -9.0
        miss_steps(adam)

    for i in range(rounds + 1):  # the first one pays for memory and module loading
        again()
        step += 1
        with clock("whole" if i else "first"):
            report = strategy.post_step(table, adam, step)
    assert report["relocated"] >= rows // 20
    assert report["added"] == target - rows
    for _ in range(rounds):
        again()
        step += 1
        with clock("flush"):
            adam.flush()
        columns = table.columns()
        with clock("dead rows"):
            dead = native().dead_rows(columns, MIN_OPACITY)
        with clock("sample"):
            sources = native().sample_rows(columns, MIN_OPACITY, len(dead), 0, 2 * step)
        with clock("relocate"):
            native().relocate(columns, adam.state(), sources, dead, MIN_OPACITY, adam.steps)
        with clock("sample to add"):
            sources = native().sample_rows(columns, MIN_OPACITY, target - rows, 0, 2 * step + 1)
        with clock("grow"):
            table.grow(target)
            adam.grow(target)
        to = native().RowList.consecutive(rows, target)
        with clock("copy to new"):
            native().relocate(columns, adam.state(), sources, to, MIN_OPACITY, adam.steps)
    size = row_bytes(table)
    floors = {
        "flush": 6.0 * size * rows,
        "dead rows": 44.0 * rows,
        "sample": 2 * 44.0 * rows,
        "relocate": 4.0 * size * len(dead),
        "sample to add": 2 * 44.0 * rows,
        "copy to new": 4.0 * size * (target - rows),
    }
    return show(f"MCMC, {rows:,} rows, degree {degree}", clock, floors)


def default(rows: int, degree: int, rounds: int) -> dict[str, Any]:
    """Double every 20th row and prune as many, with the cap binding for a tenth of them; then reorder."""
    table, adam = make(rows, degree, int(rows * 1.05))
    strategy = DefaultStrategy(rows, refine_start=0, refine_every=1, scene_scale=1e3)
    clock = Clock()
    for i in range(rounds + 1):
        table.shrink(min(rows, table.num_rows))
        adam.shrink(table.num_rows)
        table.grow(rows)
        adam.grow(rows)
        strategy.post_step(table, adam, 1)  # makes statistics, if there are none
        assert adam.statistics is not None
        adam.statistics.views.fill_(1)
        adam.statistics.gradient.zero_()
        with torch.no_grad():
            table.opacities.detach().fill_(1.0)
            table.opacities.detach()[::20] = -9.0
        adam.statistics.gradient[1::18] = 1.0
        miss_steps(adam)
        with clock("whole" if i else "first"):
            report = strategy.post_step(table, adam, 2 + i)
        assert report["pruned"] == report["added"] == -(-rows // 20)
    for _ in range(rounds):
        miss_steps(adam)
        adam.flush()
        with clock("reset opacities"):
            native().reset_opacities(table.columns(), adam.state(), 0.5)
        with torch.no_grad():
            table.means.detach().normal_()
        with clock("reorder shuffled rows"):
            native().reorder(table.columns(), adam.state(), [])
        with clock("reorder sorted rows"):
            native().reorder(table.columns(), adam.state(), [])
    size = 3 * row_bytes(table) + 4  # with moments and last_step
    floors = {
        "whole": (2.0 * row_bytes(table) * 3 + 4.0 * size + 60) * rows,
        "reset opacities": 5 * 4.0 * rows,
        "reorder shuffled rows": (4.0 * size + 12 + 8 * 24 + 16) * rows,
        "reorder sorted rows": (4.0 * size + 12 + 8 * 24 + 16) * rows,
    }
    return show(f"default densification, {rows:,} rows, degree {degree}", clock, floors)


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
    results = {
        kind.__name__: {rows: kind(rows, arguments.degree, arguments.rounds) for rows in arguments.rows}
        for kind in (mcmc, default)
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
