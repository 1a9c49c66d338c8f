# SPDX-License-Identifier: Apache-2.0
"""Not a test: one city on the mesh of MGPU_DEVICES, through all that moves its rows (test_meshes.py).

Usage: placement_probe.py OUT.pt ROWS WIDTH HEIGHT RANGES
Writes images and gradients of an aerial and a street view: of unsorted rows in equal chunks, sorted and placed, refined,
and after rows were dealt to shards unevenly; then in stripes for so many ranges, and after these were refined and moved;
and, sorted again, the moments after a training step and more moves.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from city_scene import city_cameras, city_columns

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.data.city.town import build_town
from ns_mgpu_splat.partition.batches import visible_rows
from ns_mgpu_splat.partition.placement import Placement, PlacementSettings, even_homes
from ns_mgpu_splat.partition.stripes import deal, stripe_rows
from ns_mgpu_splat.splats.densify import McmcStrategy

LRS = {"means": 1e-4, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3}
GRADIENTS = ("means", "scales", "opacities", "sh0")
SPARSE_ROWS = 1 << 20  # from here on gradients are written of rows that have one


def uneven(rows: int, shards: int) -> list[tuple[int, int]]:
    """Homes of very unlike sizes, the second empty; on one shard all rows."""
    ends = [rows * (shard * shard + shard + 1) // (shards * shards + 40) for shard in range(shards)]
    ends[-1] = rows
    if shards > 2:
        ends[1] = ends[0]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def look(table: SplatTable, cameras: list[Any]) -> dict[str, Any]:
    """Images and gradients of both views."""
    images = render(table, cameras)
    loss = sum((image.rgb * image.rgb).sum() + 0.1 * image.depth_sum.sum() for image in images)
    loss.backward()
    gradients: dict[str, Any] = {}
    for name in GRADIENTS:
        column = getattr(table, name)
        gradient, column.grad = column.grad, None
        if table.num_rows >= SPARSE_ROWS:
            rows = gradient.reshape(table.num_rows, -1).abs().amax(1).nonzero()[:, 0]
            gradients[name + ".rows"], gradient = rows.cpu(), gradient[rows]
        gradients[name] = gradient.cpu()
    for column in table.columns():
        column.grad = None
    return {
        "images": [
            torch.cat([image.rgb, image.depth_sum, image.accumulation], -1).detach().cpu() for image in images
        ],
        "gradients": gradients,
    }


def dealt(table: SplatTable, adam: SplatAdam, ranges: int) -> None:
    """Stripes for so many shards, on a mesh of any number: the same rows in the same places."""
    if len(table.homes) == ranges:
        deal(table, adam)
    else:
        homes = even_homes(table.num_rows, ranges, 16)
        table.reorder(adam, deal=homes, stripe=stripe_rows(table.num_rows, ranges))


def main(out: str, rows: int, width: int, height: int, ranges: int) -> None:
    """Look at the table in each of its states."""
    begin = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begin:7.2f} s  {what}", flush=True)

    device = ns_mgpu_splat.init()
    shards = len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]
    town = build_town(16)
    found = city_cameras(town, 32, width, height)
    cameras = [found["aerial"][5], found["street"][7]]
    table = SplatTable.from_columns(**city_columns(town, rows, shuffled=True), capacity=rows * 11 // 10)
    table.requires_grad_(True)
    with torch.no_grad():
        table.opacities[::50] = -9.0  # some dead rows, for the refinement to move
    adam = SplatAdam(table, LRS, seed=3)
    placement = Placement(PlacementSettings(horizon=100_000_000))  # small moves pay, too
    strategy = McmcStrategy(
        rows * 21 // 20, refine_start=0, refine_every=1, refine_stop=100, placement=placement
    )
    result: dict[str, Any] = {"shards": shards, "homes": {}, "rows": {}, "moved": {}, "seen rows": {}}

    def note(state: str) -> None:
        result[state] = look(table, cameras)
        result["seen rows"][state] = visible_rows(table, cameras)
        result["homes"][state], result["rows"][state] = table.homes, table.num_rows
        result["moved"][state] = placement.pages_moved
        say(f"{state}: {table.num_rows:,} rows, homes {table.homes}")

    note("unsorted")
    table.reorder(adam)
    placement.update(table, adam)
    note("placed")
    result["refined"] = strategy.post_step(table, adam, 1)
    note("densified")
    table.place(uneven(table.num_rows, shards), adam)
    note("moved")
    dealt(table, adam, ranges)
    note("striped")
    with torch.no_grad():
        table.opacities[::50] = -9.0
    striped = Placement(PlacementSettings(layout="stripes"))
    strategy.placement, strategy.max_gaussians = striped, table.capacity
    result["refined stripes"] = strategy.post_step(table, adam, 3)
    table.place(uneven(table.num_rows, shards), adam)
    note("striped, refined and moved")
    strategy.placement = placement
    table.reorder(adam)

    targets = [torch.zeros(height, width, 3, dtype=torch.uint8, device=device) for _ in cameras]
    for _ in range(12):
        report = train_step(table, adam, cameras, targets)
        if adam.steps == 1:
            result["exp_avg"] = {name: adam.exp_avg[name].cpu() for name in GRADIENTS}
            result["loss"] = report.loss
    before = [tensor.detach().cpu() for tensor in (*table.columns(), *adam.rows_of_all())]
    placement.observe(table, adam)
    placement.update(table, adam)
    after = [tensor.detach().cpu() for tensor in (*table.columns(), *adam.rows_of_all())]
    result["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    result["seen"] = placement.costs(table).cost.tolist()
    result["homes"]["trained"] = table.homes
    adam.flush()
    strategy.post_step(table, adam, 2)
    result["rows"]["refined again"] = table.num_rows
    result["finite"] = all(bool(column.detach().isfinite().all()) for column in table.columns())
    result["report"] = vars(placement.report)
    say(f"trained, moved and refined again: {table.num_rows:,} rows, homes {table.homes}")
    torch.save(result, out)
    say("written")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
