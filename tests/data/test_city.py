# SPDX-License-Identifier: Apache-2.0
"""The city: its datasets load, agree with themselves from view to view, and are never half there.

The oracle for the pictures is geometry written here anew: depth of one view, put into space with transforms.json alone, must be
seen in the same colour by another view.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from plyfile import PlyData

from ns_mgpu_splat.data.city import cli

pytest.importorskip("open3d", reason="open3d (with libusb-1.0-0) takes the pictures", exc_type=ImportError)


def make(out: Path, *arguments: str) -> int:
    return cli.main([str(out), *arguments])


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 16 pictures of two blocks, in a folder with spaces in its name."""
    out = tmp_path_factory.mktemp("data") / "my little town"
    assert make(out, "--blocks", "2", "--images", "16", "--size", "200x150", "--seed", "3") == 0
    return out


def load(folder: Path) -> tuple[dict, list[dict]]:
    meta = json.loads((folder / "transforms.json").read_text())
    frames = []
    for f in meta["frames"]:
        with (
            Image.open(folder / f["file_path"]) as picture,
            Image.open(folder / f["depth_file_path"]) as depth,
        ):
            frames.append(
                {
                    "name": Path(f["file_path"]).stem,
                    "pose": np.array(f["transform_matrix"]),
                    "rgb": np.asarray(picture, np.float64) / 255,
                    "depth": np.asarray(depth, np.float64) * 1e-3,
                }
            )
    return meta, frames


def disagreement(meta: dict, frames: list[dict], shift: float) -> tuple[np.ndarray, np.ndarray]:
    """For each pair of views with enough in common: the median colour difference, and the share of pixels below 0.12.

    `shift` moves the places (world units) before the second view looks at them.
    """
    f, cx, cy, w, h = meta["fl_x"], meta["cx"], meta["cy"], meta["w"], meta["h"]
    u, v = np.meshgrid(np.arange(w) + 0.5, np.arange(h) + 0.5)
    medians, shares = [], []
    for a in frames:
        z = a["depth"]
        world = (
            np.stack([(u - cx) / f * z, -(v - cy) / f * z, -z], -1) @ a["pose"][:3, :3].T + a["pose"][:3, 3]
        )
        world, color, z = world[z > 0] + [shift, shift, 0], a["rgb"][z > 0], z[z > 0]
        for b in frames:
            if a is b:
                continue
            p = (world - b["pose"][:3, 3]) @ b["pose"][:3, :3]
            depth = np.maximum(-p[:, 2], 1e-6)
            j = np.floor(p[:, 0] / depth * f + cx).astype(int)
            i = np.floor(-p[:, 1] / depth * f + cy).astype(int)
            seen = (p[:, 2] < -0.05) & (j >= 0) & (j < w) & (i >= 0) & (i < h)
            seen[seen] = np.abs(b["depth"][i[seen], j[seen]] / depth[seen] - 1) < 0.01
            # From much farther a pixel averages over more of the texture: compare views of one scale.
            seen &= np.abs(np.log(depth / z)) < np.log(1.5)
            if seen.sum() < 1000:
                continue
            difference = np.abs(b["rgb"][i[seen], j[seen]] - color[seen]).mean(-1)
            medians.append(np.median(difference))
            shares.append((difference < 0.12).mean())
    return np.array(medians), np.array(shares)


def test_pictures_agree_where_depth_says_they_see_the_same_place(town: Path) -> None:
    meta, frames = load(town)
    medians, shares = disagreement(meta, frames, 0.0)
    assert len(medians) >= 12
    # Nearest pixels: what differs is edges, half a pixel aside. Median 2.5 of 255 steps, edges a tenth of the picture.
    assert medians.mean() < 0.01
    assert medians.max() < 0.025
    assert shares.mean() > 0.88
    assert shares.min() > 0.75
    # Poses or depths half a metre wrong would show.
    assert disagreement(meta, frames, 0.05)[0].mean() > 0.014


def test_views_of_both_kinds_show_what_they_should(town: Path) -> None:
    _, frames = load(town)
    names = sorted(f["name"] for f in frames)
    assert names == [f"aerial_{k:04d}" for k in range(8)] + [f"street_{k:04d}" for k in range(8)]
    for f in frames:
        assert f["rgb"].shape == (150, 200, 3)
        assert f["rgb"].std() > 0.08, f"{f['name']} is almost uniform"
        rotation = f["pose"][:3, :3]
        np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-9)
        if f["name"].startswith("aerial"):
            assert f["pose"][2, 3] > 4  # high up
            assert f["pose"][2, 2] > 0.7  # looking down by 45 degrees or more
            assert (f["depth"] > 0).all()
        else:
            assert 0.15 < f["pose"][2, 3] < 0.3
            assert abs(f["pose"][2, 2]) < 0.2
            assert (f["depth"] == 0).mean() > 0.05, "no sky"
            assert f["depth"][f["depth"] > 0].min() > 0.03, f"{f['name']} stands too close to something"


@pytest.mark.parametrize("step", [8, 10])
def test_held_out_views_are_of_all_kinds(step: int) -> None:
    """Nerfstudio holds out every tenth picture, COLMAP's readers every eighth."""
    from ns_mgpu_splat.data.city.cameras import place_cameras
    from ns_mgpu_splat.data.city.town import build_town

    poses = place_cameras(build_town(2, 0), 200)
    for first in (0, step - 1):
        above = np.array([p.camera_to_world for p in poses[first::step] if p.name.startswith("aerial")])
        steep = above[:, 2, 2] > 0.99
        headings = {round(float(np.arctan2(*m[[1, 0], 2])) / (np.pi / 2)) % 4 for m in above[~steep]}
        assert 0 < steep.mean() < 0.6
        assert len(headings) >= 3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cameras_stand_clear_of_everything(seed: int) -> None:
    import open3d as o3d

    from ns_mgpu_splat.data.city.cameras import place_cameras
    from ns_mgpu_splat.data.city.town import build_town

    arrays = build_town(5, seed)
    scene = o3d.t.geometry.RaycastingScene()
    vertices = arrays.corners.reshape(-1, 3)
    scene.add_triangles(
        o3d.core.Tensor(np.ascontiguousarray(vertices)),
        o3d.core.Tensor(np.arange(len(vertices), dtype=np.uint32).reshape(-1, 3)),
    )
    places = np.array([p.camera_to_world[:3, 3] for p in place_cameras(arrays, 600)], np.float32)
    distance = scene.compute_distance(o3d.core.Tensor(places)).numpy()
    assert distance.min() > 0.03, "a camera is within 30 cm of a surface"
    above = np.concatenate([places, np.tile(np.float32([1e-3, 2e-3, 1]), (len(places), 1))], 1)
    crossings = scene.count_intersections(o3d.core.Tensor(above)).numpy()
    below_roofs = places[:, 2] < 0.4
    assert (crossings[~below_roofs] == 0).all(), "an aerial camera has something above it"
    assert (crossings[below_roofs] % 2 == 0).all(), "a street camera is inside something closed"


def test_nerfstudio_loads_it(town: Path) -> None:
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
    from nerfstudio.data.datasets.depth_dataset import DepthDataset

    outputs = (
        NerfstudioDataParserConfig(data=town, load_3D_points=True).setup().get_dataparser_outputs("train")
    )
    assert len(outputs.image_filenames) == 15
    points = outputs.metadata["points3D_xyz"].numpy()
    assert points.shape == outputs.metadata["points3D_rgb"].shape
    assert len(points) > 5000
    # The stock depth unit is right: a pixel's depth, put into space, lies among the seed points.
    item = DepthDataset(outputs)[2]
    camera = outputs.cameras[2]
    z = item["depth_image"].numpy()[::4, ::4, 0]
    i, j = np.mgrid[0:150:4, 0:200:4] + 0.5
    local = np.stack(
        [(j - float(camera.cx)) / float(camera.fx) * z, -(i - float(camera.cy)) / float(camera.fy) * z, -z],
        -1,
    )
    pose = camera.camera_to_worlds.numpy()
    world = (local @ pose[:, :3].T + pose[:, 3])[z > 0]
    from scipy.spatial import cKDTree

    nearest, _ = cKDTree(points).query(world)
    assert np.median(nearest) < 0.03


def test_seed_points_carry_sky_and_colours_of_the_pictures(town: Path) -> None:
    vertex = PlyData.read(town / "sparse_pc.ply")["vertex"]
    xyz = np.stack([vertex[c] for c in "xyz"], 1)
    rgb = np.stack([vertex[c] for c in ("red", "green", "blue")], 1) / 255
    radius = json.loads((town / "city.json").read_text())["dome_radius"]
    on_sky = np.abs(np.linalg.norm(xyz, axis=1) - radius) < 1e-3 * radius
    assert on_sky.sum() == 2500
    assert (rgb[on_sky][:, 2] > rgb[on_sky][:, 0]).mean() > 0.95, "the sky is not blue"
    meta, frames = load(town)
    f = next(f for f in frames if f["name"] == "aerial_0000")
    p = (xyz[~on_sky] - f["pose"][:3, 3]) @ f["pose"][:3, :3]
    z = np.maximum(-p[:, 2], 1e-6)
    j = np.floor(p[:, 0] / z * meta["fl_x"] + meta["cx"]).astype(int)
    i = np.floor(-p[:, 1] / z * meta["fl_y"] + meta["cy"]).astype(int)
    seen = (p[:, 2] < 0) & (j >= 0) & (j < meta["w"]) & (i >= 0) & (i < meta["h"])
    seen[seen] = np.abs(f["depth"][i[seen], j[seen]] / z[seen] - 1) < 0.005
    assert seen.sum() > 300
    assert np.median(np.abs(f["rgb"][i[seen], j[seen]] - rgb[~on_sky][seen]).mean(-1)) < 0.03


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_same_seed_same_bytes_other_seed_other_town(tmp_path: Path) -> None:
    options = ["--blocks", "1", "--images", "3", "--size", "41x31", "--splats", "500"]
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        assert make(tmp_path / name, *options, "--seed", seed) == 0
    a, b, c = (files_of(tmp_path / name) for name in "abc")
    assert a == b
    assert all(a[name] != c[name] for name in a)


@pytest.mark.parametrize(
    ("images", "size"),
    [("1", "64x48"), ("2", "33x57"), ("3", "1x1"), ("2", "7x200")],
    ids=["one", "odd", "pixel", "tall"],
)
def test_small_and_odd_sizes(tmp_path: Path, images: str, size: str) -> None:
    assert make(tmp_path / "t", "--blocks", "1", "--images", images, "--size", size) == 0
    meta, frames = load(tmp_path / "t")
    w, h = map(int, size.split("x"))
    assert len(frames) == int(images)
    assert (meta["w"], meta["h"]) == (w, h)
    assert all(f["rgb"].shape == (h, w, 3) and f["depth"].shape == (h, w) for f in frames)


def test_large_pictures_are_cast_in_chunks_without_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    from ns_mgpu_splat.data.city import raycast
    from ns_mgpu_splat.data.city.cameras import Lens, place_cameras
    from ns_mgpu_splat.data.city.town import build_town

    arrays = build_town(1, 0)
    renderer = raycast.Renderer(arrays)
    pose = place_cameras(arrays, 2)[1].camera_to_world
    whole = renderer.render(pose, Lens(90, 67))
    monkeypatch.setattr(raycast, "_CHUNK", 1000)
    parts = renderer.render(pose, Lens(90, 67))
    np.testing.assert_array_equal(whole.rgb, parts.rgb)
    np.testing.assert_array_equal(whole.depth, parts.depth)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    options = ["--blocks", "1", "--images", "1", "--size", "16x12"]
    assert make(tmp_path, *options) != 0
    assert "is not empty" in capsys.readouterr().err
    assert make(tmp_path, *options, "--overwrite") != 0
    assert "did not write" in capsys.readouterr().err
    assert files_of(tmp_path) == {"thesis.txt": b"precious"}
    assert make(tmp_path / "thesis.txt", *options) != 0
    assert "is a file" in capsys.readouterr().err


def test_overwrite_replaces_the_old_town_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path, "--blocks", "1", "--images", "4", "--size", "16x12", "--splats", "10") == 0
    (tmp_path / "images" / "mine.png").write_bytes(b"mine")
    before = files_of(tmp_path)
    assert make(tmp_path, "--blocks", "1", "--images", "2", "--size", "16x12") != 0
    assert files_of(tmp_path) == before
    assert make(tmp_path, "--blocks", "1", "--images", "2", "--size", "20x12", "--overwrite") == 0
    after = files_of(tmp_path)
    assert sorted(after) == [
        "city.json", "depths/aerial_0000.png", "depths/street_0000.png", "images/aerial_0000.png", "images/mine.png",
        "images/street_0000.png", "sparse_pc.ply", "transforms.json",
    ]  # fmt: skip
    assert after["images/mine.png"] == b"mine"
    # A stranger's file where a new one would go is not clobbered either.
    (tmp_path / "images" / "aerial_0001.png").write_bytes(b"theirs")
    assert make(tmp_path, "--blocks", "1", "--images", "4", "--size", "16x12", "--overwrite") != 0
    assert "in the way" in capsys.readouterr().err
    assert (tmp_path / "images" / "aerial_0001.png").read_bytes() == b"theirs"


def test_a_killed_run_leaves_nothing_that_looks_whole_and_does_not_block_the_next(tmp_path: Path) -> None:
    out = tmp_path / "town"
    command = [
        sys.executable,
        "-m",
        "ns_mgpu_splat.data.city.cli",
        str(out),
        "--blocks",
        "1",
        "--images",
        "400",
        "--size",
        "160x120",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while len(list(out.glob(".*/images/*.png"))) < 3:
            assert process.poll() is None, "ended before it could be killed"
            assert time.monotonic() < deadline, "wrote no picture within a minute"
            time.sleep(0.05)
        busy = subprocess.run(
            [*command[:3], str(out), "--images", "1"], capture_output=True, text=True, timeout=60, check=False
        )
        assert busy.returncode != 0
        assert "Another mgpu-splat-city is writing" in busy.stderr
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert [p.name for p in out.iterdir()] == [".mgpu-splat-city-partial"]
    assert make(out, "--blocks", "1", "--images", "2", "--size", "16x12") == 0
    assert sorted(os.listdir(out)) == ["city.json", "depths", "images", "sparse_pc.ply", "transforms.json"]


def test_overwrite_keeps_the_old_town_until_the_new_one_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ns_mgpu_splat.data.city import dataset

    options = ["--blocks", "1", "--images", "2", "--size", "16x12"]
    assert make(tmp_path, *options) == 0
    before = files_of(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "write_point_cloud", fail)
        assert make(tmp_path, *options, "--overwrite", "--seed", "5") != 0
    assert files_of(tmp_path) == before

    # Killed while files are being moved: no transforms.json, and --overwrite clears up.
    real = os.replace
    moved = 0

    def replace(source: Path, target: Path) -> None:
        nonlocal moved
        moved += 1
        if moved == 3:
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(dataset.os, "replace", replace)
        assert make(tmp_path, *options, "--overwrite", "--seed", "5") == 130
    assert not (tmp_path / "transforms.json").exists()
    assert make(tmp_path, *options, "--overwrite", "--seed", "5") == 0
    assert sorted(files_of(tmp_path)) == sorted(before)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--blocks", "0"], "--blocks is 0"),
        (["--images", "-1"], "negative"),
        (["--images", "0"], "nothing to make"),
        (["--size", "0x10"], "--size is 0x10"),
        (["--size", "99999x10"], "--size is 99999x10"),
    ],
)
def test_bad_numbers_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert make(tmp_path / "t", *arguments) == 1
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_a_size_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make(tmp_path / "t", "--size", "big")
    assert stop.value.code != 0
    assert "WIDTHxHEIGHT" in capsys.readouterr().err
