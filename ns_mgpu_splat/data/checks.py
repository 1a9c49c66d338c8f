# SPDX-License-Identifier: Apache-2.0
"""Find everything wrong with a capture before training starts, and say it in sentences.

Every problem names its file, says what was found and what to do. All problems are collected, not just the first:
a user who has to fix twelve files should learn so once. Reading the files that describe a capture raises
`DatasetError` by itself (colmap.py, capture.py); this module checks what they describe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from ns_mgpu_splat.data.capture import Capture, Frame

Level = Literal["full", "sizes", "none"]

kFixHint = (
    "Restore the file, or leave such frames out with --pipeline.datamanager.dataparser.on-bad-image skip"
)


kFarthest = 1e12  # units from the origin: beyond, a single pose flattens all others


class DatasetError(Exception):
    """A capture that cannot be used. `str()` is what the user reads: one sentence, or a list of them."""

    def __init__(self, problems: str | Iterable[str], root: Path | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        where = f" with {root}" if root is not None else ""
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            text = f"{len(self.problems)} problems{where}:\n" + "\n".join(f"  - {p}" for p in self.problems)
        super().__init__(text)


@dataclass
class BadFrame:
    """One frame that cannot be used. `sentence` names its file and says what to do."""

    index: int
    sentence: str


def shown(path: Path, root: Path) -> str:
    """`path` as the user knows it: relative to the capture where it lies in there."""
    try:
        return str(path.relative_to(root))
    except ValueError:
        return str(path)


def check_pose(frame: Frame, source: Path) -> str | None:
    """Return what is wrong with a frame's pose or intrinsics, or None."""
    name = f"{frame.label} ({frame.name})"
    pose = frame.camera_to_world
    if not np.isfinite(pose).all():
        return (
            f"{source.name}: the pose of {name} has NaN or infinite entries. Remove the frame, or repair it."
        )
    if np.abs(pose[:3, 3]).max() > kFarthest:
        return (
            f"{source.name}: the pose of {name} lies {np.abs(pose[:3, 3]).max():.3g} units from the origin, farther than "
            "any number here can follow. Remove the frame, or repair it."
        )
    rotation = pose[:3, :3]
    if np.linalg.det(rotation) < 0.5 or np.abs(rotation.T @ rotation - np.eye(3)).max() > 2e-2:
        return (
            f"{source.name}: the pose of {name} has no rotation in its upper left 3x3 block "
            f"(determinant {np.linalg.det(rotation):.3g}). It must be orthonormal, camera-to-world."
        )
    values = (frame.fx, frame.fy, frame.cx, frame.cy, *frame.lens.coefficients)
    if not np.isfinite(values).all() or frame.fx <= 0 or frame.fy <= 0:
        return (
            f"{source.name}: {name} has the focal lengths {frame.fx:g}, {frame.fy:g} and the principal point "
            f"{frame.cx:g}, {frame.cy:g}. They must be finite, in pixels, focal lengths above 0."
        )
    if frame.width < 1 or frame.height < 1:
        return f"{source.name}: {name} has the image size {frame.width}x{frame.height}. Correct it there."
    return None


def check_image(frame: Frame, capture: Capture, decode: bool) -> str | None:
    """Return what is wrong with a frame's image, mask or depth file, or None.

    Args:
        frame: one frame; `frame.orientation` is set when the file's EXIF rotation makes its size fit.
        decode: read all pixels; otherwise the header and the end of the file only.
    """
    from ns_mgpu_splat.data import images

    file = shown(frame.image, capture.root)
    where = f"{frame.label} of {capture.source.name}"
    if not frame.image.is_file():
        return f"{file} is missing, but {where} names it. {kFixHint}."
    try:
        info = images.probe(frame.image)
    except images.ImageError as error:
        return f"{file} cannot be read: {error}. {kFixHint}."
    expected = (frame.width, frame.height)
    if info.size != expected:
        if info.turned_size == expected:
            frame.orientation = info.orientation
        else:
            return (
                f"{file} is {info.size[0]}x{info.size[1]}, but {where} says {expected[0]}x{expected[1]}. "
                "Rescale the image, or correct w and h there."
            )
    frame.has_alpha = info.has_alpha
    reason = images.why_unreadable(frame.image, decode)
    if reason is not None:
        return f"{file} cannot be read: {reason}. {kFixHint}."
    if frame.mask is not None:
        mask_file = shown(frame.mask, capture.root)
        if not frame.mask.is_file():
            return f"{mask_file} is missing, but {where} names it as the mask of {file}."
        try:
            mask_size = images.probe(frame.mask).size
        except images.ImageError as error:
            return f"{mask_file} cannot be read: {error}. {kFixHint}."
        if mask_size != expected:
            return (
                f"{mask_file} is {mask_size[0]}x{mask_size[1]}, but its image {file} is "
                f"{expected[0]}x{expected[1]}. Rescale the mask."
            )
    return None


def check_points(points: np.ndarray, source: Path) -> None:
    """Raise DatasetError if a seed point (N, 3) is not finite."""
    bad = ~np.isfinite(points).all(axis=1)
    if bad.any():
        raise DatasetError(
            f"{source}: {int(bad.sum()):,} of {len(points):,} points have NaN or infinite coordinates, the first is "
            f"point {int(bad.argmax()):,}. Remove them from the file."
        )


def find_bad_frames(
    capture: Capture, level: Level, progress: Callable[[int, int], None] | None = None, workers: int = 2
) -> list[BadFrame]:
    """Check all frames of a capture.

    Args:
        capture: as read by `read_capture`.
        level: "full" reads every pixel of every image, as training will; "sizes" reads headers; "none" only
            looks at poses and intrinsics.
        progress: called with (done, total) now and then.
        workers: threads that read image files.
    Returns: the bad frames, in order.
    """
    bad: list[BadFrame] = []
    sound: list[int] = []
    first_of: dict[Path, Frame] = {}
    for index, frame in enumerate(capture.frames):
        first = first_of.setdefault(frame.image, frame)
        if first is not frame:  # one copy could be held out and the other trained on
            sentence: str | None = (
                f"{capture.source.name}: {frame.label} and {first.label} are the same photograph, {frame.name}. "
                "Remove one of them."
            )
        else:
            sentence = check_pose(frame, capture.source)
        if sentence is None:
            sound.append(index)
        else:
            bad.append(BadFrame(index, sentence))
    if level != "none":
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="check-images") as pool:
            results = pool.map(lambda i: check_image(capture.frames[i], capture, level == "full"), sound)
            for done, (index, sentence) in enumerate(zip(sound, results, strict=True)):
                if sentence is not None:
                    bad.append(BadFrame(index, sentence))
                if progress is not None:
                    progress(done + 1, len(sound))
    return sorted(bad, key=lambda b: b.index)
