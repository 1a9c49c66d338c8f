# SPDX-License-Identifier: Apache-2.0
"""A capture: photographs with poses, as found on disk. Reads Nerfstudio folders and COLMAP folders.

`read_capture` looks at the folder and needs no flag. Poses are kept in float64 and in the file's own world, so that
georeferenced coordinates (millions of metres) lose nothing before they are centred.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ns_mgpu_splat.data import colmap
from ns_mgpu_splat.data.checks import DatasetError, is_file, shown
from ns_mgpu_splat.data.images import ImageError, probe
from ns_mgpu_splat.data.lens import Lens, Pinhole

kColmapFolders = ("sparse/0", "sparse", "colmap/sparse/0", "colmap/sparse", ".")
kSeedNames = ("sparse_pc.ply", "points3D.ply", "seed.ply")
kGiveData = " Give the folder of a capture with --data."
# COLMAP guesses gravity along +y; Nerfstudio's world has z up. The same turn as Nerfstudio's own COLMAP parser makes.
kWorldFromColmap = np.array([[1.0, 0, 0, 0], [0, 0, 1.0, 0], [0, -1.0, 0, 0]])
# What ns-process-data applied before it wrote `applied_transform` down.
kOldAppliedTransform = np.array([[0, 1.0, 0, 0], [1.0, 0, 0, 0], [0, 0, -1.0, 0]])
kOpenGlFromOpenCv = np.diag([1.0, -1.0, -1.0, 1.0])

kImageSuffixes = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp")
kOrientations = ("pca", "up", "vertical", "none")
kLensNames = {
    "PINHOLE": "opencv",
    "SIMPLE_PINHOLE": "opencv",
    "PERSPECTIVE": "opencv",
    "SIMPLE_RADIAL": "opencv",
    "RADIAL": "opencv",
    "OPENCV": "opencv",
    "OPENCV_FISHEYE": "fisheye",
    "FISHEYE624": "fisheye624",
}
kMostDistortion = {"opencv": 6, "fisheye": 6, "fisheye624": 12}  # entries of distortion_params


@dataclass
class Frame:
    """One photograph. Its camera as in the file, lens apart; `camera_to_world` (4, 4) float64, OpenGL axes."""

    name: str
    label: str  # "frame 146": how the describing file counts it
    image: Path
    mask: Path | None
    depth: Path | None
    camera_to_world: np.ndarray
    camera: Pinhole
    lens: Lens
    orientation: int = 1  # EXIF rotation to undo; the checks set it
    mask_orientation: int = 1
    has_alpha: bool = False
    colmap_id: int | None = None  # of the image in the reconstruction that the frame is from


@dataclass
class BadEntry:
    """A frame that is described so badly that there is no `Frame` of it."""

    name: str
    sentence: str
    image: Path | None = None


@dataclass
class Capture:
    """All photographs of a folder, ordered by name.

    Attributes:
        root: the folder. source: the file that describes it.
        layout: which kind of folder it is; decides the default split.
        applied_transform: (3, 4) from the original world to the frames' world, or None.
        listed_split: names of frames by split, where the file lists them.
        seed_file: point cloud (.ply) in the frames' world, or None.
        seed_reconstruction: COLMAP folder with points in COLMAP's world, or None.
        bad_entries: frames that could not even be described; they can be left out.
        problems: what is wrong with the capture as a whole; nothing can be left out to mend it.
        notes: what its owner may want to know.
    """

    root: Path
    source: Path
    layout: Literal["nerfstudio", "colmap"]
    frames: list[Frame]
    applied_transform: np.ndarray | None = None
    applied_scale: float = 1.0
    orientation_override: str | None = None
    listed_split: dict[str, set[Path]] = field(default_factory=dict)
    seed_file: Path | None = None
    seed_reconstruction: Path | None = None
    bad_entries: list[BadEntry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read_points(self) -> tuple[np.ndarray, np.ndarray, Path] | None:
        """Seed points in the frames' world: (N, 3) float64, colours (N, 3) uint8 and the file; None where there are none.

        Raises: DatasetError if the file is damaged. Points that are not finite are returned as they are.
        """
        if self.seed_file is not None:
            xyz, rgb = read_ply_points(self.seed_file)
            path = self.seed_file
        elif self.seed_reconstruction is not None:
            xyz, rgb, path = colmap.read_points(self.seed_reconstruction)
            applied = self.applied_transform
            if applied is not None:
                with np.errstate(invalid="ignore"):  # what is not finite is found later, and named
                    xyz = xyz @ applied[:, :3].T + applied[:, 3]
        else:
            return None
        return (xyz, rgb, path) if len(xyz) else None

    def read_tracks(self) -> colmap.Tracks | None:
        """Which photograph (`Frame.colmap_id`) saw which sparse point, in the frames' world; None where nobody knows.

        Raises: DatasetError if the file is damaged.
        """
        if self.seed_reconstruction is None or all(f.colmap_id is None for f in self.frames):
            return None
        found = colmap.read_tracks(self.seed_reconstruction)
        xyz, applied = found.xyz, self.applied_transform
        if applied is not None:
            with np.errstate(invalid="ignore"):
                xyz = xyz @ applied[:, :3].T + applied[:, 3]
        return colmap.Tracks(xyz, found.errors, found.points_of) if found.points_of else None


def read_capture(
    path: Path,
    images_path: Path | None = None,
    colmap_path: Path | None = None,
    masks_path: Path | None = None,
) -> Capture:
    """Read what describes a folder of photographs.

    Args:
        path: a folder with `transforms.json`, a folder with `images` and `sparse/0`, or a .json file.
        images_path, colmap_path: of a COLMAP folder, relative to it; None: where they usually are.
        masks_path: of a COLMAP folder; the mask of a.jpg is a.jpg.png, as COLMAP has it, or a.png.
    Raises: DatasetError, with the file's name.
    """
    found = find_capture(Path(path), colmap_path)
    if found.is_file():
        return _read_transforms(found)
    return _read_colmap(Path(path), found, images_path, masks_path)


def find_capture(path: Path, colmap_path: Path | None = None) -> Path:
    """What describes the photographs of a folder: its .json file, or the folder of its reconstruction.

    Args: as `read_capture`. Reads no file.
    Raises: DatasetError if there is none.
    """
    path = Path.cwd() if path == Path() else path
    if not path.exists():
        raise DatasetError(f"{path} does not exist.{kGiveData}")
    if not path.is_dir():
        if path.suffix != ".json" or not path.is_file():
            raise DatasetError(f"{path} is a file. Give the folder of a capture, or its transforms.json.")
        return path
    candidates = [str(colmap_path)] if colmap_path is not None else kColmapFolders
    if (path / "transforms.json").is_file() and colmap_path is None:
        return path / "transforms.json"
    found = _reconstruction(path, candidates)
    if found is not None:
        return found
    meant = _what_was_meant(path)
    if not any(path.iterdir()):
        raise DatasetError(f"{path} is an empty folder.{meant or kGiveData}")
    raise DatasetError(
        f"{path} has neither a transforms.json (Nerfstudio) nor a {candidates[0]}/cameras.bin (COLMAP): there are no "
        f"cameras.{meant or ' Run `ns-process-data` or COLMAP on the photographs first.'}"
    )


def _what_was_meant(path: Path) -> str:
    """The sentence on a capture near a folder that is none, to be put behind another one; empty where there is none."""
    near = _captures_near(path)
    if not near:
        return ""
    kind = "a capture" if len(near) == 1 else f"one of {len(near):,} captures in this folder"
    return f" Did you mean --data {shlex.quote(str(near[0]))}? That is {kind}."


def _reconstruction(path: Path, candidates: Sequence[str]) -> Path | None:
    """The first of some folders below `path` that holds a COLMAP reconstruction, whole or not."""
    for name in candidates:
        folder = path / name
        if any(
            is_file(folder / f"{stem}{suffix}")
            for stem in ("cameras", "images")
            for suffix in (".bin", ".txt")
        ):
            return folder
    return None


def _captures_near(path: Path) -> list[Path]:
    """The capture whose folder of photographs `path` may be, else those that lie in `path`; the whole paths of their folders."""
    here = Path(os.path.abspath(path))
    try:
        below = sorted(each for each in here.iterdir() if each.is_dir())
    except OSError:
        below = []

    def is_capture(folder: Path) -> bool:
        # a reconstruction's own folder is none
        reconstruction = _reconstruction(folder, kColmapFolders[:-1])
        return is_file(folder / "transforms.json") or reconstruction is not None

    return [here.parent] if is_capture(here.parent) else [*filter(is_capture, below)]


def _read_colmap(root: Path, folder: Path, images_path: Path | None, masks_path: Path | None) -> Capture:
    cameras, cameras_file = colmap.read_cameras(folder)
    images, images_file = colmap.read_images(folder)
    if not cameras:
        raise DatasetError(f"{cameras_file} holds no cameras. Run COLMAP's mapper again.")
    if not images:
        raise DatasetError(f"{images_file} holds no images. Run COLMAP's mapper again.")
    images_dir = root / (images_path if images_path is not None else "images")
    if not images_dir.is_dir():
        raise DatasetError(
            f"{images_dir} does not exist, but {images_file} names {len(images):,} images. Copy the photographs "
            "there, or name their folder with --pipeline.datamanager.dataparser.images-path."
        )
    world = np.vstack([kWorldFromColmap, [0, 0, 0, 1.0]])
    frames, bad_entries = [], []
    for number, image in enumerate(images):
        if image.camera_id not in cameras:
            sentence = (
                f"{images_file}: image {image.name} uses camera {image.camera_id}, which {cameras_file.name} lacks. "
                "Both files must come from one reconstruction."
            )
            bad_entries.append(BadEntry(image.name, sentence, images_dir / image.name))
            continue
        camera, lens = cameras[image.camera_id]
        pose = np.eye(4)
        pose[:3, :3] = image.rotation.T
        pose[:3, 3] = -image.rotation.T @ image.translation
        frames.append(
            Frame(
                name=image.name,
                label=f"image {number}",
                image=images_dir / image.name,
                mask=_mask_of(root / masks_path / image.name) if masks_path is not None else None,
                depth=None,
                camera_to_world=world @ pose @ kOpenGlFromOpenCv,
                camera=camera,
                lens=lens,
                colmap_id=image.image_id,
            )
        )
    frames.sort(key=lambda f: f.name)
    has_points = any((folder / f"points3D{suffix}").is_file() for suffix in (".bin", ".txt"))
    split = {}
    for name in ("train", "val", "test"):
        listing = root / f"{'validation' if name == 'val' else name}_list.txt"
        if listing.is_file():
            split[name] = {
                images_dir / line.strip()
                for line in listing.read_text("utf-8-sig", "replace").splitlines()
                if line.strip()
            }
    return Capture(
        root=root,
        source=images_file,
        layout="colmap",
        frames=frames,
        applied_transform=kWorldFromColmap.copy(),
        listed_split=split,
        seed_reconstruction=folder if has_points else None,
        bad_entries=bad_entries,
        notes=_colmap_notes(root, folder, images_dir, len(images)),
    )


def _mask_of(image: Path) -> Path:
    """The mask of a.jpg: a.jpg.png as COLMAP has it, else a.png."""
    colmaps = image.with_name(image.name + ".png")
    return colmaps if is_file(colmaps) else image.with_suffix(".png")


def _colmap_notes(root: Path, folder: Path, images_dir: Path, count: int) -> list[str]:
    """Photographs without a pose, and a larger reconstruction beside this one."""
    notes = []
    found = sum(path.suffix.lower() in kImageSuffixes for path in images_dir.rglob("*"))
    if found > count:
        notes.append(
            f"{found - count:,} of the {found:,} images in {shown(images_dir, root)} have no pose in "
            f"{shown(folder, root)} and are not used."
        )
    for other in sorted(folder.parent.iterdir()):
        if other != folder and other.is_dir() and (other / "images.bin").is_file():
            with (other / "images.bin").open("rb") as file:
                theirs = int.from_bytes(file.read(8), "little")
            if theirs > count:
                notes.append(
                    f"{shown(other, root)} is another reconstruction, of {theirs:,} images; this one has {count:,}. Choose "
                    f"it with --pipeline.datamanager.dataparser.colmap-path {shlex.quote(shown(other, root))}."
                )
    return notes


def _read_transforms(path: Path) -> Capture:
    root = path.parent
    try:
        meta = json.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin files with a mark
    except (ValueError, OSError, RecursionError) as error:
        raise DatasetError(
            f"{path} is no valid JSON: {error}. It may be cut short; write it again."
        ) from None
    entries = meta.get("frames") if isinstance(meta, dict) else None
    if not isinstance(entries, list):
        raise DatasetError(f'{path} has no list "frames". It must be a Nerfstudio transforms.json.')
    if not entries:
        raise DatasetError(f"{path} lists no frames: there are no images. Run `ns-process-data` again.")
    problems: list[str] = []
    bad_entries: list[BadEntry] = []
    frames: list[Frame] = []
    for number, entry in enumerate(entries):
        try:
            frames.append(_frame(number, entry, meta, root, path))
        except DatasetError as error:
            name = entry.get("file_path") if isinstance(entry, dict) else None
            bad_entries.append(
                BadEntry(f"frame {number}", str(error), root / name if isinstance(name, str) else None)
            )
    for what in ("mask", "depth"):
        having = sum(getattr(f, what) is not None for f in frames)
        if 0 < having < len(frames):
            lacking = next(f for f in frames if getattr(f, what) is None)
            key = "mask_path" if what == "mask" else "depth_file_path"
            problems.append(
                f"{path}: {having:,} of {len(frames):,} frames have a {key}, {lacking.name} has none. Give every frame "
                "one, or none."
            )
    frames.sort(key=lambda f: str(f.image))
    old_reconstruction = root / "colmap" / "sparse" / "0"
    applied = None
    if "applied_transform" in meta:
        with _collected(problems):
            applied = _matrix(meta["applied_transform"], (3, 4), f"{path}: applied_transform")
            if not _invertible(applied):
                problems.append(
                    f"{path}: applied_transform cannot be undone: its left 3x3 block has no inverse. Correct it there."
                )
    elif old_reconstruction.is_dir():
        applied = kOldAppliedTransform.copy()
    seed, reconstruction = None, None
    if meta.get("ply_file_path"):
        with _collected(problems):
            seed = _path(meta["ply_file_path"], root, f"{path}: ply_file_path")
        if seed is not None and not is_file(seed):
            problems.append(
                f"{seed} is missing, but {path.name} names it in ply_file_path. Restore it, or remove the entry to "
                "start from random points."
            )
            seed = None
    else:
        seed = next((root / name for name in kSeedNames if (root / name).is_file()), None)
        if seed is None and any((old_reconstruction / f"points3D{s}").is_file() for s in (".bin", ".txt")):
            reconstruction = old_reconstruction
    split = {}
    for name in ("train", "val", "test"):
        listed = meta.get(f"{name}_filenames")
        if listed is not None:
            if not isinstance(listed, list):
                problems.append(f"{path}: {name}_filenames is no list of file names. Correct it there.")
                continue
            with _collected(problems):
                split[name] = {
                    _path(entry, root, f"{path}: an entry of {name}_filenames") for entry in listed
                }
    known = {f.image for f in frames} | {b.image for b in bad_entries}
    for name, members in split.items():
        unknown = sorted(shown(m, root) for m in members - known)
        if unknown:
            problems.append(
                f"{path}: {name}_filenames names {unknown[0]}"
                + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
                + ", which no frame has. Correct the list."
            )
    scale = 1.0
    with _collected(problems):
        scale = _number(meta.get("applied_scale"), 1.0, f"{path}: applied_scale")
    if not 0 < scale < math.inf:
        problems.append(f"{path}: applied_scale is {scale:g}, expected a factor above 0. Correct it there.")
    orientation = meta.get("orientation_override")
    if orientation not in (None, *kOrientations):
        problems.append(
            f"{path}: orientation_override is {orientation!r}, expected one of {', '.join(kOrientations)}. Correct it "
            "there."
        )
    return Capture(
        root=root,
        source=path,
        layout="nerfstudio",
        frames=frames,
        applied_transform=applied,
        applied_scale=scale,
        orientation_override=orientation,
        listed_split=split,
        seed_file=seed,
        seed_reconstruction=reconstruction,
        bad_entries=bad_entries,
        problems=problems,
    )


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Put a DatasetError on the list instead of ending there."""
    try:
        yield
    except DatasetError as error:
        problems.extend(error.problems)


def merged(entries: list[BadEntry]) -> list[str]:
    """One sentence for what all frames lack, instead of one a frame."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(re.sub(r"frame \d+ \(.*?\)", "", entry.sentence), []).append(entry.sentence)
    return [
        sentences[0]
        + (f" The same goes for {len(sentences) - 1:,} more frames." if len(sentences) > 1 else "")
        for sentences in groups.values()
    ]


def _invertible(matrix: np.ndarray) -> bool:
    return bool(np.isfinite(matrix).all() and abs(np.linalg.det(matrix[:, :3])) > 1e-12)


def _matrix(value: Any, shape: tuple[int, int], where: str) -> np.ndarray:
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        matrix = np.empty(0)
    if matrix.shape == (3, 4) and shape == (4, 4):
        matrix = np.vstack([matrix, [0, 0, 0, 1.0]])
    if matrix.shape != shape:
        raise DatasetError(f"{where} is no {shape[0]}x{shape[1]} matrix of numbers. Correct it there.")
    return matrix


def _path(value: Any, root: Path, where: str) -> Path:
    if not isinstance(value, str):
        raise DatasetError(f"{where} is {value!r}, not a file name. Correct it there.")
    return root / value


def _number(value: Any, default: float, where: str) -> float:
    if value is None:
        return default
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise DatasetError(f"{where} is {value!r}, not a number. Correct it there.") from None


def _frame(number: int, entry: Any, meta: dict[str, Any], root: Path, path: Path) -> Frame:
    label = f"frame {number}"
    if not isinstance(entry, dict) or not isinstance(entry.get("file_path"), str):
        raise DatasetError(f"{path}: {label} has no file_path. Correct it there.")
    name = entry["file_path"]

    def value(key: str) -> Any:
        return entry.get(key, meta.get(key))

    def number_of(key: str, default: float | None = None) -> float:
        given = value(key)
        if given is None:
            if default is not None:
                return default
            raise DatasetError(f"{path}: {label} ({name}) has no {key}, and neither has the file. Add it.")
        return _number(given, 0.0, f"{path}: {key} of {label} ({name})")

    model = value("camera_model") or "OPENCV"
    if not isinstance(model, str) or model not in kLensNames:
        raise DatasetError(
            f"{path}: {label} ({name}) has the camera model {model}, which is not supported. Supported are "
            f"{', '.join(kLensNames)}; undistort the images first."
        )
    if entry.get("transform_matrix") is None:
        raise DatasetError(f"{path}: {label} ({name}) has no transform_matrix. Add it, or remove the frame.")
    pose = _matrix(entry["transform_matrix"], (4, 4), f"{path}: transform_matrix of {label} ({name})")
    image = root / name
    if "\\" in name and not is_file(image):  # written on Windows
        image = root / name.replace("\\", "/")
    if not image.suffix and not is_file(image):  # NeRF's synthetic scenes leave the suffix out
        image = next((p for p in (image.with_suffix(s) for s in (".png", ".jpg")) if is_file(p)), image)
    width, height = value("w"), value("h")
    if width is None or height is None:
        try:
            width, height = probe(image).size
        except (ImageError, OSError):
            raise DatasetError(
                f"{path}: {label} ({name}) has no w and h, and {image} cannot be read. Add w and h, or the image."
            ) from None
    width, height = number_of("w", width), number_of("h", height)
    if not (math.isfinite(width) and math.isfinite(height)):
        raise DatasetError(
            f"{path}: {label} ({name}) has the image size {width:g}x{height:g}. Correct it there."
        )
    width, height = int(width), int(height)
    if value("fl_x") is None and value("camera_angle_x") is not None:
        angle = number_of("camera_angle_x")
        if not 0 < angle < math.pi:
            raise DatasetError(
                f"{path}: camera_angle_x of {label} ({name}) is {angle:g}, expected radians between 0 and pi."
            )
        fx = 0.5 * width / math.tan(0.5 * angle)
    else:
        fx = number_of("fl_x")
    cx, cy = number_of("cx", width / 2), number_of("cy", height / 2)
    camera = Pinhole(width, height, fx, number_of("fl_y", fx), cx, cy)
    lens = _lens(kLensNames[model], value, number_of, path, f"{label} ({name})")
    mask, depth = entry.get("mask_path"), entry.get("depth_file_path")
    return Frame(
        name=name,
        label=label,
        image=image,
        mask=_path(mask, root, f"{path}: mask_path of {label} ({name})") if mask else None,
        depth=_path(depth, root, f"{path}: depth_file_path of {label} ({name})") if depth else None,
        camera_to_world=pose,
        camera=camera,
        lens=lens,
    )


def _lens(
    kind: str, value: Callable[[str], Any], number_of: Callable[..., float], path: Path, who: str
) -> Lens:
    """The lens of a frame, from distortion_params (Nerfstudio's order: k1 k2 k3 k4 p1 p2) or k1, k2, ..."""
    given, most = value("distortion_params"), kMostDistortion[kind]
    where = f"{path}: distortion_params of {who}"
    if kind == "fisheye624":
        if not isinstance(given, list) or len(given) != most:
            raise DatasetError(
                f"{where} is {given!r}, expected a list of the 12 numbers k1..k6 p1 p2 s1..s4. Correct it there."
            )
        return Lens(kind, tuple(_number(entry, 0.0, where) for entry in given))
    if given is not None:
        if not isinstance(given, list) or len(given) > most:
            raise DatasetError(
                f"{where} is {given!r}, expected a list of k1 k2 k3 k4 p1 p2. Correct it there."
            )
        k1, k2, k3, k4, p1, p2 = (*(_number(entry, 0.0, where) for entry in given), *[0.0] * most)[:most]
    else:
        k1, k2, k3, k4, p1, p2 = (number_of(key, 0.0) for key in ("k1", "k2", "k3", "k4", "p1", "p2"))
    if kind == "fisheye":
        return Lens(kind, (k1, k2, k3, k4))
    return Lens(kind, (k1, k2, p1, p2, k3, k4)) if any((k1, k2, k3, k4, p1, p2)) else Lens()


def read_ply_points(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, 3) float64 and colours (N, 3) uint8 of a point cloud; grey where the file has no colours."""
    from plyfile import PlyData, PlyParseError

    try:
        vertex = PlyData.read(str(path))["vertex"].data
        xyz = np.stack([np.asarray(vertex[axis], dtype=np.float64) for axis in ("x", "y", "z")], axis=1)
    except (PlyParseError, KeyError, ValueError, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip() or "no vertices with x, y and z"
        raise DatasetError(
            f"{path} cannot be read as a point cloud: {reason}. It may be cut short; write it again, or remove it to "
            "start from random points."
        ) from None
    names = vertex.dtype.names or ()
    for channels in (
        ("red", "green", "blue"),
        ("r", "g", "b"),
        ("diffuse_red", "diffuse_green", "diffuse_blue"),
    ):
        if all(c in names for c in channels):
            colors = np.stack([np.asarray(vertex[c]) for c in channels], axis=1)
            if colors.dtype.kind == "f":
                colors = np.nan_to_num(colors * (255 if not len(colors) or colors.max() <= 1 else 1)).round()
            if colors.dtype == np.uint16 and len(colors) and colors.max() > 255:  # 16 bit a channel
                colors = (colors.astype(np.uint32) + 128) // 257
            return xyz, colors.clip(0, 255).astype(np.uint8)
    if all(f"f_dc_{i}" in names for i in range(3)):
        dc = np.stack([np.asarray(vertex[f"f_dc_{i}"]) for i in range(3)], axis=1)
        return xyz, ((dc * 0.28209479177387814 + 0.5) * 255).clip(0, 255).round().astype(np.uint8)
    return xyz, np.full((len(xyz), 3), 128, dtype=np.uint8)
