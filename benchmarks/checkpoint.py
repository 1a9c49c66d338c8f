# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: size, seconds to save until it is on disk, to read, and host memory that both take.

    python benchmarks/checkpoint.py [--rows 2000000] [--sh-degree 3] [--half] [--peer] [--folder DIR] [--json FILE]

Saving is all that a run does: flush, write aside, fsync, rename, fsync of the folder. Reading is into a table and an
optimizer of the same run; the file is dropped from the page cache before. With --peer, `torch.save` of the same state and
an fsync runs beside it. The disk's own speed stands in the first line: O_DIRECT writes of 64 MiB to a file of 2 GiB.
"""

from __future__ import annotations

import argparse
import json
import mmap
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


def seconds(run: Callable[[], object]) -> float:
    """Time of one run, with all GPUs waited for."""
    wait = vars(torch)["mgpu"].synchronize
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def own_memory() -> int:
    """Bytes that belong to this process alone: without mapped files."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def risen(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, and by how many GiB this process's own memory rose at most."""
    stop, before = threading.Event(), own_memory()
    most = [before]

    def watch() -> None:
        while not stop.wait(0.005):
            most[0] = max(most[0], own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        took = seconds(run)
    finally:
        stop.set()
        watcher.join()
    return took, (most[0] - before) / GIB


def disk_speed(folder: Path) -> float:
    """GB/s of writes past the page cache by one thread; 0 where the file system knows none."""
    path, size, piece = folder / "probe", 2 * GIB, 64 << 20
    block = mmap.mmap(-1, piece)
    block.write(os.urandom(1 << 20) * (piece >> 20))
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return 0.0
    try:
        start = time.perf_counter()
        for offset in range(0, size, piece):
            os.pwrite(file, block, offset)
        os.fsync(file)
        return size / (time.perf_counter() - start) / 1e9
    finally:
        os.close(file)
        path.unlink()


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def made(rows: int, sh_degree: int, half: bool) -> tuple[Any, Any]:
    """A table of noise and its optimizer, some steps into a run."""
    from ns_mgpu_splat.splats import SplatAdam, SplatTable

    table = SplatTable(rows, sh_degree=sh_degree, half=half)
    optimizer = SplatAdam(table, {"means": 1e-4})
    with torch.no_grad():
        for column in table.columns():
            column.normal_()
        for moment in optimizer.state()[:-1]:
            moment.normal_()
    return table, optimizer


def state_of(table: Any, optimizer: Any) -> dict[str, Any]:
    """What a run saves, but for what has no rows."""
    moments = optimizer.state_dict()  # flushes
    columns = {f"_model.gauss_params.{name}": c.detach() for name, c in table.named_columns().items()}
    return {"step": 0, "pipeline": columns, "optimizers": {"splats": moments}}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """All figures, by name."""
    from ns_mgpu_splat.nerfstudio import checkpoint

    figures = {"disk GB/s": disk_speed(folder)}
    table, optimizer = made(arguments.rows, arguments.sh_degree, arguments.half)
    checkpoint.save({"step": 0, "pipeline": {"x": torch.zeros(1 << 24)}}, folder, 0, True)  # threads, buffers
    models = folder / "nerfstudio_models"
    for turn in range(2):

        def save(turn: int = turn) -> None:
            checkpoint.save(state_of(table, optimizer), models, turn, keep_others=False)

        figures[f"save s (turn {turn + 1})"], figures["save: host GiB more"] = risen(save)
    path = checkpoint.find(models)
    size = path.stat().st_size
    figures["size GB"], figures["bytes a row"] = size / 1e9, size / max(1, arguments.rows)
    figures["save GB/s"] = size / 1e9 / min(figures["save s (turn 1)"], figures["save s (turn 2)"])

    def load() -> None:
        state = checkpoint.read(path)
        columns = {name.rsplit(".", 1)[1]: column for name, column in state["pipeline"].items()}
        table.write_rows(0, columns)
        optimizer.load_state_dict(state["optimizers"]["splats"])

    forget(path)
    figures["load s (not cached)"], figures["load: host GiB more"] = risen(load)
    figures["load GB/s"] = size / 1e9 / figures["load s (not cached)"]
    if arguments.peer:
        other = folder / "peer.pt"

        def save_with_torch() -> None:
            torch.save(state_of(table, optimizer), other)
            with other.open("rb") as file:
                os.fsync(file.fileno())

        figures["torch.save + fsync s"], figures["torch.save: host GiB more"] = risen(save_with_torch)
    return figures


def main() -> None:
    """Run, and print a line a figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", help="mesh; default: MGPU_DEVICES")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--sh-degree", type=int, default=3)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--peer", action="store_true", help="torch.save, too")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder's")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    import ns_mgpu_splat

    ns_mgpu_splat.init(arguments.devices)
    with tempfile.TemporaryDirectory(prefix="CKPT-", dir=arguments.folder) as folder:
        figures = measure(arguments, Path(folder))
    shards = vars(torch)["mgpu"].mesh().shards
    for key, value in figures.items():
        print(f"{key:30s} {value:10.3f}", flush=True)
    if arguments.json:
        on_gpus = shards[0].startswith("cuda")
        machine = torch.cuda.get_device_name() if on_gpus else platform.processor() or platform.machine()
        head = {
            "machine": machine,
            "torch": torch.__version__,
            "devices": list(shards),
            "rows": arguments.rows,
        }
        arguments.json.write_text(json.dumps({**head, **figures}, indent=1))


if __name__ == "__main__":
    main()
