# SPDX-License-Identifier: Apache-2.0
"""`export()`: rows of a source, through frame and selection, to a file or to a folder of tiles, in constant memory.

It walks over the rows several times: once to select them, once to see where they lie, once or more to write. What is kept
between the walks is one bit a row, and a few numbers a tile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ns_mgpu_splat.export.formats import FileFacts, Format, Plane, Stream
from ns_mgpu_splat.export.frame import Frame
from ns_mgpu_splat.export.ply import PlyFormat
from ns_mgpu_splat.export.rows import RowSource
from ns_mgpu_splat.export.selection import Box, Selection, Survey, select
from ns_mgpu_splat.export.splat import SplatFormat
from ns_mgpu_splat.export.spz import SpzFormat
from ns_mgpu_splat.export.tiles import (
    INDEX,
    Cell,
    Grid,
    is_tile_folder,
    survey_tiles,
    tile_name,
    write_index,
)
from ns_mgpu_splat.splats.targets import check_room, whole_file, whole_folder, writable_target

FORMATS: dict[str, Format] = {f.suffix: f for f in (PlyFormat(), SplatFormat(), SpzFormat())}
_FILES_AT_ONCE = 128  # a compressed stream holds a quarter of a megabyte, and a process has a thousand files

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many rows of it are done, and of how many."""


class ExportError(ValueError):
    """What stands against an export, in a sentence for the user."""


@dataclass(frozen=True)
class ExportSettings:
    """What to export.

    Attributes:
        frame: of what is written. sh_degree: keep harmonics up to this degree; None: all.
        crop: keep the Gaussians with their means in this box, which is in the frame. max_splats: keep the most important ones.
        tile_size: side of the cubes to cut space into, a file for each; None: one file.
        overwrite: replace what is there. antialiased: the run was trained so; `.spz` files say it.
    """

    frame: Frame = field(default_factory=Frame)
    sh_degree: int | None = None
    crop: Box | None = None
    max_splats: int | None = None
    tile_size: float | None = None
    overwrite: bool = False
    antialiased: bool = False

    def __post_init__(self) -> None:
        if self.sh_degree not in (None, 0, 1, 2, 3):
            raise ExportError(f"--sh-degree is {self.sh_degree}; it must be 0, 1, 2 or 3.")
        if self.max_splats is not None and self.max_splats < 1:
            raise ExportError(f"--max-splats is {self.max_splats}; it must be 1 or more.")
        if self.tile_size is not None and not 0 < self.tile_size < np.inf:
            raise ExportError(f"--tile-size is {self.tile_size:g}; it must be a length above 0.")
        if self.crop is not None:
            for axis, low, high in zip("xyz", self.crop[:3], self.crop[3:], strict=True):
                if not low <= high:
                    raise ExportError(
                        f"--crop has {axis} from {low:g} to {high:g}. Give x0 y0 z0 x1 y1 z1: the smaller corner first."
                    )


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        path: the file, or the index of the tiles. count: Gaussians. size: bytes of all files. files: how many.
        selection: why the other rows stayed behind. survey: where the Gaussians lie, in the frame.
        sh_degree: of the harmonics that were written.
        misfits: Gaussians that look different in the file because the format cannot hold a value; `misfit` says which.
    """

    path: Path
    count: int
    size: int
    files: int
    selection: Selection
    survey: Survey
    sh_degree: int
    misfits: int = 0
    misfit: str = ""


def target_of(output: Path, settings: ExportSettings) -> tuple[Format, Path]:
    """The format that a path asks for, and where the result goes: a file, or for tiles the folder of the file's name
    without its suffix. Touches nothing.

    Raises: ExportError, OSError in a sentence if something stands against it.
    """
    form = FORMATS.get(output.suffix.lower())
    if form is None:
        known = ", ".join(FORMATS)
        raise ExportError(f"{output} should end in one of {known}: the ending chooses the format.")
    if settings.tile_size is None:
        target = writable_target(output)
        if target.exists() and not settings.overwrite:
            raise ExportError(
                f"{output} is there already. Add --overwrite to replace it, or give another path."
            )
        return form, target
    folder = writable_target(output).with_name(output.stem)  # also complains about what is no file
    if folder.exists() or folder.is_symlink():
        if (
            not folder.is_dir()
            or folder.is_symlink()
            or (any(folder.iterdir()) and not is_tile_folder(folder))
        ):
            raise ExportError(
                f"{folder}, where the tiles would go, is or holds something else. Give another name than {output.name}."
            )
        if not settings.overwrite:
            raise ExportError(
                f"{folder} holds tiles already. Add --overwrite to replace them, or give another path."
            )
    return form, folder


def export(
    rows: RowSource, output: Path, settings: ExportSettings, progress: Progress = lambda *_: None
) -> Exported:
    """Write the Gaussians of `rows` that `settings` ask for.

    Args:
        output: the file; its ending is the format. With tiles: the folder of that name without the ending.
    Raises: ExportError, OSError in a sentence. What was there before is as it was then, and nothing is left beside it.
    """
    form, target = target_of(output, settings)
    if rows.num_rows == 0:
        raise ExportError("The run has no Gaussian: there is nothing to export.")
    work = _Work(rows, form, settings, progress)
    selection = work.select()
    grid = work.survey(selection)
    files: list[tuple[Cell | None, Survey]]
    if grid is None:
        files = [(None, work.total)]
        size = form.most_bytes(work.facts(work.total))
    else:
        files = [(cell, survey) for cell, survey in grid.surveys.items()]
        size = sum(form.most_bytes(work.facts(survey)) for survey in grid.surveys.values())
    largest = max(survey.count for _, survey in files)
    if largest > form.most_rows:
        tiles = "a --tile-size" if grid is None else "a smaller --tile-size"
        raise ExportError(
            f"{largest:,} Gaussians are more than one {form.suffix} file can hold. Give --max-splats, or {tiles}."
        )
    check_room(target, size)
    if grid is None:
        with whole_file(target, overwrite=settings.overwrite) as file:
            work.write(selection, None, files, lambda _: contextlib.nullcontext(file))
        path, written = target, target.stat().st_size
    else:
        with whole_folder(target, replaceable=settings.overwrite) as folder:
            work.write(
                selection, grid, files, lambda cell: (folder / tile_name(cell, form.suffix)).open("wb")
            )
            written = sum(path.stat().st_size for path in folder.iterdir())
            written += write_index(folder, grid, form.suffix, work.index_facts(selection))
        path = target / INDEX
    return Exported(
        path,
        selection.count,
        written,
        len(files),
        selection,
        work.total,
        work.sh_degree,
        work.misfits,
        form.misfit,
    )


class _Work:
    """The walks of one export."""

    def __init__(self, rows: RowSource, form: Format, settings: ExportSettings, progress: Progress) -> None:
        self.rows, self.form, self.settings, self.progress = rows, form, settings, progress
        wanted = rows.sh_degree if settings.sh_degree is None else settings.sh_degree
        self.sh_degree = min(wanted, rows.sh_degree, form.highest_degree)
        self.total = Survey()
        self.misfits = 0

    def select(self) -> Selection:
        """The rows to write, at least one."""
        settings, rows = self.settings, self.rows
        done = 0

        def step(count: int) -> None:
            nonlocal done
            done += count
            self.progress("Selecting", done, rows.num_rows)

        selection = select(rows, settings.frame, settings.crop, settings.max_splats, step)
        if selection.count == 0:
            raise ExportError(self._why_nothing(selection))
        return selection

    def _why_nothing(self, selection: Selection) -> str:
        if selection.outside == 0:
            return f"None of the {self.rows.num_rows:,} Gaussians has finite values only: there is nothing to export."
        everything = select(self.rows, self.settings.frame, None, None)
        survey = Survey()
        for positions in self._positions(everything):
            survey.add(positions)
        ranges = ", ".join(
            f"{axis} {low:.6g} to {high:.6g}"
            for axis, low, high in zip("xyz", survey.low, survey.high, strict=True)
        )
        return (
            f"No Gaussian lies in the --crop box. In the {self.settings.frame.name} frame, in which the box is given, they lie "
            f"within {ranges}."
        )

    def _positions(self, selection: Selection) -> Iterator[np.ndarray]:
        for begin, chunk in self.rows.chunks(("means",)):
            keep = selection.get(begin, begin + len(chunk["means"]))
            yield self.settings.frame.positions(chunk["means"][keep])

    def survey(self, selection: Selection) -> Grid | None:
        """Where the selected rows lie: in `self.total`, and for tiles in the grid."""
        if self.settings.tile_size is None:
            for positions in self._positions(selection):
                self.total.add(positions)
            return None
        grid = survey_tiles(self.rows, selection, self.settings.frame, self.settings.tile_size)
        for survey in grid.surveys.values():
            self.total.low = np.minimum(self.total.low, survey.low)
            self.total.high = np.maximum(self.total.high, survey.high)
            self.total.count += survey.count
        return grid

    def facts(self, survey: Survey) -> FileFacts:
        """What the header of a file with these rows is made of."""
        frame = self.settings.frame
        corners = np.stack([survey.low, survey.high]) - frame.offset
        notes = ["Generated by ns-mgpu-splat", f"frame: {frame.name}"]
        if frame.offset.any():
            # PLY readers take coordinates as float32, so the far origin cannot be in them
            notes.append(f"offset to add to coordinates: {' '.join(f'{v:.17g}' for v in frame.offset)}")
        reach = float(np.abs(corners).max())
        return FileFacts(survey.count, self.sh_degree, reach, self.settings.antialiased, notes)

    def index_facts(self, selection: Selection) -> dict[str, Any]:
        """What the index says of all tiles."""
        frame = self.settings.frame
        return {
            "generator": "ns-mgpu-splat",
            "frame": frame.name,
            "offset": frame.offset.tolist(),
            "sh_degree": self.sh_degree,
            "count": selection.count,
            "bounds": [self.total.low.tolist(), self.total.high.tolist()],
        }

    def write(
        self,
        selection: Selection,
        grid: Grid | None,
        files: Sequence[tuple[Cell | None, Survey]],
        open_file: Callable[[Any], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Write all files, a few at a time, plane by plane."""
        batches = [
            range(i, min(len(files), i + _FILES_AT_ONCE)) for i in range(0, len(files), _FILES_AT_ONCE)
        ]
        walks = [(batch, len(self.form.planes(self.facts(files[batch[0]][1])))) for batch in batches]
        total = self.rows.num_rows * sum(planes for _, planes in walks)
        done = 0
        for batch, planes in walks:
            facts = [self.facts(files[i][1]) for i in batch]
            with contextlib.ExitStack() as stack:
                streams = []
                for i, fact in zip(batch, facts, strict=True):
                    file = stack.enter_context(open_file(files[i][0]))
                    streams.append(stack.enter_context(self.form.stream(file)))
                    streams[-1].write(self.form.header(fact))
                of_file = [self.form.planes(fact) for fact in facts]
                for plane in range(planes):
                    for rows in self._write_plane(
                        selection, grid, batch, streams, [of[plane] for of in of_file]
                    ):
                        done += rows
                        self.progress("Writing", done, total)

    def _write_plane(
        self,
        selection: Selection,
        grid: Grid | None,
        batch: range,
        streams: Sequence[Stream],
        planes: Sequence[Plane],
    ) -> Iterator[int]:
        """One walk; yields the rows of each chunk."""
        wanted = planes[0].columns
        read = wanted if grid is None or "means" in wanted else ("means", *wanted)
        for begin, chunk in self.rows.chunks(read):
            count = len(chunk[read[0]])
            keep = selection.get(begin, begin + count)
            if not keep.all():
                chunk = {name: values[keep] for name, values in chunk.items()}
            if grid is None:
                streams[0].write(self._encoded(planes[0], chunk).data)
            elif len(chunk["means"]):
                tiles = grid.numbers(self.settings.frame.positions(chunk["means"]))
                for tile in np.unique(tiles).tolist():
                    if tile in batch:
                        members = tiles == tile
                        part = {name: chunk[name][members] for name in wanted}
                        at = tile - batch.start
                        streams[at].write(self._encoded(planes[at], part).data)
            yield count

    def _encoded(self, plane: Plane, chunk: dict[str, np.ndarray]) -> np.ndarray:
        moved = self.settings.frame.apply(chunk, self.sh_degree)
        if len(moved[plane.columns[0]]):
            self.misfits += plane.misfits(moved)
        return plane.encode(moved)
