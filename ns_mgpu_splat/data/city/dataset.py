# SPDX-License-Identifier: Apache-2.0
"""Writes a town as a Nerfstudio dataset, aside first and then renamed, so that a killed run leaves nothing that looks whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ns_mgpu_splat.data.city import splats, texture
from ns_mgpu_splat.data.city.cameras import Lens, Pose, place_cameras
from ns_mgpu_splat.data.city.town import METRES_PER_UNIT, Town, build_town

TOOL = "mgpu-splat-city"
STAGING = ".mgpu-splat-city-partial"  # inside OUT, so that renaming never crosses file systems
DEPTH_UNIT = 1e-3  # world units a step: Nerfstudio's default, here 1 cm
MAX_SIZE = 16384
SEED_POINTS_AN_IMAGE, MIN_SEED_POINTS, MAX_SEED_POINTS = 400, 6000, 2_000_000
SKY_POINTS = 2500
Progress = Callable[[str, int, int], None]  # what, done, total


class CityError(Exception):
    """One sentence for the user."""


@dataclass(frozen=True)
class CityOptions:
    """What to make.

    Attributes:
        blocks: built-up blocks, at least 1. images: pictures, 0 for none. width, height: of a picture, pixels.
        seed: of everything random. splats: Gaussians to sample, 0 for none.
    """

    blocks: int = 4
    images: int = 120
    width: int = 800
    height: int = 600
    seed: int = 0
    splats: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise CityError(f"--blocks is {self.blocks}; a town needs at least 1 block.")
        if self.images < 0 or self.splats < 0:
            raise CityError(f"--images {self.images} and --splats {self.splats} must not be negative.")
        if self.images == 0 and self.splats == 0:
            raise CityError("There is nothing to make: ask for --images or --splats of at least 1.")
        if not (1 <= self.width <= MAX_SIZE and 1 <= self.height <= MAX_SIZE):
            raise CityError(
                f"--size is {self.width}x{self.height}; each side must be between 1 and {MAX_SIZE} pixels."
            )


def write_city(
    out: Path, options: CityOptions, *, overwrite: bool = False, progress: Progress | None = None
) -> list[str]:
    """Write a town to the folder `out`.

    Args:
        out: made if missing; must be empty, or hold an earlier town with `overwrite`.
        overwrite: replace the earlier town's files; other files in `out` stay as they are.
        progress: told about each picture and chunk of Gaussians.
    Returns: the names of the files written, relative to `out`.
    Raises: CityError with one sentence; RaycastUnavailable if pictures are wanted and open3d cannot be imported.
    """
    if options.images:
        from ns_mgpu_splat.data.city.raycast import import_open3d

        import_open3d()  # before anything is written
    new = _file_names(options)
    old = _check_target(out, new, overwrite)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CityError(f"The folder {out} cannot be made: {error.strerror}.") from error
    with _staging(out) as stage:
        _check_target(out, new, overwrite)  # again, now that nobody else writes here
        town = build_town(options.blocks, options.seed)
        if options.images:
            _write_pictures(town, options, stage, progress)
        if options.splats:
            done = 0

            def tell(count: int) -> None:
                nonlocal done
                done += count
                if progress:
                    progress("Gaussians", done, options.splats)

            splats.write_splats(town, options.splats, stage / "splats.ply", options.seed, tell)
        description = {
            "tool": TOOL, **asdict(options), "metres_per_unit": METRES_PER_UNIT, "depth_unit": DEPTH_UNIT,
            "dome_radius": town.dome_radius, "layout": [town.layout.columns, town.layout.rows], "triangles": town.num_triangles,
        }  # fmt: skip
        (stage / "city.json").write_text(json.dumps(description, indent=2) + "\n")
        _publish(stage, out, new, old)
    return new


def _file_names(o: CityOptions) -> list[str]:
    """What a run with these options leaves, transforms.json last."""
    names = ["city.json"]
    if o.splats:
        names.append("splats.ply")
    if o.images:
        digits = max(4, len(str(o.images)))
        aerial = (o.images + 1) // 2
        for kind, count in (("aerial", aerial), ("street", o.images - aerial)):
            for k in range(count):
                names += [f"images/{kind}_{k:0{digits}d}.png", f"depths/{kind}_{k:0{digits}d}.png"]
        names += ["sparse_pc.ply", "transforms.json"]
    return names


def _check_target(out: Path, new: list[str], overwrite: bool) -> list[str]:
    """Names of the earlier town's files in `out`; refuses whatever could lose a stranger's file."""
    if not out.exists():
        return []
    if not out.is_dir():
        raise CityError(f"{out} is a file, not a folder; choose another folder.")
    entries = [p.name for p in out.iterdir() if p.name != STAGING]
    if not entries:
        return []
    if not overwrite:
        raise CityError(
            f"The folder {out} is not empty; choose another one, or add --overwrite to replace an earlier town in it."
        )
    try:
        description = json.loads((out / "city.json").read_text())
        if description["tool"] != TOOL:
            raise KeyError("tool")
        fields = ("blocks", "images", "width", "height", "seed", "splats")
        old = _file_names(CityOptions(**{k: int(description[k]) for k in fields}))
    except (OSError, ValueError, KeyError, TypeError, CityError) as error:
        raise CityError(
            f"The folder {out} holds files that {TOOL} did not write (it has no city.json of this tool); "
            "--overwrite replaces earlier towns only, so choose another folder."
        ) from error
    known = set(old)
    for name in new:
        if name not in known and (out / name).exists():
            raise CityError(
                f"{out / name} is in the way and was not written by {TOOL}; move it, or choose another folder."
            )
    return old


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A locked, empty folder in `out`. What a killed run left there is cleared first; this run's is removed at the end."""
    stage = out / STAGING
    stage.mkdir(exist_ok=True)
    handle = os.open(stage, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CityError(
                f"Another {TOOL} is writing to {out}; wait for it, or choose another folder."
            ) from error
        for entry in stage.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    finally:
        os.close(handle)


def _publish(stage: Path, out: Path, new: list[str], old: list[str]) -> None:
    """Move the new files into place. transforms.json goes first and comes last; city.json tells of the new files before they
    come, so that --overwrite can clear up after a run killed half-way through this."""
    for name in reversed(old):
        if name != "city.json":
            (out / name).unlink(missing_ok=True)
    for name in new:
        (out / name).parent.mkdir(exist_ok=True)
        os.replace(stage / name, out / name)
    for folder in {str(Path(name).parent) for name in old} - {"."}:
        path = out / folder
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _write_pictures(town: Town, options: CityOptions, stage: Path, progress: Progress | None) -> None:
    from ns_mgpu_splat.data.city.raycast import Renderer

    lens = Lens(options.width, options.height)
    poses = place_cameras(town, options.images)
    renderer = Renderer(town)
    (stage / "images").mkdir()
    (stage / "depths").mkdir()
    wanted = int(np.clip(SEED_POINTS_AN_IMAGE * len(poses), MIN_SEED_POINTS, MAX_SEED_POINTS))
    anywhere = wanted // 4
    share = -(-(wanted - anywhere) // len(poses))

    def take(index: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        pose = poses[index]
        picture = renderer.render(pose.camera_to_world, lens)
        Image.fromarray(picture.rgb).save(stage / "images" / f"{pose.name}.png", compress_level=4)
        steps = np.rint(picture.depth / DEPTH_UNIT)
        steps[steps > 65535] = 0  # too far to tell
        Image.fromarray(steps.astype(np.uint16)).save(stage / "depths" / f"{pose.name}.png", compress_level=4)
        rng = np.random.default_rng([town.seed & 0xFFFFFFFFFFFFFFFF, 11, index])
        return _seed_points(picture.rgb, picture.depth, picture.smooth, pose, lens, share, rng)

    points: list[NDArray[np.float32]] = []
    colors: list[NDArray[np.uint8]] = []
    workers = min(8, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        waiting: list[Future[Any]] = []
        try:
            for index in range(len(poses)):
                waiting.append(pool.submit(take, index))
                if len(waiting) > 2 * workers:
                    _collect(waiting.pop(0), points, colors, progress, len(poses))
            while waiting:
                _collect(waiting.pop(0), points, colors, progress, len(poses))
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
    # Views that were not taken may show what these do not: a few points lie on all surfaces.
    rows = splats.sample_splats(town, anywhere, town.seed)
    points.append(rows["means"])
    colors.append(np.rint(np.clip(rows["sh0"] * splats.SH_C0 + 0.5, 0, 1) * 255).astype(np.uint8))
    sky_points, sky_colors = _sky_points(town)
    points.append(sky_points)
    colors.append(sky_colors)
    write_point_cloud(stage / "sparse_pc.ply", np.concatenate(points), np.concatenate(colors))
    (stage / "transforms.json").write_text(json.dumps(_transforms(poses, lens), indent=1) + "\n")


def _collect(
    future: Future[Any],
    points: list[NDArray[np.float32]],
    colors: list[NDArray[np.uint8]],
    progress: Progress | None,
    total: int,
) -> None:
    p, c = future.result()
    points.append(p)
    colors.append(c)
    if progress:
        progress("Pictures", len(points), total)


def _transforms(poses: list[Pose], lens: Lens) -> dict[str, Any]:
    cx, cy = lens.center
    return {
        "camera_model": "OPENCV", "fl_x": lens.focal, "fl_y": lens.focal, "cx": cx, "cy": cy, "w": lens.width, "h": lens.height,
        "k1": 0.0, "k2": 0.0, "p1": 0.0, "p2": 0.0,
        "orientation_override": "none",  # z is up already
        "ply_file_path": "sparse_pc.ply",
        "frames": [
            {
                "file_path": f"images/{p.name}.png",
                "depth_file_path": f"depths/{p.name}.png",
                "transform_matrix": p.camera_to_world.tolist(),
            }
            for p in poses
        ],
    }  # fmt: skip


def _seed_points(
    rgb: NDArray[np.uint8], depth: NDArray[np.float32], smooth: NDArray[np.bool_], pose: Pose, lens: Lens, count: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:  # fmt: skip
    """Up to `count` places seen in a picture, with its colours; distant ones more often, as they stand for more surface."""
    rows = np.flatnonzero(smooth & (depth > 0))
    if len(rows) == 0:
        return np.empty((0, 3), np.float32), np.empty((0, 3), np.uint8)
    z = depth.ravel()[rows].astype(np.float64)
    upper = np.cumsum(z)
    at = (np.arange(count) + rng.random(count)) / count * upper[-1]
    chosen = np.unique(np.minimum(np.searchsorted(upper, at, side="right"), len(rows) - 1))
    v, u = np.divmod(rows[chosen], lens.width)
    cx, cy = lens.center
    local = (
        np.stack([(u + 0.5 - cx) / lens.focal, -(v + 0.5 - cy) / lens.focal, -np.ones(len(u))], 1)
        * z[chosen, None]
    )
    world = local @ pose.camera_to_world[:3, :3].T + pose.camera_to_world[:3, 3]
    return world.astype(np.float32), rgb.reshape(-1, 3)[rows[chosen]]


def _sky_points(town: Town) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Points on the sky dome, closer together near the horizon, so that the sky has Gaussians from the start."""
    k = np.arange(SKY_POINTS)
    z = ((k + 0.5) / SKY_POINTS) ** 1.4
    angle = k * np.pi * (3 - 5**0.5)
    r = np.sqrt(1 - z * z)
    direction = np.stack([r * np.cos(angle), r * np.sin(angle), z], 1).astype(np.float32)
    return direction * np.float32(town.dome_radius), (texture.sky(direction) * 255 + 0.5).astype(np.uint8)


def write_point_cloud(path: Path, points: NDArray[np.float32], colors: NDArray[np.uint8]) -> None:
    """Write points [n, 3] and colours [n, 3] as a binary .ply."""
    rows = np.empty(len(points), [("xyz", "<f4", 3), ("rgb", "u1", 3)])
    rows["xyz"], rows["rgb"] = points, colors
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}"]
    header += [f"property float {c}" for c in "xyz"] + [
        f"property uchar {c}" for c in ("red", "green", "blue")
    ]
    with open(path, "wb") as file:
        file.write(("\n".join([*header, "end_header"]) + "\n").encode("ascii"))
        file.write(rows.tobytes())
