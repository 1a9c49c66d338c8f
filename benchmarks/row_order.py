# SPDX-License-Identifier: Apache-2.0
"""What the order of rows is worth: training steps with rows as in the file, shuffled, and along the Hilbert curve.

    python benchmarks/row_order.py [--rows 2.8M@1080p 9M@4K] [--quick] [--json FILE]
    python benchmarks/row_order.py --table 10000000          # no scene: what keeping a table of so many rows in order costs

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


def time_table(rows: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds (medians) of reordering normal points with SH of degree 3 and moments, of measuring their order, and of
    the sparse grid of their voxels."""
    import ns_mgpu_splat
    from ns_mgpu_splat.device import native
    from ns_mgpu_splat.partition.summary import summarise
    from ns_mgpu_splat.splats.optimizer import SplatAdam

    ns_mgpu_splat.init()
    table = ns_mgpu_splat.SplatTable(rows)
    adam = SplatAdam(table, {})
    times: dict[str, list[float]] = {}
    for _ in range(rounds + 1):  # the first one pays for memory and module loading
        with torch.no_grad():
            table.means.detach().normal_()
        for name, call in (
            ("reorder shuffled", lambda: native().reorder(table.columns(), adam.state(), [])),
            ("reorder sorted", lambda: native().reorder(table.columns(), adam.state(), [])),
            ("measure", lambda: native().measure_rows(table.means.detach())),
            ("grid", lambda: summarise(table.means)),
        ):
            torch.mgpu.synchronize()  # type: ignore[attr-defined]
            begin = time.perf_counter()
            call()
            torch.mgpu.synchronize()  # type: ignore[attr-defined]
            times.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=["2.8M@1080p", "9M@1080p", "9M@4K"], choices=list(ROWS))
    parser.add_argument("--table", type=int, metavar="ROWS")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.table is not None:
        times = time_table(arguments.table)
        print(f"{arguments.table:,} rows: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()))
        if arguments.json:
            arguments.json.write_text(json.dumps(times, indent=1))
        return
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
