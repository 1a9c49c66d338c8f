# SPDX-License-Identifier: Apache-2.0
"""What the partition is worth: bytes between shards, balance, what the machinery itself costs, and what rows out of sight do.

    python benchmarks/locality.py [--tables links machinery visibility] [--splats N] [--blocks B] [--images N] [--size WxH]
        [--steps 1 8 8s all] [--json FILE]

The scene is that of `mgpu-splat-city --splats N`: Gaussians on the surfaces of a town, and the cameras of its survey from
the air and its drive along the streets. The mesh is that of MGPU_DEVICES (default here: cpu:8).

links: bytes from shard to shard in a training step: of rows in random order in equal chunks, of rows in the order of space,
placed by cost, and of stripes of these; tiles have the same kind of owners in all. Also two balances, largest over mean, over
the steps: of the blending work (`blend`), and of the visible rows that a shard projects and steps (`rows`). `--steps`: how
many cameras a step has: a number of random ones, a number with `s` of ones that are spread over the shards
(partition/batches.py), or all in one step. All cameras are seen once, street and air apart. `remote`: share of the visible
rows that another shard than their home blends; `least`: the same if each tile were blended where most of its rows are at
home, whatever the balance: no choice of owners does better with these homes. Before the table, of rows in the order of space:
the same for rows that light a pixel, their share, and for steps the share if each tile may go to any shard within 10 % of
balance (greedy).

machinery: milliseconds of a training step, and of all that is done between steps: order, observation, placement, moves;
and their share of the steps between two refinements.

visibility: a training step of a camera that always sees the same, of 1 M to 64 M Gaussians, with cells and without: part
`growth` of visibility.py: a town and a camera in one of its streets, the town replicated where the camera does not look.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "partition"))
from city_scene import city_cameras, city_columns

LRS = {"means": 1e-5, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}
KINDS = ("records", "gradients", "pixels")
LAYOUTS = ("space", "stripes", "unsorted")  # the first one chooses the steps
TARGETS = {"street": 5.0, "aerial": 3.0}
REFINE_EVERY = 100
TILE = 16  # pixels
LIT_EVERY = 6  # cameras: one in so many is rendered to see which rows light a pixel


def total(matrix: list[list[int]]) -> int:
    """Bytes over all pairs of shards."""
    return sum(map(sum, matrix))


def batches(table: Any, cameras: list[Any], name: str) -> list[list[Any]]:
    """All cameras as steps: `8`: eight random ones; `8s`: eight that are spread over the shards; `all`. The last step may have
    fewer."""
    from ns_mgpu_splat.partition.batches import spread_batches, visible_rows

    if name == "all":
        return [cameras]
    if name.endswith("s"):
        found = spread_batches(visible_rows(table, cameras), int(name[:-1]))
    else:
        order = torch.randperm(len(cameras), generator=torch.Generator().manual_seed(0)).tolist()
        found = [order[first : first + int(name)] for first in range(0, len(order), int(name))]
    return [[cameras[i] for i in step] for step in found]


def targets_of(cameras: list[Any]) -> list[torch.Tensor]:
    """Grey photographs: what is in them moves no byte."""
    return [torch.full((c.height, c.width, 3), 128, dtype=torch.uint8, device="mgpu") for c in cameras]


def observe_links(table: Any, adam: Any, steps: list[list[Any]]) -> list[dict[str, Any]]:
    """What each step sent; nothing is trained."""
    from ns_mgpu_splat import train_step
    from ns_mgpu_splat.partition.batches import visible_rows

    found = []
    for cameras in steps:
        report = train_step(table, adam, cameras, targets_of(cameras), accumulate=True)
        links = report.links
        adam.zero_pending()
        seen = visible_rows(table, cameras).sum(0)
        found.append(
            {kind: total(links[kind]) for kind in KINDS}
            | {name: links[name] for name in ("remote_rows", "visible_rows", "imbalance")}
            | {"row_imbalance": float(seen.max() / max(1.0, seen.mean()))}
        )
    return found


def tile_counts(table: Any, camera: Any, *, lit: bool = False) -> Tensor:
    """(tiles, shards) rows that a camera sees, by the tile of their centre (the nearest one if it is outside) and by home.

    lit: only those that light a pixel, by the gradient of their colours.
    """
    from ns_mgpu_splat import render
    from ns_mgpu_splat.device import native

    ends = torch.tensor([end for _, end in table.homes])
    frame = native().splat_project(table.columns(), [camera.arguments()], False, table.sh_degree)
    row, _, centre, *_ = frame.records()
    tile = (centre.cpu() / TILE).long()
    if lit:
        table.sh0.requires_grad_(True)
        render(table, camera)[0].rgb.sum().backward()
        kept = table.sh0.grad.cpu().abs().amax(1)[row] > 0
        table.sh0.grad = None
        row, tile = row[kept], tile[kept]
    across, down = -(-camera.width // TILE), -(-camera.height // TILE)
    tile = tile[:, 1].clamp(0, down - 1) * across + tile[:, 0].clamp(0, across - 1)
    pairs = tile * len(ends) + torch.bucketize(row, ends, right=True)
    return torch.bincount(pairs, minlength=across * down * len(ends)).view(-1, len(ends))


def least_remote(counts: Tensor) -> float:
    """Share of the rows that leave their home if each tile is blended where most of its rows are at home."""
    return 1 - float(counts.amax(1).sum()) / max(1.0, float(counts.sum()))


def free_remote(counts: Tensor, tolerance: float = 1.1) -> float:
    """The same if no shard may blend more than `tolerance` times its share of the rows: greedy, those tiles first to which
    it matters most. Not the least possible, but tiles may go anywhere."""
    shards, load = counts.shape[1], counts.sum(1)
    most, used, at_home = tolerance * float(load.sum()) / shards, [0.0] * shards, 0
    two = counts.sort(1, descending=True).values
    for tile in (two[:, 0] - two[:, 1]).argsort(descending=True).tolist():
        weight = float(load[tile])
        if weight == 0:
            continue
        best = counts[tile].argsort(descending=True).tolist()
        to = next((s for s in best if used[s] + weight <= most), min(range(shards), key=used.__getitem__))
        used[to] += weight
        at_home += int(counts[tile, to])
    return 1 - at_home / max(1.0, float(load.sum()))


def print_limits(
    table: Any, cameras: dict[str, list[Any]], steps: dict[tuple[str, str], list[list[Any]]]
) -> dict[str, Any]:
    """What owners of tiles could do at best with these homes, and how much of what travels lights a pixel."""
    out: dict[str, Any] = {}
    for kind, of_kind in cameras.items():
        counts = {id(camera): tile_counts(table, camera) for camera in of_kind}
        some = of_kind[::LIT_EVERY]
        lit = [tile_counts(table, camera, lit=True) for camera in some]
        found = {
            "least": least_remote(torch.cat(list(counts.values()))),
            "lit": float(sum(c.sum() for c in lit) / sum(counts[id(camera)].sum() for camera in some)),
            "least of lit": least_remote(torch.cat(lit)),
        }
        for name in [name for of, name in steps if of == kind]:
            free = [free_remote(torch.cat([counts[id(c)] for c in step])) for step in steps[kind, name]]
            found[f"free, {name}"] = statistics.fmean(free)
        out[kind] = found
        print(
            f"  {kind}: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in found.items()),
            flush=True,
        )
    return out


def warm_up(table: Any, adam: Any, cameras: list[Any]) -> None:
    """Steps with learning rates of zero, so that placement knows how often rows are seen."""
    from ns_mgpu_splat import train_step

    for camera in cameras:
        train_step(table, adam, camera, targets_of([camera]), lrs=dict.fromkeys(LRS, 0.0))


def links_table(options: argparse.Namespace) -> dict[str, Any]:
    """All layouts, street and air, for each number of views a step."""
    from ns_mgpu_splat import SplatAdam, SplatTable
    from ns_mgpu_splat.data.city.town import build_town
    from ns_mgpu_splat.partition.placement import Placement
    from ns_mgpu_splat.partition.stripes import deal, stripe_rows

    town = build_town(options.blocks)
    cameras = city_cameras(town, options.images, *options.size)
    columns = city_columns(town, options.splats, shuffled=True)
    out: dict[str, Any] = {}
    steps: dict[tuple[str, str], list[list[Any]]] = {}
    for layout in LAYOUTS:
        table = SplatTable.from_columns(**columns)
        adam = SplatAdam(table, LRS, report_means=False)
        if layout == "space":
            table.reorder(adam)
            placement = Placement()
            everything = cameras["aerial"] + cameras["street"]
            order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(1)).tolist()
            warm_up(table, adam, [everything[i] for i in order[: options.warm_up]])
            placement.observe(table, adam)
            adam.flush()
            placement.update(table, adam)
            out["placement"] = placement.figures() | {"homes": table.homes}
            for kind, name in product(cameras, options.steps):
                steps[kind, name] = batches(table, cameras[kind], name)
            out["limits"] = print_limits(table, cameras, steps)
        elif layout == "stripes":
            deal(table, adam)
            out["stripe_rows"] = stripe_rows(table.num_rows, len(table.homes))
        for (kind, name), of_kind in steps.items():
            out[f"{layout} {kind} {name}"] = summary(observe_links(table, adam, of_kind))
            print(f"  {layout}, {kind}, {name} a step: {len(of_kind)} steps", flush=True)
        del table, adam
    print_links(out, options)
    return out


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Means a step, and the balances at the median and the 95th percentile step."""
    out = {kind: statistics.fmean(step[kind] for step in steps) for kind in KINDS}
    out["bytes"] = sum(out[kind] for kind in KINDS)
    out["remote_rows"] = statistics.fmean(step["remote_rows"] for step in steps)
    out["remote_share"] = sum(s["remote_rows"] for s in steps) / max(1, sum(s["visible_rows"] for s in steps))
    for name in ("imbalance", "row_imbalance"):
        balance = sorted(step[name] for step in steps)
        out[f"{name}_median"] = statistics.median(balance)
        out[f"{name}_p95"] = balance[min(len(balance) - 1, int(0.95 * len(balance)))]
    out["steps"] = len(steps)
    return out


def print_links(found: dict[str, Any], options: argparse.Namespace) -> None:
    """The table of the docs."""
    shards = len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]
    print(
        f"\n{options.splats:,} Gaussians, {options.blocks} blocks, {options.images} cameras of {options.size[0]}x"
        f"{options.size[1]}, {shards} shards, stripes of {found['stripe_rows']:,}; MB between shards a step; balances at the "
        "median step and the 95th percentile"
    )
    print(
        f"{'views':8}{'a step':>7} {'layout':9}{'MB':>8}{'fewer':>8}{'records':>9}{'target':>8}{'remote':>9}{'least':>9}"
        f"{'blend p50, p95':>17}{'rows p50, p95':>16}"
    )
    for kind, name, layout in product(("street", "aerial"), options.steps, LAYOUTS):
        a, b = found[f"unsorted {kind} {name}"], found[f"{layout} {kind} {name}"]
        travelled = [x["records"] + x["gradients"] for x in (a, b)]
        against = f"{a['bytes'] / max(1.0, b['bytes']):7.2f}x{travelled[0] / max(1.0, travelled[1]):8.2f}x"
        target = f"{TARGETS[kind]:7.0f}x" if layout == "space" else ""
        least = f"{100 * found['limits'][kind]['least']:7.1f} %" if layout == "space" else ""
        print(
            f"{kind:8}{name:>7} {layout:9}{b['bytes'] / 1e6:8.2f}{against}{target:>8}{100 * b['remote_share']:7.1f} %{least:>9}"
            f"{b['imbalance_median']:11.3f},{b['imbalance_p95']:6.3f}{b['row_imbalance_median']:10.3f},"
            f"{b['row_imbalance_p95']:6.3f}"
        )


def milliseconds(work: Callable[[], Any], rounds: int, before: Callable[[], Any] | None = None) -> float:
    """Median wall-clock time of `work`, with the device done before and after."""
    times = []
    for _ in range(rounds):
        if before is not None:
            before()
        torch.mgpu.synchronize()  # type: ignore[attr-defined]
        begin = time.perf_counter()
        work()
        torch.mgpu.synchronize()  # type: ignore[attr-defined]
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def machinery_table(options: argparse.Namespace) -> dict[str, Any]:
    """What is done between steps, against the steps."""
    from ns_mgpu_splat import SplatAdam, SplatTable, train_step
    from ns_mgpu_splat.data.city.town import build_town
    from ns_mgpu_splat.partition.placement import Placement

    town = build_town(options.blocks)
    cameras = city_cameras(town, options.images, *options.size)
    columns = city_columns(town, options.splats, shuffled=True)
    columns["shN"] = torch.zeros(options.splats, 15, 3)
    table = SplatTable.from_columns(**columns)
    del columns
    adam = SplatAdam(table, LRS, report_means=False)
    shards = len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]
    placement = Placement()
    out: dict[str, Any] = {"shards": shards, "rows": table.num_rows}
    order = torch.randperm(table.num_rows, generator=torch.Generator().manual_seed(2)).to("mgpu")

    def shuffle() -> None:
        adam.flush()
        for column in table.columns():
            if column.numel():
                column.detach().copy_(column.detach()[order])

    out["reorder, shuffled rows"] = milliseconds(lambda: table.reorder(adam), options.rounds, shuffle)
    out["reorder, sorted rows"] = milliseconds(lambda: table.reorder(adam), options.rounds, adam.flush)
    placement.update(table, adam)
    for kind in ("aerial", "street"):
        views = cameras[kind][: options.rounds * 4]
        steps: list[float] = []
        for camera in [*views[:3], *views]:  # the first ones size buffers
            steps.append(milliseconds(partial(train_step, table, adam, camera, targets_of([camera])), 1))
        out[f"step, {kind}"] = statistics.median(steps[3:])
    even = table.homes
    out["observe"] = milliseconds(lambda: placement.observe(table, adam), options.rounds)
    adam.flush()
    placement.update(table, adam)
    out["update, nothing moves"] = milliseconds(lambda: placement.update(table, adam), options.rounds)
    out["move of all that is off"] = milliseconds(
        lambda: placement.update(table, adam), options.rounds, lambda: table.place(even, adam)
    )
    step = min(out["step, aerial"], out["step, street"])
    between = out["observe"] + out["update, nothing moves"]
    out["share of steps"] = between / (REFINE_EVERY * step)
    print(
        f"\n{table.num_rows:,} Gaussians of SH degree 3, {shards} shards, {options.size[0]}x{options.size[1]}; ms"
    )
    for name, value in out.items():
        if isinstance(value, float):
            text = f"{100 * value:10.2f} %" if name.startswith("share") else f"{value:10.3f}"
            print(f"  {name:28}{text}")
    return out


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=["links", "machinery", "visibility"],
        default=["links", "machinery"],
    )
    parser.add_argument("--splats", type=int, default=200_000)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--images", type=int, default=120, help="cameras, half of them from the air")
    parser.add_argument(
        "--size", type=lambda text: tuple(map(int, text.split("x"))), default=(400, 300), metavar="WxH"
    )
    parser.add_argument("--steps", nargs="+", default=["1", "8", "8s", "all"], help="cameras a step")
    parser.add_argument("--warm-up", type=int, default=60, help="steps before placement looks at the rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--millions", nargs="+", type=float, default=[1, 4, 16, 64], help="of rows, table visibility"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("MGPU_DEVICES", "cpu:8")
    import ns_mgpu_splat

    ns_mgpu_splat.init()
    results: dict[str, Any] = {"benchmark": "locality", "torch": torch.__version__}
    if "links" in options.tables:
        if len(torch.mgpu.mesh().shards) == 1:  # type: ignore[attr-defined]
            print("A mesh of one shard sends nothing: no table of links. Set MGPU_DEVICES=0,0,0,0 or cpu:8.")
        else:
            results["links"] = links_table(options)
    if "machinery" in options.tables:
        results["machinery"] = machinery_table(options)
    if "visibility" in options.tables:
        from visibility import growth

        print()
        results["visibility"] = growth("town", options.millions, (1920, 1244), quick=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
