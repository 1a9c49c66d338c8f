# SPDX-License-Identifier: Apache-2.0
"""Lenses: distortion as pycolmap and Nerfstudio have it, the undistorted pinhole, photographs through each lens."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from ns_mgpu_splat.data import colmap, lens
from ns_mgpu_splat.data.images import ImageSource
from ns_mgpu_splat.data.lens import Lens, Pinhole

# model: its parameters after focal lengths and principal point
PARAMETERS = {
    "SIMPLE_PINHOLE": [],
    "PINHOLE": [],
    "SIMPLE_RADIAL": [-0.1],
    "RADIAL": [-0.1, 0.02],
    "OPENCV": [-0.1, 0.02, 0.003, -0.002],
    "FULL_OPENCV": [-0.1, 0.02, 0.003, -0.002, 0.01, 0.03, -0.01, 0.002],
    "OPENCV_FISHEYE": [0.05, -0.01, 0.003, -0.001],
    "SIMPLE_RADIAL_FISHEYE": [0.05],
    "RADIAL_FISHEYE": [0.05, -0.01],
    "SIMPLE_FISHEYE": [],
    "FISHEYE": [],
    "THIN_PRISM_FISHEYE": [0.05, -0.01, 0.003, -0.002, 0.003, -0.001, 0.004, -0.003],
    "RAD_TAN_THIN_PRISM_FISHEYE": [
        0.05, -0.01, 0.003, -0.001, 0.0005, -0.0002, 0.003, -0.002, 0.004, -0.001, -0.003, 0.001,
    ],
    "FOV": [0.9],
    "SIMPLE_DIVISION": [-0.2],
    "DIVISION": [0.2],
    "EUCM": [0.6, 1.1],
}  # fmt: skip
WIDTH, HEIGHT, FOCAL = 96, 72, 70.0


def camera_of(model: str) -> tuple[Pinhole, Lens, list[float]]:
    """Our camera of a COLMAP model, and COLMAP's list of parameters."""
    focals = [FOCAL] if colmap.kLensOf[model][1] == 1 else [FOCAL, FOCAL * 1.02]
    values = [*focals, 47.0, 37.5, *PARAMETERS[model]]
    read = colmap.camera_from_model(model, WIDTH, HEIGHT, tuple(values), "cameras.txt: camera 1")
    return Pinhole(WIDTH, HEIGHT, read.fx, read.fy, read.cx, read.cy), read.lens, values


def test_every_model_of_colmap_that_is_a_projection_is_supported() -> None:
    assert set(PARAMETERS) == set(colmap.kLensOf) == set(colmap.kParameters) - {"EQUIRECTANGULAR"}


@pytest.mark.parametrize("model", PARAMETERS)
def test_rays_meet_the_image_where_colmap_says(model: str) -> None:
    pycolmap = pytest.importorskip("pycolmap")
    camera, distortion, values = camera_of(model)
    try:
        theirs = pycolmap.Camera(model=model, width=WIDTH, height=HEIGHT, params=values)
    except (ValueError, TypeError) as error:
        pytest.skip(f"this pycolmap does not know {model}: {error}")
    rng = np.random.default_rng(0)
    rays = np.concatenate([rng.uniform(-0.6, 0.6, (200, 2)), np.zeros((1, 2)), [[1e-12, 0]]])
    expected = np.array([theirs.img_from_cam(np.array([[*ray, 1.0]])) for ray in rays]).reshape(-1, 2)
    x, y = lens.distort(rays[:, 0], rays[:, 1], distortion)
    ours = np.stack([x * camera.fx + camera.cx, y * camera.fy + camera.cy], axis=1)
    assert np.abs(ours - expected).max() < 1e-9


def test_fisheye624_is_nerfstudios() -> None:
    import torch
    from nerfstudio.cameras.camera_utils import fisheye624_project

    camera, distortion, values = camera_of("RAD_TAN_THIN_PRISM_FISHEYE")
    rays = np.random.default_rng(1).uniform(-0.8, 0.8, (100, 2))
    xyz = torch.from_numpy(np.concatenate([rays, np.ones((100, 1))], axis=1))[None]
    expected = fisheye624_project(xyz, torch.tensor([values], dtype=torch.float64))[0].numpy()
    x, y = lens.distort(rays[:, 0], rays[:, 1], distortion)
    ours = np.stack([x * camera.fx + camera.cx, y * camera.fy + camera.cy], axis=1)
    assert np.abs(ours - expected).max() < 1e-6


@pytest.mark.parametrize("model", PARAMETERS)
def test_undistorted_photograph_shows_what_its_pinhole_sees(model: str, tmp_path) -> None:
    """Oracle: a smooth pattern at infinity, photographed through the lens by inverting the model by iteration."""
    camera, distortion, _ = camera_of(model)
    px, py = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    u, v = (px - camera.cx) / camera.fx, (py - camera.cy) / camera.fy
    x, y = u.copy(), v.copy()
    for _ in range(500):  # damped fixed point: all these lenses are monotonic in the picture
        du, dv = lens.distort(x, y, distortion)
        x, y = x + 0.3 * (u - du), y + 0.3 * (v - dv)
    assert max(np.abs(lens.distort(x, y, distortion)[0] - u).max(), 0) < 1e-6
    Image.fromarray(pattern(x, y)).save(tmp_path / "a.png")
    pixels, _ = ImageSource(tmp_path / "a.png", None, camera, distortion).read()
    pinhole = lens.undistorted_pinhole(camera, distortion)
    assert lens.why_no_pinhole(camera, distortion) is None
    assert (pinhole.width, pinhole.height) == (WIDTH, HEIGHT)
    expected = pattern((px - pinhole.cx) / pinhole.fx, (py - pinhole.cy) / pinhole.fy).astype(float)
    off = np.abs(pixels - expected).max(axis=-1)
    assert np.quantile(off, 0.95) < 2.5  # of 255: linear interpolation of a smooth pattern


def pattern(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A smooth picture (H, W, 3) uint8 of ray directions (x, y, 1)."""
    waves = [np.sin(6 * x + 1) * np.cos(5 * y), np.cos(7 * y + 2) * np.sin(4 * x), np.sin(5 * (x + y))]
    return (127.5 + 120 * np.stack(waves, axis=-1) + 0.5).astype(np.uint8)


@pytest.mark.parametrize(
    "distortion",
    [
        Lens("opencv", (500.0,)),
        Lens("opencv", (-30.0, 4.0)),
        Lens("fisheye", (400.0, -3000.0)),
    ],
)
def test_coefficients_that_leave_no_picture_are_noticed(distortion: Lens) -> None:
    assert lens.why_no_pinhole(Pinhole(WIDTH, HEIGHT, FOCAL, FOCAL, 48, 36), distortion) is not None


@pytest.mark.parametrize("degrees", [120, 170, 200])
def test_a_very_wide_fisheye_keeps_its_middle(degrees: int) -> None:
    """As a pinhole it would be endless: what is kept is at most 127 degrees across, and inside the photograph."""
    focal = WIDTH / np.radians(degrees)
    camera, distortion = Pinhole(WIDTH, HEIGHT, focal, focal, 48, 36), Lens("fisheye", (0.0, 0, 0, 0))
    assert lens.why_no_pinhole(camera, distortion) is None
    kept = lens.undistorted_pinhole(camera, distortion)
    corner = np.hypot(48 / kept.fx, 36 / kept.fy)
    assert corner <= 2.0001
    assert np.arctan(48 / kept.fx) <= np.radians(degrees / 2)
    if degrees >= 170:
        assert corner > 1.99
    else:  # tight: the corner, an edge or both touch the photograph's edges
        reach = lens.distort(np.array([48 / kept.fx, 0]), np.array([0, 36 / kept.fy]), distortion)
        assert max(reach[0][0] * focal / 48, reach[1][1] * focal / 36) == pytest.approx(1, abs=0.3)


def test_invisible_pixels_do_not_bleed_into_the_undistorted_picture() -> None:
    pixels = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    pixels[:, : WIDTH // 2] = (200, 100, 50, 255)
    camera = Pinhole(WIDTH, HEIGHT, FOCAL, FOCAL, 48, 36)
    result = lens.undistort(pixels, camera, Lens("opencv", (0.05,)))
    seen = result[..., 3] > 8
    assert np.abs(result[seen][:, :3].astype(int) - (200, 100, 50)).max() <= 2
