# SPDX-License-Identifier: Apache-2.0
"""Fisheye and orthographic cameras of Nerfstudio: datasets of OPENCV_FISHEYE, and the cameras that its tools hand over.

Oracles: the scene's exact ray casting through OpenCV's formula, and the rays of Nerfstudio's own cameras.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scene
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio_tools import train_many
from PIL import Image

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatTable
from ns_mgpu_splat.nerfstudio.dataparser import MgpuSplatDataParserConfig, random_points
from ns_mgpu_splat.nerfstudio.model import CameraError, lens_of, view_matrix
from ns_mgpu_splat.splats import project

K = (-0.05, 0.005, 0.0, 0.0)  # (1 / 3, 2 / 15, ...) would be a pinhole
WIDTH, HEIGHT, FOCAL = 64, 48, 30.0  # 83 degrees off the axis in the corners


def fisheye_picture(pose: np.ndarray, samples: int = 2) -> np.ndarray:
    """The scene through the lens: each ray's angle is found by bisection."""
    total = np.zeros((HEIGHT * WIDTH, 3))
    for sy in range(samples):
        for sx in range(samples):
            x, y = np.meshgrid(
                np.arange(WIDTH) + (sx + 0.5) / samples, np.arange(HEIGHT) + (sy + 0.5) / samples
            )
            u, v = (x - WIDTH / 2) / FOCAL, (y - HEIGHT / 2) / FOCAL
            radius = np.hypot(u, v)
            low, high = np.zeros_like(radius), np.full_like(radius, 2.0)
            for _ in range(50):
                t = (low + high) / 2
                beyond = t * (1 + K[0] * t**2 + K[1] * t**4) > radius
                low, high = np.where(beyond, low, t), np.where(beyond, t, high)
            local = np.stack([u / radius * np.sin(low), -v / radius * np.sin(low), -np.cos(low)], axis=-1)
            rays = local.reshape(-1, 3) @ pose[:3, :3].T
            total += scene.cast(np.broadcast_to(pose[:3, 3], rays.shape), rays)
    return (total / samples**2 + 0.5).astype(np.uint8).reshape(HEIGHT, WIDTH, 3)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> scene.Scene:
    """The tiny scene as a Nerfstudio folder of an OPENCV_FISHEYE camera."""
    made = scene.write_nerfstudio(
        tmp_path_factory.mktemp("fisheye"), images=13, points=1500, width=WIDTH, height=HEIGHT
    )
    for name, pose in zip(made.names, made.poses, strict=True):
        Image.fromarray(fisheye_picture(pose)).save(made.root / "images" / name)
    file = made.root / "transforms.json"
    lens = {"camera_model": "OPENCV_FISHEYE", "fl_x": FOCAL, "fl_y": FOCAL, "k1": K[0], "k2": K[1]}
    file.write_text(json.dumps(json.loads(file.read_text()) | lens))
    return made


def test_a_fisheye_dataset_keeps_its_pictures_and_its_lens(capture: scene.Scene) -> None:
    parser = MgpuSplatDataParserConfig(data=capture.root).setup()
    parser.level = "sizes"
    outputs = parser.get_dataparser_outputs("train")
    cameras = outputs.cameras
    assert {int(t) for t in cameras.camera_type.flatten()} == {CameraType.FISHEYE.value}
    assert torch.allclose(cameras.distortion_params[:, :4], torch.tensor(K).expand(len(cameras), 4))
    assert (float(cameras.fx[0]), float(cameras.cx[0])) == (FOCAL, WIDTH / 2)
    stored = np.asarray(Image.open(outputs.image_filenames[0]))
    assert np.array_equal(outputs.metadata["sources"][0].read()[0], stored)


def test_training_on_a_fisheye_dataset_shows_its_held_out_pictures(
    capture: scene.Scene, tmp_path: Path, run_tool: Callable[..., object]
) -> None:
    """And the seed points lie where the pictures show them, which they do not if these are taken for a pinhole's."""
    wrong = tmp_path / "pinhole"
    wrong.mkdir()
    (wrong / "images").symlink_to(capture.root / "images")
    (wrong / "sparse_pc.ply").symlink_to(capture.root / "sparse_pc.ply")
    meta = json.loads((capture.root / "transforms.json").read_text())
    plain = meta | {"camera_model": "OPENCV", "k1": 0.0, "k2": 0.0}
    (wrong / "transforms.json").write_text(json.dumps(plain))
    options = ["--schedule-steps", 300, "--timestamp", "run"]
    options += ["--pipeline.model.max-gaussians", 2500, "--pipeline.model.warmup-length", 50]
    options += ["--pipeline.model.refine-every", 50, "--pipeline.model.background-color", "black"]
    runs = [
        ["--data", root, "--experiment-name", name, "--max-num-iterations", steps, *options]
        for name, root, steps in (("fisheye", capture.root, 300), ("pinhole", wrong, 5))
    ]
    results = train_many(runs, tmp_path)
    assert [r["code"] for r in results] == [0, 0], results
    starts = [np.mean(r["losses"][:5]) for r in results]  # type: ignore[index]
    assert starts[0] < 0.85 * starts[1], starts
    assert np.mean(results[0]["losses"][-20:]) < 0.4 * starts[0]  # type: ignore[index]
    said = " ".join(str(results[0]["out"]).split())
    assert not re.search("undistort", said, re.IGNORECASE)
    config = tmp_path / "fisheye" / "mgpu-splat" / "run" / "config.yml"
    run_tool("ns-eval", "--load-config", config, "--output-path", tmp_path / "eval.json")
    assert (
        json.loads((tmp_path / "eval.json").read_text())["results"]["psnr"] > 17
    )  # the seed points have 12.6 dB


@pytest.mark.parametrize(
    ("kind", "distortion"),
    [
        (CameraType.PERSPECTIVE, None),
        (CameraType.FISHEYE, None),
        (CameraType.FISHEYE, (0.05, -0.01, 0.003, -0.001, 0.0, 0.0)),
        (CameraType.ORTHOPHOTO, None),
    ],
)
def test_a_point_on_nerfstudios_ray_lands_on_the_rays_pixel(
    kind: CameraType, distortion: tuple[float, ...] | None
) -> None:
    ns_mgpu_splat.init()
    pose = scene.look_at(np.array([1.0, -2.0, 0.7]), np.array([0.1, 0.2, 0.3]))[:3]
    focal = 9.0 if kind is CameraType.ORTHOPHOTO else 20.0
    cameras = Cameras(
        camera_to_worlds=torch.from_numpy(pose).float()[None],
        fx=torch.tensor([[focal]]),
        fy=torch.tensor([[1.1 * focal]]),
        cx=torch.tensor([[31.0]]),
        cy=torch.tensor([[25.0]]),
        width=torch.tensor([[64]]),
        height=torch.tensor([[48]]),
        camera_type=kind,
        distortion_params=None if distortion is None else torch.tensor([distortion]),
    )
    pixels = torch.tensor([[5, 9], [24, 31], [40, 60], [12, 33], [47, 2]])  # row, column
    rays = cameras.generate_rays(camera_indices=0, coords=pixels + 0.5)
    points = rays.origins + 1.7 * rays.directions
    table = SplatTable.from_points(points, torch.full((5, 3), 0.5))
    with torch.no_grad():
        table.opacities.fill_(4.0)
    viewmat = view_matrix(cameras.camera_to_worlds[0])
    camera = Camera(viewmat, focal, 1.1 * focal, 31.0, 25.0, 64, 48, *lens_of(cameras[0:1]))
    records = project(table, camera)
    assert records.row.cpu().tolist() == [0, 1, 2, 3, 4]
    expected = pixels.flip(1) + 0.5
    assert torch.allclose(records.means2d.detach().cpu(), expected, atol=0.01)


def test_cameras_that_cannot_be_drawn_are_refused_and_not_taken_for_pinholes() -> None:
    drawn = {CameraType.PERSPECTIVE, CameraType.FISHEYE, CameraType.ORTHOPHOTO}
    for kind in set(CameraType) - drawn:
        camera = Cameras(torch.eye(4)[None, :3], 20.0, 20.0, 32.0, 24.0, 64, 48, camera_type=kind)
        with pytest.raises(CameraError, match=f"{kind.name} cameras cannot be drawn. Choose a perspective"):
            lens_of(camera)


def test_random_points_lie_in_what_a_fisheye_sees() -> None:
    ns_mgpu_splat.init()
    cameras = Cameras(
        camera_to_worlds=torch.eye(4)[None, :3],
        fx=torch.tensor([[20.0]]),
        fy=torch.tensor([[20.0]]),
        cx=torch.tensor([[32.0]]),
        cy=torch.tensor([[24.0]]),
        width=torch.tensor([[64]]),
        height=torch.tensor([[48]]),
        camera_type=torch.tensor([[CameraType.FISHEYE.value]]),
        distortion_params=torch.tensor([[0.05, -0.01, 0.003, -0.001, 0.0, 0.0]]),
    )
    points, colors = random_points(cameras, 500, 1.0)
    assert float((points[:, 2] > 0).float().mean()) > 0.02  # beyond 90 degrees of an axis along -z
    table = SplatTable.from_points(points, colors / 255)
    with torch.no_grad():
        table.opacities.fill_(4.0)
        table.scales.fill_(-8.0)
    camera = Camera(
        view_matrix(cameras.camera_to_worlds[0]), 20.0, 20.0, 32.0, 24.0, 64, 48, *lens_of(cameras[0:1])
    )
    records = project(table, camera)
    assert len(records.row) >= 499  # one may lie on the rim
    x, y = records.means2d.detach().cpu().unbind(-1)
    assert ((x > -0.5) & (x < 64.5) & (y > -0.5) & (y < 48.5)).all()
    assert float(x.std()) > 15
