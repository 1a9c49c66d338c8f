# SPDX-License-Identifier: Apache-2.0
"""`mgpu-splat-data`: Nerfstudio and COLMAP folders to Nerfstudio's cameras, without a flag and without a question.

Poses are centred in float64. Images are rescaled, and undistorted unless a fisheye took them, when they are read
(`data/images.py`): the cameras here are already those of the images that are then at hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.camera_utils import auto_orient_and_center_poses
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.dataparsers.base_dataparser import DataParser, DataParserConfig, DataparserOutputs
from nerfstudio.data.scene_box import SceneBox
from nerfstudio.plugins.registry_dataparser import DataParserSpecification
from nerfstudio.utils.rich_utils import CONSOLE
from rich.markup import escape
from rich.progress import Progress, TaskID
from tyro.conf import Suppress

from ns_mgpu_splat.data.capture import Capture, Frame, merged, read_capture
from ns_mgpu_splat.data.checks import (
    DatasetError,
    Level,
    check_points,
    find_bad_frames,
    kSkip,
    printable,
    usable_points,
)
from ns_mgpu_splat.data.depth import DepthSamples, samples_from_map, samples_from_points
from ns_mgpu_splat.data.images import ImageSource
from ns_mgpu_splat.data.lens import Lens, fisheye_angle, undistorted_pinhole
from ns_mgpu_splat.nerfstudio.older_runs import FillsIn
from ns_mgpu_splat.nerfstudio.say import say

# Below this many pixels a training run decodes every image once before it starts (about 10 s a gigapixel and core);
# above, only headers and file endings are read.
kDecodePixels = 2_000_000_000
# Length of the mean of the viewing directions (unit vectors): above, all photographs look one way, and their up axes may
# lie in the ground's plane; below, they look all round, and the mean says nothing.
kOneWay, kAllRound = 0.9, 0.2
# Mean squared sine of the angles between the viewing directions and the nearest axis: below, Nerfstudio's focus, which is
# found in float32, is rounding or no number at all.
kParallel = 1e-6
# Pixels of the shorter side that rescaled images must keep: a tile's side; SSIM's window is 11 wide.
kLeastSide = 16


@dataclass
class MgpuSplatDataParserConfig(FillsIn, DataParserConfig):
    """A folder with transforms.json, or with images and sparse/0: which one is seen by looking."""

    _target: type = field(default_factory=lambda: MgpuSplatDataParser)
    """Class that reads the folder."""
    data: Path = Path()
    """Folder of the capture, or its transforms.json. Set by --data."""
    downscale_factor: int | None = None
    """Divide width and height of every image by this, in memory, with an area filter. None or 1 trains at full size;
    2 quarters the work of a step: use it for photographs beyond 1600 pixels or a first look."""
    scale_factor: float = 1.0
    """Multiply all camera positions by this, after scaling them automatically. Rarely needed."""
    scene_scale: float = 1.0
    """Half side of the scene box in units of the scaled world. Only the viewer's crop box starts from it."""
    orientation_method: Literal["pca", "up", "vertical", "down", "none"] = "up"
    """How the world is turned upright: "up" averages the cameras' up axes. "down" is for surveys from the air, straight down
    or oblique in all headings: the way the cameras look on average is down. "vertical" suits cameras that all look one way
    at something upright, "pca" aligns flat flights, "none" keeps the file's axes."""
    center_method: Literal["poses", "focus", "none"] = "poses"
    """What becomes the origin: the mean camera, the point the cameras look at, or the file's own origin. Not "none"
    with georeferenced coordinates: float32 keeps half a metre of them."""
    auto_scale_poses: bool = True
    """Scale the world so that all cameras lie within -1 and 1. Switch it off to keep the file's unit of length."""
    eval_mode: Literal["auto", "fraction", "filename", "interval", "all"] = "auto"
    """Which images are held out: "auto" takes the file's own lists, else every eval-interval-th image by name for
    COLMAP and 1 - train-split-fraction for Nerfstudio folders; "filename" looks for train or eval in the names; "all"
    trains on everything and measures on the same images."""
    train_split_fraction: float = 0.9
    """Share of the images to train on where eval-mode is a fraction; the rest, at least one, is held out."""
    eval_interval: int = 8
    """Hold out every n-th image by name where eval-mode is an interval; 8 is what papers report."""
    images_path: Path | None = None
    """Folder of the photographs of a COLMAP capture, below the data folder. None: images."""
    colmap_path: Path | None = None
    """Folder of the reconstruction, below the data folder. None: sparse/0, sparse, colmap/sparse/0, whichever is
    there. Give it to use the reconstruction of a folder that also has a transforms.json."""
    masks_path: Path | None = None
    """Folder of masks of a COLMAP capture, below the data folder: for a.jpg a file a.jpg.png or a.png, black where a pixel
    shall not count. Nerfstudio folders name masks in transforms.json."""
    depth_unit_scale_factor: float = 1e-3
    """Units of the capture's world in one unit of its depth maps: 0.001 for millimetres. They are used with
    --pipeline.model.depth-weight."""
    num_random_points: int = 50_000
    """Points to start from where the capture has none; drawn inside what the cameras see."""
    seed_points: bool = True
    """Start from the capture's point cloud. Switch it off to start from random points instead."""
    includes_time: Suppress[bool] = False
    """Time-dependent captures are not supported."""

    @property
    def factor(self) -> int:
        """By which images' sides are divided."""
        return 1 if self.downscale_factor is None else int(self.downscale_factor)


@dataclass
class MgpuSplatDataParser(DataParser):
    """Read a capture once, then hand out its splits.

    Attributes:
        level: how much of the image files to look at; the datamanager sets it.
        want_points: read seed points; the datamanager switches it off where nothing is trained.
        skip: leave frames out that cannot be used, and say which, instead of ending; the datamanager sets it.
        workers: threads that decode images for the check.
        want_depth: have "depths" in the metadata of the training images; the datamanager sets it.
    """

    config: MgpuSplatDataParserConfig
    level: Level = "none"
    want_points: bool = True
    skip: bool = False
    workers: int = 2
    want_depth: bool = False
    downscale_factor: int | None = None  # ns tools set it; the config counts
    _capture: Capture | None = None
    # images that cannot be read: their cameras still count for world and split, so that tools, which do not look at the
    # images, have the same world and split as the training had
    _fileless: frozenset[Path] | set[Path] = frozenset()
    _points: tuple[np.ndarray, np.ndarray] | None = None

    def _generate_dataparser_outputs(self, split: str = "train", **kwargs: Any) -> DataparserOutputs:
        """Raises DatasetError with everything that is wrong."""
        check_options(self.config)
        capture = self.capture()
        frames = capture.frames
        transform, scale = self._world(frames, capture)
        members = split_members(capture, self.config, split)
        chosen = [frames[i] for i in members if frames[i].image not in self._fileless]
        if split == "train" and not chosen:
            raise DatasetError(f"{capture.source}: all images to train on are bad; they are listed above.")
        sources = [image_source(frame, self.config.factor) for frame in chosen]
        cameras = self._cameras([self._pose(f, transform, scale) for f in chosen], sources)
        box = self.config.scene_scale
        positions = np.stack([self._pose(f, transform, scale)[:, 3] for f in frames])
        metadata: dict[str, Any] = {
            "sources": sources,
            "frame_names": [f.name for f in chosen],
            "has_alpha": any(f.has_alpha for f in frames),
            "camera_extent": camera_extent(positions),
            "depth_filenames": [f.depth for f in chosen] if chosen and chosen[0].depth is not None else None,
            "depth_unit_scale_factor": self.config.depth_unit_scale_factor,
        }
        if split == "train" and self.want_points:
            metadata["points3D_xyz"], metadata["points3D_rgb"] = self._seeds(
                capture, transform, scale, cameras, metadata["camera_extent"]
            )
        if split == "train" and self.want_depth:
            metadata["depths"] = self._depths(capture, chosen, sources, cameras, transform, scale)
        return WorldOutputs(
            image_filenames=[f.image for f in chosen],
            cameras=cameras,
            scene_box=SceneBox(aabb=torch.tensor([[-box] * 3, [box] * 3], dtype=torch.float32)),
            mask_filenames=[f.mask for f in chosen if f.mask is not None] or None,
            dataparser_scale=scale * capture.applied_scale,
            dataparser_transform=torch.from_numpy(from_original_world(transform, capture)),
            metadata=metadata,
        )

    def _depths(
        self,
        capture: Capture,
        frames: list[Frame],
        sources: list[ImageSource],
        cameras: Cameras,
        transform: np.ndarray,
        scale: float,
    ) -> list[Callable[[], DepthSamples]]:
        """For each frame how to get its measured depths. Raises DatasetError where the capture has none."""
        if frames[0].depth is not None:
            unit = self.config.depth_unit_scale_factor * scale * capture.applied_scale
            return [
                partial(samples_from_map, frame.depth, source, unit, number)
                for number, (frame, source) in enumerate(zip(frames, sources, strict=True))
                if frame.depth is not None
            ]
        tracks = capture.read_tracks()
        if tracks is None:
            raise DatasetError(
                f"--pipeline.model.depth-weight is above 0, but {capture.root} has neither depth maps (depth_file_path in "
                "transforms.json) nor a COLMAP reconstruction that says which image saw which point. Leave it at 0."
            )
        near = (tracks.xyz @ transform[:, :3].T + transform[:, 3]) * scale
        known = tracks.errors[tracks.errors >= 0]
        typical = float(known.mean()) if len(known) else 1.0
        found: list[Callable[[], DepthSamples]] = []
        for number, (frame, source) in enumerate(zip(frames, sources, strict=True)):
            rows = tracks.points_of.get(
                -1 if frame.colmap_id is None else frame.colmap_id, np.zeros(0, np.int64)
            )
            pose = np.eye(4)
            pose[:3] = cameras.camera_to_worlds[number].double().numpy()
            viewmat = np.linalg.inv(pose @ np.diag([1.0, -1.0, -1.0, 1.0]))
            camera = undistorted_pinhole(source.camera, source.lens)
            samples = samples_from_points(
                near[rows], tracks.errors[rows], typical, viewmat, camera, source.lens
            )
            found.append(partial(_itself, samples))
        return found

    def capture(self) -> Capture:
        """Read and check the capture; the second call returns the first one's result."""
        if self._capture is not None:
            return self._capture
        config = self.config
        capture = read_capture(config.data, config.images_path, config.colmap_path, config.masks_path)
        check_factor(capture.frames, config.factor)
        level = self.level
        if level == "full" and sum(f.camera.width * f.camera.height for f in capture.frames) > kDecodePixels:
            level = "sizes"
        with _check_progress() as progress:
            bad = find_bad_frames(capture, level, progress, self.workers)
        unusable = merged(capture.bad_entries) + [b.sentence for b in bad]
        general, cloud = list(capture.problems), None
        if self.want_points and config.seed_points:
            cloud = self._read_points(capture, general)
        left_out = len(capture.bad_entries) + len({b.index for b in bad})
        total = len(capture.bad_entries) + len(capture.frames)
        if general or ((unusable or cloud) and not self.skip):
            problems = [*general, *unusable, *([cloud] if cloud else [])]
            spare = " and ".join(
                what for what, some in (("frames", unusable), ("seed points", cloud)) if some
            )
            helps = spare and left_out < total and not self.skip
            advice = f"Bad {spare} can be left out instead: {kSkip}." if helps else ""
            raise DatasetError(problems, capture.root, advice)
        if unusable:
            if left_out == total:
                raise DatasetError(
                    [f"No usable image is left: all {total:,} frames are bad.", *unusable], capture.root
                )
            lost = {b.index for b in bad if not b.files}
            self._fileless = {capture.frames[b.index].image for b in bad if b.files}
            capture.frames = [f for i, f in enumerate(capture.frames) if i not in lost]
            say(f"[bold yellow]{left_out:,} of {total:,} frames are left out:[/bold yellow]")
            for sentence in unusable:
                say(f"  - {printable(sentence)}", markup=False, highlight=False)
        lists = capture.listed_split
        both = lists.get("train", set()) & (lists.get("val", set()) | lists.get("test", set()))
        if both and level != "none" and config.eval_mode == "auto":
            capture.notes.append(
                f"{len(both):,} images are listed to be trained on and to be held out: what is measured on them tells nothing "
                "about other views."
            )
        if level != "none" and capture.orientation_override is None:
            capture.notes += orientation_notes(camera_poses(capture.frames), config.orientation_method)
        for note in capture.notes:
            say(f"[yellow]{escape(printable(note))}", highlight=False)
        self._capture = capture
        return capture

    def _read_points(self, capture: Capture, problems: list[str]) -> str | None:
        """Read the seed points once; what is wrong with the file goes to `problems`, with single points is returned."""
        try:
            found = capture.read_points()
        except DatasetError as error:
            problems.extend(error.problems)
            return None
        if found is None:
            return None
        xyz, rgb, path = found
        sentence = check_points(xyz, path)
        if sentence is not None:
            usable = usable_points(xyz)
            xyz, rgb = xyz[usable], rgb[usable]
            if self.skip:
                say(
                    f"[bold yellow]{len(usable) - len(xyz):,} of {len(usable):,} seed points are left out:[/bold yellow]"
                )
                say(f"  - {sentence}", markup=False, highlight=False)
        if len(xyz):
            self._points = (xyz, rgb)
        return sentence

    def _world(self, frames: list[Frame], capture: Capture) -> tuple[np.ndarray, float]:
        """The (3, 4) transform from the frames' world to the model's, before scaling, and the scale."""
        poses = camera_poses(frames)
        method = capture.orientation_override or self.config.orientation_method
        # first to the mean in float64: georeferenced coordinates lose half a metre in float32
        offset = poses[:, :3, 3].mean(axis=0) if self.config.center_method != "none" else np.zeros(3)
        near = poses.copy()
        near[:, :3, 3] -= offset
        turn = np.eye(3)  # what is turned here, in float64, before Nerfstudio's function
        if method == "down":
            against = mean_viewing_direction(poses) * -1.0
            length = float(np.linalg.norm(against))
            method = "up"
            if length >= kAllRound:
                method, turn = "none", rotation_to_z(against / length)
                near[:, :3] = turn @ near[:, :3]
        if method == "vertical" and len(poses) < 2:
            raise DatasetError(
                f"{capture.source}: --pipeline.datamanager.dataparser.orientation-method vertical needs two images, and there "
                'is one. Use "up".'
            )
        if self.config.center_method == "focus" and len(poses) > 1 and spread(poses) < kParallel:
            raise DatasetError(
                f"{capture.source}: the cameras look in parallel, so there is no point that all look at. Use "
                "--pipeline.datamanager.dataparser.center-method poses."
            )
        oriented, transform = auto_orient_and_center_poses(
            torch.from_numpy(near.astype(np.float32)),
            method=method,  # type: ignore[arg-type]
            center_method=self.config.center_method,
        )
        matrix = transform[:3].numpy().astype(np.float64)
        # the function's rotation comes from float32: make it orthonormal again
        u, _, vt = np.linalg.svd(matrix[:, :3])
        shift = np.linalg.solve(matrix[:, :3], matrix[:, 3])
        rotation = u @ vt
        result = np.hstack([rotation @ turn, (rotation @ (shift - turn @ offset))[:, None]])
        scale = self.config.scale_factor
        if self.config.auto_scale_poses:
            largest = float(oriented[:, :3, 3].abs().max())
            scale /= largest if largest > 1e-9 else 1.0  # one camera, or all in one place: keep the unit
        return result, scale

    @staticmethod
    def _pose(frame: Frame, transform: np.ndarray, scale: float) -> np.ndarray:
        pose = transform @ frame.camera_to_world
        pose[:, 3] *= scale
        return pose

    @staticmethod
    def _cameras(poses: list[np.ndarray], sources: list[ImageSource]) -> Cameras:
        pinholes = [undistorted_pinhole(s.camera, s.lens) for s in sources]

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([getattr(p, name) for p in pinholes], dtype=dtype).reshape(-1, 1)

        matrices = np.stack(poses) if poses else np.zeros((0, 3, 4))
        lenses: dict[str, Any] = {"camera_type": CameraType.PERSPECTIVE}
        if any(s.lens.kind == "fisheye" for s in sources):
            types = [
                CameraType.FISHEYE if s.lens.kind == "fisheye" else CameraType.PERSPECTIVE for s in sources
            ]
            lenses["camera_type"] = torch.tensor([[t.value] for t in types], dtype=torch.int64)
            # k1 k2 k3 k4 p1 p2; of other lenses nothing is left
            lenses["distortion_params"] = torch.tensor(
                [
                    (*s.lens.coefficients, *[0.0] * 6)[:6] if s.lens.kind == "fisheye" else (0.0,) * 6
                    for s in sources
                ],
                dtype=torch.float32,
            )
        return Cameras(
            camera_to_worlds=torch.from_numpy(matrices.astype(np.float32)),
            fx=column("fx", torch.float32),
            fy=column("fy", torch.float32),
            cx=column("cx", torch.float32),
            cy=column("cy", torch.float32),
            width=column("width", torch.int64),
            height=column("height", torch.int64),
            **lenses,
            metadata={},  # ns-export cameras wants one
        )

    def _seeds(
        self, capture: Capture, transform: np.ndarray, scale: float, cameras: Cameras, extent: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._points is not None:
            (xyz, rgb), self._points = self._points, None  # wanted once; a city has a hundred million
            near = (xyz @ transform[:, :3].T + transform[:, 3]) * scale
            return torch.from_numpy(near.astype(np.float32)), torch.from_numpy(rgb)
        count = self.config.num_random_points
        why = (
            "seed points are switched off"
            if not self.config.seed_points
            else f"{capture.root} has no seed points"
        )
        say(f"[bold yellow]{escape(why)}: starting from {count:,} random points in what the cameras see.")
        return random_points(cameras, count, extent)


def _itself(samples: DepthSamples) -> DepthSamples:
    return samples


@dataclass
class WorldOutputs(DataparserOutputs):
    """Nerfstudio's outputs with a `dataparser_transform` in float64, so that the way back to the world is exact.

    A position x of the capture's original world lies at `scale * (transform[:, :3] @ x + transform[:, 3])`.
    """

    def save_dataparser_transform(self, path: Path) -> None:
        """Write Nerfstudio's JSON file, with every digit, and the point of the world that became the origin."""
        transform = self.dataparser_transform.double().numpy()
        data = {
            "transform": transform.tolist(),
            "scale": float(self.dataparser_scale),
            "offset": (-np.linalg.solve(transform[:, :3], transform[:, 3])).tolist(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=4), encoding="utf-8")

    def transform_poses_to_original_space(
        self, poses: torch.Tensor, camera_convention: Literal["opengl", "opencv"] = "opencv"
    ) -> torch.Tensor:
        """Poses (N, 3, 4) of the model's world in the capture's, float64."""
        return super().transform_poses_to_original_space(poses.cpu().double(), camera_convention)


def camera_poses(frames: list[Frame]) -> np.ndarray:
    """Camera-to-world matrices (N, 4, 4) float64, OpenGL axes."""
    return np.stack([f.camera_to_world for f in frames])


def viewing_directions(poses: np.ndarray) -> np.ndarray:
    """The unit vectors (N, 3) along which cameras (N, 4, 4) look."""
    backward = poses[:, :3, 2]
    return -(backward / np.linalg.norm(backward, axis=1, keepdims=True))


def mean_viewing_direction(poses: np.ndarray) -> np.ndarray:
    """Mean (3,) of the cameras' viewing directions; its length is 1 where all look the same way."""
    return viewing_directions(poses).mean(axis=0)


def spread(poses: np.ndarray) -> float:
    """Mean squared sine of the angles of cameras' lines of sight (N, 4, 4) with the axis that they go along most, 0 to 2/3."""
    lines = viewing_directions(poses)
    return float(np.linalg.eigvalsh(np.eye(3) - lines.T @ lines / len(lines))[0])


def rotation_to_z(up: np.ndarray) -> np.ndarray:
    """The (3, 3) float64 rotation that brings a unit vector (3,) to (0, 0, 1); exact for -z, too."""
    half_turn = np.diag([1.0, -1.0, -1.0]) if up[2] < 0 else np.eye(3)
    x, y, z = half_turn @ up  # z is 0 or more: far from where the formula has no value
    cross = np.array([[0, 0, -x], [0, 0, -y], [x, y, 0]])  # matrix of up x (0, 0, 1)
    return (np.eye(3) + cross + cross @ cross / (1 + z)) @ half_turn


def orientation_notes(poses: np.ndarray, method: str) -> list[str]:
    """What to say before training about cameras (N, 4, 4) whose directions do not go with an orientation method."""
    length = float(np.linalg.norm(mean_viewing_direction(poses)))
    if method == "up" and len(poses) > 2 and length > kOneWay:
        return [
            "All photographs look the same way. If this is a survey from above and the scene stands on edge, begin a new run "
            "with --pipeline.datamanager.dataparser.orientation-method down."
        ]
    if method == "down" and length < kAllRound:
        return [
            "The photographs look all round and none knows where down is: --pipeline.datamanager.dataparser.orientation-method "
            'is "up" for this capture.'
        ]
    return []


def from_original_world(transform: np.ndarray, capture: Capture) -> np.ndarray:
    """The (3, 4) float64 transform from the world before `applied_transform` and `applied_scale` to the model's.

    Args:
        transform: (3, 4), from the frames' world, before scaling. The result is before scaling by both scales.
    """
    result = transform.astype(np.float64)
    result[:, 3] /= capture.applied_scale
    if capture.applied_transform is not None:
        result = result @ np.vstack([capture.applied_transform, [0, 0, 0, 1.0]])
    return result


@contextmanager
def _check_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Bars of what is checked, one after the other; none where nobody looks."""
    if not CONSOLE.is_terminal:
        yield None
        return
    with Progress(transient=True, console=CONSOLE) as bars:
        task: TaskID | None = None
        shown = ""

        def progress(what: str, done: int, total: int) -> None:
            nonlocal task, shown
            if what != shown:
                if task is not None:
                    bars.remove_task(task)
                task, shown = bars.add_task(what, total=total), what
            bars.update(task, completed=done)  # type: ignore[arg-type]

        yield progress


def check_options(config: MgpuSplatDataParserConfig) -> None:
    """Raise DatasetError naming the first option of the dataparser that is impossible."""
    factor = config.downscale_factor
    for option, value, wanted, fits in (
        ("downscale-factor", factor, "a whole number from 1 up", factor is None or (factor >= 1 and int(factor) == factor)),
        ("scale-factor", config.scale_factor, "a factor above 0", 0 < config.scale_factor < math.inf),
        ("scene-scale", config.scene_scale, "a length above 0", 0 < config.scene_scale < math.inf),
        ("train-split-fraction", config.train_split_fraction, "between 0 and 1", 0 <= config.train_split_fraction <= 1),
        ("eval-interval", config.eval_interval, "a whole number from 2 up", config.eval_interval >= 2),
        ("num-random-points", config.num_random_points, "0 or more", config.num_random_points >= 0),
    ):  # fmt: skip
        if not fits:
            raise DatasetError(f"--pipeline.datamanager.dataparser.{option} is {value}; it must be {wanted}.")


def check_factor(frames: list[Frame], factor: int) -> None:
    """Raise DatasetError if a downscale factor leaves less of an image than can be trained on.

    Sizes are those that the capture's file says; which of them are wrong is found later.
    """
    cameras = [f.camera for f in frames if f.camera.width >= 1 and f.camera.height >= 1]
    if factor == 1 or not cameras:
        return
    smallest = min(cameras, key=lambda c: min(c.width, c.height))
    side = min(smallest.width, smallest.height)
    if side // factor >= kLeastSide:
        return
    most = side // kLeastSide
    cure = f"The largest factor that makes sense is {most}" if most > 1 else "Leave it out"
    size = f"{smallest.width}x{smallest.height}"
    left = f"{max(1, smallest.width // factor)}x{max(1, smallest.height // factor)}"
    raise DatasetError(
        f"--pipeline.datamanager.dataparser.downscale-factor {factor} leaves {left} pixels of images of {size}; at least "
        f"{kLeastSide} must be left of the shorter side. {cure}."
    )


def image_source(frame: Frame, factor: int) -> ImageSource:
    """How to read a frame's image at 1/factor of its size."""
    camera = frame.camera.scaled(max(1, frame.camera.width // factor), max(1, frame.camera.height // factor))
    return ImageSource(frame.image, frame.mask, camera, frame.lens, frame.orientation, frame.mask_orientation)


def camera_extent(positions: np.ndarray) -> float:
    """Largest distance of a camera (N, 3) from the mean camera; 1 where all are in one place."""
    extent = (
        float(np.linalg.norm(positions - positions.mean(axis=0), axis=1).max()) if len(positions) else 0.0
    )
    return extent if extent > 1e-6 else 1.0


def random_points(
    cameras: Cameras, count: int, extent: float, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw points inside what the cameras see.

    Args:
        cameras: at least one. count: points. extent: world units; depths go to three times of it.
    Returns: positions (count, 3) float32 and grey-ish colours (count, 3) uint8.
    """
    rng = np.random.default_rng(seed)
    which = rng.integers(0, len(cameras), count)
    c2w = cameras.camera_to_worlds.numpy()[which]
    k = {
        name: getattr(cameras, name).numpy()[which, 0] for name in ("fx", "fy", "cx", "cy", "width", "height")
    }
    depth = (
        extent * 3.0 * np.cbrt(rng.uniform(0.01, 1.0, count))
    )  # as many points in each volume of a frustum
    x = (rng.uniform(0, 1, count) * k["width"] - k["cx"]) / k["fx"]
    y = (rng.uniform(0, 1, count) * k["height"] - k["cy"]) / k["fy"]
    in_camera = np.stack([x * depth, -y * depth, -depth], axis=1)
    for camera in np.unique(which[cameras.camera_type.numpy()[which, 0] == CameraType.FISHEYE.value]):
        given = cameras.distortion_params
        lens = Lens("fisheye", () if given is None else tuple(given[camera, :4].tolist()))
        own = which == camera
        radius = np.hypot(x[own], y[own])
        angle = fisheye_angle(radius, lens)
        aside = np.sin(angle) / np.maximum(radius, 1e-12)
        rays = np.stack([x[own] * aside, -y[own] * aside, -np.cos(angle)], axis=1)
        in_camera[own] = rays * depth[own, None]
    xyz = np.einsum("nij,nj->ni", c2w[:, :, :3], in_camera) + c2w[:, :, 3]
    rgb = rng.integers(64, 192, (count, 3), dtype=np.uint8)
    return torch.from_numpy(xyz.astype(np.float32)), torch.from_numpy(rgb)


def split_members(capture: Capture, config: MgpuSplatDataParserConfig, split: str) -> list[int]:
    """Indices into `capture.frames` (ordered by name) of a split: "train", "val" or "test"."""
    count = len(capture.frames)
    everything = list(range(count))
    mode = config.eval_mode
    if mode == "all":
        return everything
    lists = capture.listed_split
    if mode == "auto" and lists:
        if "train" not in lists:
            held_out: set[Path] = set().union(*lists.values())
            chosen = {f.image for f in capture.frames} - held_out
        else:
            chosen = lists["train"]
        if split != "train":
            other = "test" if split == "val" else "val"
            chosen = lists.get(split, lists.get(other, {f.image for f in capture.frames} - chosen))
        members = [i for i in everything if capture.frames[i].image in chosen]
        if split == "train" and not members:
            raise DatasetError(
                f"{capture.root}: train_list.txt, validation_list.txt and test_list.txt leave no image with a pose to train on. "
                "Correct them."
                if capture.layout == "colmap"
                else f"{capture.source} lists no image to train on. Correct train_filenames there."
            )
        return members
    if mode == "auto":
        mode = "interval" if capture.layout == "colmap" else "fraction"
    if count == 1:
        held = []
    elif mode == "interval":
        held = everything[:: max(2, config.eval_interval)]
    elif mode == "filename":
        names = [Path(f.name).name.lower() for f in capture.frames]
        held = [i for i in everything if any(word in names[i] for word in ("eval", "test", "val"))]
        if len(held) == count or not any("train" in n for n in names):
            raise DatasetError(
                f"{capture.source}: eval-mode filename needs images with train and eval in their names."
            )
    else:
        training = max(1, min(count - 1, math.ceil(count * config.train_split_fraction)))
        kept = set(np.linspace(0, count - 1, training, dtype=int).tolist())  # as Nerfstudio spreads them
        held = [i for i in everything if i not in kept]
    return sorted(set(everything) - set(held)) if split == "train" else held


mgpu_splat_dataparser = DataParserSpecification(
    config=MgpuSplatDataParserConfig(),
    description="Nerfstudio or COLMAP folder, recognised by looking; images are rescaled in memory.",
)
