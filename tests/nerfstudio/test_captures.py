# SPDX-License-Identifier: Apache-2.0
"""Reading captures: poses, cameras, splits, seed points. Oracles: Nerfstudio's own parsers, and the scene's definition."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scene
import torch
from datasets import UTM, georeferenced, write_good
from PIL import Image

from ns_mgpu_splat.data import capture as captures
from ns_mgpu_splat.data import checks, colmap
from ns_mgpu_splat.nerfstudio.dataparser import MgpuSplatDataParserConfig


def parse(root: Path, split: str = "train", **changes):
    parser = MgpuSplatDataParserConfig(data=root, **changes).setup()
    parser.level = "sizes"
    return parser.get_dataparser_outputs(split)


def by_name(outputs) -> dict[str, torch.Tensor]:
    return {p.name: c for p, c in zip(outputs.image_filenames, outputs.cameras.camera_to_worlds, strict=True)}


@pytest.mark.parametrize("name", ["brighton_small", "banana_small"])
def test_colmap_folder_gives_the_cameras_and_points_of_nerfstudios_parser(
    shared_data: Path, name: str
) -> None:
    from nerfstudio.data.dataparsers.colmap_dataparser import ColmapDataParserConfig

    root = shared_data / name
    ours = parse(root)
    theirs = (
        ColmapDataParserConfig(data=root, colmap_path=Path("sparse/0"), downscale_factor=1)
        .setup()
        .get_dataparser_outputs("train")
    )
    expected = by_name(theirs)
    for file, pose in by_name(ours).items():
        if file in expected:  # theirs counts every 8th by COLMAP's image number, ours by name
            assert torch.allclose(pose, expected[file], atol=1e-5), file  # float32 poses of size 1
    assert torch.allclose(ours.dataparser_transform.float(), theirs.dataparser_transform, atol=1e-4)
    assert ours.dataparser_scale == pytest.approx(theirs.dataparser_scale, rel=1e-5)
    ordered = [p.sort(dim=0).values for p in (ours.metadata["points3D_xyz"], theirs.metadata["points3D_xyz"])]
    assert torch.allclose(*ordered, atol=1e-4)


def test_nerfstudio_folder_gives_the_cameras_of_nerfstudios_parser(nerfstudio_folder: scene.Scene) -> None:
    from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig

    ours = parse(nerfstudio_folder.root)
    theirs = (
        NerfstudioDataParserConfig(data=nerfstudio_folder.root, downscale_factor=1)
        .setup()
        .get_dataparser_outputs("train")
    )
    expected = by_name(theirs)
    assert set(by_name(ours)) == set(expected)
    for file, pose in by_name(ours).items():
        assert torch.allclose(pose, expected[file], atol=1e-5), file
    assert torch.equal(ours.cameras.fx, theirs.cameras.fx)
    assert torch.equal(ours.cameras.cx, theirs.cameras.cx)


@pytest.mark.parametrize("kind", ["binary", "text"])
def test_colmap_folder_of_the_scene_has_its_poses_and_colours(tmp_path: Path, kind: str) -> None:
    made = scene.write_colmap(tmp_path / "with space", images=5, binary=kind == "binary")
    read = captures.read_capture(made.root)
    assert [f.name for f in read.frames] == made.names
    turn = np.vstack([captures.kWorldFromColmap, [0, 0, 0, 1]])
    for frame, pose in zip(read.frames, made.poses, strict=True):
        assert np.allclose(frame.camera_to_world, turn @ pose, atol=1e-9)
        camera = frame.camera
        assert (camera.fx, camera.cx, camera.width) == (made.focal, made.width / 2, made.width)
    points = read.read_points()
    assert points is not None
    expected, colors = scene.surface_points(400)
    assert np.allclose(points[0], expected @ turn[:3, :3].T, atol=1e-6)
    assert np.array_equal(points[1], colors)


def test_text_image_without_observations_at_the_end_of_the_file_is_read(tmp_path: Path) -> None:
    made = scene.write_colmap(tmp_path, images=2, binary=False)
    file = tmp_path / "sparse" / "0" / "images.txt"
    file.write_text(file.read_text().rstrip("\n").rsplit("\n", 1)[0] + "\n")
    assert len(colmap.read_images(file.parent)[0]) == len(made.names)


def test_colmap_folder_holds_out_every_eighth_image_by_name(shared_data: Path) -> None:
    root = shared_data / "caliterra_aerial"
    held = [p.name for p in parse(root, "test").image_filenames]
    names = sorted(p.name for p in (root / "images").iterdir())
    assert held == names[::8]
    assert sorted(held + [p.name for p in parse(root).image_filenames]) == names


def test_lists_in_the_file_decide_the_split(tmp_path: Path) -> None:
    made = scene.write_nerfstudio(tmp_path, images=6)
    file = tmp_path / "transforms.json"
    meta = json.loads(file.read_text())
    meta["train_filenames"] = [f"images/{n}" for n in made.names[:4]]
    meta["test_filenames"] = [f"images/{n}" for n in made.names[4:]]
    file.write_text(json.dumps(meta))
    assert [p.name for p in parse(tmp_path).image_filenames] == made.names[:4]
    assert [p.name for p in parse(tmp_path, "test").image_filenames] == made.names[4:]
    assert [p.name for p in parse(tmp_path, "val").image_filenames] == made.names[4:]


@pytest.mark.parametrize(
    ("size", "factor", "words"),
    [
        ((64, 48), 3, None),  # 21x16
        ((64, 48), 4, "leaves 16x12 pixels of images of 64x48; at least 16 must be left of the shorter side. "
         "The largest factor that makes sense is 3."),
        ((48, 64), 1000, "leaves 1x1 pixels of images of 48x64; at least 16"),
        ((40, 31), 2, "leaves 20x15 pixels of images of 40x31; at least 16 must be left of the shorter side. Leave it out."),
        ((8, 6), 1, None),
        ((8, 6), None, None),
    ],
)  # fmt: skip
def test_a_downscale_factor_that_leaves_no_picture_is_refused(
    tmp_path: Path, size: tuple[int, int], factor: int | None, words: str | None
) -> None:
    """1000 trained on pictures of a pixel or two, and said nothing."""
    scene.write_nerfstudio(tmp_path, images=2, width=size[0], height=size[1])
    if words is None:
        assert parse(tmp_path, downscale_factor=factor).cameras.height[0] == size[1] // (factor or 1)
        return
    with pytest.raises(checks.DatasetError) as refused:
        parse(tmp_path, downscale_factor=factor)
    assert f"--pipeline.datamanager.dataparser.downscale-factor {factor} {words}" in str(refused.value)


def test_the_least_side_that_may_be_left_is_the_smallest_image_s(tmp_path: Path) -> None:
    scene.write_nerfstudio(tmp_path, images=3)
    file = tmp_path / "transforms.json"
    meta = json.loads(file.read_text())
    meta["frames"][1].update(w=60, h=20)
    file.write_text(json.dumps(meta))
    with pytest.raises(checks.DatasetError, match="leaves 30x10 pixels of images of 60x20"):
        parse(tmp_path, downscale_factor=2)


@pytest.mark.parametrize("layout", ["nerfstudio", "colmap"])
@pytest.mark.parametrize(("asked", "meant"), [("mein Test/images", "mein Test"), ("", "mein Test")])
def test_a_folder_beside_the_capture_s_own_is_answered_with_that(
    tmp_path: Path, layout: str, asked: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its photographs' folder, or the one that it lies in."""
    write_good(tmp_path / "mein Test", layout)
    expected = f"there are no cameras. Did you mean --data '{tmp_path / meant}'? That is a capture."
    with pytest.raises(checks.DatasetError) as refused:
        captures.find_capture(tmp_path / asked)
    assert str(refused.value).endswith(expected)
    monkeypatch.chdir(tmp_path)  # the folder that is meant is said in full
    with pytest.raises(checks.DatasetError) as refused:
        captures.find_capture(Path(asked))
    assert str(refused.value).endswith(expected)


def test_a_folder_far_from_any_capture_is_answered_with_what_makes_one(tmp_path: Path) -> None:
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    (tmp_path / "z").mkdir()
    with pytest.raises(checks.DatasetError, match=r"there are no cameras\. Run `ns-process-data` or COLMAP"):
        captures.find_capture(tmp_path / "photos")
    write_good(tmp_path / "capture", "colmap")
    for asked in (
        "photos/sub",
        "capture/sparse",
    ):  # not the reconstruction's folder, which has no photographs
        with pytest.raises(checks.DatasetError) as refused:
            captures.find_capture(tmp_path / asked)
        said = f"Did you mean --data {tmp_path / 'capture'}?"
        assert (said in str(refused.value)) == (asked == "capture/sparse")
    write_good(tmp_path / "another", "nerfstudio")
    with pytest.raises(checks.DatasetError, match=r"another\? That is one of 2 captures in this folder\.$"):
        captures.find_capture(tmp_path)


@pytest.mark.parametrize("skip", [False, True])
def test_leaving_bad_frames_out_is_advised_once_and_not_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], skip: bool
) -> None:
    """Each line of the list ended with the same option."""
    made = scene.write_nerfstudio(tmp_path, images=6, points=50)
    images = [tmp_path / "images" / name for name in made.names]
    images[1].unlink()
    images[2].write_bytes(b"")
    images[3].write_bytes(images[3].read_bytes()[:-200])
    points, colors = scene.surface_points(50)
    points[17] = np.nan
    scene.write_ply(tmp_path / "sparse_pc.ply", points, colors)
    parser = MgpuSplatDataParserConfig(data=tmp_path).setup()
    parser.level, parser.skip = "full", skip
    if skip:
        parser.get_dataparser_outputs("train")
        said = capsys.readouterr().out
    else:
        with pytest.raises(checks.DatasetError) as refused:
            parser.get_dataparser_outputs("train")
        said = str(refused.value)
    for path in images[1:4]:
        assert path.name in said
    assert said.count("Restore the file") == 3
    assert "Remove them from the file" in said
    if skip:
        assert "on-bad-image" not in said
    else:
        *problems, advice = said.splitlines()[1:]
        assert len(problems) == 4
        assert "on-bad-image" not in "".join(problems)
        assert advice == (
            "Bad frames and seed points can be left out instead: --pipeline.datamanager.on-bad-image skip."
        )


@pytest.mark.parametrize(("bad", "advised"), [(1, True), (4, False)])
def test_leaving_bad_frames_out_is_advised_where_it_leaves_some(
    bad: int, advised: bool, tmp_path: Path
) -> None:
    made = scene.write_nerfstudio(tmp_path, images=4)
    for name in made.names[:bad]:
        (tmp_path / "images" / name).write_bytes(b"")
    with pytest.raises(checks.DatasetError) as refused:
        parse(tmp_path)
    said = str(refused.value)
    assert said.endswith(
        " Restore the file. Bad frames can be left out instead: --pipeline.datamanager.on-bad-image skip."
    ) == (bad == 1)
    assert ("on-bad-image" in said) == advised


@pytest.mark.parametrize("size", [(64, 48), (63, 47)])
def test_downscaled_cameras_see_the_same_field_of_view(tmp_path: Path, size: tuple[int, int]) -> None:
    scene.write_nerfstudio(tmp_path, images=2, width=size[0], height=size[1])
    full, half = parse(tmp_path).cameras, parse(tmp_path, downscale_factor=2).cameras
    assert (half.width[0], half.height[0]) == (size[0] // 2, size[1] // 2)
    for width, focal in (("width", "fx"), ("height", "fy")):
        view = [float(getattr(c, width)[0] / getattr(c, focal)[0]) for c in (full, half)]
        assert view[0] == pytest.approx(view[1], rel=1e-6)
    assert not (tmp_path / "images_2").exists()


def test_georeferenced_captures_lose_nothing(tmp_path: Path) -> None:
    """Oracle: the same capture near the origin, and the world's coordinates as they were written."""
    made = write_good(tmp_path / "near", "nerfstudio")
    write_good(tmp_path / "far", "nerfstudio")
    georeferenced(tmp_path / "far")
    near, far = parse(tmp_path / "near"), parse(tmp_path / "far")
    assert torch.allclose(near.cameras.camera_to_worlds, far.cameras.camera_to_worlds, atol=1e-6)
    assert torch.allclose(near.metadata["points3D_xyz"], far.metadata["points3D_xyz"], atol=1e-6)
    # and back: float32 keeps 1e-7 of two metres, where it would keep half a metre of 4,500,000
    far.save_dataparser_transform(tmp_path / "far" / "out" / "dataparser_transforms.json")
    saved = json.loads((tmp_path / "far" / "out" / "dataparser_transforms.json").read_text())
    transform, scale = np.array(saved["transform"]), saved["scale"]
    model = far.cameras.camera_to_worlds[:, :, 3].double().numpy()
    world = np.linalg.solve(transform[:, :3], (model / scale - transform[:, 3]).T).T
    expected = {Path(n).stem: pose[:3, 3] + UTM for n, pose in zip(made.names, made.poses, strict=True)}
    for file, position in zip(far.image_filenames, world, strict=True):
        assert np.abs(position - expected[file.stem]).max() < 1e-6
    assert np.allclose(saved["offset"], made.poses[:, :3, 3].mean(axis=0) + UTM, atol=1e-6)
    poses = far.transform_poses_to_original_space(far.cameras.camera_to_worlds, "opengl")
    assert np.abs(poses[:, :3, 3].numpy() - world).max() < 1e-6


@pytest.mark.parametrize("layout", ["nerfstudio", "colmap"])
def test_saved_transform_leads_back_to_the_world_before_applied_transform_and_scale(
    tmp_path: Path, layout: str
) -> None:
    made = write_good(tmp_path, layout)
    applied, factor = np.array([[0, 1.0, 0, 3], [1.0, 0, 0, -2], [0, 0, -1.0, 5]]), 2.5
    if layout == "nerfstudio":
        file = tmp_path / "transforms.json"
        meta = json.loads(file.read_text()) | {"applied_transform": applied.tolist(), "applied_scale": factor}
        for frame, pose in zip(meta["frames"], made.poses, strict=True):
            moved = np.vstack([applied, [0, 0, 0, 1]]) @ pose
            moved[:3, 3] *= factor
            frame["transform_matrix"] = moved.tolist()
        file.write_text(json.dumps(meta))
    outputs = parse(tmp_path)
    transform = outputs.dataparser_transform.numpy()
    model = outputs.cameras.camera_to_worlds[:, :, 3].double().numpy()
    world = np.linalg.solve(transform[:, :3], (model / outputs.dataparser_scale - transform[:, 3]).T).T
    expected = {Path(n).stem: pose[:3, 3] for n, pose in zip(made.names, made.poses, strict=True)}
    for path, position in zip(outputs.image_filenames, world, strict=True):
        assert np.abs(position - expected[path.stem]).max() < 1e-6


def test_leaving_images_out_changes_neither_world_nor_split(tmp_path: Path) -> None:
    """A tool that looks at no image must have the world and the split of the training, which found some to be bad."""
    made = scene.write_nerfstudio(tmp_path, images=12, points=50)
    whole = {split: parse(tmp_path, split) for split in ("train", "test")}
    held = whole["test"].image_filenames[0].name
    for name in (made.names[1], made.names[7], held):
        (tmp_path / "images" / name).write_bytes(b"no image")
    parser = MgpuSplatDataParserConfig(data=tmp_path).setup()
    parser.level, parser.skip = "full", True
    for split, outputs in whole.items():
        left = parser.get_dataparser_outputs(split)
        names = [p.name for p in outputs.image_filenames]
        assert [p.name for p in left.image_filenames] == [
            n for n in names if n not in (made.names[1], made.names[7], held)
        ]
        assert torch.equal(left.dataparser_transform, outputs.dataparser_transform)
        assert left.dataparser_scale == outputs.dataparser_scale
        assert all(torch.equal(by_name(left)[n], by_name(outputs)[n]) for n in by_name(left))


def test_one_image_is_trained_on_and_none_held_out(tmp_path: Path) -> None:
    scene.write_nerfstudio(tmp_path, images=1)
    assert len(parse(tmp_path).image_filenames) == 1
    assert len(parse(tmp_path, "test").image_filenames) == 0
    assert parse(tmp_path).dataparser_scale > 0


def test_capture_without_points_starts_inside_what_the_cameras_see(tmp_path: Path) -> None:
    scene.write_nerfstudio(tmp_path, points=None, images=4)
    outputs = parse(tmp_path, num_random_points=2000)
    points = outputs.metadata["points3D_xyz"]
    assert points.shape == (2000, 3)
    seen = torch.zeros(len(points), dtype=torch.bool)
    cameras = outputs.cameras
    for i in range(len(cameras)):
        pose = cameras.camera_to_worlds[i]
        local = (points - pose[:, 3]) @ pose[:, :3]
        x = cameras.fx[i] * local[:, 0] / -local[:, 2] + cameras.cx[i]
        y = -cameras.fy[i] * local[:, 1] / -local[:, 2] + cameras.cy[i]
        seen |= (
            (local[:, 2] < 0)
            & (x >= -0.01)
            & (x <= cameras.width[i] + 0.01)
            & (y >= -0.01)
            & (y <= cameras.height[i] + 0.01)
        )
    assert bool(seen.all())


def test_empty_cloud_counts_as_no_points(tmp_path: Path) -> None:
    scene.write_nerfstudio(tmp_path, points=0, images=3)
    assert len(parse(tmp_path, num_random_points=77).metadata["points3D_xyz"]) == 77


def test_distorted_camera_becomes_a_pinhole_whose_image_fits(tmp_path: Path) -> None:
    """Oracle: the scene photographed by a lens model of our own, then undistorted, equals a pinhole photograph."""
    made = scene.write_nerfstudio(tmp_path, images=1, width=96, height=72)
    k1, k2 = 0.08, -0.02
    x, y = np.meshgrid(np.arange(96) + 0.5, np.arange(72) + 0.5)
    u, v = (x - 48) / made.focal, (y - 36) / made.focal
    undistorted = np.stack([u, v], axis=-1)
    for _ in range(50):  # fixed-point inverse of the Brown model
        r2 = (undistorted**2).sum(axis=-1, keepdims=True)
        undistorted = np.stack([u, v], axis=-1) / (1 + k1 * r2 + k2 * r2**2)
    local = np.concatenate([undistorted[..., :1], -undistorted[..., 1:], -np.ones((72, 96, 1))], axis=-1)
    rays = local.reshape(-1, 3) @ made.poses[0][:3, :3].T
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
    colors = scene.cast(np.broadcast_to(made.poses[0][:3, 3], rays.shape), rays)
    Image.fromarray(colors.reshape(72, 96, 3).astype(np.uint8)).save(tmp_path / "images" / made.names[0])
    file = tmp_path / "transforms.json"
    meta = json.loads(file.read_text()) | {"k1": k1, "k2": k2}
    file.write_text(json.dumps(meta))
    outputs = parse(tmp_path)
    camera = outputs.cameras[0]
    image, _ = outputs.metadata["sources"][0].read()
    assert image.shape == (72, 96, 3)
    px, py = np.meshgrid(np.arange(96) + 0.5, np.arange(72) + 0.5)
    rays = (
        np.stack(
            [
                (px - float(camera.cx)) / float(camera.fx),
                -(py - float(camera.cy)) / float(camera.fy),
                -np.ones_like(px),
            ],
            axis=-1,
        ).reshape(-1, 3)
        @ made.poses[0][:3, :3].T
    )
    rays /= np.linalg.norm(rays, axis=1, keepdims=True)
    expected = scene.cast(np.broadcast_to(made.poses[0][:3, 3], rays.shape), rays).reshape(72, 96, 3)
    off = np.abs(image.astype(float) - expected).max(axis=-1)
    assert np.quantile(off, 0.8) < 3, "interpolation blurs edges only"
    shifted = np.abs(np.roll(image, 1, axis=1).astype(float) - expected).max(axis=-1)
    assert off.mean() < 0.6 * shifted.mean(), "half a pixel off would be as bad as this"


def test_capture_is_found_without_a_flag(tmp_path: Path) -> None:
    made = scene.write_colmap(tmp_path / "a", images=2)
    assert captures.read_capture(made.root).layout == "colmap"
    flat = tmp_path / "b"
    shutil.copytree(made.root / "images", flat / "images")
    shutil.copytree(made.root / "sparse" / "0", flat / "sparse")
    assert captures.read_capture(flat).layout == "colmap"
    both = scene.write_nerfstudio(tmp_path / "a", images=2)
    assert captures.read_capture(both.root).layout == "nerfstudio"
    assert captures.read_capture(both.root, colmap_path=Path("sparse/0")).layout == "colmap"


def test_a_colmap_text_model_with_one_line_an_image_is_refused_not_halved(tmp_path: Path) -> None:
    scene.write_colmap(tmp_path, images=4, binary=False)
    file = tmp_path / "sparse" / "0" / "images.txt"
    images = [line for line in file.read_text().splitlines() if line.endswith(".png")]
    assert len(images) == 4
    file.write_text("\n".join(images) + "\n")
    with pytest.raises(
        checks.DatasetError, match=r"images\.txt has no line of 2D observations before"
    ) as refused:
        captures.read_capture(tmp_path)
    assert "Each image needs two lines" in str(refused.value)


@pytest.mark.parametrize("text", ["hello\n", "1 0 0\n2 0 0\n", "1 0 0 x 1 2 3 0.5\n"])
def test_colmap_text_points_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    scene.write_colmap(tmp_path, images=2, binary=False)
    (tmp_path / "sparse" / "0" / "points3D.txt").write_text(text)
    with pytest.raises(checks.DatasetError, match=r"points3D\.txt is cut short or damaged"):
        captures.read_capture(tmp_path).read_points()


def test_the_folder_of_a_larger_reconstruction_can_be_typed(tmp_path: Path) -> None:
    write_good(tmp_path, "colmap")
    larger = tmp_path / "sparse" / "mein Test"
    larger.mkdir()
    (larger / "images.bin").write_bytes((99).to_bytes(8, "little"))
    (note,) = captures.read_capture(tmp_path).notes
    assert note.endswith("--pipeline.datamanager.dataparser.colmap-path 'sparse/mein Test'.")
