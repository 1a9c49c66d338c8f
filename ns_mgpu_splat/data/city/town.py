# SPDX-License-Identifier: Apache-2.0
"""The town as plain arrays: triangles, texture coordinates and a table of surfaces. NumPy only.

Frame: x east, y north, z up. Building code below works in metres; a finished `Town` holds world units of
`METRES_PER_UNIT` metres, so that a depth map in Nerfstudio's default unit (1/1000 of a world unit, 16 bit) reaches 655 m.
Texture coordinates stay in metres.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

METRES_PER_UNIT = 10.0

BLOCK_WIDTH, BLOCK_DEPTH = 48.0, 36.0  # the built part of a block, metres
CARRIAGEWAY, PAVEMENT = 8.0, 3.0
STREET = CARRIAGEWAY + 2 * PAVEMENT
RIM = 19.0  # gardens with detached houses outside the outer streets
KERB = 0.15  # height of pavements above the carriageway

Point = tuple[float, float, float]
Color = tuple[float, float, float]


class Material(IntEnum):
    """Selects the procedural texture of a surface (texture.py). In brackets: what `params` holds."""

    PLAIN = 0  # [noise amplitude, seed]
    FIELD = 1  # [seed]; colours are the two crops
    ASPHALT = 2  # [length, width, has markings, seed]
    PAVEMENT = 3  # [seed]
    FACADE = 4  # [width, height, floor height, bay width, window width, window height, style bits, seed]
    TILES = 5  # [row height, seed]
    FOLIAGE = 6  # [centre x, y, z in world units, radius in world units, seed]


class Style:
    """Bits of a facade's style parameter."""

    SHUTTERS, BANDS, SHOP, DOOR, STONE_BASE, BLANK = 1, 2, 4, 8, 16, 32


@dataclass
class Layout:
    """Where streets and blocks lie, in metres; the town is centred on the origin.

    `street_x[i]`, `street_y[j]` are centre lines; `blocks` lists (column, row) with buildings, `parks` the rest of the grid.
    """

    columns: int
    rows: int
    blocks: list[tuple[int, int]]
    parks: list[tuple[int, int]]
    street_x: NDArray[np.floating]
    street_y: NDArray[np.floating]

    @property
    def half_size(self) -> tuple[float, float]:
        """Half width and half depth up to the outer edge of the outer pavement."""
        return float(self.street_x[-1]) + STREET / 2, float(self.street_y[-1]) + STREET / 2

    def block_rect(self, column: int, row: int) -> tuple[float, float, float, float]:
        """x0, x1, y0, y1 of a block inside its pavement."""
        x0, y0 = float(self.street_x[column]) + STREET / 2, float(self.street_y[row]) + STREET / 2
        return x0, x0 + BLOCK_WIDTH, y0, y0 + BLOCK_DEPTH


@dataclass
class Town:
    """A town of T triangles on S surfaces.

    Attributes:
        corners: float32 [T, 3, 3], world units, counter-clockwise seen from outside.
        uv: float32 [T, 3, 2], metres on the surface.
        surface: int32 [T], row of the surface tables below.
        material: int8 [S]; color, accent: float32 [S, 3], linear RGB albedo; params: float32 [S, 8], see `Material`.
        height_boxes: float32 [B, 5] x0, x1, y0, y1, top and height_discs: float32 [D, 4] x, y, radius, top, world units:
            what keeps the sky away, for light.py.
        layout: streets and blocks, metres.
        dome_radius: world units; the sky is a sphere of that radius around the origin.
        seed: as given to `build_town`.
    """

    corners: NDArray[np.float32]
    uv: NDArray[np.float32]
    surface: NDArray[np.int32]
    material: NDArray[np.int8]
    color: NDArray[np.float32]
    accent: NDArray[np.float32]
    params: NDArray[np.float32]
    height_boxes: NDArray[np.float32]
    height_discs: NDArray[np.float32]
    layout: Layout
    dome_radius: float
    seed: int

    @property
    def num_triangles(self) -> int:
        """T."""
        return int(self.corners.shape[0])


def plan(blocks: int) -> Layout:
    """Arrange `blocks` (at least 1) on a grid as square as can be; what the grid has left over becomes parks."""
    if blocks < 1:
        raise ValueError(f"A town needs at least 1 block, not {blocks}.")
    columns = math.ceil(math.sqrt(blocks * BLOCK_DEPTH / BLOCK_WIDTH))
    rows = math.ceil(blocks / columns)
    cells = [(i, j) for j in range(rows) for i in range(columns)]
    # Parks are spread over the grid instead of cutting off a corner.
    spare = len(cells) - blocks
    park_index = {int((k + 0.5) * len(cells) / spare) for k in range(spare)} if spare else set()
    pitch_x, pitch_y = BLOCK_WIDTH + STREET, BLOCK_DEPTH + STREET
    return Layout(
        columns,
        rows,
        [c for k, c in enumerate(cells) if k not in park_index],
        [c for k, c in enumerate(cells) if k in park_index],
        (np.arange(columns + 1) - columns / 2) * pitch_x,
        (np.arange(rows + 1) - rows / 2) * pitch_y,
    )


def linear(srgb: Color) -> Color:
    """sRGB in [0, 1] to linear light."""
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb)
    return r, g, b


WALLS: list[Color] = [
    (0.86, 0.80, 0.68), (0.80, 0.66, 0.52), (0.72, 0.43, 0.34), (0.88, 0.86, 0.82), (0.86, 0.74, 0.52), (0.70, 0.74, 0.76),
    (0.64, 0.40, 0.33), (0.80, 0.58, 0.48), (0.76, 0.78, 0.68), (0.90, 0.84, 0.74), (0.78, 0.52, 0.36), (0.60, 0.62, 0.66),
]  # fmt: skip
ACCENTS: list[Color] = [
    (0.20, 0.36, 0.30), (0.50, 0.18, 0.16), (0.18, 0.28, 0.42), (0.34, 0.24, 0.18), (0.62, 0.46, 0.16), (0.30, 0.32, 0.34),
]  # fmt: skip
ROOFS: list[Color] = [
    (0.58, 0.35, 0.28), (0.52, 0.31, 0.25), (0.62, 0.42, 0.32), (0.40, 0.40, 0.43), (0.46, 0.36, 0.31), (0.33, 0.35, 0.39),
]  # fmt: skip
CARS: list[Color] = [
    (0.75, 0.76, 0.78), (0.16, 0.17, 0.19), (0.56, 0.18, 0.16), (0.22, 0.32, 0.48), (0.88, 0.88, 0.86), (0.32, 0.40, 0.34),
]  # fmt: skip
LEAVES: list[Color] = [
    (0.36, 0.49, 0.23), (0.31, 0.45, 0.23), (0.42, 0.53, 0.26), (0.28, 0.40, 0.24), (0.49, 0.55, 0.28), (0.60, 0.51, 0.26),
]  # fmt: skip
STONE: Color = (0.66, 0.64, 0.60)
LAWN: Color = (0.44, 0.53, 0.29)
LAWN_DRY: Color = (0.52, 0.56, 0.33)


def _icosphere() -> NDArray[np.float64]:
    """Triangles [80, 3, 3] of a once subdivided icosahedron of radius 1."""
    g = (1 + 5**0.5) / 2
    v = np.array([[-1, g, 0], [1, g, 0], [-1, -g, 0], [1, -g, 0], [0, -1, g], [0, 1, g], [0, -1, -g], [0, 1, -g],
                  [g, 0, -1], [g, 0, 1], [-g, 0, -1], [-g, 0, 1]])  # fmt: skip
    f = np.array([[0, 11, 5], [0, 5, 1], [0, 1, 7], [0, 7, 10], [0, 10, 11], [1, 5, 9], [5, 11, 4], [11, 10, 2], [10, 7, 6],
                  [7, 1, 8], [3, 9, 4], [3, 4, 2], [3, 2, 6], [3, 6, 8], [3, 8, 9], [4, 9, 5], [2, 4, 11], [6, 2, 10],
                  [8, 6, 7], [9, 8, 1]])  # fmt: skip
    t = v[f]
    a, b, c = t[:, 0], t[:, 1], t[:, 2]
    ab, bc, ca = (a + b) / 2, (b + c) / 2, (c + a) / 2
    t = np.concatenate([np.stack(x, 1) for x in ((a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca))])
    return t / np.linalg.norm(t, axis=-1, keepdims=True)


_SPHERE = _icosphere()


@dataclass
class _Builder:
    """Collects triangles (metres) and surfaces. Loose values go to lists, ready arrays to `batches`."""

    rng: np.random.Generator
    triangles: list[list[float]] = field(default_factory=list)  # 9 coordinates
    uvs: list[list[float]] = field(default_factory=list)  # 6
    surfaces: list[int] = field(default_factory=list)
    batches: list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]] = field(
        default_factory=list
    )
    table: list[list[float]] = field(default_factory=list)  # material, color, accent, params
    boxes: list[list[float]] = field(default_factory=list)
    discs: list[list[float]] = field(default_factory=list)

    def pick(self, palette: list[Color], jitter: float = 0.03) -> Color:
        """A colour of the palette, a little changed."""
        base = palette[int(self.rng.integers(len(palette)))]
        d = self.rng.uniform(-jitter, jitter, 3) * 0.5 + self.rng.uniform(-jitter, jitter)
        r, g, b = (float(min(max(c + e, 0.03), 0.97)) for c, e in zip(base, d, strict=True))
        return r, g, b

    def new_surface(
        self,
        material: Material,
        color: Color,
        accent: Color = (0, 0, 0),
        params: Sequence[SupportsFloat] = (),
    ) -> int:
        """Add a row to the surface table; colours are sRGB. Returns its index."""
        row = [float(material), *linear(color), *linear(accent), *map(float, params)]
        self.table.append(row + [0.0] * (15 - len(row)))
        return len(self.table) - 1

    def plain(self, color: Color, noise: float = 0.05) -> int:
        """A plain surface with a little noise."""
        return self.new_surface(Material.PLAIN, color, params=(noise, self.rng.integers(1000)))

    def triangle(self, a: Point, b: Point, c: Point, uv: list[float], surface: int) -> None:
        """Add one triangle with uv = [ua, va, ub, vb, uc, vc]."""
        self.triangles.append([*a, *b, *c])
        self.uvs.append(uv)
        self.surfaces.append(surface)

    def quad(
        self, a: Point, b: Point, c: Point, d: Point, u: float, v: float, surface: int, v0: float = 0.0
    ) -> None:
        """Add the quad a b c d (counter-clockwise) with uv (0, v0), (u, v0), (u, v0 + v), (0, v0 + v)."""
        self.triangle(a, b, c, [0, v0, u, v0, u, v0 + v], surface)
        self.triangle(a, c, d, [0, v0, u, v0 + v, 0, v0 + v], surface)

    def floor(self, x0: float, x1: float, y0: float, y1: float, z: float, surface: int) -> None:
        """A horizontal rectangle facing up; u along x, v along y."""
        self.quad((x0, y0, z), (x1, y0, z), (x1, y1, z), (x0, y1, z), x1 - x0, y1 - y0, surface)

    def walls(
        self,
        x0: float,
        x1: float,
        y0: float,
        y1: float,
        z0: float,
        z1: float,
        surfaces: int | tuple[int, int, int, int],
    ) -> None:
        """Four outward walls: south, east, north, west. A surface of -1 leaves that wall out."""
        s, e, n, w = (surfaces,) * 4 if isinstance(surfaces, int) else surfaces
        h = z1 - z0
        if s >= 0:
            self.quad((x0, y0, z0), (x1, y0, z0), (x1, y0, z1), (x0, y0, z1), x1 - x0, h, s)
        if e >= 0:
            self.quad((x1, y0, z0), (x1, y1, z0), (x1, y1, z1), (x1, y0, z1), y1 - y0, h, e)
        if n >= 0:
            self.quad((x1, y1, z0), (x0, y1, z0), (x0, y1, z1), (x1, y1, z1), x1 - x0, h, n)
        if w >= 0:
            self.quad((x0, y1, z0), (x0, y0, z0), (x0, y0, z1), (x0, y1, z1), y1 - y0, h, w)

    def box(
        self,
        x0: float,
        x1: float,
        y0: float,
        y1: float,
        z0: float,
        z1: float,
        side: int,
        top: int | None = None,
    ) -> None:
        """Walls and top of a box."""
        self.walls(x0, x1, y0, y1, z0, z1, side)
        self.floor(x0, x1, y0, y1, z1, side if top is None else top)

    def slab(self, x0: float, x1: float, y0: float, y1: float, z: float, top: int, side: int) -> None:
        """A raised floor with its kerb, from the ground up."""
        self.walls(x0, x1, y0, y1, -0.05, z, side)
        self.floor(x0, x1, y0, y1, z, top)

    def blob(
        self, x: float, y: float, z: float, rx: float, rz: float, color: Color, rough: float = 0.13
    ) -> None:
        """A lump of leaves."""
        rng = self.rng
        waves = rng.normal(size=(3, 3)) * 2.2
        phase = rng.uniform(0, 6.28, 3)
        radius = 1 + rough * np.sin(_SPHERE @ waves.T + phase).sum(-1, keepdims=True)
        corners = _SPHERE * radius * [rx, rx, rz] + [x, y, z]
        k = METRES_PER_UNIT
        r = math.sqrt(rx * rz) / k
        surface = self.new_surface(
            Material.FOLIAGE, color, params=(x / k, y / k, z / k, r, float(rng.integers(1000)))
        )
        uv = np.zeros((len(corners), 3, 2), np.float32)
        self.batches.append((corners.astype(np.float32), uv, np.full(len(corners), surface, np.int32)))

    def tree(
        self, x: float, y: float, z: float, size: float, clear: float = 2.7, kind: int | None = None
    ) -> None:
        """A tree with its trunk at (x, y), crown radius about `size`, crown above z + clear."""
        rng = self.rng
        kind = int(rng.integers(5)) if kind is None else kind
        color = self.pick(LEAVES[:5] if rng.random() < 0.93 else LEAVES[5:], 0.04)
        bark = self.plain((0.36, 0.28, 0.21))
        if kind == 4:  # conifer: three stacked cones of leaves
            t = 0.14
            self.walls(x - t, x + t, y - t, y + t, z, z + clear * 0.5, bark)
            dark: Color = (color[0] * 0.62, color[1] * 0.75, color[2] * 0.85)
            for k in range(3):
                self.blob(
                    x,
                    y,
                    z + clear * 0.5 + size * (0.9 + 1.05 * k),
                    size * (0.85 - 0.24 * k),
                    size * 0.95,
                    dark,
                    0.06,
                )
            top = z + clear * 0.5 + size * 3.8
        else:
            t = 0.17
            self.walls(x - t, x + t, y - t, y + t, z, z + clear + size * 0.6, bark)
            zc = z + clear + size * 0.95
            self.blob(x, y, zc, size, size * 0.95, color)
            for _ in range(2):
                a = rng.uniform(0, 6.28)
                d, r = size * 0.42, size * rng.uniform(0.55, 0.7)
                self.blob(
                    x + d * math.cos(a), y + d * math.sin(a), zc + size * rng.uniform(0.1, 0.55), r, r, color
                )
            top = zc + size
        self.discs.append([x, y, size * 0.9, top])

    def car(self, x: float, y: float, along_x: bool) -> None:
        """A parked car: body, cabin with dark windows, wheels hinted by a dark sill."""
        half_l, half_w = 2.1, 0.85

        def rect(l0: float, l1: float, w: float) -> tuple[float, float, float, float]:
            return (x + l0, x + l1, y - w, y + w) if along_x else (x - w, x + w, y + l0, y + l1)

        paint = self.plain(self.pick(CARS), 0.0)
        glass = self.plain((0.16, 0.19, 0.22), 0.0)
        tyre = self.plain((0.10, 0.10, 0.11), 0.0)
        self.walls(*rect(-half_l + 0.2, half_l - 0.2, half_w - 0.05), 0.0, 0.35, tyre)
        self.box(*rect(-half_l, half_l, half_w), 0.3, 0.85, paint)
        flip = 1 if self.rng.random() < 0.5 else -1
        l0, l1 = sorted((-1.35 * flip, 0.85 * flip))
        self.box(*rect(l0, l1, half_w - 0.12), 0.85, 1.38, glass, paint)

    def facade(self, width: float, height: float, look: _Look, style: int) -> int:
        """A facade surface; bays are fitted to the width."""
        bays = max(1, round(width / look.bay))
        return self.new_surface(
            Material.FACADE, look.wall, look.accent,
            (width, height, look.floor, width / bays, look.window_w, look.window_h, style, self.rng.integers(1000)),
        )  # fmt: skip


@dataclass
class _Look:
    """What the facades of one building share."""

    wall: Color
    accent: Color
    floor: float
    bay: float
    window_w: float
    window_h: float
    style: int


def _look(b: _Builder) -> _Look:
    rng = b.rng
    style = 0
    if rng.random() < 0.3:
        style |= Style.SHUTTERS
    if rng.random() < 0.5:
        style |= Style.BANDS
    if rng.random() < 0.5:
        style |= Style.STONE_BASE
    bay = rng.uniform(2.4, 3.2)
    modern = rng.random() < 0.2
    window_w = bay * (0.68 if modern else rng.uniform(0.36, 0.5))
    if modern:
        style &= ~Style.SHUTTERS
    return _Look(
        b.pick(WALLS), b.pick(ACCENTS), rng.uniform(2.9, 3.4), bay, window_w, rng.uniform(1.4, 1.8), style
    )


def _gable(
    b: _Builder, rect: tuple[float, float, float, float], z: float, rise: float, along_x: bool, roof: int, wall: int,
    free: tuple[bool, bool] = (True, True),
) -> None:  # fmt: skip
    """A gable roof over `rect`; `wall` is the surface of the gables; `free` ends (west/south first) overhang."""
    x0, x1, y0, y1 = rect
    if not along_x:  # turn by 90 degrees: (x, y) = (-y', x') keeps orientation
        lo, hi, m0, m1 = y0, y1, -x1, -x0
    else:
        lo, hi, m0, m1 = x0, x1, y0, y1

    def p(l: float, m: float, h: float) -> Point:  # noqa: E741
        return (l, m, h) if along_x else (-m, l, h)

    mid, over = (m0 + m1) / 2, 0.35
    slope = rise / (mid - m0)
    drop = over * slope
    length = math.hypot(mid - m0 + over, rise + drop)
    e0 = lo - (over if free[0] else 0.0)
    e1 = hi + (over if free[1] else 0.0)
    b.quad(
        p(e0, m0 - over, z - drop),
        p(e1, m0 - over, z - drop),
        p(e1, mid, z + rise),
        p(e0, mid, z + rise),
        e1 - e0,
        length,
        roof,
    )
    b.quad(
        p(e1, m1 + over, z - drop),
        p(e0, m1 + over, z - drop),
        p(e0, mid, z + rise),
        p(e1, mid, z + rise),
        e1 - e0,
        length,
        roof,
    )
    w = m1 - m0
    b.triangle(p(lo, m1, z), p(lo, m0, z), p(lo, mid, z + rise), [0, 0, w, 0, w / 2, rise], wall)
    b.triangle(p(hi, m0, z), p(hi, m1, z), p(hi, mid, z + rise), [0, 0, w, 0, w / 2, rise], wall)


def _hip(b: _Builder, rect: tuple[float, float, float, float], z: float, rise: float, roof: int) -> None:
    """A hip roof over `rect`."""
    over = 0.35
    x0, x1, y0, y1 = rect[0] - over, rect[1] + over, rect[2] - over, rect[3] + over
    z0 = z - 0.1
    half = min(x1 - x0, y1 - y0) / 2
    long_x = x1 - x0 >= y1 - y0
    r0: Point = (x0 + half, (y0 + y1) / 2, z + rise) if long_x else ((x0 + x1) / 2, y0 + half, z + rise)
    r1: Point = (x1 - half, (y0 + y1) / 2, z + rise) if long_x else ((x0 + x1) / 2, y1 - half, z + rise)
    sw, se, ne, nw = (x0, y0, z0), (x1, y0, z0), (x1, y1, z0), (x0, y1, z0)
    length = math.hypot(half, rise)
    if long_x:
        b.quad(sw, se, r1, r0, x1 - x0, length, roof)
        b.quad(ne, nw, r0, r1, x1 - x0, length, roof)
        b.triangle(se, ne, r1, [0, 0, y1 - y0, 0, half, length], roof)
        b.triangle(nw, sw, r0, [0, 0, y1 - y0, 0, half, length], roof)
    else:
        b.quad(se, ne, r1, r0, y1 - y0, length, roof)
        b.quad(nw, sw, r0, r1, y1 - y0, length, roof)
        b.triangle(sw, se, r0, [0, 0, x1 - x0, 0, half, length], roof)
        b.triangle(ne, nw, r1, [0, 0, x1 - x0, 0, half, length], roof)


def _building(
    b: _Builder,
    rect: tuple[float, float, float, float],
    floors: int,
    front: int,
    party: tuple[float, float],
    shops: bool,
) -> float:
    """A town house. `front` is 0 for south, 2 for north; `party` gives the eave heights of the west and east neighbours
    (0: none, the wall is free). Returns the eave height."""
    rng = b.rng
    x0, x1, y0, y1 = rect
    look = _look(b)
    z0 = KERB
    height = floors * look.floor
    z1 = z0 + height
    width, depth = x1 - x0, y1 - y0
    street = look.style | (Style.SHOP if shops else Style.DOOR)
    south = b.facade(width, height, look, street if front == 0 else look.style)
    north = b.facade(width, height, look, street if front == 2 else look.style)
    west_blank, east_blank = party[0] > 0, party[1] > 0
    blank = b.plain((look.wall[0] * 0.93, look.wall[1] * 0.93, look.wall[2] * 0.92))
    west = -1 if west_blank else b.facade(depth, height, look, look.style)
    east = -1 if east_blank else b.facade(depth, height, look, look.style)
    b.walls(x0, x1, y0, y1, z0, z1, (south, east, north, west))
    # Above a lower neighbour the party wall shows.
    if west_blank and party[0] < z1:
        b.walls(x0, x1, y0, y1, party[0] - 0.3, z1, (-1, -1, -1, blank))
    if east_blank and party[1] < z1:
        b.walls(x0, x1, y0, y1, party[1] - 0.3, z1, (-1, blank, -1, -1))
    kind = rng.random()
    if kind < 0.38:  # flat roof with parapet
        gravel = b.plain(b.pick([(0.55, 0.54, 0.52), (0.47, 0.47, 0.48), (0.60, 0.56, 0.50)]), 0.10)
        edge = b.plain((look.wall[0] * 0.9, look.wall[1] * 0.9, look.wall[2] * 0.9))
        t, h = 0.3, 0.6
        b.walls(x0, x1, y0, y1, z1, z1 + h, edge)
        for r in (
            (x0, x1, y0, y0 + t),
            (x0, x1, y1 - t, y1),
            (x0, x0 + t, y0 + t, y1 - t),
            (x1 - t, x1, y0 + t, y1 - t),
        ):
            b.floor(*r, z1 + h, edge)
        xi0, xi1, yi0, yi1 = x0 + t, x1 - t, y0 + t, y1 - t
        b.quad((xi1, yi0, z1), (xi0, yi0, z1), (xi0, yi0, z1 + h), (xi1, yi0, z1 + h), width, h, edge)
        b.quad((xi0, yi1, z1), (xi1, yi1, z1), (xi1, yi1, z1 + h), (xi0, yi1, z1 + h), width, h, edge)
        b.quad((xi0, yi0, z1), (xi0, yi1, z1), (xi0, yi1, z1 + h), (xi0, yi0, z1 + h), depth, h, edge)
        b.quad((xi1, yi1, z1), (xi1, yi0, z1), (xi1, yi0, z1 + h), (xi1, yi1, z1 + h), depth, h, edge)
        b.floor(xi0, xi1, yi0, yi1, z1, gravel)
        for _ in range(int(rng.integers(1, 4))):  # stair head, machinery
            w, d, h2 = rng.uniform(1.2, 3.0), rng.uniform(1.2, 2.6), rng.uniform(0.8, 2.2)
            xa, ya = rng.uniform(x0 + 0.8, x1 - 0.8 - w), rng.uniform(y0 + 0.8, y1 - 0.8 - d)
            b.box(
                xa,
                xa + w,
                ya,
                ya + d,
                z1,
                z1 + h2,
                b.plain(b.pick([(0.70, 0.70, 0.70), (0.55, 0.57, 0.60), look.wall])),
            )
        b.boxes.append([x0, x1, y0, y1, z1 + 0.4])
    else:
        rise = depth / 2 * rng.uniform(0.55, 0.9)
        roof = b.new_surface(Material.TILES, b.pick(ROOFS), params=(0.35, rng.integers(1000)))
        free = party[0] == 0 and party[1] == 0
        if free and kind > 0.7:
            _hip(b, rect, z1, min(rise, width / 2 * 0.9), roof)
        else:
            _gable(b, rect, z1, rise, True, roof, blank, (not west_blank, not east_blank))
            for y, s in ((y0, 1.0), (y1, -1.0)):  # dormers
                if rng.random() < 0.4 and width > 8:
                    glass = b.plain((0.20, 0.24, 0.29), 0.0)
                    for k in range(int(width // 4)):
                        xd = x0 + (k + 0.5) * width / int(width // 4)
                        slope = rise / (depth / 2)
                        yf, h = y + s * 1.1, 1.25
                        zb = z1 + 1.1 * slope
                        yb = yf + s * h / slope
                        ya, yc = min(yf, yb), max(yf, yb)
                        side = (glass, blank, -1, blank) if s > 0 else (-1, blank, glass, blank)
                        b.walls(xd - 0.7, xd + 0.7, ya, yc, zb - 0.1, zb + h, side)
                        b.floor(xd - 0.85, xd + 0.85, ya - 0.15 * (s > 0), yc + 0.15 * (s < 0), zb + h, roof)
        ym = (y0 + y1) / 2
        for _ in range(int(rng.integers(1, 3))):  # chimneys
            xc, yc = rng.uniform(x0 + 1, x1 - 1), ym + rng.choice([-1, 1]) * depth * 0.15
            b.box(
                xc - 0.4,
                xc + 0.4,
                yc - 0.4,
                yc + 0.4,
                z1 + rise * 0.4,
                z1 + rise + 0.9,
                b.plain(b.pick([(0.55, 0.36, 0.30), STONE])),
            )
        b.boxes.append([x0, x1, y0, y1, z1 + rise * 0.3])
        b.boxes.append([x0, x1, y0 + depth * 0.25, y1 - depth * 0.25, z1 + rise * 0.75])
    sign, y = (-1.0, y0) if front == 0 else (1.0, y1)
    if shops:  # awnings over some of the shop windows
        bays = max(1, round(width / look.bay))
        step = width / bays
        cloth = b.plain(
            b.pick([(0.70, 0.24, 0.20), (0.24, 0.42, 0.34), (0.80, 0.70, 0.48), (0.24, 0.34, 0.52)]), 0.04
        )
        for k in range(bays):
            if rng.random() < 0.5:
                xa, xb = x0 + k * step + 0.15, x0 + (k + 1) * step - 0.15
                q: list[Point] = [
                    (xa, y + sign * 1.3, z0 + 2.35),
                    (xb, y + sign * 1.3, z0 + 2.35),
                    (xb, y, z0 + 2.75),
                    (xa, y, z0 + 2.75),
                ]
                if sign > 0:
                    q = [q[1], q[0], q[3], q[2]]
                b.quad(q[0], q[1], q[2], q[3], xb - xa, 1.4, cloth)
    elif rng.random() < 0.5:  # balconies
        bays = max(1, round(width / look.bay))
        step = width / bays
        rail = b.plain(b.pick([(0.30, 0.31, 0.33), (0.80, 0.80, 0.78), look.accent]), 0.0)
        for k in range(bays):
            if (k + bays) % 2 == 0:
                continue
            for f in range(1, floors):
                zf = z0 + f * look.floor
                xc = x0 + (k + 0.5) * step
                ya, yb = sorted((y, y + sign * 0.9))
                b.box(xc - 0.95, xc + 0.95, ya, yb, zf, zf + 0.85, rail)
                b.quad(
                    (xc - 0.95, yb, zf),
                    (xc + 0.95, yb, zf),
                    (xc + 0.95, ya, zf),
                    (xc - 0.95, ya, zf),
                    1.9,
                    0.9,
                    rail,
                )
    return z1


def _row_of_houses(b: _Builder, x0: float, x1: float, y0: float, y1: float, front: int) -> None:
    """Adjoining houses from x0 to x1, sometimes with a gap."""
    rng = b.rng
    widths = []
    left = x1 - x0
    while left > 1e-6:
        w = float(rng.uniform(8.0, 13.5))
        if left - w < 8.0:
            w = left if left < 14.5 else left / 2
        widths.append(w)
        left -= w
    n = len(widths)
    gap_after = [bool(rng.random() < 0.2) and w > 9.5 for w in widths]
    floors = [int(rng.choice([2, 3, 3, 4, 4, 5, 6])) for _ in range(n)]
    shops = rng.random(n) < 0.35
    x, depth, previous = x0, 0.0, 0.0
    for k, w in enumerate(widths):
        end = x + w - (3.0 if gap_after[k] and k + 1 < n else 0.0)
        if previous == 0.0:  # party walls are hidden only between houses of one depth
            depth = float(rng.uniform(10.0, 12.5))
        rect = (x, end, y0, y0 + depth) if front == 0 else (x, end, y1 - depth, y1)
        # The next house does not exist yet: assume its eaves at 3.0 m a floor at least, so the wall may start a little low.
        following = 0.0 if k + 1 == n or gap_after[k] else KERB + floors[k + 1] * 2.9
        eaves = _building(b, rect, floors[k], front, (previous, following), bool(shops[k]))
        previous = 0.0 if gap_after[k] else min(eaves, KERB + floors[k] * 2.9)
        x += w


def _lawn(b: _Builder) -> int:
    return b.new_surface(Material.FIELD, b.pick([LAWN]), b.pick([LAWN_DRY]), (b.rng.integers(1000),))


def _block(b: _Builder, rect: tuple[float, float, float, float], park: bool) -> None:
    """A block with its pavement: two rows of houses around a green court, or a park."""
    rng = b.rng
    x0, x1, y0, y1 = rect
    p = PAVEMENT
    paving = b.new_surface(
        Material.PAVEMENT, b.pick([(0.66, 0.64, 0.60)], 0.02), params=(rng.integers(1000),)
    )
    kerb = b.plain((0.58, 0.57, 0.55), 0.02)
    # Pavement as a frame: the court inside is another surface.
    b.walls(x0 - p, x1 + p, y0 - p, y1 + p, -0.05, KERB, kerb)
    b.floor(x0 - p, x1 + p, y0 - p, y0, KERB, paving)
    b.floor(x0 - p, x1 + p, y1, y1 + p, KERB, paving)
    b.floor(x0 - p, x0, y0, y1, KERB, paving)
    b.floor(x1, x1 + p, y0, y1, KERB, paving)
    lawn = _lawn(b)
    ym = (y0 + y1) / 2
    if park:
        gravel = b.plain((0.74, 0.68, 0.56), 0.06)
        c, w = (x0 + x1) / 2, 1.5
        for xa, xb in ((x0, c - w), (c + w, x1)):
            for ya, yb in ((y0, ym - w), (ym + w, y1)):
                b.floor(xa, xb, ya, yb, KERB, lawn)
        b.floor(x0, x1, ym - w, ym + w, KERB, gravel)
        b.floor(c - w, c + w, y0, ym - w, KERB, gravel)
        b.floor(c - w, c + w, ym + w, y1, KERB, gravel)
        for _ in range(16):
            x, y = rng.uniform(x0 + 2, x1 - 2), rng.uniform(y0 + 2, y1 - 2)
            if abs(x - c) > 3.5 and abs(y - ym) > 3.5:
                b.tree(x, y, KERB, rng.uniform(1.8, 3.0))
    else:
        b.floor(x0, x1, y0, y1, KERB, lawn)
        _row_of_houses(b, x0, x1, y0, y1, 0)
        _row_of_houses(b, x0, x1, y0, y1, 2)
        for k in range(5):
            x = x0 + (k + rng.uniform(0.25, 0.75)) * (x1 - x0) / 5
            b.tree(x, ym + rng.uniform(-1.5, 1.5), KERB, rng.uniform(1.6, 2.4))
    # Street trees stand near the kerb, crowns above head height; between them lies the way of the camera car.
    for y in (y0 - p + 0.7, y1 + p - 0.7):
        for k in range(5):
            if rng.random() < 0.8:
                b.tree(
                    x0 + (k + 0.5) * (x1 - x0) / 5, y, KERB, rng.uniform(1.2, 1.6), 2.9, int(rng.integers(4))
                )
    for x in (x0 - p + 0.7, x1 + p - 0.7):
        for k in range(3):
            if rng.random() < 0.6:
                b.tree(
                    x, y0 + (k + 0.5) * (y1 - y0) / 3, KERB, rng.uniform(1.2, 1.5), 2.9, int(rng.integers(4))
                )
    gap = CARRIAGEWAY / 2 - 2.95  # centre of a parked car, from the kerb outwards
    for y in (y0 - p - gap, y1 + p + gap):
        for k in range(int((x1 - x0) // 6)):
            if rng.random() < 0.45:
                b.car(x0 + (k + 0.5) * 6 + rng.uniform(-0.4, 0.4), y, True)
    for x in (x0 - p - gap, x1 + p + gap):
        for k in range(int((y1 - y0) // 6)):
            if rng.random() < 0.35:
                b.car(x, y0 + (k + 0.5) * 6 + rng.uniform(-0.4, 0.4), False)


def _streets(b: _Builder, layout: Layout) -> None:
    """Carriageways between the blocks and the outer pavement."""
    half = CARRIAGEWAY / 2
    xs, ys = layout.street_x, layout.street_y

    def asphalt(length: float, marked: bool) -> int:
        return b.new_surface(
            Material.ASPHALT,
            (0.42, 0.42, 0.43),
            (0.84, 0.83, 0.79),
            (length, CARRIAGEWAY, marked, b.rng.integers(1000)),
        )

    for x in map(float, xs):
        for y in map(float, ys):
            b.floor(x - half, x + half, y - half, y + half, 0.0, asphalt(CARRIAGEWAY, False))
    for y in map(float, ys):
        for i in range(layout.columns):
            xa, xb = float(xs[i]) + half, float(xs[i + 1]) - half
            b.floor(xa, xb, y - half, y + half, 0.0, asphalt(xb - xa, True))
    for x in map(float, xs):
        for j in range(layout.rows):
            ya, yb = float(ys[j]) + half, float(ys[j + 1]) - half
            # u runs along the street, here north.
            b.quad(
                (x + half, ya, 0),
                (x + half, yb, 0),
                (x - half, yb, 0),
                (x - half, ya, 0),
                yb - ya,
                CARRIAGEWAY,
                asphalt(yb - ya, True),
            )
    hx, hy = layout.half_size
    p = PAVEMENT
    kerb = b.plain((0.58, 0.57, 0.55), 0.02)
    for r in (
        (-hx, hx, -hy, -hy + p),
        (-hx, hx, hy - p, hy),
        (-hx, -hx + p, -hy + p, hy - p),
        (hx - p, hx, -hy + p, hy - p),
    ):
        b.slab(
            *r,
            KERB,
            b.new_surface(Material.PAVEMENT, (0.66, 0.64, 0.60), params=(b.rng.integers(1000),)),
            kerb,
        )


def _rim(b: _Builder, layout: Layout) -> None:
    """Detached houses with gardens around the outer streets."""
    rng = b.rng
    hx, hy = layout.half_size
    sides = [(-hx, hx, 0), (-hy, hy, 1), (-hx, hx, 2), (-hy, hy, 3)]  # south, east, north, west

    for lo, hi, side in sides:

        def place(
            l0: float, l1: float, m0: float, m1: float, side: int = side
        ) -> tuple[float, float, float, float]:
            """l along the side, m away from the town, to a rectangle."""
            if side == 0:
                return l0, l1, -hy - m1, -hy - m0
            if side == 2:
                return l0, l1, hy + m0, hy + m1
            if side == 1:
                return hx + m0, hx + m1, l0, l1
            return -hx - m1, -hx - m0, l0, l1

        lots = max(1, round((hi - lo) / 17.0))
        step = (hi - lo) / lots
        for k in range(lots):
            l0, l1 = lo + k * step, lo + (k + 1) * step
            lawn = _lawn(b)
            b.slab(*place(l0, l1, 0.0, RIM), KERB - 0.02, lawn, lawn)
            hedge = b.plain(b.pick([(0.32, 0.42, 0.23)]), 0.25)
            b.box(*place(l0 + 0.4, l1 - 2.6, 0.5, 1.1), 0.0, 1.1, hedge)
            b.box(*place(l0, l0 + 0.5, 1.1, RIM - 0.5), 0.0, 1.2, hedge)
            if rng.random() < 0.82:
                w, d = rng.uniform(8.0, min(11.0, step - 4.0)), rng.uniform(7.0, 8.5)
                c = (l0 + l1) / 2 + rng.uniform(-0.6, 0.6)
                set_back = rng.uniform(3.6, 5.5)
                rect = place(c - w / 2, c + w / 2, set_back, set_back + d)
                _detached(b, rect, side)
                b.tree(
                    *_centre(place(l0 + 1.5, l1 - 1.5, RIM - 4.5, RIM - 2.0), rng),
                    KERB,
                    rng.uniform(1.7, 2.6),
                )
                if rng.random() < 0.5:
                    b.tree(
                        *_centre(place(l0 + 1.2, l0 + 2.2, 2.2, 3.0), rng), KERB, rng.uniform(0.8, 1.1), 1.2
                    )
            else:
                for _ in range(4):
                    b.tree(*_centre(place(l0 + 2, l1 - 2, 4.0, RIM - 2.5), rng), KERB, rng.uniform(1.7, 2.8))
    for sx in (-1, 1):  # corners
        for sy in (-1, 1):
            xa, xb = sorted((sx * hx, sx * (hx + RIM)))
            ya, yb = sorted((sy * hy, sy * (hy + RIM)))
            lawn = _lawn(b)
            b.slab(xa, xb, ya, yb, KERB - 0.02, lawn, lawn)
            for _ in range(4):
                b.tree(rng.uniform(xa + 3, xb - 3), rng.uniform(ya + 3, yb - 3), KERB, rng.uniform(1.8, 2.8))


def _centre(rect: tuple[float, float, float, float], rng: np.random.Generator) -> tuple[float, float]:
    return float(rng.uniform(rect[0], rect[1])), float(rng.uniform(rect[2], rect[3]))


def _detached(b: _Builder, rect: tuple[float, float, float, float], side: int) -> None:
    rng = b.rng
    x0, x1, y0, y1 = rect
    look = _look(b)
    look.style &= ~Style.BANDS
    height = int(rng.integers(1, 3)) * look.floor
    z1 = KERB + height
    facing = {0: 2, 1: 3, 2: 0, 3: 1}[side]  # the door looks at the street
    faces = [
        b.facade(w, height, look, look.style | (Style.DOOR if k == facing else 0))
        for k, w in enumerate((x1 - x0, y1 - y0) * 2)
    ]
    b.walls(x0, x1, y0, y1, KERB, z1, (faces[0], faces[1], faces[2], faces[3]))
    along_x = x1 - x0 >= y1 - y0
    span = min(x1 - x0, y1 - y0)
    rise = span / 2 * rng.uniform(0.6, 0.95)
    roof = b.new_surface(Material.TILES, b.pick(ROOFS), params=(0.35, rng.integers(1000)))
    if rng.random() < 0.35:
        _hip(b, rect, z1, rise * 0.85, roof)
    else:
        end = b.plain(look.wall)
        _gable(b, rect, z1, rise, along_x, roof, end)
    xc, yc = (x0 + x1) / 2 + rng.uniform(-1, 1), (y0 + y1) / 2 + rng.uniform(-1, 1)
    b.box(
        xc - 0.35,
        xc + 0.35,
        yc - 0.35,
        yc + 0.35,
        z1 + rise * 0.5,
        z1 + rise + 0.8,
        b.plain((0.56, 0.38, 0.32)),
    )
    b.boxes.append([x0, x1, y0, y1, z1 + rise * 0.4])


def _fields(b: _Builder, layout: Layout, radius: float) -> None:
    """Fields from the gardens to the foot of the sky, with clumps of trees."""
    rng = b.rng
    hx, hy = layout.half_size[0] + RIM, layout.half_size[1] + RIM
    cell = max(28.0, radius / 40)
    crops: list[Color] = [
        (0.48, 0.56, 0.28),
        (0.58, 0.60, 0.32),
        (0.66, 0.62, 0.38),
        (0.42, 0.52, 0.26),
        (0.55, 0.50, 0.34),
    ]

    def edges(half: float) -> list[float]:
        n = max(1, round(2 * half / cell))
        inner = list(np.linspace(-half, half, n + 1))
        more = max(1, math.ceil((radius - half) / cell))
        outer = list(np.linspace(half, radius, more + 1)[1:])
        return [-v for v in reversed(outer)] + inner + outer

    ex, ey = edges(hx), edges(hy)
    for xa, xb in pairwise(ex):
        for ya, yb in pairwise(ey):
            cx, cy = (xa + xb) / 2, (ya + yb) / 2
            if abs(cx) < hx and abs(cy) < hy:
                continue  # the town
            near = math.hypot(max(xa, -xb, 0.0), max(ya, -yb, 0.0))
            if near > radius:
                continue
            crop = b.new_surface(
                Material.FIELD, b.pick(crops, 0.02), b.pick(crops, 0.02), (rng.integers(1000),)
            )
            b.floor(xa, xb, ya, yb, 0.0, crop)
    perimeter = 4 * (hx + hy)
    for _ in range(int(min(perimeter / 14, 600))):
        side, t = int(rng.integers(4)), rng.uniform(-1, 1)
        out = 4 + abs(rng.normal()) * 35
        x, y = [(t * hx, -hy - out), (hx + out, t * hy), (t * hx, hy + out), (-hx - out, t * hy)][side]
        for _ in range(int(rng.integers(1, 4))):
            b.tree(
                float(x + rng.normal() * 4),
                float(y + np.sign(y) * abs(rng.normal()) * 2),
                0.0,
                rng.uniform(2.0, 3.4),
                1.2,
            )


def build_town(blocks: int, seed: int = 0) -> Town:
    """Build a town.

    Args:
        blocks: how many built-up blocks, at least 1.
        seed: another seed, another town; the same seed gives the same arrays bit for bit.
    Returns: the town; about 8,000 triangles a block, more in small towns.
    Raises: ValueError if blocks < 1.
    """
    layout = plan(blocks)
    hx, hy = layout.half_size
    radius = 1.5 * math.hypot(hx + RIM, hy + RIM) + 120.0
    parts = []
    jobs = (
        [(1, c, False) for c in layout.blocks] + [(1, c, True) for c in layout.parks] + [(2, (0, 0), False)]
    )
    offset = 0
    boxes, discs, tables = [], [], []
    for kind, cell, park in jobs:
        b = _Builder(np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, kind, *cell]))
        if kind == 1:
            _block(b, layout.block_rect(*cell), park)
        else:
            _streets(b, layout)
            _rim(b, layout)
            _fields(b, layout, radius * 1.02)
        parts.append(
            (
                np.asarray(b.triangles, np.float32).reshape(-1, 3, 3),
                np.asarray(b.uvs, np.float32).reshape(-1, 3, 2),
                np.asarray(b.surfaces, np.int32) + offset,
            )
        )
        parts.extend((c, u, s + offset) for c, u, s in b.batches)
        table = np.asarray(b.table, np.float32).reshape(-1, 15)
        tables.append(table)
        offset += len(table)
        boxes.append(np.asarray(b.boxes, np.float32).reshape(-1, 5))
        discs.append(np.asarray(b.discs, np.float32).reshape(-1, 4))
    table = np.concatenate(tables)
    k = np.float32(METRES_PER_UNIT)
    return Town(
        corners=(np.concatenate([p[0] for p in parts]) / k).astype(np.float32, copy=False),
        uv=np.concatenate([p[1] for p in parts]),
        surface=np.concatenate([p[2] for p in parts]).astype(np.int32),
        material=table[:, 0].astype(np.int8),
        color=np.ascontiguousarray(table[:, 1:4]),
        accent=np.ascontiguousarray(table[:, 4:7]),
        params=np.ascontiguousarray(table[:, 7:15]),
        height_boxes=np.concatenate(boxes) / k,
        height_discs=np.concatenate(discs) / k,
        layout=layout,
        dome_radius=radius / METRES_PER_UNIT,
        seed=seed,
    )
