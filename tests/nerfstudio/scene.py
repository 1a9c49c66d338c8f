# SPDX-License-Identifier: Apache-2.0
"""A tiny scene for tests: a checkered floor, a red and a blue ball under a black sky, photographed by exact ray casting.

Written as a Nerfstudio folder or as a COLMAP folder (text or binary), with numpy and PIL alone.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

BALLS = [((0.35, 0.1, 0.3), 0.3, (200, 60, 50)), ((-0.4, -0.2, 0.22), 0.22, (50, 80, 200))]
SKY = np.zeros(3)  # as the background of a render: no Gaussians are needed for it


def shade(points: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Colours (N, 3) of surface points; kind 0 is the floor, 1 and 2 the balls, -1 the sky."""
    checker = (np.floor(points[:, 0] * 2) + np.floor(points[:, 1] * 2)) % 2
    color = np.where(checker[:, None] > 0, [[205.0, 200, 180]], [[70.0, 110, 80]])
    for index, (center, radius, base) in enumerate(BALLS):
        normal = (points - center) / radius
        light = 0.6 + 0.4 * np.clip(normal @ np.array([0.3, 0.4, 0.86]), 0, 1)
        color = np.where((kind == index + 1)[:, None], light[:, None] * np.array(base), color)
    return np.where((kind == -1)[:, None], SKY, color)


def cast(origins: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Colours (N, 3) in [0, 255] seen along rays."""
    count = len(directions)
    best, kind = np.full(count, np.inf), np.full(count, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = -origins[:, 2] / directions[:, 2]
    spot = origins + t[:, None] * directions
    hit = (t > 1e-3) & (np.abs(spot[:, :2]).max(axis=1) < 1.5)
    best[hit], kind[hit] = t[hit], 0
    for index, (center, radius, _) in enumerate(BALLS):
        offset = origins - center
        b = (offset * directions).sum(axis=1)
        square = b * b - (offset * offset).sum(axis=1) + radius**2
        t = -b - np.sqrt(np.maximum(square, 0))
        hit = (square > 0) & (t > 1e-3) & (t < best)
        best[hit], kind[hit] = t[hit], index + 1
    points = origins + np.where(np.isfinite(best), best, 0)[:, None] * directions
    return shade(points, kind)


@dataclass
class Scene:
    """What was written, in the scene's own world (z up, OpenGL cameras)."""

    root: Path
    names: list[str]
    poses: np.ndarray  # (N, 4, 4) camera-to-world
    width: int
    height: int
    focal: float


def look_at(eye: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Camera-to-world (4, 4), OpenGL axes."""
    back = eye - target
    back = back / np.linalg.norm(back)
    right = np.cross([0, 0, 1.0], back)
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2], pose[:3, 3] = right, np.cross(back, right), back, eye
    return pose


def photograph(pose: np.ndarray, width: int, height: int, focal: float, samples: int = 2) -> np.ndarray:
    """An image (H, W, 3) uint8, samples x samples rays a pixel."""
    total = np.zeros((height * width, 3))
    for sy in range(samples):
        for sx in range(samples):
            x, y = np.meshgrid(
                np.arange(width) + (sx + 0.5) / samples, np.arange(height) + (sy + 0.5) / samples
            )
            local = np.stack([(x - width / 2) / focal, -(y - height / 2) / focal, -np.ones_like(x)], axis=-1)
            rays = local.reshape(-1, 3) @ pose[:3, :3].T
            rays /= np.linalg.norm(rays, axis=1, keepdims=True)
            total += cast(np.broadcast_to(pose[:3, 3], rays.shape), rays)
    return (total / samples**2 + 0.5).astype(np.uint8).reshape(height, width, 3)


def surface_points(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Seed points (count, 3) on the surfaces, and their colours (count, 3) uint8."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, count, p=[0.6, 0.2, 0.2])
    points = np.zeros((count, 3))
    points[:, :2] = rng.uniform(-1.5, 1.5, (count, 2))
    for index, (center, radius, _) in enumerate(BALLS):
        normal = rng.normal(size=(count, 3))
        normal /= np.linalg.norm(normal, axis=1, keepdims=True)
        points = np.where((kind == index + 1)[:, None], np.array(center) + radius * normal, points)
    return points, shade(points, kind).clip(0, 255).astype(np.uint8)


def write_ply(path: Path, points: np.ndarray, colors: np.ndarray) -> None:
    """A binary point cloud."""
    row = np.dtype([(n, "<f4") for n in "xyz"] + [(n, "u1") for n in ("red", "green", "blue")])
    data = np.empty(len(points), dtype=row)
    for i, name in enumerate(row.names or ()):
        data[name] = points[:, i] if i < 3 else colors[:, i - 3]
    header = f"ply\nformat binary_little_endian 1.0\nelement vertex {len(points)}\n"
    header += "".join(
        f"property {'float' if i < 3 else 'uchar'} {n}\n" for i, n in enumerate(row.names or ())
    )
    path.write_bytes((header + "end_header\n").encode() + data.tobytes())


def make(root: Path, images: int = 9, width: int = 64, height: int = 48) -> Scene:
    """Photographs in root/images, no description yet."""
    (root / "images").mkdir(parents=True, exist_ok=True)
    focal = 0.9 * width
    names, poses = [], []
    for i in range(images):
        angle = 2 * np.pi * i / max(images, 1)
        eye = np.array([2.0 * np.cos(angle), 2.0 * np.sin(angle), 1.0 + 0.3 * (i % 2)])
        poses.append(look_at(eye, np.array([0, 0, 0.2])))
        names.append(f"view_{i:03d}.png")
        Image.fromarray(photograph(poses[-1], width, height, focal)).save(root / "images" / names[-1])
    return Scene(root, names, np.array(poses).reshape(-1, 4, 4), width, height, focal)


def write_nerfstudio(root: Path, points: int | None = 400, **kwargs: int) -> Scene:
    """A Nerfstudio folder; points=None writes no cloud."""
    scene = make(root, **kwargs)
    meta: dict = {
        "camera_model": "OPENCV",
        "fl_x": scene.focal,
        "fl_y": scene.focal,
        "cx": scene.width / 2,
        "cy": scene.height / 2,
        "w": scene.width,
        "h": scene.height,
        "frames": [
            {"file_path": f"images/{name}", "transform_matrix": pose.tolist()}
            for name, pose in zip(scene.names, scene.poses, strict=True)
        ],
    }
    if points is not None:
        write_ply(root / "sparse_pc.ply", *surface_points(points))
        meta["ply_file_path"] = "sparse_pc.ply"
    (root / "transforms.json").write_text(json.dumps(meta, indent=1))
    return scene


def quaternion(rotation: np.ndarray) -> np.ndarray:
    """(w, x, y, z) of a rotation matrix, through its largest eigenvector (Bar-Itzhack)."""
    r = rotation
    k = np.array(
        [
            [r[0, 0] - r[1, 1] - r[2, 2], 0, 0, 0],
            [r[0, 1] + r[1, 0], r[1, 1] - r[0, 0] - r[2, 2], 0, 0],
            [r[0, 2] + r[2, 0], r[1, 2] + r[2, 1], r[2, 2] - r[0, 0] - r[1, 1], 0],
            [r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1], r[0, 0] + r[1, 1] + r[2, 2]],
        ]
    )
    _, vectors = np.linalg.eigh(k / 3)
    q = vectors[[3, 0, 1, 2], -1]
    return q * np.sign(q[0]) if q[0] else q


def write_colmap(root: Path, points: int = 400, binary: bool = True, model: int = 1, **kwargs: int) -> Scene:
    """A COLMAP folder: images and sparse/0, one PINHOLE camera (or another model number)."""
    scene = make(root, **kwargs)
    folder = root / "sparse" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    parameters = (scene.focal, scene.focal, scene.width / 2, scene.height / 2)
    poses = []
    for pose in scene.poses:
        w2c = np.linalg.inv(pose @ np.diag([1.0, -1, -1, 1]))
        poses.append((*quaternion(w2c[:3, :3]), *w2c[:3, 3]))
    xyz, rgb = surface_points(points)
    if binary:
        extra = {0: 3, 1: 4, 7: 5, 10: 12}[model] - 4
        values = parameters[:3] if extra < 0 else (*parameters, *[0.0] * extra)
        camera = struct.pack("<QiiQQ", 1, 1, model, scene.width, scene.height)
        (folder / "cameras.bin").write_bytes(camera + struct.pack(f"<{len(values)}d", *values))
        images = struct.pack("<Q", len(poses))
        for i, (name, pose) in enumerate(zip(scene.names, poses, strict=True)):
            images += struct.pack("<i7di", i + 1, *pose, 1) + name.encode() + b"\0"
            images += struct.pack("<Q", 2) + struct.pack("<ddq", 1.5, 2.5, -1) * 2
        (folder / "images.bin").write_bytes(images)
        cloud = struct.pack("<Q", len(xyz))
        for i, (p, c) in enumerate(zip(xyz, rgb, strict=True)):
            cloud += struct.pack("<Q3d3BdQ", i + 1, *p, *c.tolist(), 0.5, 2) + struct.pack(
                "<iiii", 1, 0, 2, 0
            )
        (folder / "points3D.bin").write_bytes(cloud)
    else:
        (folder / "cameras.txt").write_text(
            f"# Camera list\n# Number of cameras: 1\n1 PINHOLE {scene.width} {scene.height} "
            + " ".join(map(repr, map(float, parameters)))
        )
        lines = [f"# Image list\n# Number of images: {len(poses)}, mean observations per image: 1"]
        for i, (name, pose) in enumerate(zip(scene.names, poses, strict=True)):
            lines += [
                f"{i + 1} {' '.join(repr(float(v)) for v in pose)} 1 {name}",
                "1.5 2.5 -1" if i % 2 else "",
            ]
        (folder / "images.txt").write_text("\n".join(lines) + "\n")
        rows = [
            f"{i + 1} {p[0]!r} {p[1]!r} {p[2]!r} {c[0]} {c[1]} {c[2]} 0.5 1 0 2 0"
            for i, (p, c) in enumerate(zip(xyz.tolist(), rgb.tolist(), strict=True))
        ]
        (folder / "points3D.txt").write_text(f"# Number of points: {len(rows)}\n" + "\n".join(rows) + "\n")
    return scene
