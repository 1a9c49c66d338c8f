# SPDX-License-Identifier: Apache-2.0
"""What a training step costs on several shards, stage by stage: on the GPUs, and on the host that serves them.

Scenes are those of fast_step.py. For each mesh, in a process of its own, milliseconds: the median step (L1 + D-SSIM, batch 1);
each stage with the GPUs waited for around it (MGPU_STAGE_TIMES=1); each stage as the host sees it, without its waits for
read-backs, which are a stage "wait" (MGPU_STAGE_TIMES=host). Rows are sorted before, and on
several shards placed.

    python benchmarks/shards.py [--meshes 0 0,1 0,0,0,0] [--rows 112k@1080p 49M@4K] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fast_step
import torch

ROUNDS = 20


def stage_medians(side: fast_step.Mgpu, timing: str) -> dict[str, float]:
    """Median milliseconds by stage of a step; stages of the same name count together."""
    from ns_mgpu_splat import train_step

    os.environ["MGPU_STAGE_TIMES"] = timing
    steps: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        report = train_step(side.table, side.adam, side.camera, side.targets["full"], ssim_weight=0.2)
        sums: dict[str, float] = {}
        for stage, seconds in report.times:
            sums[stage] = sums.get(stage, 0.0) + seconds * 1e3
        for stage, ms in sums.items():
            steps.setdefault(stage, []).append(ms)
    del os.environ["MGPU_STAGE_TIMES"]
    return {stage: statistics.median(times) for stage, times in steps.items()}


def sort_and_place(side: fast_step.Mgpu) -> None:
    """Sort the rows, and on several shards deal them by who is seen, as ns-train does."""
    from ns_mgpu_splat.partition.placement import Placement

    side.table.reorder(side.adam)
    if len(side.shards) == 1:
        return
    placement = Placement()
    for _ in range(3):
        side.iteration("full")
    placement.observe(side.table, side.adam)
    side.adam.flush()
    placement.update(side.table, side.adam)


def measure(rows: list[str], quick: bool) -> dict[str, Any]:
    """The figures of this process's mesh."""
    side = fast_step.Mgpu(quick)
    out: dict[str, Any] = {}
    for name in rows:
        row = fast_step.ROWS[name]
        side.prepare(row)
        sort_and_place(side)
        figures: dict[str, Any] = {
            "step": side.clock.median_ms(partial(side.iteration, "full")),
            "host": stage_medians(side, "host"),
        }
        figures["gpus"] = stage_medians(side, "1")
        out[name] = figures | {"links": links_of(side)}
    return out


def links_of(side: fast_step.Mgpu) -> dict[str, float]:
    """Megabytes between shards in a step, and the largest load over the mean."""
    from ns_mgpu_splat import train_step

    report = train_step(side.table, side.adam, side.camera, side.targets["full"], ssim_weight=0.2)
    links = report.links
    return {
        "records_mb": sum(map(sum, links["records"])) / 1e6,
        "pixels_mb": sum(map(sum, links["pixels"])) / 1e6,
        "imbalance": float(links["imbalance"]),
    }


def show(mesh: str, name: str, figures: dict[str, Any]) -> None:
    """One scene on one mesh."""
    links = figures["links"]
    print(
        f"{name} on {mesh}: {links['records_mb']:.1f} MB of records, {links['pixels_mb']:.1f} MB of pixels, "
        f"imbalance {links['imbalance']:.2f}"
    )

    def line(label: str, stages: dict[str, float]) -> None:
        parts = "  ".join(f"{stage} {ms:.3f}" for stage, ms in stages.items())
        print(f"  {label:<18} {sum(stages.values()):7.3f} = {parts}")

    print(f"  step: {figures['step']:.3f} ms")
    line("host", figures["host"])
    line("GPUs, stage by stage", figures["gpus"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--meshes", nargs="+", default=["0", "0,1", "0,1,2,3", "0,0,0,0"])
    parser.add_argument("--rows", nargs="+", default=["112k@1080p", "49M@4K"], choices=fast_step.ROWS)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(measure(args.rows, args.quick)))
        return
    results: dict[str, Any] = {"benchmark": "shards", "torch": torch.__version__, "meshes": {}}
    for mesh in args.meshes:
        command = [sys.executable, __file__, "--inside", "--rows", *args.rows]
        done = subprocess.run(
            command + (["--quick"] if args.quick else []),
            env={**os.environ, "MGPU_DEVICES": mesh},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            print(f"mesh {mesh} failed (exit code {done.returncode})", flush=True)
            continue
        results["meshes"][mesh] = json.loads(done.stdout.splitlines()[-1])
        for name, figures in results["meshes"][mesh].items():
            show(mesh, name, figures)
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if len(results["meshes"]) < len(args.meshes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
