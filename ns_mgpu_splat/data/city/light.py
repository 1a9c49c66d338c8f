# SPDX-License-Identifier: Apache-2.0
"""Sun and sky light on the town. NumPy only; the sun's shadow comes from ray casting (raycast.py) or, without it, from here.

All light is diffuse, so a place has one colour from wherever it is seen. The sky's share at a place is taken from a height map
of the town: what rises above the place nearby hides sky.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ns_mgpu_splat.data.city.town import METRES_PER_UNIT, Material, Town

Array = NDArray[np.floating]  # float32, but for sums on the way
SUN_COLOR = np.array([1.72, 1.58, 1.34], np.float32)
SKY_COLOR = np.array([0.50, 0.58, 0.70], np.float32)
BOUNCE_COLOR = np.array([0.30, 0.28, 0.25], np.float32)
_CELL = 0.05  # world units: half a metre


def sun_direction(town: Town) -> Array:
    """Unit vector to the sun; it stands 40 to 55 degrees high, at an azimuth that lights two sides of every street."""
    rng = np.random.default_rng([town.seed & 0xFFFFFFFFFFFFFFFF, 7])
    elevation = math.radians(rng.uniform(40, 55))
    azimuth = math.radians(rng.choice([-60.0, -125.0]) + rng.uniform(-12, 12))
    c = math.cos(elevation)
    return np.array([c * math.cos(azimuth), c * math.sin(azimuth), math.sin(elevation)], np.float32)


@dataclass
class HeightMap:
    """Heights above the ground on a grid of half metres, and two blurred versions (about 3 m and 9 m wide)."""

    heights: Array
    near: Array
    wide: Array
    origin: tuple[float, float]

    def lookup(self, grid: Array, x: Array, y: Array) -> Array:
        """Nearest cell; 0 outside."""
        rows, columns = grid.shape
        i = ((y - np.float32(self.origin[1])) * np.float32(1 / _CELL)).astype(np.int32)
        j = ((x - np.float32(self.origin[0])) * np.float32(1 / _CELL)).astype(np.int32)
        np.clip(i, 0, rows - 1, out=i)  # the edge of the map is open ground
        np.clip(j, 0, columns - 1, out=j)
        return grid.ravel()[i.astype(np.int64) * columns + j]


def _box_blur(a: Array, radius: int) -> Array:
    for axis in (0, 1):
        pad = [(radius + 1, radius) if k == axis else (0, 0) for k in (0, 1)]
        c = np.cumsum(np.pad(a, pad), axis=axis, dtype=np.float64)
        n = a.shape[axis]
        a = (c.take(range(2 * radius + 1, 2 * radius + 1 + n), axis) - c.take(range(n), axis)) / (
            2 * radius + 1
        )
    return a.astype(np.float32)


def height_map(town: Town) -> HeightMap:
    """Rasterise the houses and trees of a town."""
    hx, hy = (h / METRES_PER_UNIT + 3.0 for h in town.layout.half_size)
    columns, rows = int(2 * hx / _CELL) + 1, int(2 * hy / _CELL) + 1
    grid = np.zeros((rows, columns), np.float32)

    def window(x0: float, x1: float, y0: float, y1: float) -> tuple[slice, slice]:
        j0, j1 = (round((x + hx) / _CELL) for x in (x0, x1))
        i0, i1 = (round((y + hy) / _CELL) for y in (y0, y1))
        return slice(max(i0, 0), max(i1, 0)), slice(max(j0, 0), max(j1, 0))

    for x0, x1, y0, y1, top in town.height_boxes.tolist():
        w = window(x0, x1, y0, y1)
        grid[w] = np.maximum(grid[w], top)
    for x, y, r, top in town.height_discs.tolist():
        w = window(x - r, x + r, y - r, y + r)
        cells = grid[w]
        yy = (np.arange(w[0].start, w[0].start + cells.shape[0]) + 0.5) * _CELL - hy - y
        xx = (np.arange(w[1].start, w[1].start + cells.shape[1]) + 0.5) * _CELL - hx - x
        inside = yy[:, None] ** 2 + xx[None, :] ** 2 < r * r
        cells[inside] = np.maximum(cells[inside], top)
    near = _box_blur(_box_blur(grid, 2), 2)
    wide = _box_blur(_box_blur(grid, 7), 7)
    return HeightMap(grid, near, wide, (-hx, -hy))


def sky_share(heights: HeightMap, points: Array, normals: Array) -> Array:
    """Share of sky light that reaches a place, in (0, 1].

    Args:
        points: float32 [n, 3], world units. normals: float32 [n, 3], unit, outwards.
    """
    out = np.float32(0.14)
    x, y = points[:, 0] + normals[:, 0] * out, points[:, 1] + normals[:, 1] * out
    z = points[:, 2] + np.float32(0.02)
    near = np.maximum(heights.lookup(heights.near, x, y) - z, 0)
    wide = np.maximum(heights.lookup(heights.wide, x, y) - z, 0)
    return 1 / (1 + np.float32(0.9) * near + np.float32(0.8) * wide)


def march_sun(town: Town, heights: HeightMap, points: Array, normals: Array) -> NDArray[np.bool_]:
    """Whether the sun reaches places, from the height map alone (no ray casting): softens nothing, misses what overhangs."""
    sun = sun_direction(town)
    horizontal = float(np.hypot(sun[0], sun[1]))
    step = np.float32(0.08)  # horizontal, world units
    rise = np.float32(step * sun[2] / horizontal)
    dx, dy = np.float32(step * sun[0] / horizontal), np.float32(step * sun[1] / horizontal)
    p = points + normals * np.float32(0.06)
    x, y, z = p[:, 0].copy(), p[:, 1].copy(), p[:, 2].copy()
    lit = np.ones(len(p), bool)
    rows = np.arange(len(p))
    top = float(heights.heights.max()) if heights.heights.size else 0.0
    for _ in range(200):
        x, y, z = x + dx, y + dy, z + rise
        hit = heights.lookup(heights.heights, x, y) > z
        lit[rows[hit]] = False
        keep = ~hit & (z < top)
        if not keep.any():
            break
        rows, x, y, z = rows[keep], x[keep], y[keep], z[keep]
    return lit


def shading_normals(town: Town, triangle: NDArray[np.int32], points: Array, normals: Array) -> Array:
    """Replace the facets of leaves by the direction from the middle of their crown."""
    surface = town.surface[triangle]
    rows = np.flatnonzero(town.material[surface] == Material.FOLIAGE)
    if len(rows) == 0:
        return normals
    p = town.params[surface[rows]]
    n = points[rows] - p[:, :3]
    n *= (np.float32(0.8) / np.maximum(p[:, 3], 1e-6))[:, None]
    n += normals[rows] * np.float32(0.5)
    n /= np.maximum(np.sqrt(np.einsum("ij,ij->i", n, n)), 1e-9)[:, None]
    out = normals.copy()
    out[rows] = n
    return out


def shade(
    town: Town, heights: HeightMap, albedo: Array, points: Array, normals: Array, lit: NDArray[np.bool_]
) -> Array:
    """Display colour of places.

    Args:
        albedo: float32 [n, 3], linear. points, normals: float32 [n, 3]. lit: bool [n], whether the sun reaches the place.
    Returns: float32 [n, 3], sRGB values in [0, 1].
    """
    sun = np.maximum(normals @ sun_direction(town), 0) * lit
    share = sky_share(heights, points, normals)
    up = normals[:, 2] * np.float32(0.5)
    color = sun[:, None] * SUN_COLOR
    color += (share * (np.float32(0.55) + up))[:, None] * SKY_COLOR
    color += ((np.float32(0.5) - up) * (np.float32(0.4) + np.float32(0.6) * share))[:, None] * BOUNCE_COLOR
    color *= albedo
    return to_display(color)


_STEPS = 4096
_LINEAR = np.linspace(0, 1, _STEPS)
_SRGB = np.where(_LINEAR <= 0.0031308, 12.92 * _LINEAR, 1.055 * _LINEAR ** (1 / 2.4) - 0.055).astype(
    np.float32
)


def to_display(color: Array) -> Array:
    """Linear light to sRGB in [0, 1] by table; brighter than 1 is clipped."""
    index = np.clip(color * np.float32(_STEPS - 1) + np.float32(0.5), 0, _STEPS - 1).astype(np.int32)
    return _SRGB[index]
