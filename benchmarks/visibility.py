# SPDX-License-Identifier: Apache-2.0
"""What a step costs follows what the camera sees, not how many Gaussians there are: culling by cells, on and off.

Two parts:

    cull     the table of fast_step's rows of 9 M and 49 M (gsplat's garden, replicated), as it is made and in the order of
             space: milliseconds of the kernels that cull, of all of an iteration, and how many cells and rows were walked
    growth   a camera that always sees the same, from 1 M rows to 64 M: the scene is replicated all around it, but where
             the camera would see more of it. `--scene town` (default): a town of 16 blocks with a million Gaussians, seen
             from one of its streets; `--scene garden`: gsplat's

Images with and without cells are compared, bit for bit. Medians, as in fast_step.py; kernels by torch.profiler (GPU).

    python benchmarks/visibility.py [--only cull growth] [--grids 9 21] [--scene town] [--millions 1 2 4 ...]
        [--size 1920x1244] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fast_step import COLUMNS, LR, Clock, Garden
from kernel_profile import profiled
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "partition"))
from city_scene import city_cameras, city_columns

BLOCKS = 16  # of the town
KERNELS = {
    "cull": ("cull_kernel", "list_cells_kernel"),
    "record": ("record_kernel",),
    "step": ("step_kernel",),
}


class GardenTile:
    """gsplat's garden with random shapes, as fast_step.py has it; `scale` of their sizes."""

    side = 4.0
    """World units, from one copy to the next."""
    nearest = 1
    """Copies around the first one that are there although the camera may see them."""

    def __init__(self, scale: float) -> None:
        self.garden, self.scale = Garden(), scale
        self.means = self.garden.means

    def camera(self, width: int, height: int) -> Any:
        """The scene's first one."""
        from ns_mgpu_splat import Camera

        return Camera.from_K(self.garden.viewmat, self.garden.scaled(width, height), width, height)

    def fill(self, new: dict[str, Tensor], copies: int) -> None:
        """Write rows of so many copies, where the first one is."""
        new["scales"].uniform_().mul_(0.02 * self.scale).clamp_min_(1e-9).log_()
        new["quats"].normal_()
        new["opacities"].uniform_().clamp_(1e-6, 1 - 1e-6).logit_()
        new["shN"].normal_(0.0, 0.02)
        means, sh0 = self.means.to("mgpu"), self.garden.sh0.to("mgpu")
        for first in range(0, copies * len(means), len(means)):
            new["means"][first : first + len(means)].copy_(means)
            new["sh0"][first : first + len(means)].copy_(sh0)


class TownTile:
    """A town of 16 blocks with `rows` Gaussians on its surfaces, and a camera in the street that is nearest to its middle."""

    nearest = 0

    def __init__(self, rows: int) -> None:
        from ns_mgpu_splat.data.city.town import build_town

        self.town = build_town(BLOCKS)
        self.columns = city_columns(self.town, rows, shuffled=False)
        self.means = self.columns["means"]
        low, high = self.means.amin(0), self.means.amax(0)
        self.side, self.middle = float((high - low)[:2].max()), (low + high) / 2

    def camera(self, width: int, height: int) -> Any:
        """Of the town's own drive."""
        cameras = city_cameras(self.town, 64, width, height)["street"]
        return min(cameras, key=lambda c: float((c.viewmat[:3, :3] @ self.middle + c.viewmat[:3, 3]).norm()))

    def fill(self, new: dict[str, Tensor], copies: int) -> None:
        """Write rows of so many copies, where the first one is."""
        new["shN"].normal_(0.0, 0.02)
        for name, column in self.columns.items():
            there, rows = column.to("mgpu"), len(column)
            for first in range(0, copies * rows, rows):
                new[name][first : first + rows].copy_(there)


class Scene:
    """A table that grows by copies of a tile, its optimizer and one camera."""

    def __init__(
        self, tile: GardenTile | TownTile, capacity_tiles: int, size: tuple[int, int], quick: bool
    ) -> None:
        import ns_mgpu_splat
        from ns_mgpu_splat import SplatTable
        from ns_mgpu_splat.splats.optimizer import SplatAdam

        ns_mgpu_splat.init()
        mgpu = vars(torch)["mgpu"]
        self.on_gpu = mgpu.mesh().shards[0].startswith("cuda")
        self.clock = Clock("mgpu", self.on_gpu, quick)
        self.tile, self.points = tile, len(tile.means)
        self.table = SplatTable(0, sh_degree=3, capacity=capacity_tiles * self.points).requires_grad_(True)
        self.table.cells.least_rows = 0  # whatever the table's size
        self.adam = SplatAdam(self.table, dict.fromkeys(COLUMNS, LR), report_means=False)
        self.camera = tile.camera(*size)
        target = torch.rand(size[1], size[0], 3, generator=torch.Generator().manual_seed(1))
        self.target = (target * 255).round().to(torch.uint8).to("mgpu")

    def add(self, offsets: list[tuple[float, float]]) -> None:
        """One more copy at each offset."""
        first = self.table.num_rows
        self.adam.flush()
        self.table.grow(first + self.points * len(offsets))
        self.adam.grow(self.table.num_rows)
        with torch.no_grad():
            new = {name: column.detach()[first:] for name, column in self.table.named_columns().items()}
            self.tile.fill(new, len(offsets))
            for i, (x, y) in enumerate(offsets):
                at = slice(i * self.points, (i + 1) * self.points)
                new["means"][at].add_(torch.tensor([x, y, 0.0], device="mgpu"))

    def iteration(self) -> Any:
        """One training step with the full objective."""
        from ns_mgpu_splat import train_step

        return train_step(self.table, self.adam, self.camera, self.target, ssim_weight=0.2)

    def image(self) -> Tensor:
        """What the camera sees."""
        from ns_mgpu_splat import render

        with torch.no_grad():
            return render(self.table, self.camera, optimizer=self.adam, depth=False)[0].rgb.cpu()

    def kernels(self) -> dict[str, float]:
        """Milliseconds of kernels in one iteration; none without a GPU."""
        if not self.on_gpu:
            return {}
        rounds = 5

        def work() -> None:
            for _ in range(rounds):
                self.iteration()
            self.clock.wait()

        out = dict.fromkeys(KERNELS, 0.0)
        for kernel in profiled(work, rounds).kernels:
            for part, names in KERNELS.items():
                if any(name in kernel.name for name in names):
                    out[part] += kernel.ms
        return out

    def measure(self, *, cells: bool) -> dict[str, Any]:
        """Figures of an iteration with cells, or without."""
        self.table.cells.enabled = cells
        for _ in range(3):
            report = self.iteration()
        result: dict[str, Any] = {"cells": cells, "iter_ms": self.clock.median_ms(self.iteration)}
        result["kernels_ms"] = self.kernels()
        result["culled"] = {name: sum(counts) for name, counts in report.culled.items()}
        result["visible"] = report._result.report["rows_seen"]
        result["rows"] = self.table.num_rows
        return result

    def both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Without cells and with them; their images must be the same bits."""
        pair = self.measure(cells=False), self.measure(cells=True)
        self.adam.flush()
        for _ in range(2):  # by cells from the second on
            by_cells = self.image()
        self.table.cells.enabled = False
        if not torch.equal(by_cells, self.image()):
            raise RuntimeError(f"{self.table.num_rows:,} rows: the image by cells is another one")
        return pair


def square(grid: int) -> list[tuple[float, float]]:
    """Offsets of a grid of gardens, as fast_step.py lays them."""
    ends = [GardenTile.side * (i - grid // 2) for i in range(grid)]
    return list(itertools.product(ends, ends))


def around(tile: GardenTile | TownTile, camera: Any) -> Iterator[tuple[float, float]]:
    """Offsets by distance: those in the middle, then those of which the camera sees nothing."""
    low, high = tile.means.amin(0), tile.means.amax(0)
    middle, radius = (low + high) / 2, float((high - low).norm() / 2) + 0.1
    rotation, shift = camera.viewmat[:3, :3], camera.viewmat[:3, 3]
    sides = []  # inward normals of the image's sides, in the camera
    for axis, length, focal, centre in (
        (0, camera.width, camera.fx, camera.cx),
        (1, camera.height, camera.fy, camera.cy),
    ):
        for sign, extent in ((1.0, centre), (-1.0, length - centre)):
            normal = torch.zeros(3)
            normal[axis], normal[2] = sign * focal, extent
            sides.append(normal / normal.norm())
    places = sorted(itertools.product(range(-40, 41), repeat=2), key=lambda p: (max(map(abs, p)), p))
    for x, y in places:
        centre3 = rotation @ (middle + torch.tensor([tile.side * x, tile.side * y, 0.0])) + shift
        hidden = float(centre3[2]) < -radius or any(float(side @ centre3) < -radius for side in sides)
        if max(abs(x), abs(y)) <= tile.nearest or hidden:
            yield tile.side * x, tile.side * y


def show(name: str, result: dict[str, Any]) -> None:
    """One line."""
    culled, kernels = result["culled"], result["kernels_ms"]
    parts = "  ".join(f"{part} {ms:.3f}" for part, ms in kernels.items())
    cells = f"{culled['cells_kept']:,} of {culled['cells']:,} cells" if culled["cells"] else "no cells"
    rows, visible = result["rows"] / 1e6, result["visible"] / 1e6
    print(
        f"{name:18s} {rows:6.2f} M rows, {visible:5.2f} M visible, iter {result['iter_ms']:8.3f} ms;  {parts};  "
        f"{cells}, {culled['candidates'] / 1e6:.2f} M candidates",
        flush=True,
    )


def cull(grids: list[int], size: tuple[int, int], quick: bool) -> dict[str, Any]:
    """The kernels that cull, on rows as they are made and in the order of space."""
    out: dict[str, Any] = {}
    for grid in grids:
        scene = Scene(GardenTile(0.5), grid * grid, size, quick)
        scene.add(square(grid))
        for order in ("as made", "sorted"):
            if order == "sorted":
                scene.table.reorder(scene.adam)
            for result in scene.both():
                name = f"{order}, {'cells' if result['cells'] else 'all rows'}"
                out[f"{grid}x{grid} {name}"] = result
                show(name, result)
        del scene
        vars(torch)["mgpu"].empty_cache()
    return out


def growth(kind: str, millions: list[float], size: tuple[int, int], quick: bool) -> dict[str, Any]:
    """The same view of ever more rows; the town has a million rows, or the least that were asked for."""
    tile = GardenTile(0.5) if kind == "garden" else TownTile(round(1e6 * min(1.0, *millions)))
    points = len(tile.means)
    tiles = [max((2 * tile.nearest + 1) ** 2, round(m * 1e6 / points)) for m in millions]
    scene = Scene(tile, max(tiles), size, quick)
    places = around(tile, scene.camera)
    out: dict[str, Any] = {}
    have = 0
    for count in tiles:
        scene.add(list(itertools.islice(places, count - have)))
        have = count
        scene.table.reorder(scene.adam)
        for result in scene.both():
            name = "cells" if result["cells"] else "all rows"
            out[f"{scene.table.num_rows} {name}"] = result
            show(name, result)
    for name in ("all rows", "cells"):
        times = [result["iter_ms"] for key, result in out.items() if key.endswith(f" {name}")]
        out[f"growth {name}"] = times[-1] / times[0] - 1
        print(
            f"{name}: from {tiles[0] * points:,} to {tiles[-1] * points:,} rows the step grows by {out[f'growth {name}']:.1%}"
        )
    return out


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=["cull", "growth"], default=["cull", "growth"])
    parser.add_argument(
        "--grids", nargs="+", type=int, default=[9, 21], help="gardens along a side, part cull"
    )
    parser.add_argument(
        "--millions", nargs="+", type=float, default=[1, 2, 4, 8, 16, 32, 64], help="of rows, part growth"
    )
    parser.add_argument("--scene", choices=["town", "garden"], default="town", help="of part growth")
    parser.add_argument("--size", default="1920x1244", help="of the image")
    parser.add_argument(
        "--quick", action="store_true", help="10 iterations of each kind instead of 30 and more"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    width, height = (int(side) for side in arguments.size.split("x"))
    result: dict[str, Any] = {
        "benchmark": "visibility",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "size": arguments.size,
    }
    try:
        if "cull" in arguments.only:
            result["cull"] = cull(arguments.grids, (width, height), arguments.quick)
        if "growth" in arguments.only:
            result["growth"] = growth(arguments.scene, arguments.millions, (width, height), arguments.quick)
    finally:  # what there is
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
