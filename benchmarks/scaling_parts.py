# SPDX-License-Identifier: Apache-2.0
"""What scaling.py measures, part by part, on the mesh of this process. Each function yields rows: flat dictionaries.

A part runs in a process of its own that scaling.py starts: `prepare` does what needs no GPU, `run` the rest.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_profile import profiled
from torch import Tensor

Rows = Iterator[dict[str, Any]]

LR = 1e-6  # so small that the scene stays the same
LRS = dict.fromkeys(("means", "quats", "scales", "opacities", "sh0", "shN"), LR)
STEP_LR = 1e-3  # of the one step that meshes are compared by
ROWS_A_BLOCK = 3_100_000  # of the town, at 3840 pixels
WARM_UP = 24  # steps, in which placement learns what is seen
GIB = float(1 << 30)
PAGE = 2 << 20
MARGIN = 4.0  # GiB a card that the largest table leaves for contexts and what a step needs at least
TRIES, LESS_A_TRY = 10, 0.02  # of the largest table
GARDEN_ROWS = 111_785
LAYOUTS = ("placed", "unsorted", "striped")  # of rows on several shards; on one, the third is the first


@dataclass(frozen=True)
class Case:
    """A scene and the size of its images."""

    name: str
    rows: int
    width: int
    height: int
    blocks: int
    half: bool = False
    garden: int = 0
    """Side of the grid of gardens (fast_step.py); 0: the town."""


def case_of(millions: float, size: tuple[int, ...] | None, half_above: float) -> Case:
    """The row of the strong scaling table with so many Gaussians: 1920x1244 below 10 M, else 3840x2489."""
    width, height = size or ((1920, 1244) if millions < 10 else (3840, 2489))
    width, height = int(width), int(height)
    rows = round(millions * 1e6)
    blocks = max(1, round(rows / (ROWS_A_BLOCK * (width / 3840) ** 2)))
    half = millions > half_above
    return Case(f"{millions:g}M{' half' if half else ''}", rows, width, height, min(blocks, 256), half)


# ---- a scene on the device


def mgpu() -> Any:
    """`torch.mgpu`, which is there once the device is registered."""
    return vars(torch)["mgpu"]


def shard_count() -> int:
    """Shards of the mesh."""
    return len(mgpu().mesh().shards)


def on_gpus() -> bool:
    """Whether the shards are on GPUs."""
    return bool(mgpu().mesh().shards[0].startswith("cuda"))


def gpu_count() -> int:
    """Different GPUs of the mesh; shards of the host count as one each."""
    return len(set(mgpu().mesh().shards))


class Scene:
    """A case's table, optimizer, cameras and target on the mesh."""

    def __init__(self, case: Case, source: Any, order: str = "town", *, images: int = 64) -> None:
        from ns_mgpu_splat import SplatAdam, SplatTable

        self.case, self.source = case, source
        start = time.perf_counter()
        self.table = SplatTable(case.rows, sh_degree=3, half=case.half)
        self.adam = SplatAdam(self.table, LRS, report_means=False)
        self.cameras: dict[str, list[Any]] = source.cameras(images, case.width, case.height)
        source.fill(self.table, order)
        mgpu().synchronize()
        self.seconds = time.perf_counter() - start
        generator = torch.Generator().manual_seed(1)
        target = torch.randint(0, 256, (case.height, case.width, 3), generator=generator, dtype=torch.uint8)
        self.target = target.to("mgpu")

    def step(self, cameras: list[Any], *, accumulate: bool = False) -> Any:
        """One training step with the full objective."""
        from ns_mgpu_splat import train_step

        return train_step(self.table, self.adam, cameras, [self.target] * len(cameras), accumulate=accumulate)

    def batches(self, kind: str, size: int, views: int) -> list[list[Any]]:
        """Steps of so many cameras of a kind, with `views` in all, two steps at least: the same on any mesh."""
        cameras = self.cameras[kind]
        steps = max(2, views // size)
        return [[cameras[(step * size + i) % len(cameras)] for i in range(size)] for step in range(steps)]

    def lay_out(self, layout: str) -> dict[str, float]:
        """Rows as this layout has them, from the order in which they were made; what that took and gave.

        "placed": the product's layout "space", dealt by what is seen; "striped": its "stripes"; "unsorted": as they are.
        """
        if layout == "placed":
            return self.sort_and_place()
        if layout == "unsorted":
            return {}
        from ns_mgpu_splat.partition.stripes import deal

        start = time.perf_counter()
        deal(self.table, self.adam)
        mgpu().synchronize()
        return {"reorder_s": time.perf_counter() - start}

    def sort_and_place(self) -> dict[str, float]:
        """Rows in Hilbert order, dealt to shards by what cameras of all kinds see; what that took and gave."""
        from ns_mgpu_splat.partition.placement import Placement

        placement, start = Placement(), time.perf_counter()
        self.table.reorder(self.adam)
        mgpu().synchronize()
        sorted_at = time.perf_counter()
        if shard_count() > 1:
            kinds = list(self.cameras.values())
            for i in range(WARM_UP):
                of_kind = kinds[i % len(kinds)]
                self.step([of_kind[(i // len(kinds)) % len(of_kind)]])
            placement.observe(self.table, self.adam)
            self.adam.flush()
            mgpu().synchronize()
        observed_at = time.perf_counter()
        placement.update(self.table, self.adam)
        mgpu().synchronize()
        return {
            "reorder_s": sorted_at - start,
            "place_s": time.perf_counter() - observed_at,
            **placement.figures(),
        }

    def close(self) -> None:
        """Give all memory back."""
        del self.table, self.adam, self.cameras, self.target
        gc.collect()
        mgpu().synchronize()
        mgpu().empty_cache()


def memory_gib() -> dict[str, list[float]]:
    """GiB by shard in use and at the peak, and by GPU what is not free."""
    shards = mgpu().memory_stats()["shards"]
    out = {name: [round(s[name] / GIB, 3) for s in shards] for name in ("allocated", "peak", "reserved")}
    if on_gpus():
        found = [torch.cuda.mem_get_info(name) for name in dict.fromkeys(mgpu().mesh().shards)]
        out["gpu_used"] = [round((total - free) / GIB, 3) for free, total in found]
    return out


def link_figures(found: dict[str, Any], steps: int) -> dict[str, float]:
    """Bytes a step by kind, and shares, from `torch.mgpu.link_stats()`."""
    from locality import KINDS, total

    moved = {kind: total(found[kind]) / steps for kind in KINDS}
    return {
        **{f"{kind}_mb": value / 1e6 for kind, value in moved.items()},
        "links_mb": sum(moved.values()) / 1e6,
        "remote_share": found["remote_rows"] / max(1, found["visible_rows"]),
        "visible": found["visible_rows"] / steps,
        "imbalance": found["imbalance"],
        "imbalance_max": found["imbalance_max"],
    }


def timed_steps(scene: Scene, steps: list[list[Any]], passes: int) -> dict[str, Any]:
    """Wall-clock milliseconds a step, the host waiting only at both ends of a pass through all steps."""
    home = statistics.fmean(home_imbalance(scene.step(cameras)) for cameras in steps[:4])
    mgpu().synchronize()
    mgpu().reset_peak_memory_stats()
    mgpu().reset_link_stats()
    found = []
    for _ in range(passes):
        start = time.perf_counter()
        for cameras in steps:
            scene.step(cameras)
        mgpu().synchronize()
        found.append(1e3 * (time.perf_counter() - start) / len(steps))
    links = link_figures(mgpu().link_stats(reset=True), passes * len(steps))
    times = {"ms": statistics.median(found), "ms_least": min(found), "ms_most": max(found)}
    return times | {"steps": len(steps), "home_imbalance": home} | links


def home_imbalance(report: Any) -> float:
    """Rows that a shard projects in a step, largest over mean."""
    projected = report.culled["candidates"]
    return max(projected) * len(projected) / max(1, sum(projected))


def stage_times(scene: Scene, steps: list[list[Any]]) -> dict[str, Any]:
    """`stages`, mean milliseconds of each (wants MGPU_STAGE_TIMES=1 on GPUs), and `home_imbalance`: rows that a shard projects,
    largest over mean, mean over the steps."""
    together: dict[str, float] = {}
    home = []
    for cameras in steps:
        report = scene.step(cameras)
        for stage, spent in report.times:
            together[stage] = together.get(stage, 0.0) + 1e3 * spent / len(steps)
        home.append(home_imbalance(report))
    stages = {stage: round(milliseconds, 4) for stage, milliseconds in together.items()}
    return {"stages": stages, "home_imbalance": statistics.fmean(home)}


def sort_into_stripes(scene: Scene, shards: int) -> None:
    """Rows where the product's "stripes" has them on so many shards, whatever the mesh."""
    from ns_mgpu_splat.partition.placement import even_homes, row_bytes_of
    from ns_mgpu_splat.partition.stripes import deal, stripe_rows

    if shards == shard_count():
        deal(scene.table, scene.adam)
        return
    rows = scene.table.num_rows
    homes = even_homes(rows, shards, max(row_bytes_of(scene.table.columns())))
    scene.table.reorder(scene.adam, deal=homes, stripe=stripe_rows(rows, shards))


# ---- work: what does not depend on whether shards run side by side


@contextmanager
def stage_timing(value: str | None) -> Iterator[None]:
    """In here MGPU_STAGE_TIMES says this, or nothing."""
    before = os.environ.pop("MGPU_STAGE_TIMES", None)
    if value is not None:
        os.environ["MGPU_STAGE_TIMES"] = value
    try:
        yield
    finally:
        os.environ.pop("MGPU_STAGE_TIMES", None)
        if before is not None:
            os.environ["MGPU_STAGE_TIMES"] = before


def host_times(scene: Scene, steps: list[list[Any]]) -> dict[str, float]:
    """`host_ms`: what a step's calls take the thread that issues them, without its waits for the GPUs."""
    with stage_timing("host"):
        stages = stage_times(scene, steps)["stages"]
    return {"host_ms": sum(ms for stage, ms in stages.items() if stage != "wait")}


def kernel_times(scene: Scene, steps: list[list[Any]]) -> dict[str, Any]:
    """`kernels_ms`, by torch's profiler: kernels, copies and fills of a step, in sum over all shards; `launches` of them, and
    `kernels`, each one's milliseconds. After a pass over the same steps: rooms for records shrink from step to step, and one step
    in between would have "project" done twice in another."""

    def work() -> None:
        for cameras in steps:
            scene.step(cameras)
        everything_done()

    with stage_timing(None):
        found = profiled(work, len(steps))
    kernels = found.by_short_name()
    return {
        "kernels_ms": sum(kernels.values()),
        "launches": sum(kernel.launches for kernel in found.kernels),
        "kernels": {name: round(ms, 4) for name, ms in kernels.items()},
    }


# ---- the parts


class GardenSource:
    """gsplat's garden, replicated, with its first camera alone: the workload that peers were measured on."""

    def __init__(self, case: Case) -> None:
        from fast_step import Garden

        self.garden, self.case = Garden(), case

    def cameras(self, images: int, width: int, height: int) -> dict[str, list[Any]]:
        """The first camera, four times."""
        from ns_mgpu_splat import Camera

        camera = Camera.from_K(self.garden.viewmat, self.garden.scaled(width, height), width, height)
        return {"garden": [camera] * min(images, 4)}

    def fill(self, table: Any, order: str = "town") -> None:
        """Rows as fast_step.py makes them, garden after garden, or unsorted."""
        from town_scene import places, plain

        columns = {name: plain(column) for name, column in table.named_columns().items()}
        self.garden.fill(columns, self.case.garden, 0.5)
        if order != "town":
            rows, device = table.num_rows, columns["means"].device
            place = places(0, rows, rows, order, device)
            for column in columns.values():
                column.copy_(column[place])
            del place
        table.cells.forget()
        mgpu().synchronize()
        if on_gpus():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def source_of(case: Case) -> Any:
    """Makes the rows of a case; what needs no GPU happens here."""
    from town_scene import TownScene

    return GardenSource(case) if case.garden else TownScene(case.blocks, case.rows)


class Part(ABC):
    """What scaling.py starts in a process: options from its command line, and the shards that it will get."""

    def __init__(self, options: dict[str, Any], shards: int) -> None:
        self.options, self.shards = options, shards
        self.quick: bool = options["quick"]
        self.views = options["views"] or (8 if self.quick else 16)
        """Of timing, for each figure and pass."""
        self.passes = 2 if self.quick else 3

    def batch_sizes(self) -> list[int]:
        """Cameras a step: 1 and as many as there are shards; one shard takes the others' numbers, to compare with."""
        sizes = {1, self.shards} if self.shards > 1 else {1, *self.options["gpus"]}
        return sorted(sizes)

    def prepare(self) -> None:  # noqa: B027 (most parts have nothing to prepare)
        """What needs no device."""

    @abstractmethod
    def run(self) -> Rows:
        """Measure."""


def cases_of(options: dict[str, Any]) -> list[Case]:
    """The scenes of strong scaling: towns, then gardens."""
    size = tuple(options["size"]) if options["size"] else None
    cases = [case_of(millions, size, options["half_above"]) for millions in options["millions"]]
    for grid in options["gardens"]:
        rows, (width, height) = GARDEN_ROWS * grid * grid, size or (3840, 2489)
        cases.append(Case(f"garden {rows / 1e6:.1f}M", rows, width, height, 0, garden=grid))
    return cases


def fits(case: Case) -> str | None:
    """None if table and moments fit with room for a step and a sort, else the sentence that says so."""
    if not on_gpus():
        return None
    free = sum(torch.cuda.mem_get_info(name)[0] for name in dict.fromkeys(mgpu().mesh().shards)) / GIB
    bytes_a_row = 504 if case.half else 712
    needed = case.rows * bytes_a_row * 1.05 / GIB + 6
    if needed <= free:
        return None
    return f"{case.name}: {needed:.0f} GiB needed, {free:.0f} free on {gpu_count()} GPUs"


class Strong(Part):
    """Strong scaling: milliseconds a step, rows in Hilbert order and placed."""

    wanted_stages = False

    def prepare(self) -> None:
        """Towns and cameras."""
        self.cases, self.sources = cases_of(self.options), []
        for case in self.cases:
            try:
                self.sources.append(source_of(case))
            except SystemExit as error:  # no garden here
                self.sources.append(str(error))

    def run(self) -> Rows:
        """Case by case, the smallest first."""
        for case, source in zip(self.cases, self.sources, strict=True):
            reason = source if isinstance(source, str) else fits(case)
            if reason:
                yield {"case": case.name, "left_out": reason}
                continue
            yield from self.run_case(case, source)

    def run_case(self, case: Case, source: Any) -> Rows:
        """One scene; on several shards also unsorted, and in stripes, so that each camera's rows are at home on all of them."""
        for layout in LAYOUTS if self.shards > 1 else LAYOUTS[:1]:
            scene = Scene(case, source, order_of(layout))
            head = head_of(case, scene) | {"layout": layout} | scene.lay_out(layout)
            for kind in scene.cameras:
                for batch in self.batch_sizes():
                    found = timed_steps(scene, scene.batches(kind, batch, self.views), self.passes)
                    yield head | {"kind": kind, "batch": batch} | found | memory_gib()
            scene.close()


def order_of(layout: str) -> str:
    """In which order rows are made for a layout."""
    return "unsorted" if layout == "unsorted" else "town"


def head_of(case: Case, scene: Scene) -> dict[str, Any]:
    """How the rows of a scene begin."""
    size = f"{case.width}x{case.height}"
    return {"case": case.name, "rows": case.rows, "size": size, "make_s": scene.seconds}


class Stages(Strong):
    """Where the time of a step goes, and what goes over the links, of rows in each layout."""

    def run_case(self, case: Case, source: Any) -> Rows:
        """One scene, written anew for each layout."""
        scene: Scene | None = None
        for layout in LAYOUTS if self.shards > 1 else LAYOUTS[:2]:
            if scene is None:
                scene = Scene(case, source, order_of(layout))
            else:
                scene.adam.flush()
                source.fill(scene.table, order_of(layout))
            head = head_of(case, scene) | {"layout": layout} | scene.lay_out(layout)
            for kind in scene.cameras:
                for batch in self.batch_sizes():
                    steps = scene.batches(kind, batch, self.views)
                    for cameras in steps:  # whole passes from here on: kernel_times says why
                        scene.step(cameras)
                    mgpu().reset_link_stats()
                    times = stage_times(scene, steps)
                    links = link_figures(mgpu().link_stats(reset=True), len(steps))
                    work = host_times(scene, steps) | kernel_times(scene, steps) if on_gpus() else {}
                    yield head | {"kind": kind, "batch": batch} | times | links | work
        if scene is not None:
            scene.close()


class Weak(Part):
    """Weak scaling: the same number of Gaussians and of cameras for each GPU, in a town that grows with it."""

    def prepare(self) -> None:
        """The town, a block for so many rows."""
        size = tuple(self.options["size"]) if self.options["size"] else None
        one = case_of(self.options["weak_millions"], size, 1e9)
        self.case = Case(
            f"{self.options['weak_millions']:g}M a GPU",
            one.rows * self.shards,
            one.width,
            one.height,
            one.blocks * self.shards,
        )
        self.source = source_of(self.case)

    def run(self) -> Rows:
        """Rows in the product's layout: stripes, on one shard Hilbert order."""
        reason = fits(self.case)
        if reason:
            yield {"case": self.case.name, "left_out": reason}
            return
        head = {
            "case": self.case.name,
            "rows": self.case.rows,
            "size": f"{self.case.width}x{self.case.height}",
        }
        scene = Scene(self.case, self.source, images=8 * self.shards + 16)
        head |= {"make_s": scene.seconds} | scene.lay_out("striped")
        for kind in scene.cameras:
            for batch in sorted({1, self.shards}):
                found = timed_steps(scene, scene.batches(kind, batch, self.views), self.passes)
                yield head | {"kind": kind, "batch": batch} | found | memory_gib()
        scene.close()


class Largest(Part):
    """The most Gaussians that train for 20 steps, by what the cards have free."""

    half = False

    def prepare(self) -> None:
        """Nothing: how many rows there will be, the cards say."""

    def limit_rows(self, bytes_a_row: int) -> int:
        """Rows that fill the smallest card of the mesh but for a margin, or the number given."""
        cap = round(self.options["largest_millions"] * 1e6) if self.options["largest_millions"] else None
        if not on_gpus():
            return cap or 100_000
        names = mgpu().mesh().shards
        free = [torch.cuda.mem_get_info(name)[0] / names.count(name) for name in dict.fromkeys(names)]
        rows = int((min(free) - MARGIN * GIB) * len(names) / bytes_a_row)
        return min(rows, cap) if cap else rows

    def run(self) -> Rows:
        """From the full cards downwards, by 2 % after each time that memory ran out; the town grows with the rows."""
        bytes_a_row = 504 if self.half else 712
        rows = self.limit_rows(bytes_a_row)
        width, height = self.options["size"] or (1920, 1244)
        for attempt in range(TRIES):
            blocks = max(1, round(rows / ROWS_A_BLOCK))
            case = Case("half" if self.half else "fp32", rows, width, height, blocks, self.half)
            try:
                yield self.train(case, attempt)
                return
            except (torch.OutOfMemoryError, MemoryError) as error:
                sentence = str(error).splitlines()[0][:300]
            gc.collect()
            mgpu().empty_cache()
            print(f"{rows:,} rows: {sentence}", flush=True)
            rows = int(rows * (1 - LESS_A_TRY))
        yield {
            "case": case.name,
            "left_out": f"out of memory {TRIES} times, last with {case.rows:,} rows: {sentence}",
        }

    def train(self, case: Case, attempt: int) -> dict[str, Any]:
        """20 steps of alternating views."""
        scene = Scene(case, source_of(case), images=20)
        bytes_a_row = sum(
            t.stride(0) * t.element_size()
            for t in (*scene.table.columns(), *scene.adam.rows_of_all())
            if t.numel()
        )
        mgpu().synchronize()
        start = time.perf_counter()
        for i in range(20):
            report = scene.step([scene.cameras[("aerial", "street")[i % 2]][i // 2]])
        mgpu().synchronize()
        spent = time.perf_counter() - start
        memory = memory_gib()
        used = sum(memory.get("gpu_used", memory["peak"])) * GIB
        if not report.loss < 10:
            raise RuntimeError(f"the loss of {case.rows:,} rows is {report.loss} after 20 steps")
        found = {
            "case": case.name,
            "rows": case.rows,
            "tries": attempt + 1,
            "make_s": scene.seconds,
            "ms": 1e3 * spent / 20,
            "bytes_a_row": bytes_a_row,
            "used_bytes_a_row": used / case.rows,
        }
        scene.close()
        return found | memory


class LargestHalf(Largest):
    """The same with SH and first moments in 16 bits."""

    half = True


class Equality(Part):
    """What scaling.py compares between meshes: images, gradients of all columns, and the table after one step."""

    def prepare(self) -> None:
        """The town."""
        width, height = self.options["size"] or (1280, 830)
        rows = round(self.options["equality_millions"] * 1e6)
        self.case = Case(
            f"{self.options['equality_millions']:g}M", rows, width, height, max(1, round(rows / 200_000))
        )
        self.source = source_of(self.case)

    def run(self) -> Rows:
        """Unsorted rows, placed ones and a step from there, striped ones and a step; tensors go to files whose names are in
        the rows. One shard also has the rows in each other mesh's stripes: which row is where depends on their number."""
        scene = self.scene()
        yield self.images_and_gradients(scene, "unsorted")
        # by what nothing was seen: training steps before would make the tables of two meshes differ
        from ns_mgpu_splat.partition.placement import Placement

        scene.table.reorder(scene.adam)
        Placement().update(scene.table, scene.adam)
        yield self.images_and_gradients(scene, "placed")
        yield self.after_a_step(scene, "step")
        scene.close()
        others = [shards for shards in self.options["gpus"] if shards > 1]
        for shards in others if self.shards == 1 else [self.shards]:
            scene = self.scene()
            sort_into_stripes(scene, shards)
            yield self.images_and_gradients(scene, f"striped {shards}")
            yield self.after_a_step(scene, f"step striped {shards}")
            scene.close()

    def scene(self) -> Scene:
        """The town as it was made, in no order; the same on any mesh."""
        scene = Scene(self.case, self.source, "unsorted", images=8)
        scene.table.requires_grad_(True)
        return scene

    @staticmethod
    def compared_views(scene: Scene) -> list[Any]:
        """What is compared."""
        return [scene.cameras["aerial"][0], scene.cameras["street"][0], scene.cameras["aerial"][1]]

    def images_and_gradients(self, scene: Scene, layout: str) -> dict[str, Any]:
        """The row that names their file."""
        from ns_mgpu_splat import render

        images = [
            (image.rgb, image.depth, image.accumulation)
            for image in render(scene.table, self.compared_views(scene))
        ]
        torch.stack([(rgb * rgb).sum() + 0.1 * depth.sum() for rgb, depth, _ in images]).sum().backward()
        found: dict[str, Tensor] = {
            f"image {i}": torch.cat(image, -1).detach().cpu() for i, image in enumerate(images)
        }
        for name, column in scene.table.named_columns().items():
            if column.grad is None:
                raise RuntimeError(f"{name} has no gradient")
            found[f"gradient {name}"] = column.grad.cpu()
            column.grad = None
        return self.written(layout, found)

    def after_a_step(self, scene: Scene, layout: str) -> dict[str, Any]:
        """The row that names the file of the loss, moments and parameters."""
        scene.adam.set_lrs(dict.fromkeys(LRS, STEP_LR))
        report = scene.step(self.compared_views(scene))
        scene.adam.flush()
        found = {"loss": torch.tensor([report.loss])}
        for name, column in scene.table.named_columns().items():
            found[f"moment {name}"] = scene.adam.exp_avg[name].cpu()
            found[f"parameter {name}"] = column.detach().cpu()
        return self.written(layout, found)

    def written(self, layout: str, found: dict[str, Tensor]) -> dict[str, Any]:
        """The row that names the file."""
        path = Path(self.options["folder"]) / f"equality-{self.shards}-{layout.replace(' ', '-')}.pt"
        torch.save(found, path)
        return {"case": self.case.name, "rows": self.case.rows, "layout": layout, "file": str(path)}


class Links(Part):
    """Peers, bandwidths, what forking and joining costs, and moving pages."""

    def run(self) -> Rows:
        """One row with lists."""
        mesh = mgpu().mesh()
        access = [list(map(int, row)) for row in mesh.peer_matrix]
        yield {"case": "peers", "links": [list(row) for row in mesh.links], "access": access}
        mib = 16 if not on_gpus() else (256 if self.quick else 1024)
        if on_gpus() and gpu_count() > 1:
            yield {"case": "copy", "mib": mib, "gb_s": copy_speeds(mib)}
        yield {"case": "read by the first shard", "mib": mib, "gb_s": read_speeds(mib)}
        yield {"case": "read by all shards at once", "mib": mib} | sharded_read(mib)
        yield {"case": "fork and join"} | fork_join()
        yield {"case": "pages"} | page_moves(mib)


def seconds_of(work: Callable[[], Any], rounds: int = 5) -> float:
    """Least time of one run, all GPUs done before and after."""
    times = []
    for _ in range(rounds):
        everything_done()
        start = time.perf_counter()
        work()
        everything_done()
        times.append(time.perf_counter() - start)
    return min(times)


def everything_done() -> None:
    """Wait for the mesh, and for plain CUDA work on any of its GPUs."""
    mgpu().synchronize()
    if on_gpus():
        for name in dict.fromkeys(mgpu().mesh().shards):
            torch.cuda.synchronize(name)


def copy_speeds(mib: int) -> list[list[float]]:
    """GB/s of plain copies from each GPU (row) to each (column), four in a row."""
    names = list(dict.fromkeys(mgpu().mesh().shards))
    tensors = [torch.ones(mib << 20, dtype=torch.uint8, device=name) for name in names]
    others = [torch.ones(mib << 20, dtype=torch.uint8, device=name) for name in names]

    def copy(a: int, b: int) -> None:
        for _ in range(4):
            others[b].copy_(tensors[a], non_blocking=True)

    speeds = [
        [4 * (mib << 20) / seconds_of(partial(copy, a, b), 3) / 1e9 for b in range(len(names))]
        for a in range(len(names))
    ]
    return [[round(speed, 1) for speed in row] for row in speeds]


def read_speeds(mib: int) -> list[float]:
    """GB/s at which a kernel on the first shard adds up pages that lie on each shard."""
    from town_scene import plain

    out = []
    for shard in range(shard_count()):
        x = mgpu().reserve(((mib << 20) // 4,), (mib << 20) // 4)
        mgpu().place(x, shard)
        y = plain(x)
        out.append(round((mib << 20) / seconds_of(y.sum) / 1e9, 1))
        del x, y
    return out


def sharded_read(mib: int) -> dict[str, float]:
    """GB/s a shard of a sharded sum: over pages of its own, and over pages of its neighbour."""
    shards = shard_count()
    elements = shards * (mib << 20) // 4
    x = mgpu().reserve((elements,), elements)
    found = {}
    for name, shift in (("own_gb_s", 0), ("neighbour_gb_s", 1)):
        if shift and shards == 1:
            continue
        where = (mgpu().placement(x) + shift) % shards if shift else mgpu().placement(x)
        mgpu().place(x, where)
        found[name] = round((mib << 20) / seconds_of(lambda: x.sum()) / 1e9, 1)
    return found


def fork_join() -> dict[str, float]:
    """Microseconds of a sharded operator on 16 MiB: of the host's call, and until all GPUs are done and joined."""
    x = torch.zeros(4 << 20, device="mgpu")
    rounds = 20 if not on_gpus() else 200
    for _ in range(5):
        x.add_(1)
    everything_done()
    start = time.perf_counter()
    for _ in range(rounds):
        x.add_(1)
    called = time.perf_counter() - start
    everything_done()
    spent = time.perf_counter() - start
    waited = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        x.add_(1)
        mgpu().synchronize()
        waited += time.perf_counter() - begin
    return {
        "call_us": round(1e6 * called / rounds, 2),
        "in_a_row_us": round(1e6 * spent / rounds, 2),
        "waited_for_us": round(1e6 * waited / rounds, 2),
    }


def page_moves(mib: int) -> dict[str, float]:
    """Milliseconds to move pages between the first and the last shard, and to host memory and back; contents are compared."""
    shards = shard_count()
    x = torch.arange((mib << 20) // 4, dtype=torch.int32, device="mgpu")
    want = int(x.sum(dtype=torch.int64).item())
    pages = mgpu().placement(x).numel()
    mgpu().place(x, 0)
    found: dict[str, float] = {"pages": pages}
    single = [0] * pages
    single[pages // 2] = shards - 1
    if shards > 1:
        found["one_page_ms"] = 1e3 * timed(lambda: mgpu().place(x, single))
        mgpu().place(x, 0)
        found["all_pages_ms"] = 1e3 * timed(lambda: mgpu().place(x, shards - 1))
        found["all_gb_s"] = (mib << 20) / found["all_pages_ms"] / 1e6
        assert int(x.sum(dtype=torch.int64).item()) == want
    found["to_host_ms"] = 1e3 * timed(lambda: mgpu().to_host(x))
    found["to_device_ms"] = 1e3 * timed(lambda: mgpu().to_device(x))
    assert int(x.sum(dtype=torch.int64).item()) == want
    return {name: round(value, 3) for name, value in found.items()}


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one run."""
    return seconds_of(work, 1)


class Caliterra(Part):
    """Training on real photographs, by the bare loop of caliterra.py."""

    def prepare(self) -> None:
        """Import what is slow to import."""
        import caliterra

        self.data = caliterra.data_folder()
        if self.data.is_dir():
            import ns_mgpu_splat.nerfstudio.config  # noqa: F401

    def run(self) -> Rows:
        """One row a seed."""
        import caliterra

        if not self.data.is_dir():
            yield {"case": "caliterra", "left_out": f"{self.data} is absent; set MGPU_TEST_DATA"}
            return
        options = {"downscale": self.options["downscale"], "model": [], "lock": None}
        steps = self.options["caliterra_steps"]
        for seed in self.options["seeds"]:
            found = caliterra.bare(self.data, steps, seed, options)
            yield {"case": "caliterra", "steps": steps, "seed": seed} | found


PARTS: dict[str, type[Part]] = {
    "links": Links,
    "strong": Strong,
    "stages": Stages,
    "equality": Equality,
    "caliterra": Caliterra,
    "weak": Weak,
    "largest": Largest,
    "largest-half": LargestHalf,
}


def environment_of(part: str) -> dict[str, str]:
    """What a part wants set before the device starts."""
    return {"MGPU_STAGE_TIMES": "1"} if part == "stages" else {}
