# SPDX-License-Identifier: Apache-2.0
"""Read COLMAP reconstructions (binary or text) with numpy alone.

Format: https://colmap.github.io/format.html. A file that ends early, an unknown camera model or a dangling id raises
`DatasetError` with the file's name. 2D observations are skipped, not parsed: they are most of `images.bin`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ns_mgpu_splat.data.checks import DatasetError
from ns_mgpu_splat.data.lens import Lens, Pinhole

# model id: (name, number of parameters); ids as in COLMAP's src/colmap/sensor/models.h
kModels = {
    0: ("SIMPLE_PINHOLE", 3),
    1: ("PINHOLE", 4),
    2: ("SIMPLE_RADIAL", 4),
    3: ("RADIAL", 5),
    4: ("OPENCV", 8),
    5: ("OPENCV_FISHEYE", 8),
    6: ("FULL_OPENCV", 12),
    7: ("FOV", 5),
    8: ("SIMPLE_RADIAL_FISHEYE", 4),
    9: ("RADIAL_FISHEYE", 5),
    10: ("THIN_PRISM_FISHEYE", 12),
    11: ("RAD_TAN_THIN_PRISM_FISHEYE", 16),
    12: ("SIMPLE_DIVISION", 4),
    13: ("DIVISION", 5),
    14: ("SIMPLE_FISHEYE", 3),
    15: ("FISHEYE", 4),
    16: ("EUCM", 6),
    17: ("EQUIRECTANGULAR", 2),
}
kParameters = dict(kModels.values())
# model: (our kind of lens, number of focal lengths); the principal point and the coefficients follow
kLensOf = {
    "SIMPLE_PINHOLE": ("pinhole", 1),
    "PINHOLE": ("pinhole", 2),
    "SIMPLE_RADIAL": ("opencv", 1),
    "RADIAL": ("opencv", 1),
    "OPENCV": ("opencv", 2),
    "FULL_OPENCV": ("opencv", 2),
    "OPENCV_FISHEYE": ("fisheye", 2),
    "SIMPLE_RADIAL_FISHEYE": ("fisheye", 1),
    "RADIAL_FISHEYE": ("fisheye", 1),
    "SIMPLE_FISHEYE": ("fisheye", 1),
    "FISHEYE": ("fisheye", 2),
    "THIN_PRISM_FISHEYE": ("thin_prism_fisheye", 2),
    "RAD_TAN_THIN_PRISM_FISHEYE": ("fisheye624", 2),
    "FOV": ("fov", 2),
    "SIMPLE_DIVISION": ("division", 1),
    "DIVISION": ("division", 2),
    "EUCM": ("eucm", 2),
}
kSupported = ", ".join(kLensOf)


@dataclass(frozen=True)
class ColmapImage:
    """A registered image: its name and its world-to-camera transform (OpenCV axes), float64."""

    name: str
    camera_id: int
    rotation: np.ndarray  # (3, 3)
    translation: np.ndarray  # (3,)
    image_id: int = 0


class _Bytes:
    """A cursor over a binary file that knows its name when it runs out."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what, self.at = path, what, 0
        self.data = path.read_bytes()
        self.done, self.count = 0, 0

    def cut_short(self) -> DatasetError:
        return DatasetError(
            f"{self.path} is cut short: it promises {self.count:,} {self.what} and ends within number "
            f"{self.done + 1:,}. Copy it again, or export the reconstruction anew."
        )

    def take(self, layout: struct.Struct) -> tuple:
        if self.at + layout.size > len(self.data):
            raise self.cut_short()
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def take_name(self) -> str:
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise self.cut_short()
        name = self.data[self.at : end].decode("utf-8", errors="replace")
        self.at = end + 1
        return name

    def skip(self, count: int) -> None:
        if self.at + count > len(self.data):
            raise self.cut_short()
        self.at += count


def camera_from_model(
    model: str, width: int, height: int, p: tuple[float, ...], where: str
) -> tuple[Pinhole, Lens]:
    """Intrinsics and lens of a COLMAP camera model. Raises DatasetError for one we cannot undistort."""
    if model in kParameters and len(p) != kParameters[model]:
        raise DatasetError(f"{where} has {len(p)} parameters, but {model} has {kParameters[model]}.")
    if model not in kLensOf:
        raise DatasetError(
            f"{where} has the camera model {model}, which is not supported. Supported are {kSupported}; undistort the "
            "images with `colmap image_undistorter` first, or cut panoramas into perspective views."
        )
    kind, focals = kLensOf[model]
    fx, fy = (p[0], p[0]) if focals == 1 else (p[0], p[1])
    camera = Pinhole(width, height, fx, fy, p[focals], p[focals + 1])
    return camera, Lens(kind, tuple(p[focals + 2 :]))


def _pick(folder: Path, stem: str) -> Path:
    for suffix in (".bin", ".txt"):
        if (folder / (stem + suffix)).is_file():
            return folder / (stem + suffix)
    raise DatasetError(f"{folder} has no {stem}.bin and no {stem}.txt. Export the whole reconstruction.")


def _records(path: Path) -> list[str]:
    """The lines of a COLMAP text file that are not comments, right-stripped; blank lines stay."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if not line.lstrip().startswith("#")]


def _promised(path: Path, what: str) -> int | None:
    """The count in a text file's header comment (`# Number of images: 12, ...`), or None."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.startswith("#"):
                return None
            if line.lower().startswith(f"# number of {what}:"):
                digits = line.split(":", 1)[1].split(",")[0].strip()
                return int(digits) if digits.isdigit() else None
    return None


def _check_promise(path: Path, what: str, found: int) -> None:
    promised = _promised(path, what)
    if promised is not None and found < promised:
        raise DatasetError(
            f"{path} is cut short: it promises {promised:,} {what} and holds {found:,}. Copy it again, or export "
            "the reconstruction anew."
        )


def read_cameras(folder: Path) -> tuple[dict[int, tuple[Pinhole, Lens]], Path]:
    """Cameras with their lenses by id, and the file they came from."""
    path = _pick(folder, "cameras")
    cameras: dict[int, tuple[Pinhole, Lens]] = {}
    if path.suffix == ".bin":
        file = _Bytes(path, "cameras")
        (file.count,) = file.take(struct.Struct("<Q"))
        for _ in range(file.count):
            camera_id, model_id, width, height = file.take(struct.Struct("<iiQQ"))
            if model_id not in kModels:
                raise DatasetError(
                    f"{path}: camera {camera_id} has the unknown camera model number {model_id}. Supported are "
                    f"{kSupported}; undistort the images with `colmap image_undistorter` first."
                )
            model, parameters = kModels[model_id]
            values = file.take(struct.Struct(f"<{parameters}d"))
            where = f"{path}: camera {camera_id}"
            cameras[camera_id] = camera_from_model(model, width, height, values, where)
            file.done += 1
        return cameras, path
    for line in filter(None, _records(path)):
        fields = line.split()
        where = f"{path}: camera {fields[0]}"
        try:
            camera_id, width, height = int(fields[0]), int(fields[2]), int(fields[3])
            values = tuple(float(f) for f in fields[4:])
        except (IndexError, ValueError):
            raise DatasetError(
                f"{path} is cut short or damaged at the line '{line[:60]}'. Copy it again."
            ) from None
        cameras[camera_id] = camera_from_model(fields[1], width, height, values, where)
    _check_promise(path, "cameras", len(cameras))
    return cameras, path


def rotation_from_quaternion(q: tuple[float, float, float, float]) -> np.ndarray:
    """The (3, 3) rotation of a quaternion (w, x, y, z), normalised first; NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # all zero: NaN, which the checks find and name
        w, x, y, z = np.asarray(q, dtype=np.float64) / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def _is_image(line: str) -> bool:
    """Whether a line describes an image: nine numbers and a name. Observations are numbers alone, three each."""
    fields = line.split(maxsplit=10)
    if len(fields) < 10:
        return False
    try:
        float(fields[9])
    except ValueError:
        return True
    return False


def read_images(folder: Path) -> tuple[list[ColmapImage], Path]:
    """Registered images in the file's order, and the file they came from."""
    path = _pick(folder, "images")
    images: list[ColmapImage] = []
    if path.suffix == ".bin":
        file = _Bytes(path, "images")
        head, points = struct.Struct("<i7di"), struct.Struct("<Q")
        (file.count,) = file.take(points)
        for _ in range(file.count):
            image_id, *pose, camera_id = file.take(head)
            name = file.take_name()
            (observations,) = file.take(points)
            file.skip(24 * observations)
            rotation = rotation_from_quaternion((pose[0], pose[1], pose[2], pose[3]))
            images.append(ColmapImage(name, camera_id, rotation, np.array(pose[4:]), image_id))
            file.done += 1
        return images, path
    lines = _records(path)
    while lines and not lines[0]:
        lines.pop(0)
    for line in lines[1::2]:
        if _is_image(line):  # taken for observations, it would be lost without a word
            raise DatasetError(
                f"{path} has no line of 2D observations before the line '{line[:60]}'. Each image needs two lines, of "
                "which the second may be empty."
            )
    for line in lines[0::2]:  # every second line holds 2D observations and may be empty
        if not line:
            continue
        fields = line.split(maxsplit=9)
        try:
            pose = [float(f) for f in fields[1:8]]
            image_id, camera_id, name = int(fields[0]), int(fields[8]), fields[9]
        except (IndexError, ValueError):
            raise DatasetError(
                f"{path} is cut short or damaged at the line '{line[:60]}'. Copy it again."
            ) from None
        rotation = rotation_from_quaternion((pose[0], pose[1], pose[2], pose[3]))
        images.append(ColmapImage(name, camera_id, rotation, np.array(pose[4:]), image_id))
    _check_promise(path, "images", len(images))
    return images, path


kPoint = np.dtype([("id", "<u8"), ("xyz", "<f8", 3), ("rgb", "u1", 3), ("error", "<f8"), ("track", "<u8")])
kPointsAtOnce = 1 << 16


def _open_points(path: Path) -> _Bytes:
    """A points3D.bin behind its count. Raises DatasetError if it cannot hold as many points as it promises."""
    file = _Bytes(path, "points")
    (file.count,) = file.take(struct.Struct("<Q"))
    if file.count * kPoint.itemsize > len(file.data):
        raise DatasetError(
            f"{path} is cut short: it promises {file.count:,} points and is only {len(file.data):,} bytes long. "
            "Copy it again, or export the reconstruction anew."
        )
    return file


def _point_starts(file: _Bytes, count: int) -> np.ndarray:
    """Where the next `count` points begin: each is followed by a track whose length it tells."""
    starts = np.empty(count, dtype=np.int64)
    at, end, read = file.at, len(file.data), struct.Struct("<Q").unpack_from
    fixed, data = kPoint.itemsize, file.data
    for row in range(count):
        starts[row] = at
        if at + fixed > end:
            raise file.cut_short()
        at += fixed + 8 * read(data, at + fixed - 8)[0]
        if at > end:
            raise file.cut_short()
        file.done += 1
    file.at = at
    return starts


def _points(file: _Bytes) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """All points, some at a time: which rows, where in the file they begin, and what comes before their tracks (`kPoint`)."""
    data = np.frombuffer(file.data, np.uint8)
    for begin in range(0, file.count, kPointsAtOnce):
        starts = _point_starts(file, min(kPointsAtOnce, file.count - begin))
        fixed = data[starts[:, None] + np.arange(kPoint.itemsize)]
        yield slice(begin, begin + len(starts)), starts, fixed.view(kPoint)[:, 0]


def read_points(folder: Path) -> tuple[np.ndarray, np.ndarray, Path]:
    """Triangulated points: positions (N, 3) float64, colours (N, 3) uint8, and the file they came from."""
    path = _pick(folder, "points3D")
    if path.suffix == ".bin":
        file = _open_points(path)
        xyz, rgb = np.empty((file.count, 3)), np.empty((file.count, 3), dtype=np.uint8)
        for rows, _, points in _points(file):
            xyz[rows], rgb[rows] = points["xyz"], points["rgb"]
        return xyz, rgb, path
    lines = [line.split(maxsplit=7)[1:7] for line in _records(path) if line]
    try:
        if any(len(line) != 6 for line in lines):
            raise ValueError
        table = np.array(lines, dtype=np.float64).reshape(-1, 6)
    except ValueError:
        raise DatasetError(
            f"{path} is cut short or damaged: a line has fewer than 7 fields, or a word among them. Copy it again."
        ) from None
    _check_promise(path, "points", len(table))
    return table[:, :3], table[:, 3:].clip(0, 255).astype(np.uint8), path


@dataclass(frozen=True)
class Tracks:
    """Which photograph saw which triangulated point.

    Attributes:
        xyz: (N, 3) float64, COLMAP's world. errors: (N,) float64, mean reprojection error in pixels; below 0: unknown.
        points_of: rows of `xyz` by image id, ascending, each once.
    """

    xyz: np.ndarray
    errors: np.ndarray
    points_of: dict[int, np.ndarray]


def read_tracks(folder: Path) -> Tracks:
    """Triangulated points with the images that saw them. Raises DatasetError as `read_points` does."""
    path = _pick(folder, "points3D")
    if path.suffix == ".bin":
        file = _open_points(path)
        xyz, errors = np.empty((file.count, 3)), np.empty(file.count)
        lengths, seen = np.empty(file.count, dtype=np.int64), []
        for rows, starts, points in _points(file):
            xyz[rows], errors[rows], lengths[rows] = points["xyz"], points["error"], points["track"]
            seen += [
                np.frombuffer(file.data, "<i4", 2 * length, start + kPoint.itemsize)[::2]
                for start, length in zip(starts, lengths[rows], strict=True)
            ]
        images = np.concatenate(seen) if seen else np.zeros(0, np.int32)
    else:
        lines = [line.split() for line in _records(path) if line]
        try:
            table = np.array([line[1:8] for line in lines], dtype=np.float64).reshape(-1, 7)
            xyz, errors = table[:, :3], table[:, 6]
            lengths = np.array([len(line[8::2]) for line in lines], dtype=np.int64)
            images = np.array([int(entry) for line in lines for entry in line[8::2]], dtype=np.int64)
        except ValueError:
            raise DatasetError(
                f"{path} is cut short or damaged: a line has fewer than 8 fields, or a word among them. Copy it again."
            ) from None
    of_point = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((of_point, images))
    images, of_point = images[order], of_point[order]
    names, begins = np.unique(images, return_index=True)
    parts = np.split(of_point, begins[1:]) if len(names) else []
    return Tracks(xyz, errors, {int(i): np.unique(part) for i, part in zip(names, parts, strict=True)})
