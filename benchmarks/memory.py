# SPDX-License-Identifier: Apache-2.0
"""Time what only `mgpu` does with memory: a table that grows in place, pages that move, a tensor of any size to a file and back.

    python benchmarks/memory.py [--table-gib 40] [--file-gib 16] [--only growth,moves,pool,files] [--json FILE]

On the host the defaults are 1 and 1 GiB. Beside each time stands what was promised, where something was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GIB = 1 << 30
PAGE = 2 << 20
SHAPES = {"means": (3,), "quats": (4,), "scales": (3,), "opacities": (), "sh0": (3,), "shN": (15, 3)}


def mgpu() -> Any:
    """`torch.mgpu`, which is there once the device is registered."""
    return vars(torch)["mgpu"]


def seconds(run: Callable[[], object]) -> float:
    """Time of one run, with all GPUs waited for."""
    mgpu().synchronize()
    start = time.perf_counter()
    run()
    mgpu().synchronize()
    return time.perf_counter() - start


def used_bytes() -> int:
    """Bytes of the GPUs' memory in use by anybody, or of the host's."""
    free, total = mgpu().mem_get_info()
    return total - free


def table(rows: int, capacity: int) -> list[torch.Tensor]:
    """Columns, first and second moments, last step: what a training run keeps for each Gaussian (712 bytes)."""
    columns = [
        mgpu().reserve((rows, *shape), capacity, torch.float32) for shape in SHAPES.values() for _ in range(3)
    ]
    return [*columns, mgpu().reserve((rows,), capacity, torch.int32)]


def growth(gib: float) -> dict[str, float]:
    """A whole table grows by a tenth, twice; memory is read while it does."""
    row_bytes = 4 * (3 * 59 + 1)
    rows = int(gib * GIB) // row_bytes
    columns = table(rows, 2 * rows)
    times = {}
    for turn, (before, after) in enumerate(
        [(rows, rows + rows // 10), (rows + rows // 10, rows + rows // 5)]
    ):
        start = used_bytes()
        peak, stop = [start], threading.Event()

        def watch(peak: list[int] = peak, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                peak[0] = max(peak[0], used_bytes())
                time.sleep(0.0005)

        def grow(after: int = after) -> None:
            for column in columns:
                mgpu().grow(column, after)

        watcher = threading.Thread(target=watch)
        if turn:  # the first is timed without anybody reading
            watcher.start()
        times[f"grow {gib:g} GiB by a tenth, {'watched' if turn else 'alone'}, ms"] = 1e3 * seconds(grow)
        stop.set()
        if turn:
            watcher.join()
        more = (after - before) * row_bytes
        peak[0] = max(peak[0], used_bytes())
        times[f"memory beyond the new rows, {'peak' if turn else 'at the end'}, MiB"] = (
            peak[0] - start - more
        ) / (1 << 20)
        assert int(columns[0][before:].count_nonzero()) == 0
    return times


def moves(gib: float) -> dict[str, float]:
    """Pages of a tensor to host memory, back, and between shards; contents are compared after each."""
    x = torch.arange(int(gib * GIB) // 4, dtype=torch.int32, device="mgpu")
    want = int(x.sum(dtype=torch.int64).item())
    shards = len(mgpu().mesh().shards)
    times = {}
    for turn in ("nothing made ready", "again", "after a pause"):
        if turn == "nothing made ready":
            mgpu().empty_cache()
        elif turn == "after a pause":
            time.sleep(0.5)
        for name, run in {
            "to_host": lambda: mgpu().to_host(x),
            "to_device": lambda: mgpu().to_device(x),
            "place on the last shard": lambda: mgpu().place(x, shards - 1),
            "place on the first shard": lambda: mgpu().place(x, 0),
        }.items():
            times[f"{name}, {gib:g} GiB, {turn}, ms"] = 1e3 * seconds(run)
            assert int(x.sum(dtype=torch.int64).item()) == want
    times["one page to_host, ms"] = 1e3 * seconds(lambda: mgpu().to_host(x, [100]))
    times["one page to_device, ms"] = 1e3 * seconds(lambda: mgpu().to_device(x, [100]))
    half = list(range(0, x.nbytes // PAGE, 2))
    times["every second page to_host, ms"] = 1e3 * seconds(lambda: mgpu().to_host(x, half))
    times["every second page to_device, ms"] = 1e3 * seconds(lambda: mgpu().to_device(x, half))
    assert int(x.sum(dtype=torch.int64).item()) == want
    return times


def pool() -> dict[str, float]:
    """Temporaries as a training step takes them: twenty alive at once, from 256 B to 256 MiB; nanoseconds of the host each."""
    from ns_mgpu_splat.device import native

    sizes = [1 << (8 + bit) for bit in range(20)]
    native().time_temporaries(sizes, 10, 0)
    rounds = 1000
    taken = min(native().time_temporaries(sizes, rounds, 0) for _ in range(5))
    return {"a temporary, taken and given back, ns": 1e9 * taken / (rounds * len(sizes))}


def rss() -> dict[str, float]:
    """Resident memory of this process in GiB: anonymous, of files, and the largest total so far."""
    lines = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return {name: int(lines[name].split()[0]) / (1 << 20) for name in ("RssAnon", "RssFile", "VmHWM")}


def files(gib: float) -> dict[str, float]:
    """One tensor to a file and back; how far the resident memory of this process rises meanwhile."""
    state = {"x": torch.arange(int(gib * GIB) // 4, dtype=torch.int32, device="mgpu")}
    times = {}
    peak, stop = {"RssAnon": 0.0, "RssFile": 0.0}, threading.Event()
    before = rss()

    def watch() -> None:
        while not stop.is_set():
            now = rss()
            for name in peak:
                peak[name] = max(peak[name], now[name])
            time.sleep(0.005)

    def watched(name: str, run: Callable[[], Any]) -> Any:
        stop.clear()
        for key in peak:
            peak[key] = 0.0
        thread = threading.Thread(target=watch)
        thread.start()
        start = time.perf_counter()
        out = run()
        mgpu().synchronize()
        times[f"{name}, s"] = time.perf_counter() - start
        stop.set()
        thread.join()
        for key in peak:
            times[f"{name}, {key} more, GiB"] = peak[key] - before[key]
        return out

    with tempfile.TemporaryDirectory(dir=os.environ.get("MGPU_BENCH_FOLDER")) as folder:
        path = Path(folder) / "x.pt"
        watched(f"save {gib:g} GiB", lambda: mgpu().save(state, path))
        want = int(state.pop("x").sum(dtype=torch.int64).item())
        mgpu().empty_cache()
        loaded = watched(f"load {gib:g} GiB", lambda: mgpu().load(path))
        assert int(loaded["x"].sum(dtype=torch.int64).item()) == want
    return times


def main() -> None:
    """Run what was asked for and print a line a figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", help="mesh; default: MGPU_DEVICES")
    parser.add_argument("--table-gib", type=float, help="size of the table that grows")
    parser.add_argument("--file-gib", type=float, help="size of the tensor that goes to a file")
    parser.add_argument("--only", default="growth,moves,pool,files", help="which, comma-separated")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    import ns_mgpu_splat

    ns_mgpu_splat.init(arguments.devices)
    on_gpus = mgpu().mesh().shards[0].startswith("cuda")
    runs: dict[str, Callable[[], dict[str, float]]] = {
        "growth": lambda: growth(arguments.table_gib or (40 if on_gpus else 1)),
        "moves": lambda: moves(1.0),
        "pool": pool,
        "files": lambda: files(arguments.file_gib or (16 if on_gpus else 1)),
    }
    results: dict[str, float] = {}
    for name in arguments.only.split(","):
        found = runs[name]()
        results.update(found)
        for key, value in found.items():
            print(f"{key:52s} {value:10.3f}", flush=True)
        mgpu().empty_cache()
    if arguments.json:
        machine = torch.cuda.get_device_name() if on_gpus else platform.processor() or platform.machine()
        head = {"machine": machine, "torch": torch.__version__, "devices": list(mgpu().mesh().shards)}
        arguments.json.write_text(json.dumps({**head, **results}, indent=1))


if __name__ == "__main__":
    main()
