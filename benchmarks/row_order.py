# SPDX-License-Identifier: Apache-2.0
"""What the order of rows is worth: training steps with rows as in the file, shuffled, and along the Hilbert curve.

    python benchmarks/row_order.py [--rows 2.8M@1080p 9M@4K] [--quick] [--json FILE]

Scene and steps are those of fast_step.py. Also the time of the reordering itself, from shuffled rows and from sorted ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fast_step import COLUMNS, ROWS, Mgpu


def measure(side: Mgpu) -> dict[str, float]:
    """Milliseconds of a forward pass and of both kinds of iterations."""
    return {
        "fwd": side.clock.median_ms(side.forward),
        "iter": side.clock.median_ms(partial(side.iteration, "L1")),
        "iter full": side.clock.median_ms(partial(side.iteration, "full")),
    }


def reorder_ms(side: Mgpu, shuffled: bool, rounds: int = 3) -> float:
    """Median wall-clock time of a reordering."""
    times = []
    for _ in range(rounds):
        if shuffled:
            shuffle(side)
        side.adam.flush()
        side.clock.wait()
        begin = time.perf_counter()
        side.table.reorder(side.adam)
        side.clock.wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def shuffle(side: Mgpu) -> None:
    """Rows in random order; the moments, which are nearly zero here, stay."""
    order = torch.randperm(side.table.num_rows, generator=torch.Generator().manual_seed(2)).to("mgpu")
    for name in COLUMNS:
        column = getattr(side.table, name).detach()
        column.copy_(column[order])


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=["2.8M@1080p", "9M@1080p", "9M@4K"], choices=list(ROWS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    side = Mgpu(arguments.quick)
    results: dict[str, Any] = {}
    for name in arguments.rows:
        row = ROWS[name]
        side.made = None
        side.prepare(row)
        result: dict[str, Any] = {"file": measure(side)}
        shuffle(side)
        result["shuffled"] = measure(side)
        result["reorder shuffled"] = reorder_ms(side, shuffled=True)
        result["reorder sorted"] = reorder_ms(side, shuffled=False)
        result["hilbert"] = measure(side)
        results[name] = result
        print(f"{name}, {side.table.num_rows:,} rows")
        for order in ("file", "shuffled", "hilbert"):
            print(f"    {order:<9}" + "".join(f"  {kind} {ms:7.3f} ms" for kind, ms in result[order].items()))
        print(
            f"    reorder: shuffled rows {result['reorder shuffled']:.2f} ms, sorted {result['reorder sorted']:.2f} ms"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
