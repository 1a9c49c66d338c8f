# SPDX-License-Identifier: Apache-2.0
"""Measured depths. Oracles: numbers put into files by hand, Pillow's rotations, a projection written out."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from ns_mgpu_splat.data import colmap
from ns_mgpu_splat.data.depth import kMostSamples, samples_from_map, samples_from_points
from ns_mgpu_splat.data.images import ImageError, ImageSource
from ns_mgpu_splat.data.lens import Lens, Pinhole

CAMERA = Pinhole(4, 3, 5.0, 5.0, 2.0, 1.5)


def source_of(camera: Pinhole = CAMERA, orientation: int = 1) -> ImageSource:
    return ImageSource(Path("unused.png"), None, camera, Lens("pinhole", ()), orientation)


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.uint16).reshape(3, 4) * 1000
    Image.fromarray(values).save(tmp_path / "map.png")
    got = samples_from_map(tmp_path / "map.png", source_of(), 1e-3 * 0.5, 0)
    assert got.pixels.tolist() == list(range(1, 12))
    assert np.allclose(got.depths, np.arange(1, 12) * 0.5, rtol=1e-6)
    assert got.typical == pytest.approx(3.0)
    floats = values.astype(np.float64)
    floats[0, 1], floats[1, 1], floats[2, 2] = np.nan, np.inf, -1
    np.save(tmp_path / "map.npy", floats)
    got = samples_from_map(tmp_path / "map.npy", source_of(), 1.0, 0)
    assert got.pixels.tolist() == [2, 3, 4, 6, 7, 8, 9, 11]
    assert got.depths[0] == 2000
    np.save(tmp_path / "none.npy", np.zeros((3, 4)))
    empty = samples_from_map(tmp_path / "none.npy", source_of(), 1.0, 0)
    assert len(empty.pixels) == 0
    assert empty.typical == 1


def test_a_large_map_is_sampled_evenly_and_a_map_of_another_size_is_fitted(tmp_path: Path) -> None:
    np.save(tmp_path / "large.npy", np.full((600, 800), 2.0, np.float32))
    got = samples_from_map(tmp_path / "large.npy", source_of(Pinhole(800, 600, 9, 9, 400, 300)), 1.0, 3)
    assert len(got.pixels) == kMostSamples == len(set(got.pixels.tolist()))
    assert abs(got.pixels.mean() / (600 * 800) - 0.5) < 0.01
    np.save(tmp_path / "half.npy", np.array([[1.0, 2.0], [3.0, 4.0]]))
    got = samples_from_map(tmp_path / "half.npy", source_of(Pinhole(4, 4, 9, 9, 2, 2)), 1.0, 0)
    assert got.depths.reshape(4, 4).tolist() == [[1, 1, 2, 2]] * 2 + [[3, 3, 4, 4]] * 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_map_turns_with_its_photograph(tmp_path: Path, orientation: int) -> None:
    values = np.arange(1, 13, dtype=np.uint8).reshape(3, 4)
    image = Image.fromarray(values)
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened))
    np.save(tmp_path / "map.npy", values.astype(np.float32))
    high, wide = expected.shape
    got = samples_from_map(
        tmp_path / "map.npy", source_of(Pinhole(wide, high, 9, 9, 2, 2), orientation), 1.0, 0
    )
    assert got.depths.reshape(high, wide).tolist() == expected.tolist()


def test_files_that_are_no_depth_maps_are_named(tmp_path: Path) -> None:
    Image.new("RGB", (4, 3)).save(tmp_path / "colours.png")
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    np.save(tmp_path / "cube.npy", np.zeros((3, 4, 2)))
    for name, reason in (
        ("colours.png", "mode RGB"),
        ("broken.npy", "cannot be read as a depth map"),
        ("cube.npy", r"float64 \[3, 4, 2\], expected numbers \[H, W\]"),
        ("missing.png", "cannot be read as a depth map"),
    ):
        with pytest.raises(ImageError, match=reason):
            samples_from_map(tmp_path / name, source_of(), 1.0, 0)


def test_points_fall_on_their_pixels_with_their_depth_and_weight() -> None:
    viewmat = np.eye(4)
    viewmat[2, 3] = 1.0  # the camera is one unit back
    points = np.array(
        [[0, 0, 1.0], [0.3, -0.2, 1.0], [0, 0, -2.0], [9, 0, 1.0], [np.nan, 0, 1], [0.1, 0.1, 3]]
    )
    errors = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 2.0])
    got = samples_from_points(points, errors, 1.0, viewmat, CAMERA)
    # x = 5 * 0.3 / 2 + 2 = 2.75, y = 5 * -0.2 / 2 + 1.5 = 1.0; x = 5 * 0.1 / 4 + 2 = 2.125, y = 1.625
    assert got.pixels.tolist() == [1 * 4 + 2, 1 * 4 + 2, 1 * 4 + 2]
    assert got.depths.tolist() == [2, 2, 4]
    assert np.allclose(got.weights, np.exp([-0.0, -1.0, -4.0]))


def test_depths_of_a_fisheye_are_distances_on_its_own_pixels(tmp_path: Path) -> None:
    """Pixels as OpenCV's, of which one lies at 100 degrees; a depth map holds z at the same places."""
    import cv2

    camera, lens = Pinhole(80, 60, 20.0, 21.0, 40.0, 30.0), Lens("fisheye", (0.05, -0.01, 0.003, -0.001))
    front = np.array([[0.4, 0.3, 2.0], [-1.0, 0.5, 1.5], [2.0, 0.1, 1.0], [0.0, 0.0, 3.0]])
    k = np.array([[20.0, 0, 40], [0, 21.0, 30], [0, 0, 1]])
    at, _ = cv2.fisheye.projectPoints(
        front.reshape(-1, 1, 3), np.zeros(3), np.zeros(3), k, np.array(lens.coefficients)
    )
    wanted = [int(np.floor(y)) * 80 + int(np.floor(x)) for x, y in at[:, 0]]
    beside = [[np.sin(np.radians(100)), 0, np.cos(np.radians(100))], [0, 0, -1.0], [0.0, np.nan, 1.0]]
    points = np.concatenate([front, beside])
    got = samples_from_points(points, np.zeros(7), 1.0, np.eye(4), camera, lens)
    t = np.radians(100)
    radius = t * (1 + 0.05 * t**2 - 0.01 * t**4 + 0.003 * t**6 - 0.001 * t**8)
    assert got.pixels.tolist() == [*wanted, 30 * 80 + int(40 + 20 * radius)]
    assert np.allclose(got.depths, [*np.linalg.norm(front, axis=1), 1.0], rtol=1e-6)

    z = np.zeros((60, 80), np.float32)
    z.reshape(-1)[wanted] = front[:, 2]
    z[30, 78] = 1.0  # 100 degrees from the axis, where z is no depth
    np.save(tmp_path / "map.npy", z)
    source = ImageSource(Path("unused.png"), None, camera, lens)
    got = samples_from_map(tmp_path / "map.npy", source, 1.0, 0)
    order = np.argsort(wanted)
    assert got.pixels.tolist() == np.array(wanted)[order].tolist()
    # a pixel's centre is up to 0.7 pixels from the point: 2 degrees
    assert np.allclose(got.depths, np.linalg.norm(front, axis=1)[order], rtol=0.1)


def write_points(folder: Path, tracks: list[list[int]]) -> None:
    """A points3D.bin and its text twin: point i at (i, 0, 0) with error i / 2."""
    data = struct.pack("<Q", len(tracks))
    lines = []
    for i, track in enumerate(tracks):
        data += struct.pack("<Q3d3BdQ", 10 + i, i, 0, 0, 1, 2, 3, i / 2, len(track))
        data += b"".join(struct.pack("<ii", image, 0) for image in track)
        lines.append(f"{10 + i} {i} 0 0 1 2 3 {i / 2} " + " ".join(f"{image} 0" for image in track))
    (folder / "bin").mkdir()
    (folder / "bin" / "points3D.bin").write_bytes(data)
    (folder / "txt").mkdir()
    (folder / "txt" / "points3D.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", ["bin", "txt"])
def test_tracks_say_which_image_saw_which_point(tmp_path: Path, kind: str) -> None:
    write_points(tmp_path, [[1, 7], [7], [], [7, 7, 3]])
    found = colmap.read_tracks(tmp_path / kind)
    assert found.xyz[:, 0].tolist() == [0, 1, 2, 3]
    assert found.errors.tolist() == [0, 0.5, 1, 1.5]
    assert {i: rows.tolist() for i, rows in found.points_of.items()} == {1: [0], 3: [3], 7: [0, 1, 3]}


def test_no_points_are_no_tracks(tmp_path: Path) -> None:
    write_points(tmp_path, [])
    for kind in ("bin", "txt"):
        assert not colmap.read_tracks(tmp_path / kind).points_of


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_points(tmp_path, [[1, 2, 3]])
    path = tmp_path / "bin" / "points3D.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Exception, match=r"points3D\.bin is cut short"):
        colmap.read_tracks(tmp_path / "bin")
