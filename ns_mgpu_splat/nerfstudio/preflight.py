# SPDX-License-Identifier: Apache-2.0
"""What a run will need, before it takes anything: the number of Gaussians that fit, and a short table.

Memory of a step beyond the table was measured on an H200 (docs/benchmarks.md, "extra memory"); a margin covers what an
estimate cannot know: a view that sees more than usual, fragments, other programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from rich.table import Table

from ns_mgpu_splat.data.memory import available_memory
from ns_mgpu_splat.nerfstudio.say import say
from ns_mgpu_splat.words import shown_bytes

kShare = 0.85  # of the memory that is free; the rest is the margin
kPixelBytes = 160  # of a step, a pixel: 366 MB at 1920x1244 with 112 k rows, less 20 %
kSeenShare = 0.25  # of the rows, in one view; a city's is less
kSeenBytes = 230  # of a step, a row that is seen: 2.7 GB at 49.3 M rows (9.45 M seen) less its pixels
kFewest = 1_000  # Gaussians; a run that fits fewer is refused
kPlyFloats = (
    17  # of a Gaussian of degree 0 in INRIA's .ply: position, normal, colour, opacity, scale, quaternion
)


class PreflightError(Exception):
    """A run that cannot fit. `str()` is the sentence for its owner."""


@dataclass(frozen=True)
class Shard:
    """A shard's name and the bytes it may take: its part of what is free where it lives."""

    name: str
    free: int


@dataclass(frozen=True)
class Demand:
    """What a run asks for.

    seeds: rows to start from. cap: of the rows; "auto" takes what fits. resumed: rows of the checkpoint that is loaded.
    largest_view: pixels. images, largest_image: bytes of all decoded images, and of the largest.
    host_cache, device_cache: bytes that images may take on the host and on the device.
    """

    seeds: int
    cap: int | Literal["auto"]
    sh_degree: int
    half: bool
    largest_view: int
    images: int
    largest_image: int
    host_cache: int
    device_cache: int
    resumed: int = 0
    clone_and_split: bool = False


@dataclass(frozen=True)
class Plan:
    """What the run gets: its cap, the most rows that would fit, and bytes: of a row, a step's pixels, images."""

    demand: Demand
    shards: tuple[Shard, ...]
    cap: int
    fitting: int
    row: int
    step: int
    device_images: int
    host_images: int

    @property
    def start(self) -> int:
        """Rows at the start."""
        return self.demand.resumed or min(self.demand.seeds, self.cap)

    def on_shard(self, rows: int) -> int:
        """Bytes on each shard with this many rows in all."""
        return -(-rows // len(self.shards)) * self.row + (self.step + self.device_images) // len(self.shards)


def row_bytes(sh_degree: int, half: bool = False, clone_and_split: bool = False) -> int:
    """Bytes of a row in training: columns, both moments, the step it was last seen, and statistics.

    clone_and_split: with the statistics of the strategy "default".
    """
    from ns_mgpu_splat.splats.table import column_shapes

    total = 4  # last step
    for name, shape in column_shapes(1, sh_degree).items():
        values = 1
        for size in shape:
            values *= size
        total += values * (2 if half and name == "shN" else 4)  # the column
        total += values * (2 if half else 4) + values * 4  # its moments
    return total + (12 if clone_and_split else 0)


def ply_bytes(sh_degree: int) -> int:
    """Bytes of a row in an exported .ply."""
    return 4 * (kPlyFloats + 3 * ((sh_degree + 1) ** 2 - 1))


def free_on_shards() -> tuple[Shard, ...]:
    """The shards of the mesh; those that share a GPU or the host share what is free there."""
    names = tuple(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]
    gpus = {
        name: torch.cuda.mem_get_info(torch.device(name).index)[0]
        for name in set(names)
        if name.startswith("cuda")
    }
    host = available_memory()
    on_host = sum(not name.startswith("cuda") for name in names)
    return tuple(Shard(n, gpus[n] // names.count(n) if n in gpus else host // on_host) for n in names)


def plan(demand: Demand, shards: tuple[Shard, ...]) -> Plan:
    """Find the cap that fits.

    Rows, images and a step's buffers are spread evenly, so the shard with the least memory decides.

    Raises: PreflightError if what the run starts from does not fit.
    """
    row = row_bytes(demand.sh_degree, demand.half, demand.clone_and_split)
    on_host = not any(shard.name.startswith("cuda") for shard in shards)
    host_images = min(demand.images, demand.host_cache)
    device_images = min(demand.images, demand.device_cache)
    taken = demand.largest_view * kPixelBytes + device_images + (host_images if on_host else 0)
    budget = min(shard.free for shard in shards) * len(shards) * kShare
    per_row = row + kSeenShare * kSeenBytes
    fitting = max(0, int((budget - taken) / per_row))
    free = shown_bytes(sum(shard.free for shard in shards))
    where = f"{len(shards)} shards" if len(shards) > 1 else shards[0].name
    rest = f"{shown_bytes(taken)} of it are for images and the largest view"
    if fitting < max(kFewest, demand.resumed):
        what = (
            f"the checkpoint's {demand.resumed:,} Gaussians need {shown_bytes(demand.resumed * per_row)}"
            if demand.resumed > kFewest
            else f"not even {kFewest:,} Gaussians fit"
        )
        raise PreflightError(
            f"There is too little memory: {what}, and {free} is free on {where}, of which {kShare:.0%} is counted on; "
            f"{rest}. Add a shard to MGPU_DEVICES, end other programs, or lower the image sizes with "
            "--pipeline.datamanager.dataparser.downscale-factor."
        )
    cap = fitting if demand.cap == "auto" else min(demand.cap, fitting)
    step = demand.largest_view * kPixelBytes
    return Plan(demand, shards, cap, fitting, row, step, device_images, host_images)


def announce(plan: Plan) -> None:
    """Print what the run needs, and what was changed for it to fit."""
    demand, shards = plan.demand, plan.shards
    if demand.cap != "auto" and plan.cap < demand.cap:
        say(
            f"[bold yellow]--pipeline.model.max-gaussians {demand.cap:,} does not fit: {demand.cap:,} Gaussians take "
            f"{shown_bytes(demand.cap * plan.row)}, and {shown_bytes(sum(s.free for s in shards))} is free. The cap is "
            f"{plan.cap:,} now. Add shards to MGPU_DEVICES, or halve a Gaussian with --pipeline.model.half True or a "
            "lower --pipeline.model.sh-degree."
        )
    least = min(shard.free for shard in shards)
    each = "of each shard" if len(shards) > 1 else f"on {shards[0].name}"
    table = Table(
        title="What this run needs",
        title_justify="left",
        box=None,
        show_header=False,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    why_cap = ", as many as fit" if plan.cap == plan.fitting else ""
    for row in (
        (
            "Gaussians",
            f"{plan.start:,} to start from, at most {plan.cap:,}{why_cap}; {plan.row} B each",
        ),
        (
            f"memory {each}",
            f"{shown_bytes(plan.on_shard(plan.start))} at the start, {shown_bytes(plan.on_shard(plan.cap))} at the cap; "
            f"{shown_bytes(least)} free",
        ),
        (
            "images",
            f"{shown_bytes(demand.images)} decoded, the largest {shown_bytes(demand.largest_image)}; "
            f"room for {shown_bytes(demand.host_cache)}",
        ),
        ("a checkpoint", f"{shown_bytes(plan.cap * plan.row)} at the cap"),
        ("an exported .ply", f"{shown_bytes(plan.cap * ply_bytes(demand.sh_degree))} at the cap"),
    ):
        table.add_row(*row)
    say(table)
