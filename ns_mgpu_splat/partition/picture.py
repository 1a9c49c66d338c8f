# SPDX-License-Identifier: Apache-2.0
"""The scene from above, coloured by home shard: a picture of what each GPU holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ns_mgpu_splat.partition.colors import shard_color
from ns_mgpu_splat.words import counted

CHUNK = 1 << 20  # rows at a time
SAMPLE = 1 << 20  # rows from which the frame is taken
MAP = 1400  # pixels of the map's longer side
CELLS = (160, MAP)  # cells of that side: fewer than pixels where Gaussians are few
MARGIN = 48
PANEL = 380  # pixels of the legend's column
BACKGROUND = (16, 18, 24)
TEXT = (226, 229, 236)
FAINT = (139, 146, 160)
OUTSIDE = 0.006  # share of the Gaussians that may lie outside of the frame at each end of each axis

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ShardLegend:
    """What the legend says of one shard."""

    name: str
    rows: int
    pages: int


@dataclass(frozen=True)
class View:
    """The map in cells: `low` (2,) world at its lower left, cells per world unit, width and height in cells."""

    low: tuple[float, float]
    scale: float
    width: int
    height: int

    @classmethod
    def around(cls, points: Floats, cells: int) -> View:
        """So that nearly all of the points (N, 2) are inside, whatever a few far ones do; so many cells on the longer side."""
        if len(points) == 0:
            points = np.zeros((1, 2))
        low, high = np.quantile(points, [OUTSIDE, 1 - OUTSIDE], axis=0)
        middle = (low + high) / 2
        extent = np.maximum(high - low, 1e-6 * max(1.0, float(np.abs(middle).max()))) * 1.06
        extent = np.maximum(extent, extent.max() / 3)  # no ribbons
        scale = cells / float(extent.max())
        width, height = (math.ceil(side * scale) for side in extent)
        corner = middle - extent / 2
        return cls((float(corner[0]), float(corner[1])), scale, width, height)

    def cell(self, points: Floats) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Of points (N, 2): the index of each cell, row by row from the top, and whether it is on the map."""
        with np.errstate(invalid="ignore"):
            across = np.floor((points[:, 0] - self.low[0]) * self.scale)
            down = self.height - 1 - np.floor((points[:, 1] - self.low[1]) * self.scale)
            inside = (across >= 0) & (across < self.width) & (down >= 0) & (down < self.height)
        index = np.where(inside, down * self.width + across, 0).astype(np.int64)
        return index, inside


def draw(
    means: Tensor,
    opacities: Tensor,
    homes: Sequence[tuple[int, int]],
    legend: Sequence[ShardLegend],
    title: str,
) -> Image.Image:
    """The picture: a place is as bright as the Gaussians there are many and opaque, in the colours of their homes.

    Args:
        means: (N, 3) on the CPU, z up. opacities: (N,) or (N, 1), logits.
        homes: (begin, end) of the rows of each shard. legend: of each shard. title: of the picture, one line.
    """
    cells = round(min(max(CELLS[0], 0.9 * math.sqrt(means.shape[0])), CELLS[1]))
    view = View.around(_sample(means), cells)
    weights = np.stack([_weights(means, opacities, home, view) for home in homes])
    rgb = _shade(weights, palette(len(homes))).reshape(view.height, view.width, 3)
    wide, high = (round(side * MAP / cells) for side in (view.width, view.height))
    picture = Image.fromarray(rgb).resize((wide, high), Image.Resampling.BICUBIC)
    height = max(high + 3 * MARGIN, 180 + 58 * len(legend) + 60)
    image = Image.new("RGB", (wide + PANEL + 2 * MARGIN, height), BACKGROUND)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, 22), title, font=_font(26), fill=TEXT)
    top = MARGIN + 28
    image.paste(picture, (MARGIN, top))
    pen.rectangle((MARGIN - 1, top - 1, MARGIN + wide, top + high), outline=(52, 57, 70))
    _scale_bar(pen, view.scale * MAP / cells, wide, top + high + 16)
    _axes(pen, MARGIN + 22, top + high - 22)
    _legend(pen, legend, sum(end - begin for begin, end in homes), MARGIN + wide + 32, top)
    return image


def save(image: Image.Image, path: Path) -> None:
    """Write the picture; the suffix chooses the format. Raises ValueError for one unknown, OSError if it cannot be written."""
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"{path}: a picture ends in .png, .jpg or .webp.")
    image.save(path)


def palette(count: int) -> NDArray[np.float64]:
    """(count, 3) in 0 to 1: the colours of the first shards."""
    return np.array([shard_color(shard) for shard in range(count)]).reshape(count, 3)


def _sample(means: Tensor) -> Floats:
    """(M, 2) finite places of rows at equal distances."""
    stride = max(1, -(-means.shape[0] // SAMPLE))
    places = means[::stride, :2].double().numpy()
    return places[np.isfinite(places).all(1)]


def _weights(means: Tensor, opacities: Tensor, home: tuple[int, int], view: View) -> NDArray[np.float32]:
    """(cells,) sum of the opacities of a shard's Gaussians."""
    out = np.zeros(view.width * view.height, np.float32)
    for begin in range(home[0], home[1], CHUNK):
        end = min(begin + CHUNK, home[1])
        index, inside = view.cell(means[begin:end, :2].double().numpy())
        alpha = opacities[begin:end].reshape(-1).float().sigmoid().nan_to_num(0).double().numpy()
        out += np.bincount(index, alpha * inside, minlength=len(out)).astype(np.float32)
    return out


def _shade(weights: NDArray[np.float32], colors: Floats) -> NDArray[np.uint8]:
    """(cells, 3) from (shards, cells)."""
    total = weights.sum(0)
    seen = total > 0.02
    full = float(np.quantile(total[seen], 0.98)) if seen.any() else 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        mixed = np.where(seen[:, None], (weights.T @ colors) / np.maximum(total, 1e-9)[:, None], 0.0)
    bright = np.where(seen, 0.3 + 0.7 * np.clip(np.log1p(total) / math.log1p(full), 0, 1), 0.0)
    background = np.array(BACKGROUND) / 255 * 0.7
    rgb = background + (mixed - background) * bright[:, None]
    return (np.clip(rgb, 0, 1) * 255 + 0.5).astype(np.uint8)


def nice_length(most: float) -> float:
    """The largest of 1, 2 and 5 by a power of ten that is not above `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    return max(step * power for step in (1, 2, 5) if step * power <= most * (1 + 1e-9))


def _scale_bar(pen: ImageDraw.ImageDraw, scale: float, width: int, y: int) -> None:
    """scale: pixels per world unit."""
    length = nice_length(width / scale / 4)
    left, right = MARGIN, MARGIN + round(length * scale)
    for x in (left, right):
        pen.line((x, y - 5, x, y + 5), fill=TEXT, width=2)
    pen.line((left, y, right, y), fill=TEXT, width=2)
    pen.text((right + 12, y - 10), _units(length), font=_font(17), fill=FAINT)


def _units(length: float) -> str:
    return f"{length:g} unit{'' if length == 1 else 's'} of the scene"


def _axes(pen: ImageDraw.ImageDraw, x: int, y: int) -> None:
    pen.line((x, y, x + 34, y), fill=FAINT, width=2)
    pen.line((x, y, x, y - 34), fill=FAINT, width=2)
    pen.text((x + 39, y - 10), "x", font=_font(16), fill=FAINT)
    pen.text((x - 4, y - 55), "y", font=_font(16), fill=FAINT)


def _legend(pen: ImageDraw.ImageDraw, legend: Sequence[ShardLegend], rows: int, x: int, y: int) -> None:
    pen.text((x, y - 4), "home shard", font=_font(17), fill=FAINT)
    y += 32
    for shard, color in zip(legend, palette(len(legend)), strict=True):
        swatch = tuple(int(255 * c) for c in color)
        pen.rounded_rectangle((x, y + 2, x + 26, y + 28), radius=5, fill=swatch)
        pen.text((x + 40, y - 3), shard.name, font=_font(20), fill=TEXT)
        share = shard.rows / rows if rows else 0.0
        pages = counted(shard.pages, "page")
        pen.text((x + 40, y + 21), f"{shard.rows:,} rows ({share:.0%}), {pages}", font=_font(15), fill=FAINT)
        y += 58


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    try:
        return ImageFont.load_default(size=size)
    except TypeError:  # Pillow before 10.1 has one size
        return ImageFont.load_default()
