# SPDX-License-Identifier: Apache-2.0
"""Bad input ends with one clear sentence that names the file, before anything is compiled or trained."""

from __future__ import annotations

import copy
import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scene
import torch
from PIL import Image

from ns_mgpu_splat.nerfstudio import checkpoint, pipeline
from ns_mgpu_splat.nerfstudio.config import mgpu_splat


def train(root: Path, output: Path, **changes: object) -> str:
    """Start training as `ns-train` does and return what it prints when it refuses."""
    from nerfstudio.scripts.train import train_loop

    config = copy.deepcopy(mgpu_splat.config)
    config.vis, config.output_dir = "tensorboard", output
    config.pipeline.datamanager.data = root
    for name, value in changes.items():
        setattr(config, name, value)
    config.set_timestamp()
    with pytest.raises(SystemExit) as refused:
        train_loop(0, 1, config)
    assert isinstance(refused.value.code, str), "a text is printed and makes the exit code 1"
    return refused.value.code


@pytest.fixture
def never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the device is started: bad input must be refused before that."""

    def fail(*_: object) -> None:
        raise AssertionError("the device was started in spite of bad input")

    monkeypatch.setattr(pipeline, "start_device", fail)


def edit(root: Path, change: Callable[[dict], None]) -> None:
    file = root / "transforms.json"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def set_pose(meta: dict, value: float) -> None:
    meta["frames"][2]["transform_matrix"][0][3] = value


def set_meta(key: str, value: object) -> Callable[[Path], None]:
    return lambda root: edit(root, lambda meta: meta.update({key: value}))


def missing_image(root: Path) -> None:
    (root / "images" / "view_001.png").unlink()


def truncated_image(root: Path) -> None:
    cut(root / "images" / "view_001.png")


def text_image(root: Path) -> None:
    (root / "images" / "view_001.png").write_text("<html>404</html>")


def resized_image(root: Path) -> None:
    Image.new("RGB", (32, 24)).save(root / "images" / "view_001.png")


def nan_points(root: Path) -> None:
    points, colors = scene.surface_points(50)
    points[17] = np.nan
    scene.write_ply(root / "sparse_pc.ply", points, colors)


NERFSTUDIO = {
    "missing image": (missing_image, ["images/view_001.png", "missing"]),
    "truncated image": (truncated_image, ["images/view_001.png", "cut short"]),
    "not an image": (text_image, ["images/view_001.png", "not a known image format"]),
    "wrong size": (resized_image, ["images/view_001.png is 32x24", "64x48", "transforms.json"]),
    "no frames": (lambda r: edit(r, lambda m: m["frames"].clear()), ["transforms.json", "no images"]),
    "no frame list": (lambda r: edit(r, lambda m: m.pop("frames")), ["transforms.json", '"frames"']),
    "NaN pose": (
        lambda r: edit(r, lambda m: set_pose(m, float("nan"))),
        ["transforms.json", "view_002.png", "NaN"],
    ),
    "no focal length": (lambda r: edit(r, lambda m: m.pop("fl_x")), ["transforms.json", "fl_x"]),
    "unknown camera": (
        lambda r: edit(r, lambda m: m.update(camera_model="EQUIRECTANGULAR")),
        ["transforms.json", "EQUIRECTANGULAR", "not supported"],
    ),
    "NaN size": (set_meta("w", float("nan")), ["transforms.json", "view_000.png", "nanx48"]),
    "angle of 0": (
        lambda r: edit(r, lambda m: (m.pop("fl_x"), m.pop("fl_y"), m.update(camera_angle_x=0))),
        ["transforms.json", "camera_angle_x", "between 0 and pi"],
    ),
    "list as camera": (set_meta("camera_model", ["PINHOLE"]), ["transforms.json", "not supported"]),
    "distortion as text": (set_meta("distortion_params", ["a"]), ["distortion_params", "'a', not a number"]),
    "distortion as number": (set_meta("distortion_params", 0.1), ["distortion_params", "expected a list"]),
    "cloud as number": (set_meta("ply_file_path", 3), ["transforms.json: ply_file_path is 3", "file name"]),
    "mask as number": (
        lambda r: edit(r, lambda m: [f.update(mask_path=3) for f in m["frames"]]),
        ["mask_path of frame 0", "is 3, not a file name"],
    ),
    "scale as text": (set_meta("applied_scale", "x"), ["applied_scale is 'x', not a number"]),
    "scale of 0": (set_meta("applied_scale", 0), ["applied_scale is 0", "above 0"]),
    "orientation": (
        set_meta("orientation_override", "sideways"),
        ["orientation_override is 'sideways'", "pca"],
    ),
    "split outside": (
        set_meta("train_filenames", ["/x/y.png"]),
        ["train_filenames names /x/y.png", "no frame"],
    ),
    "split as text": (set_meta("train_filenames", "view_000.png"), ["train_filenames is no list"]),
    "split of numbers": (set_meta("val_filenames", [1]), ["an entry of val_filenames is 1, not a file name"]),
    "pose at no place": (lambda r: edit(r, lambda m: set_pose(m, 1e300)), ["view_002.png", "1e+300 units"]),
    "cut transforms": (lambda r: cut(r / "transforms.json"), ["transforms.json", "no valid JSON"]),
    "NaN point": (nan_points, ["sparse_pc.ply", "1 of 50 points", "17"]),
    "cut cloud": (lambda r: cut(r / "sparse_pc.ply"), ["sparse_pc.ply", "cut short"]),
    "lost cloud": (lambda r: (r / "sparse_pc.ply").unlink(), ["sparse_pc.ply", "missing"]),
}


def sparse(root: Path, name: str) -> Path:
    return root / "sparse" / "0" / name


def set_translation(root: Path) -> None:
    file = sparse(root, "images.bin")
    data = bytearray(file.read_bytes())
    struct.pack_into("<d", data, 8 + 4 + 8 * 4, float("nan"))
    file.write_bytes(bytes(data))


def set_point(root: Path) -> None:
    file = sparse(root, "points3D.bin")
    data = bytearray(file.read_bytes())
    struct.pack_into("<d", data, 8 + 8, float("inf"))
    file.write_bytes(bytes(data))


def set_model(root: Path, model: int) -> None:
    file = sparse(root, "cameras.bin")
    data = bytearray(file.read_bytes() + bytes(8))
    struct.pack_into("<i", data, 12, model)
    file.write_bytes(bytes(data))


def empty_images(root: Path) -> None:
    sparse(root, "images.bin").write_bytes(struct.pack("<Q", 0))


def empty_cameras(root: Path) -> None:
    sparse(root, "cameras.bin").write_bytes(struct.pack("<Q", 0))


def lost_folder(root: Path) -> None:
    (root / "images").rename(root / "photos")


COLMAP = {
    "missing image": (missing_image, ["images/view_001.png", "missing"]),
    "cut cameras": (lambda r: cut(sparse(r, "cameras.bin")), ["cameras.bin", "cut short"]),
    "cut images": (lambda r: cut(sparse(r, "images.bin")), ["images.bin", "cut short"]),
    "cut points": (lambda r: cut(sparse(r, "points3D.bin")), ["points3D.bin", "cut short"]),
    "cut points late": (lambda r: cut(sparse(r, "points3D.bin"), 0.99), ["points3D.bin", "cut short"]),
    "NaN pose": (set_translation, ["images.bin", "view_000.png", "NaN", "remove the frame in images.txt"]),
    "infinite point": (set_point, ["points3D.bin", "1 of 400 points"]),
    "unsupported camera": (lambda r: set_model(r, 17), ["cameras.bin", "EQUIRECTANGULAR", "not supported"]),
    "unknown camera": (lambda r: set_model(r, 99), ["cameras.bin", "99"]),
    "no images": (empty_images, ["images.bin", "no images"]),
    "no cameras": (empty_cameras, ["cameras.bin", "no cameras"]),
    "no images.bin": (lambda r: sparse(r, "images.bin").unlink(), ["sparse/0", "images.bin"]),
    "no photographs": (lost_folder, ["images", "does not exist"]),
}


@pytest.mark.parametrize("case", NERFSTUDIO)
@pytest.mark.usefixtures("never_starts")
def test_bad_nerfstudio_folder_is_refused_with_the_files_name(tmp_path: Path, case: str) -> None:
    spoil, words = NERFSTUDIO[case]
    scene.write_nerfstudio(tmp_path / "data", images=4, points=50)
    spoil(tmp_path / "data")
    text = train(tmp_path / "data", tmp_path / "out")
    for word in words:
        assert word in text
    assert "\n" not in text, "one sentence for one problem"
    assert not list((tmp_path / "out").rglob("*.ckpt"))


@pytest.mark.parametrize("case", COLMAP)
@pytest.mark.usefixtures("never_starts")
def test_bad_colmap_folder_is_refused_with_the_files_name(tmp_path: Path, case: str) -> None:
    spoil, words = COLMAP[case]
    scene.write_colmap(tmp_path / "data", images=4)
    spoil(tmp_path / "data")
    text = train(tmp_path / "data", tmp_path / "out")
    for word in words:
        assert word in text
    assert "\n" not in text, "one sentence for one problem"


@pytest.mark.usefixtures("never_starts")
def test_folders_without_a_capture_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    out = tmp_path / "out"  # runs are named after their data
    assert "empty is an empty folder" in train(tmp_path / "empty", out)
    assert "no cameras" in train(tmp_path / "photos", out)
    assert "nowhere does not exist" in train(tmp_path / "nowhere", out)


@pytest.mark.usefixtures("never_starts")
def test_all_bad_images_are_listed_not_just_the_first(tmp_path: Path) -> None:
    scene.write_nerfstudio(tmp_path / "data", images=6, points=50)
    spoiled = ["view_001.png", "view_003.png", "view_004.png"]
    missing_image(tmp_path / "data")
    cut(tmp_path / "data" / "images" / spoiled[1])
    Image.new("RGB", (32, 24)).save(tmp_path / "data" / "images" / spoiled[2])
    text = train(tmp_path / "data", tmp_path / "out")
    title, *lines, advice = text.splitlines()
    assert title.startswith("mgpu-splat: 3 problems")
    for line, name in zip(lines, spoiled, strict=True):
        assert name in line
    assert advice.startswith("Bad frames can be left out instead")


@pytest.mark.usefixtures("never_starts")
@pytest.mark.parametrize("binary", [True, False])
def test_an_image_of_another_size_than_colmap_saw_has_a_remedy(tmp_path: Path, binary: bool) -> None:
    """It was to be corrected "there", in images.bin: a binary file, and not the one that has the size."""
    made = scene.write_colmap(tmp_path / "data", images=3, points=50, binary=binary)
    resized_image(made.root)
    text = train(made.root, tmp_path / "out")
    cameras = "cameras.bin" if binary else "cameras.txt"
    assert f"view_001.png is 32x24, but the camera of image 1 in {cameras} says 64x48. " in text
    assert (
        "Give the photographs at the size that COLMAP saw, or run COLMAP or `ns-process-data` on these"
        in text
    )
    assert ("correct the camera's line there" in text) == (not binary)
    assert "correct w and h" not in text


@pytest.mark.usefixtures("never_starts")
@pytest.mark.parametrize("binary", [True, False])
def test_a_lens_that_cannot_be_is_corrected_where_it_is_written(tmp_path: Path, binary: bool) -> None:
    made = scene.write_colmap(tmp_path / "data", images=3, points=50, binary=binary)
    cameras = next(made.root.rglob("cameras.*"))
    if binary:
        content = bytearray(cameras.read_bytes())
        struct.pack_into("<d", content, 8 + 4 + 4 + 16, 1e12)  # count, id, model, size; then the focal length
        cameras.write_bytes(content)
    else:
        *words, _, fy, cx, cy = cameras.read_text().split(" ")
        cameras.write_text(" ".join([*words, "1e12", fy, cx, cy]))
    text = train(made.root, tmp_path / "out")
    assert "They are in pixels." in text
    assert "orrect them in cameras.txt." in text
    assert ("`colmap model_converter --output_type TXT`" in text) == binary


@pytest.mark.usefixtures("never_starts")
@pytest.mark.parametrize("older", [True, False])
def test_checkpoint_cut_short_is_refused_and_an_older_whole_one_is_named(tmp_path: Path, older: bool) -> None:
    folder = tmp_path / "nerfstudio_models"
    state = {"pipeline": {"a": torch.zeros(1000)}}
    if older:
        checkpoint.save(state | {"step": 9}, folder, 9, True)
    newest = checkpoint.save(state | {"step": 19}, folder, 19, True)
    cut(newest)
    text = train(tmp_path, tmp_path / "out", load_dir=folder)
    assert str(newest) in text
    assert "cut short" in text
    assert ("step-000000009.ckpt" in text) == older


@pytest.mark.usefixtures("never_starts")
def test_missing_checkpoints_are_refused_with_a_hint(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "nerfstudio_models"
    checkpoint.save({"pipeline": {}, "step": 9}, folder, 9, True)
    assert f"Did you mean {folder}?" in train(tmp_path, tmp_path / "out", load_dir=folder.parent)
    assert "does not exist" in train(tmp_path, tmp_path / "out", load_checkpoint=tmp_path / "no.ckpt")
    said = train(tmp_path, tmp_path / "out", load_dir=folder, load_step=7)
    assert (
        "has no step-000000007.ckpt, but step-000000009.ckpt. --load-step takes the number in the name"
        in said
    )


def test_skipping_bad_images_leaves_them_out_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ns_mgpu_splat.nerfstudio.datamanager import MgpuSplatDatamanagerConfig

    scene.write_nerfstudio(tmp_path, images=5)
    missing_image(tmp_path)
    config = MgpuSplatDatamanagerConfig(data=tmp_path)
    config.on_bad_image = "skip"
    manager = config.setup(device="cpu")
    assert len(manager.train_dataset) + len(manager.eval_dataset) == 4
    assert "view_001.png" in capsys.readouterr().out


def test_command_line_ends_with_code_1_and_the_sentence(run_command: Callable, tmp_path: Path) -> None:
    scene.write_nerfstudio(tmp_path / "with space", images=3)
    missing_image(tmp_path / "with space")
    done = run_command("ns-train", "mgpu-splat", "--data", tmp_path / "with space", check=False)
    assert done.returncode == 1
    assert "images/view_001.png is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_several_processes_are_refused_and_MGPU_DEVICES_named(run_tool: Callable, tmp_path: Path) -> None:
    done = run_tool("ns-train", "mgpu-splat", "--data", tmp_path, "--machine.num-devices", 2, check=False)
    assert done.returncode != 0
    assert "MGPU_DEVICES" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_photograph_listed_twice_is_named(tmp_path: Path, never_starts: None) -> None:
    made = scene.write_nerfstudio(tmp_path / "twice", images=5, points=50)
    edit(made.root, lambda meta: meta["frames"].append(copy.deepcopy(meta["frames"][1])))
    said = train(made.root, tmp_path / "out")
    name = json.loads((made.root / "transforms.json").read_text())["frames"][1]["file_path"]
    assert "are the same photograph" in said
    assert Path(name).name in said


def test_an_output_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = copy.deepcopy(mgpu_splat.config)
    config.output_dir, config.timestamp = tmp_path / "file" / "out", "t"
    config.pipeline.datamanager.data = tmp_path
    with pytest.raises(SystemExit, match="--output-dir") as refused:
        config.save_config()
    assert str(tmp_path / "file") in str(refused.value.code)


def test_a_bad_folder_is_said_before_the_page_of_options(run_tool: Callable, tmp_path: Path) -> None:
    done = run_tool("ns-train", "mgpu-splat", "--data", tmp_path / "nowhere", check=False)
    assert done.returncode == 1
    assert f"{tmp_path / 'nowhere'} does not exist" in done.stderr
    assert "MgpuSplatTrainerConfig" not in done.stdout, "the configuration was dumped first"
    assert not (tmp_path / "outputs").exists()


def test_our_commands_that_run_nerfstudio_are_as_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by their names, so they say so themselves; a warning of the user's own code stays."""
    from ns_mgpu_splat.nerfstudio import evaluate

    def warns(*_: object, **__: object) -> list[evaluate.ImageScore]:
        for module in ("torch.jit._script", "nerfstudio.field_components.activations", "mine"):
            warnings.warn_explicit(f"of {module}", FutureWarning, "x.py", 1, module=module)
        return [evaluate.ImageScore("a", 1.0, 1.0)]

    monkeypatch.setattr(evaluate, "evaluate", warns)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--load-config", "config.yml"])
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        evaluate.main()
    assert [str(each.message) for each in shown] == ["of mine"]


def test_warnings_of_nerfstudio_are_hidden_in_its_commands_and_only_there(tmp_path: Path) -> None:
    """As installed: torch finds the entry point of pyproject.toml, here in a folder that stands for the installation."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    entries = pyproject["project"]["entry-points"]["torch.backends"]
    info = tmp_path / "stand_in-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand_in\nVersion: 1.0\n")
    text = "\n".join(f"{name} = {target}" for name, target in entries.items())
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{text}\n")
    program = (
        "import sys; sys.argv[0] = '/usr/bin/{name}'\n"
        "import torch, warnings\n"
        "for module in ('nerfstudio.engine.trainer', 'someone.elses'):\n"
        "    warnings.warn_explicit('of ' + module, FutureWarning, 'file.py', 1, module=module)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    said = {}
    for name in ("ns-train", "my-program"):
        done = subprocess.run(
            [sys.executable, "-c", program.format(name=name)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said[name] = done.stderr
    assert "of nerfstudio.engine.trainer" not in said["ns-train"]
    assert "of someone.elses" in said["ns-train"]
    assert "of nerfstudio.engine.trainer" in said["my-program"]


def test_checks_look_at_all_headers_before_they_decode_and_tell_how_far_they_are(tmp_path: Path) -> None:
    from ns_mgpu_splat.data.capture import read_capture
    from ns_mgpu_splat.data.checks import find_bad_frames

    scene.write_nerfstudio(tmp_path, images=5, points=50)
    missing_image(tmp_path)
    seen: list[tuple[str, int, int]] = []
    bad = find_bad_frames(read_capture(tmp_path), "full", lambda *told: seen.append(told))
    assert seen[:5] == [("Checking image headers", i + 1, 5) for i in range(5)]
    assert seen[5:] == [("Decoding all images once", i + 1, 4) for i in range(4)]
    assert [b.index for b in bad] == [1]
