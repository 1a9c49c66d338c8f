# SPDX-License-Identifier: Apache-2.0
"""Lenses: distortion as pycolmap and Nerfstudio have it, the undistorted pinhole, photographs through each lens; fisheyes."""

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
RENDERED = [model for model in PARAMETERS if colmap.kLensOf[model][0] == "fisheye"]  # as they are


def camera_of(model: str) -> tuple[Pinhole, Lens, list[float]]:
    """Our camera of a COLMAP model, and COLMAP's list of parameters."""
    focals = [FOCAL] if colmap.kLensOf[model][1] == 1 else [FOCAL, FOCAL * 1.02]
    values = [*focals, 47.0, 37.5, *PARAMETERS[model]]
    return *colmap.camera_from_model(model, WIDTH, HEIGHT, tuple(values), "cameras.txt: camera 1"), values


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


@pytest.mark.parametrize("model", [model for model in PARAMETERS if model not in RENDERED])
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
        Lens("thin_prism_fisheye", (400.0, -3000.0)),
    ],
)
def test_coefficients_that_leave_no_picture_are_noticed(distortion: Lens) -> None:
    assert lens.why_no_pinhole(Pinhole(WIDTH, HEIGHT, FOCAL, FOCAL, 48, 36), distortion) is not None


@pytest.mark.parametrize("degrees", [120, 170, 200])
def test_a_very_wide_thin_prism_fisheye_keeps_its_middle(degrees: int) -> None:
    """As a pinhole it would be endless: what is kept is at most 127 degrees across, and inside the photograph."""
    focal = WIDTH / np.radians(degrees)
    camera, distortion = Pinhole(WIDTH, HEIGHT, focal, focal, 48, 36), Lens("thin_prism_fisheye")
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


# ---- fisheyes, which are rendered as they are


@pytest.mark.parametrize("model", RENDERED)
def test_a_fisheye_photograph_stays_as_it_is(model: str, tmp_path) -> None:
    camera, distortion, _ = camera_of(model)
    pixels = np.random.default_rng(2).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    source = ImageSource(tmp_path / "a.png", None, camera, distortion)
    read, mask = source.read()
    assert np.array_equal(read, pixels)
    assert mask is None
    assert not source.has_mask
    assert lens.undistorted_pinhole(camera, distortion) == camera
    assert lens.why_no_fisheye(camera, distortion) is None


def test_the_angle_of_a_fisheyes_pixel_is_the_one_that_meets_it() -> None:
    distortion = Lens("fisheye", (0.05, -0.01, 0.003, -0.001))
    angle = np.linspace(0, 1.4, 50)
    radius, _ = lens.distort(np.tan(angle), np.zeros(50), distortion)
    assert np.abs(lens.fisheye_angle(radius, distortion) - angle).max() < 1e-6


def test_pixels_that_no_ray_meets_do_not_count(tmp_path) -> None:
    """d(t) = t - 0.1 t^3 grows up to t = sqrt(1 / 0.3), to 2/3 of it."""
    focal, distortion = 30.0, Lens("fisheye", (-0.1, 0.0, 0.0, 0.0))
    camera = Pinhole(WIDTH, HEIGHT, focal, focal, 48, 36)
    last = focal * 2 / 3 / np.sqrt(0.3)
    x, y = np.meshgrid(np.arange(WIDTH) + 0.5 - 48, np.arange(HEIGHT) + 0.5 - 36)
    expected = np.hypot(x, y) <= last
    assert 0.5 < expected.mean() < 0.95
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "a.png")
    given = np.zeros((HEIGHT, WIDTH), np.uint8)
    given[:, :60] = 255
    Image.fromarray(given).save(tmp_path / "mask.png")
    for file, counts in ((None, expected), (tmp_path / "mask.png", expected & (given > 0))):
        source = ImageSource(tmp_path / "a.png", file, camera, distortion)
        assert source.has_mask
        mask = source.read()[1]
        assert mask is not None
        assert mask.shape == (HEIGHT, WIDTH, 1)
        assert (mask[..., 0] != counts).mean() < 1e-3  # the fold is found on a grid of angles


@pytest.mark.parametrize(
    ("coefficients", "says"), [((400.0, -3000.0), "stretch"), ((-30.0, 0.0, 0.0, 0.0), "degrees around")]
)
def test_coefficients_of_no_fisheye_are_noticed(coefficients: tuple[float, ...], says: str) -> None:
    reason = lens.why_no_fisheye(Pinhole(WIDTH, HEIGHT, FOCAL, FOCAL, 48, 36), Lens("fisheye", coefficients))
    assert reason is not None
    assert says in reason
