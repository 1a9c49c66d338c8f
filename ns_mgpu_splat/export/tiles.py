# SPDX-License-Identifier: Apache-2.0
"""Cutting space into cubes: which rows go into which file, and the index that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ns_mgpu_splat.export.frame import Frame
from ns_mgpu_splat.export.rows import RowSource
from ns_mgpu_splat.export.selection import Selection, Survey

INDEX = "index.json"
FORMAT = 1
_MOST_TILES = 10_000
_REACH = 1 << 20  # cells from the origin each way: three such numbers fit in 64 bits

Cell = tuple[int, int, int]
"""Number of a cube along x, y and z: it holds the positions from cell * size up to, not including, (cell + 1) * size."""


class TileError(ValueError):
    """A tile size that does not suit the scene."""


@dataclass(frozen=True)
class Grid:
    """Cubes that hold at least one row, in order of x, then y, then z.

    Attributes:
        size: side of a cube, in units of the frame. surveys: what is in each cube.
    """

    size: float
    surveys: dict[Cell, Survey]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_codes", np.array([_code(np.array(cell)) for cell in self.surveys]))

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """For each position (rows, 3) in a cube of this grid, the cube's place in `surveys`."""
        codes: np.ndarray = self._codes  # type: ignore[attr-defined]
        return np.searchsorted(codes, _code(_cells(positions, self.size)))


def _cells(positions: np.ndarray, size: float) -> np.ndarray:
    return np.floor(positions / size).astype(np.int64)


def _code(cells: np.ndarray) -> np.ndarray:
    """One number for each cell (..., 3) within `_REACH`, in the order of x, then y, then z."""
    x, y, z = np.moveaxis(cells + _REACH, -1, 0)
    return (x << 42) | (y << 21) | z


def _cell(code: int) -> Cell:
    x, y, z = ((code >> shift & (2 * _REACH - 1)) - _REACH for shift in (42, 21, 0))
    return x, y, z


def survey_tiles(rows: RowSource, selection: Selection, frame: Frame, size: float) -> Grid:
    """Find the cubes that the selected rows lie in. Raises TileError if they are too many or too far away."""
    surveys: dict[Cell, Survey] = {}
    for begin, chunk in rows.chunks(("means",)):
        keep = selection.get(begin, begin + len(chunk["means"]))
        positions = frame.positions(chunk["means"][keep])
        if not len(positions):
            continue
        if np.abs(positions).max() / size >= _REACH - 1:
            raise TileError(
                f"--tile-size {size:g} would number a tile beyond a million: a Gaussian lies at "
                f"{np.abs(positions).max():g}. Give a larger tile, or a --crop box."
            )
        codes = _code(_cells(positions, size))
        order = np.argsort(codes, kind="stable")
        found, starts = np.unique(codes[order], return_index=True)
        for code, members in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            surveys.setdefault(_cell(code), Survey()).add(positions[members])
        if len(surveys) > _MOST_TILES:
            raise TileError(
                f"--tile-size {size:g} would make more than {_MOST_TILES:,} files. Give a larger tile, or a --crop box "
                "that leaves out what lies far away."
            )
    return Grid(size, dict(sorted(surveys.items())))


def tile_name(cell: Cell, suffix: str) -> str:
    """File name of a tile."""
    return f"tile_{cell[0]}_{cell[1]}_{cell[2]}{suffix}"


def write_index(folder: Path, grid: Grid, suffix: str, facts: dict[str, Any]) -> int:
    """Write the index of the tiles in `folder`, with `facts` about all of them; returns its size in bytes."""
    tiles = [
        {
            "file": tile_name(cell, suffix),
            "cell": list(cell),
            "count": survey.count,
            "bytes": (folder / tile_name(cell, suffix)).stat().st_size,
            "cube": [[c * grid.size for c in cell], [(c + 1) * grid.size for c in cell]],
            "bounds": [survey.low.tolist(), survey.high.tolist()],
        }
        for cell, survey in grid.surveys.items()
    ]
    index = {"format": FORMAT, **facts, "tile_size": grid.size, "tiles": tiles}
    text = json.dumps(index, indent=1) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")
    return len(text.encode())


def is_tile_folder(folder: Path) -> bool:
    """Whether a folder holds an index and its tiles and nothing else, so that it may be replaced."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = {tile["file"] for tile in index["tiles"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(path.is_file() and path.name in files | {INDEX} for path in folder.iterdir())
