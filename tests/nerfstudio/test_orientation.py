# SPDX-License-Identifier: Apache-2.0
"""Which way is up: cameras made over flat ground, in a world that is turned at random; after reading, the ground's up is z."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scene
from nerfstudio.data.dataparsers.base_dataparser import DataparserOutputs

from ns_mgpu_splat.data.checks import DatasetError
from ns_mgpu_splat.export import world_frame
from ns_mgpu_splat.nerfstudio.dataparser import MgpuSplatDataParserConfig, rotation_to_z

pytestmark = pytest.mark.any_mesh  # no mesh is started

TURN = np.linalg.qr(np.random.default_rng(7).normal(size=(3, 3)))[0]
TURN *= np.linalg.det(TURN)  # a rotation: the capture's world has its up anywhere
OFFSET = np.array([4.1e5, 5.2e6, 310.0])  # and its origin far away, as a land survey's


def survey(headings: list[float], tilt: float) -> np.ndarray:
    """Camera-to-world (N, 4, 4) over the ground z = 0: strips 20 high, looking down but for `tilt` degrees ahead."""
    poses = []
    for strip in range(4):
        heading = np.radians(headings[strip % len(headings)])
        for along in range(6):
            eye = np.array([8.0 * along, 6.0 * strip, 20.0 + 0.3 * np.sin(5 * along + strip)])
            ahead = np.array([np.cos(heading), np.sin(heading), 0])
            down = np.radians(max(tilt, 1e-4))
            poses.append(scene.look_at(eye, eye + ahead * np.sin(down) - [0, 0, np.cos(down)]))
    return np.stack(poses)


def street(headings: list[float]) -> np.ndarray:
    """Camera-to-world (N, 4, 4) of somebody who walks and looks ahead, 1.7 above the ground."""
    eyes = [np.array([1.5 * i, 0.2 * (i % 3), 1.7]) for i in range(12)]
    angles = [np.radians(headings[i % len(headings)]) for i in range(12)]
    return np.stack(
        [
            scene.look_at(e, e + np.array([np.cos(a), np.sin(a), -0.02]))
            for e, a in zip(eyes, angles, strict=True)
        ]
    )


ROUND = [0.0, 90, 180, 270]
CASES = {
    "nadir, one heading": (survey([0], 0), "down"),
    "nadir, there and back": (survey([0, 180], 0), "down"),
    "nearly nadir, there and back": (survey([0, 180], 3), "down"),
    "oblique in all headings": (survey(ROUND, 45), "down"),
    "a street as by default": (street(ROUND), "up"),
    "a street as a survey": (street(ROUND), "down"),
}


def read(
    poses: np.ndarray, method: str, folder: Path, level: str = "none", center: str = "poses"
) -> DataparserOutputs:
    """What the dataparser makes of cameras whose world is turned and moved."""
    turned = poses.copy()
    turned[:, :3] = TURN @ turned[:, :3]
    turned[:, :3, 3] += OFFSET
    frames = [
        {"file_path": f"{i:03}.png", "transform_matrix": pose.tolist()} for i, pose in enumerate(turned)
    ]
    lens = {"fl_x": 8, "fl_y": 8, "cx": 4, "cy": 4, "w": 8, "h": 8}
    (folder / "transforms.json").write_text(json.dumps({**lens, "frames": frames}))
    if level != "none":
        for frame in frames:
            scene.Image.new("RGB", (8, 8)).save(folder / frame["file_path"])
    config = MgpuSplatDataParserConfig(data=folder, orientation_method=method, center_method=center)  # type: ignore[arg-type]
    parser = config.setup()
    parser.level, parser.want_points = level, False
    return parser.get_dataparser_outputs("train")


@pytest.mark.parametrize("case", CASES)
def test_the_grounds_up_is_z(case: str, tmp_path: Path) -> None:
    poses, method = CASES[case]
    outputs = read(poses, method, tmp_path)
    turn = outputs.dataparser_transform.numpy()[:, :3]
    assert turn.dtype == np.float64
    np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(turn) > 0
    up = turn @ TURN @ [0, 0, 1.0]
    tolerance = (
        1e-5 if "nearly" not in case else 1e-2
    )  # the default's is float32; strips look ahead by 3 degrees
    assert np.linalg.norm(up - [0, 0, 1]) < tolerance


def test_exports_world_frame_brings_the_cameras_back(tmp_path: Path) -> None:
    poses = survey([0, 180], 0)
    outputs = read(poses, "down", tmp_path)
    outputs.save_dataparser_transform(tmp_path / "dataparser_transforms.json")
    saved = json.loads((tmp_path / "dataparser_transforms.json").read_text())
    frame = world_frame(np.array(saved["transform"]), saved["scale"])
    kept = [int(path.stem) for path in outputs.image_filenames]
    near = outputs.cameras.camera_to_worlds[:, :, 3].numpy()
    was = poses[kept, :3, 3] @ TURN.T + OFFSET
    # float32 of coordinates within 1, at some 20 metres each; the origin is 5,000 km away
    np.testing.assert_allclose(frame.positions(near), was, atol=5e-6)


@pytest.mark.parametrize(
    ("poses", "method", "words"),
    [
        (survey([0, 180], 0), "up", "All photographs look the same way. If this is a survey from above"),
        (survey([0, 180], 0), "down", None),
        (survey(ROUND, 45), "up", None),
        (street(ROUND), "up", None),
        (street(ROUND), "down", 'is "up" for this capture'),
    ],
)
def test_cameras_that_do_not_go_with_the_method_are_said(
    poses: np.ndarray, method: str, words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(poses, method, tmp_path, "sizes")
    said = " ".join(capsys.readouterr().out.split())
    if words is None:
        assert "orientation-method" not in said
    else:
        assert said.count(words) == 1
        assert "orientation-method" in said


@pytest.mark.parametrize(
    "up", [(0, 0, 1), (0, 0, -1), (1, 0, 0), (1e-9, 0, -1), (0, -1e-5, -1), (0.6, 0, -0.8)]
)
def test_any_direction_is_turned_to_z(up: tuple[float, float, float]) -> None:
    unit = np.array(up, dtype=np.float64) / np.linalg.norm(up)
    turn = rotation_to_z(unit)
    np.testing.assert_allclose(turn @ unit, [0, 0, 1], atol=1e-15)
    np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-14)
    assert np.linalg.det(turn) > 0


@pytest.mark.parametrize("method", ["down", "up"])
def test_cameras_in_parallel_have_no_focus(method: str, tmp_path: Path) -> None:
    poses = np.repeat(np.eye(4)[None], 5, axis=0)
    poses[:, 0, 3] = np.arange(5)
    with pytest.raises(DatasetError, match="center-method poses"):
        read(poses, method, tmp_path, center="focus")


def test_vertical_needs_two_images(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="vertical needs two images"):
        read(np.eye(4)[None], "vertical", tmp_path)
