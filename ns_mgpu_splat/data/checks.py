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

from ns_mgpu_splat.data import images
from ns_mgpu_splat.data.lens import why_no_fisheye, why_no_pinhole

if TYPE_CHECKING:
    from ns_mgpu_splat.data.capture import Capture, Frame

Level = Literal["full", "sizes", "none"]

kSkip = "--pipeline.datamanager.on-bad-image skip"
kRestore = "Restore the file"
kHeaderThreads = 16  # they wait for the disk, not for each other

kLongestName = 4000  # letters of a path
kLongFocus, kShortFocus = (
    1e6,
    1e-3,
)  # focal lengths in widths and heights of the image: beyond, nothing can be told apart
kFarthest = 1e12  # units from the origin: beyond, a single pose flattens all others


class DatasetError(Exception):
    """A capture that cannot be used. `str()` is what the user reads: one sentence, or a list, and `advice` on all of it last."""

    def __init__(self, problems: str | Iterable[str], root: Path | None = None, advice: str = "") -> None:
        self.problems = [printable(p) for p in ([problems] if isinstance(problems, str) else problems)]
        where = f" with {root}" if root is not None else ""
        if len(self.problems) == 1:
            text = f"{self.problems[0]} {advice}".rstrip()
        else:
            text = f"{len(self.problems)} problems{where}:\n" + "\n".join(f"  - {p}" for p in self.problems)
            text += f"\n{advice}" if advice else ""
        super().__init__(text)


def printable(text: str) -> str:
    """A text whose control characters and halves of characters, as damaged files have them, are written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_file(path: Path) -> bool:
    """Whether there is such a file. A name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


@dataclass
class BadFrame:
    """One frame that cannot be used. `sentence` names its file and says what to do.

    files: only its files are bad; the camera is sound, and may still tell where the scene is.
    """

    index: int
    sentence: str
    files: bool = False


def shown(path: Path, root: Path) -> str:
    """`path` as the user knows it: relative to the capture where it lies in there."""
    try:
        return str(path.relative_to(root))
    except ValueError:
        return str(path)


def camera_file(source: Path) -> Path:
    """The file with image sizes and lenses of a capture that `source` describes: COLMAP has them beside its images."""
    return source.with_name(f"cameras{source.suffix}") if source.suffix in (".bin", ".txt") else source


def _correct(source: Path, them: str) -> str:
    """What to do about numbers of a camera that are wrong."""
    where = camera_file(source)
    if where.suffix == ".bin":
        return _in_text(f"correct {them} in cameras.txt")
    return f"Correct {them} in {where.name}." if where != source else f"Correct {them} there."


def _repair_frame(source: Path) -> str:
    """What to do about a pose that is none."""
    if source.suffix == ".bin":
        return _in_text("remove the frame in images.txt")
    return "Remove the frame, or repair it."


def _in_text(deed: str) -> str:
    """Nobody edits COLMAP's binary files."""
    return (
        "Run COLMAP or `ns-process-data` again, or have its model as text (`colmap model_converter --output_type TXT`) in the "
        f"place of the .bin files and {deed}."
    )


def _size_remedy(source: Path) -> str:
    """What to do about an image of another size than its camera's."""
    if camera_file(source) == source:
        return "Rescale the image, or correct w and h there."
    again = "Give the photographs at the size that COLMAP saw, or run COLMAP or `ns-process-data` on these"
    return f"{again}." if source.suffix == ".bin" else f"{again}, or correct the camera's line there."


def check_pose(frame: Frame, source: Path) -> str | None:
    """Return what is wrong with a frame's pose or intrinsics, or None."""
    name = f"{frame.label} ({frame.name})"
    pose, camera = frame.camera_to_world, frame.camera
    if not np.isfinite(pose).all():
        return f"{source.name}: the pose of {name} has NaN or infinite entries. {_repair_frame(source)}"
    if np.abs(pose[:3, 3]).max() > kFarthest:
        return (
            f"{source.name}: the pose of {name} lies {np.abs(pose[:3, 3]).max():.3g} units from the origin, farther than "
            f"any number here can follow. {_repair_frame(source)}"
        )
    rotation = pose[:3, :3]
    if np.abs(pose[3] - (0, 0, 0, 1)).max() > 1e-6:
        return (
            f"{source.name}: the pose of {name} has {', '.join(f'{v:g}' for v in pose[3])} as its last row, expected "
            "0, 0, 0, 1. It may be transposed: the position belongs in the last column."
        )
    if np.linalg.det(rotation) < 0.5 or np.abs(rotation.T @ rotation - np.eye(3)).max() > 2e-2:
        return (
            f"{source.name}: the pose of {name} has no rotation in its upper left 3x3 block "
            f"(determinant {np.linalg.det(rotation):.3g}). It must be orthonormal, camera-to-world."
        )
    values = (camera.fx, camera.fy, camera.cx, camera.cy, *frame.lens.coefficients)
    if not np.isfinite(values).all() or camera.fx <= 0 or camera.fy <= 0:
        return (
            f"{source.name}: {name} has the focal lengths {camera.fx:g}, {camera.fy:g} and the principal point "
            f"{camera.cx:g}, {camera.cy:g}. They must be finite, in pixels, focal lengths above 0."
        )
    if camera.width < 1 or camera.height < 1:
        return f"{source.name}: {name} has the image size {camera.width}x{camera.height}. {_correct(source, 'it')}"
    shares = (camera.fx / camera.width, camera.fy / camera.height)
    if (
        max(*shares, abs(camera.cx) / camera.width, abs(camera.cy) / camera.height) > kLongFocus
        or min(shares) < kShortFocus
    ):
        return (
            f"{source.name}: {name} has the focal lengths {camera.fx:g}, {camera.fy:g} and the principal point {camera.cx:g}, "
            f"{camera.cy:g}, which no camera has whose images are {camera.width}x{camera.height}. They are in pixels. "
            f"{_correct(source, 'them')}"
        )
    coefficients = ", ".join(f"{c:g}" for c in frame.lens.coefficients)
    reason = why_no_fisheye(camera, frame.lens)
    if reason is not None:
        return (
            f"{source.name}: the coefficients k1..k4 of {name} ({coefficients}) are those of no fisheye: {reason}. "
            "Correct them."
        )
    reason = why_no_pinhole(camera, frame.lens)
    if reason is not None:
        return (
            f"{source.name}: the distortion of {name} ({coefficients}) cannot be undone: the straightened picture would "
            f"{reason}. Correct the coefficients, or undistort the images first."
        )
    return None


def _similar(path: Path) -> Path | None:
    """A file beside a missing one whose name differs in upper case or suffix only."""
    try:
        return next(
            (p for p in sorted(path.parent.iterdir()) if p.stem.lower() == path.stem.lower() and p.is_file()),
            None,
        )
    except OSError:
        return None


def check_header(frame: Frame, capture: Capture) -> list[str]:
    """Return what the headers of a frame's image and mask say is wrong, and what to do. Reads no pixels.

    Sets `frame.orientation` (and the mask's) where EXIF's rotation makes the size fit, and `frame.has_alpha`.
    """
    expected = (frame.camera.width, frame.camera.height)
    file = shown(frame.image, capture.root)
    where = f"{frame.label} of {capture.source.name}"
    problems: list[str] = []
    info = _header(frame.image, file, where, "", problems)
    if info is not None:
        frame.has_alpha = info.has_alpha
        if info.size != expected and info.turned_size == expected:
            frame.orientation = info.orientation
        elif info.size != expected:
            cameras = camera_file(capture.source)
            sized = where if cameras == capture.source else f"the camera of {frame.label} in {cameras.name}"
            swapped = " Width and height look exchanged." if info.size == expected[::-1] else ""
            problems.append(
                f"{file} is {info.size[0]}x{info.size[1]}, but {sized} says {expected[0]}x{expected[1]}.{swapped} "
                f"{_size_remedy(capture.source)}"
            )
    if frame.mask is not None:
        mask_file = shown(frame.mask, capture.root)
        info = _header(frame.mask, mask_file, where, f" as the mask of {file}", problems)
        if info is not None and info.size != expected and info.turned_size == expected:
            frame.mask_orientation = info.orientation
        elif info is not None and info.size != expected:
            problems.append(
                f"{mask_file} is {info.size[0]}x{info.size[1]}, but its image {file} is "
                f"{expected[0]}x{expected[1]}. Rescale the mask."
            )
    return problems


def _header(path: Path, file: str, where: str, role: str, problems: list[str]) -> images.ImageInfo | None:
    if not is_file(path):
        similar = _similar(path)
        hint = f"{similar.name} is there: rename it, or correct the name" if similar else kRestore
        if len(file) > kLongestName:
            problems.append(
                f"{file[:kLongestName]}... is no name that a file can have, but {where} names it{role}."
            )
        elif path.is_dir():
            problems.append(f"{file} is a folder, but {where} names it{role}. {hint}.")
        else:
            problems.append(f"{file} is missing, but {where} names it{role}. {hint}.")
        return None
    try:
        return images.probe(path)
    except images.ImageError as error:
        problems.append(f"{file} cannot be read: {error}. {kRestore}.")
    except OSError as error:
        problems.append(f"{file} cannot be read: {error.strerror or error}. {kRestore}.")
    return None


def check_pixels(frame: Frame, capture: Capture, decode: bool) -> list[str]:
    """Return what is wrong with the pixels of a frame whose headers are sound, and what to do.

    Args:
        decode: read all of them, and set `frame.has_alpha` to whether any is not opaque. Otherwise only look at the end
            of the files.
    """
    problems = []
    for path in (frame.image, frame.mask):
        if path is None:
            continue
        try:
            if decode:
                pixels = images.decoded(path)
                if path is frame.image:
                    frame.has_alpha = pixels.shape[2] == 4
                continue
            reason = images.why_unreadable(path, False)
        except images.ImageError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        if reason is not None:
            problems.append(f"{shown(path, capture.root)} cannot be read: {reason}. {kRestore}.")
    return problems


def usable_points(points: np.ndarray) -> np.ndarray:
    """Which seed points (N, 3) can be used, (N,) bool: finite, and not farther than any number here can follow."""
    with np.errstate(invalid="ignore"):
        return (np.abs(points) <= kFarthest).all(axis=1)


def check_points(points: np.ndarray, source: Path) -> str | None:
    """Return what is wrong with seed points (N, 3), or None."""
    bad = ~usable_points(points)
    if not bad.any():
        return None
    first = points[int(bad.argmax())]
    return (
        f"{source}: {int(bad.sum()):,} of {len(points):,} points have NaN, infinite or absurd coordinates, the first is "
        f"point {int(bad.argmax()):,} at {', '.join(f'{v:g}' for v in first)}. Remove them from the file."
    )


def find_bad_frames(
    capture: Capture,
    level: Level,
    progress: Callable[[str, int, int], None] | None = None,
    workers: int = 2,
) -> list[BadFrame]:
    """Check all frames of a capture: poses, then all headers, then the pixels of what is sound so far.

    Args:
        capture: as read by `read_capture`.
        level: "full" reads every pixel of every image, as training will; "sizes" reads headers; "none" only
            looks at poses and intrinsics.
        progress: called with (what is done, done, total) after each file.
        workers: threads that decode.
    Returns: what is wrong, in the order of the frames; a frame may be in it more than once.
    """
    bad: list[BadFrame] = []
    first_of: dict[Path, Frame] = {}
    everything = list(range(len(capture.frames)))
    for index, frame in enumerate(capture.frames):
        first = first_of.setdefault(frame.image, frame)
        if first is not frame:  # one copy could be held out and the other trained on
            bad.append(
                BadFrame(
                    index,
                    f"{capture.source.name}: {frame.label} and {first.label} are the same photograph, {frame.name}. "
                    "Remove one of them.",
                )
            )
        sentence = check_pose(frame, capture.source)
        if sentence is not None:
            bad.append(BadFrame(index, sentence))

    def each(what: str, threads: int, members: list[int], check: Callable[[Frame], list[str]]) -> None:
        with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="check-images") as pool:
            results = pool.map(lambda i: check(capture.frames[i]), members)
            for done, (index, sentences) in enumerate(zip(members, results, strict=True)):
                bad.extend(BadFrame(index, sentence, files=True) for sentence in sentences)
                if progress is not None:
                    progress(what, done + 1, len(members))

    if level != "none":
        each("Checking image headers", kHeaderThreads, everything, lambda f: check_header(f, capture))
        spoiled = {b.index for b in bad}
        sound = [i for i in everything if i not in spoiled]
        decode = level == "full"
        what = "Decoding all images once" if decode else "Checking the ends of image files"
        each(what, workers, sound, lambda f: check_pixels(f, capture, decode))
    return sorted(bad, key=lambda b: b.index)
