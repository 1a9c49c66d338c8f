# SPDX-License-Identifier: Apache-2.0
"""Where the pictures are taken from: a survey from the air and a drive along the streets. NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ns_mgpu_splat.data.city.town import METRES_PER_UNIT, STREET, Layout, Town

EYE_HEIGHT = 2.2  # metres; a camera on the roof of a car
LANE = 1.6  # metres right of the centre line, clear of parked cars and trees
STREET_STEP = 4.0  # metres between street pictures, at most
FLIGHT_HEIGHT = 54.0  # metres; the tallest roof is below 30
FLIGHT_INSET = 18.0  # metres


@dataclass(frozen=True)
class Pose:
    """One picture to take. `camera_to_world` is float64 [4, 4], OpenGL axes (x right, y up, z backwards), world units."""

    name: str
    camera_to_world: NDArray[np.float64]


@dataclass(frozen=True)
class Lens:
    """Pinhole intrinsics in pixels, shared by all pictures; pixel centres at +0.5."""

    width: int
    height: int

    @property
    def focal(self) -> float:
        """Focal length; the longer side spans 67 degrees."""
        return 0.75 * max(self.width, self.height)

    @property
    def center(self) -> tuple[float, float]:
        """Principal point, the middle of the picture."""
        return self.width / 2, self.height / 2


def _look(position: tuple[float, float, float], heading: float, pitch: float) -> NDArray[np.float64]:
    """Pose at `position` (metres): `heading` from east to north, `pitch` above the horizon, radians; never rolled."""
    ch, sh, cp, sp = math.cos(heading), math.sin(heading), math.cos(pitch), math.sin(pitch)
    forward = np.array([ch * cp, sh * cp, sp])
    right = np.array([sh, -ch, 0.0])
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2] = right, np.cross(right, forward), -forward
    pose[:3, 3] = np.array(position) / METRES_PER_UNIT
    return pose


def _aerial(layout: Layout, count: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
    """A grid of targets; in turn seen aslant from four sides and from straight above."""
    # Targets keep off the edge of a small town, so that each view shows what others show too.
    hx, hy = (h - min(FLIGHT_INSET, 0.4 * h) for h in layout.half_size)
    columns = max(1, round(math.sqrt(count * hx / hy)))
    rows = max(1, math.ceil(count / columns))
    cells = np.floor((np.arange(count) + 0.5) * (columns * rows / count)).astype(int)
    poses: list[NDArray[np.float64]] = []
    for k, cell in enumerate(cells):
        i, j = cell % columns, cell // columns
        if j % 2:
            i = columns - 1 - i  # fly to and fro
        x = ((i + 0.5 + rng.uniform(-0.2, 0.2)) / columns * 2 - 1) * hx
        y = ((j + 0.5 + rng.uniform(-0.2, 0.2)) / rows * 2 - 1) * hy
        height = FLIGHT_HEIGHT + rng.uniform(-4, 6)
        # The turn moves on by one after each round, so that no regular hold-out takes one kind of view only.
        view = (k % 5 + k // 5) % 5
        if view == 4:
            poses.append(_look((x, y, height), math.pi / 2 + rng.uniform(-0.2, 0.2), math.radians(-89.0)))
            continue
        heading = math.pi / 2 * (view + 1) + rng.uniform(-0.35, 0.35)
        pitch = math.radians(rng.uniform(52, 62))
        back = height / math.tan(pitch)
        poses.append(
            _look((x - back * math.cos(heading), y - back * math.sin(heading), height), heading, -pitch)
        )
    return poses


def _street(layout: Layout, count: int, rng: np.random.Generator) -> list[NDArray[np.float64]]:
    """A drive along the streets, most central first, one way and then the other; looking ahead and aslant in turn."""
    if count == 0:
        return []
    xs, ys = layout.street_x, layout.street_y
    margin = STREET / 2
    routes: list[
        tuple[float, float, float, float, float]
    ] = []  # start x, y, heading, length, distance from the centre
    for y in map(float, ys):
        routes.append((float(xs[0]) - 2, y, 0.0, float(xs[-1] - xs[0]) - margin, abs(y + 1e-3)))
    for x in map(float, xs):
        routes.append((x, float(ys[0]) - 2, math.pi / 2, float(ys[-1] - ys[0]) - margin, abs(x + 1e-3)))
    routes.sort(key=lambda r: r[4])
    back = []
    for x, y, heading, length, off in routes:
        end = length + margin + 4
        back.append(
            (x + end * math.cos(heading), y + end * math.sin(heading), heading + math.pi, length, off)
        )
    routes = routes + back
    total = sum(r[3] for r in routes)
    step = min(STREET_STEP, total / count)
    ends = np.cumsum([r[3] for r in routes])
    poses = []
    for k in range(count):
        s = (k + 0.5) * step
        leg = min(int(np.searchsorted(ends, s, side="right")), len(routes) - 1)
        x, y, heading, length, _ = routes[leg]
        d = s - (float(ends[leg]) - length)
        c, sn = math.cos(heading), math.sin(heading)
        lane = LANE + rng.uniform(-0.25, 0.25)
        position = (x + d * c + lane * sn, y + d * sn - lane * c, EYE_HEIGHT + rng.uniform(-0.2, 0.3))
        yaw = math.radians((0.0, 26.0, -26.0)[k % 3] + rng.uniform(-5, 5))
        poses.append(_look(position, heading + yaw, math.radians(rng.uniform(1, 6))))
    return poses


def place_cameras(town: Town, images: int) -> list[Pose]:
    """Poses for `images` pictures, half of them (rounded up) from the air; names are `aerial_0000` and `street_0000`."""
    aerial = (images + 1) // 2
    digits = max(4, len(str(images)))
    rng = np.random.default_rng([town.seed & 0xFFFFFFFFFFFFFFFF, 3])
    above = _aerial(town.layout, aerial, rng)
    below = _street(town.layout, images - aerial, rng)
    return [Pose(f"aerial_{k:0{digits}d}", p) for k, p in enumerate(above)] + [
        Pose(f"street_{k:0{digits}d}", p) for k, p in enumerate(below)
    ]
