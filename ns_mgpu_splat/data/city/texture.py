# SPDX-License-Identifier: Apache-2.0
"""Procedural textures: the albedo of a town at given places on its triangles. NumPy only.

Patterns are kept as coarse as a splat model can fit (a few decimetres) and soft in contrast; random numbers come from integer
hashes of the place, so that every picture and every sampled splat sees the same town.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ns_mgpu_splat.data.city.town import METRES_PER_UNIT, Material, Style, Town

Array = NDArray[np.float32]
_NOISE_SIZE = 512
_NOISE_TEXEL = 0.25  # metres


@lru_cache(maxsize=1)
def _tables() -> tuple[Array, Array]:
    """A periodic smooth noise picture [512, 512] in [-1, 1], and 65,536 uniform numbers."""
    rng = np.random.default_rng(20240229)
    f = np.fft.fftfreq(_NOISE_SIZE, _NOISE_TEXEL)
    r = np.hypot(f[:, None], f[None, :])
    # Wave lengths from 0.8 m to 16 m, long waves stronger.
    safe = np.maximum(r, 1e-9)
    spectrum = np.where((r > 1 / 16) & (r < 1 / 0.8), safe**-1.2, 0.0)
    picture = np.fft.ifft2(spectrum * np.fft.fft2(rng.normal(size=r.shape))).real
    picture = np.clip(picture / (2.0 * picture.std()), -1, 1)
    return np.ascontiguousarray(picture, np.float32), rng.random(65536, dtype=np.float32)


def noise(x: Array, y: Array, seed: Array | float) -> Array:
    """Smooth noise in [-1, 1] at x, y metres; `seed` shifts it."""
    picture, _ = _tables()
    k = np.float32(1 / _NOISE_TEXEL)
    i = (x * k + seed * np.float32(37.7)).astype(np.int32) & (_NOISE_SIZE - 1)
    j = (y * k + seed * np.float32(17.3)).astype(np.int32) & (_NOISE_SIZE - 1)
    return picture.ravel()[i * _NOISE_SIZE + j]


def hashed(i: Array, j: Array, seed: Array) -> Array:
    """Uniform number in [0, 1) for each cell (i, j) of a surface."""
    _, table = _tables()
    a, b, c = i.astype(np.int32), j.astype(np.int32), seed.astype(np.int32)
    h = (a * np.int32(7919)) ^ (b * np.int32(104729)) ^ (c * np.int32(1299709))
    h ^= h >> np.int32(13)
    return table[h & np.int32(65535)]


def _mix(a: Array, b: Array, t: Array) -> Array:
    return a + (b - a) * t[:, None]


def _facade(u: Array, v: Array, p: Array, color: Array, accent: Array) -> Array:
    width, height, floor_h, bay_w, win_w, win_h = (p[:, k] for k in range(6))
    style = p[:, 6].astype(np.int32)
    seed = p[:, 7]
    bay = np.floor(u / bay_w)
    level = np.clip(np.floor(v / floor_h), 0, np.round(height / floor_h) - 1)
    fu = np.abs(u - (bay + np.float32(0.5)) * bay_w)
    fv = v - level * floor_h
    ground = level == 0
    shop = ground & ((style & Style.SHOP) > 0)
    bays = np.round(width / bay_w)
    door = ground & ((style & Style.DOOR) > 0) & (bay == np.floor(bays / 2))
    half_w = np.where(shop, bay_w * 0.5 - 0.3, win_w * 0.5)
    half_w = np.where(door, 0.6, half_w)
    low = np.where(shop, 0.45, np.where(door, 0.0, 0.9))
    high = np.where(shop, 2.35, np.where(door, 2.25, 0.9 + win_h))
    du = fu - half_w
    dv = np.maximum(low - fv, fv - high)
    inside = np.maximum(du, dv)
    r = hashed(bay, level, seed)

    n = noise(u, v, seed)
    out = color * (1 + 0.09 * n)[:, None]
    stone = ground & ((style & Style.STONE_BASE) > 0)
    out = np.where(stone[:, None], out * np.float32(0.35) + np.array([0.24, 0.225, 0.20], np.float32), out)
    out *= np.where(v < 0.45, 0.72, 1.0).astype(np.float32)[:, None]
    trim = np.array([0.62, 0.60, 0.56], np.float32)
    band = ((style & Style.BANDS) > 0) & (fv < 0.22) & ~ground
    band |= v > height - 0.3  # eaves
    out[band] = trim * 0.9
    sill = (fv > low - 0.2) & (fv <= low) & (fu < half_w + 0.12) & ~door & ~shop
    out[sill] = trim
    shutter = ((style & Style.SHUTTERS) > 0) & (du > 0) & (du < 0.5) & (dv < 0) & ~shop & ~door
    out[shutter] = accent[shutter]
    sign = shop & (fv > 2.42) & (fv < 2.95)
    out[sign] = accent[sign] * 1.3 + 0.02
    opening = inside < 0
    frame = opening & (inside > -0.11)
    out[frame] = np.where(door | shop, 0.25, 0.62)[frame][:, None]
    glass = opening & ~frame
    # Dark panes, some with curtains, darker under the lintel and paler towards the sill.
    g = glass.nonzero()[0]
    tone = (0.035 + 0.05 * r + 0.05 * (high - fv) / np.maximum(high - low, 0.1))[g]
    pane = tone[:, None] * np.array([0.85, 1.0, 1.2], np.float32)
    curtain = (r[g] > 0.72) & (fu[g] > 0.28 * half_w[g]) & ~shop[g]
    pane[curtain] += np.array([0.30, 0.28, 0.24], np.float32)
    pane *= np.where(high[g] - fv[g] < 0.3, 0.6, 1.0).astype(np.float32)[:, None]
    wood = door[g]
    pane[wood] = accent[g][wood]
    out[g] = pane
    return out


def _asphalt(u: Array, v: Array, p: Array, color: Array, accent: Array) -> Array:
    length, width, marked = p[:, 0], p[:, 1], p[:, 2] > 0
    n = noise(u, v, p[:, 3])
    side = np.abs(v - width * 0.5)
    wear = np.abs(side - width * 0.25) - 0.75  # wheel tracks are a little paler
    out = color * (1 + 0.12 * n + 0.05 * (np.abs(wear) < 0.3))[:, None]
    gutter = side > width * 0.5 - 0.3
    out[gutter & marked] *= np.float32(0.82)
    end = np.minimum(u, length - u)
    dashes = marked & (side < 0.09) & (np.mod(u - 7.0, 5.0) < 2.5) & (end > 6.5)
    zebra = marked & (end > 1.4) & (end < 4.2) & (np.mod(v, 1.0) < 0.5) & (side < width * 0.5 - 0.4)
    stop = marked & (end > 5.0) & (end < 5.4) & (side < width * 0.5 - 0.4)
    paint = dashes | zebra | stop
    out[paint] = accent[paint] * (1 + 0.08 * n[paint])[:, None]
    return out


def _pavement(x: Array, y: Array, p: Array, color: Array) -> Array:
    i, j = np.floor(x / 1.5), np.floor(y / 1.5)
    tone = hashed(i, j, p[:, 0]) - 0.5
    from_middle = np.maximum(np.abs(x / 1.5 - i - 0.5), np.abs(y / 1.5 - j - 0.5))
    line = (from_middle > 0.46).astype(np.float32)
    return color * (1 + 0.10 * tone + 0.10 * noise(x, y, p[:, 0]) - 0.16 * line)[:, None]


def _field(x: Array, y: Array, p: Array, color: Array, accent: Array) -> Array:
    broad = noise(x * np.float32(0.12), y * np.float32(0.12), p[:, 0])
    fine = noise(x, y, p[:, 0])
    return _mix(color, accent, 0.5 + 0.5 * broad) * (1 + 0.16 * fine)[:, None]


def _tiles(u: Array, v: Array, p: Array, color: Array) -> Array:
    row = v / p[:, 0]
    j = np.floor(row)
    rows = row - j - np.float32(0.5)
    tone = hashed(np.floor(u / np.float32(0.9) + j * np.float32(0.5)), np.floor(j / 2), p[:, 1]) - 0.5
    return color * (1 + 0.14 * rows + 0.14 * tone + 0.16 * noise(u, v, p[:, 1]))[:, None]


def albedo(town: Town, triangle: NDArray[np.int32], weights: Array, points: Array) -> Array:
    """Albedo at places on triangles.

    Args:
        town: see `Town`.
        triangle: int32 [n], rows of `town.corners`.
        weights: float32 [n, 2], barycentric weights of the second and third corner.
        points: float32 [n, 3], the same places in world units.
    Returns: float32 [n, 3], linear RGB in [0, 1].
    """
    surface = town.surface[triangle]
    material = town.material[surface]
    out = np.empty((len(triangle), 3), np.float32)
    for kind in Material:
        rows = np.flatnonzero(material == kind)
        if len(rows) == 0:
            continue
        s = surface[rows]
        p, color = town.params[s], town.color[s]
        if kind in (Material.PLAIN, Material.FOLIAGE, Material.FIELD, Material.PAVEMENT):
            q = points[rows] * np.float32(METRES_PER_UNIT)
            x, y, z = q[:, 0], q[:, 1], q[:, 2]
            if kind == Material.PLAIN:
                out[rows] = color * (1 + p[:, 0] * noise(x + z * np.float32(0.7), y + z, p[:, 1]))[:, None]
            elif kind == Material.FOLIAGE:
                n = noise(x * 2.2 + z * np.float32(1.4), y * 2.2 - z * np.float32(1.5), p[:, 4])
                n += noise(x * 0.7 - z * np.float32(0.6), y * 0.7 + z * np.float32(0.5), p[:, 4])
                out[rows] = color * (1 + 0.33 * n)[:, None]
            elif kind == Material.FIELD:
                out[rows] = _field(x, y, p, color, town.accent[s])
            else:
                out[rows] = _pavement(x, y, p, color)
            continue
        corner_uv = town.uv[triangle[rows]]
        w = weights[rows]
        uv = (
            corner_uv[:, 0]
            + (corner_uv[:, 1] - corner_uv[:, 0]) * w[:, :1]
            + (corner_uv[:, 2] - corner_uv[:, 0]) * w[:, 1:]
        )
        u, v = uv[:, 0], uv[:, 1]
        if kind == Material.FACADE:
            out[rows] = _facade(u, v, p, color, town.accent[s])
        elif kind == Material.ASPHALT:
            out[rows] = _asphalt(u, v, p, color, town.accent[s])
        else:
            out[rows] = _tiles(u, v, p, color)
    return np.clip(out, 0, 1, out=out)


def sky(direction: Array) -> Array:
    """Colour of the sky dome.

    Args:
        direction: float32 [n, 3], unit, from the centre of the town to the dome.
    Returns: float32 [n, 3], display (sRGB) values in [0, 1]: a gradient, soft clouds, and hills on the horizon.
    """
    z = direction[:, 2]
    azimuth = np.arctan2(direction[:, 1], direction[:, 0])
    t = np.clip(z, 0, 1) ** np.float32(0.55)
    horizon, zenith = np.array([0.83, 0.89, 0.94], np.float32), np.array([0.36, 0.56, 0.85], np.float32)
    out = _mix(np.broadcast_to(horizon, direction.shape), np.broadcast_to(zenith, direction.shape), t)
    x, y = direction[:, 0], direction[:, 1]
    cloud = (
        np.sin(3.1 * x + 1.7 * y + 2.0 * z)
        + np.sin(-2.3 * x + 3.7 * y + 1.0)
        + np.sin(5.1 * x - 1.1 * y + 5.0 * z + 2.0)
    )
    cloud = np.clip(cloud * np.float32(0.5) - np.float32(0.1), 0, 1) * np.clip(z * 3, 0, 1)
    out = _mix(
        out, np.broadcast_to(np.array([0.95, 0.96, 0.97], np.float32), out.shape), cloud * np.float32(0.45)
    )
    ridge = (
        0.035
        + 0.012 * np.sin(3 * azimuth + 1)
        + 0.008 * np.sin(7 * azimuth)
        + 0.004 * np.sin(17 * azimuth + 2)
    )
    hill = np.clip((ridge - z) / np.float32(0.006), 0, 1)
    return _mix(out, np.broadcast_to(np.array([0.56, 0.66, 0.68], np.float32), out.shape), hill).astype(
        np.float32
    )
