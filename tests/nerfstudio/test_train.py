# SPDX-License-Identifier: Apache-2.0
"""Training through `ns-train`: resuming, caps, odd input. Oracle of resuming: the run that was not interrupted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import scene
import torch
from nerfstudio_tools import command, environment, train_many
from PIL import Image

from ns_mgpu_splat.nerfstudio import checkpoint

# refinements fall before and after the interruption, and SH degree and random colours change on the way
OPTIONS = [
    *(
        "--experiment-name",
        "tiny",
        "--steps-per-eval-image",
        7,
        "--pipeline.model.background-color",
        "random",
    ),
    *(
        "--pipeline.model.max-gaussians",
        1700,
        "--pipeline.model.warmup-length",
        5,
        "--pipeline.model.refine-every",
        10,
    ),
    *("--pipeline.model.sh-degree-interval", 9),
]


def columns(state: dict) -> dict[str, torch.Tensor]:
    prefix = "_model.gauss_params."
    return {k.removeprefix(prefix): v for k, v in state["pipeline"].items() if k.startswith(prefix)}


def moments(state: dict) -> dict[str, torch.Tensor]:
    table = state["optimizers"]["splats"]
    return {f"{kind}.{name}": table[kind][name] for kind in ("exp_avg", "exp_avg_sq") for name in table[kind]}


@pytest.fixture(scope="module")
def resumed(nerfstudio_folder: scene.Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to step 40 in one piece ("whole"), and in two pieces of 20 on one shard and on three."""
    folder = tmp_path_factory.mktemp("resume")
    data = ["--data", nerfstudio_folder.root, *OPTIONS]
    part = folder / "tiny" / "mgpu-splat" / "part" / "nerfstudio_models"
    results = train_many(
        [
            [*data, "--timestamp", "whole", "--max-num-iterations", 40, "--steps-per-save", 20],
            [*data, "--timestamp", "part", "--max-num-iterations", 20],
            [*data, "--timestamp", "again", "--max-num-iterations", 40, "--load-dir", part],
            [*data, "--timestamp", "done", "--max-num-iterations", 20, "--load-dir", part],
        ],
        folder,
    )
    assert [r["code"] for r in results] == [0] * 4, results
    said = " ".join(str(results[0]["out"]).split())
    assert re.search(r"Sparse grid: .+, [\d,]+ voxels? of \S+ with [\d,]+ Gaussians on average\.", said)
    for result, last_line in zip(results[:3], ("step 40/40", "step 20/20", "step 40/40"), strict=True):
        lines = [each for each in str(result["said"]).splitlines() if each.startswith("step ")]
        assert re.match(rf"{last_line}  loss \S+  PSNR \S+ dB  [\d,]+ Gaussians  memory ", lines[-1]), lines
    goes_on = [*data, "--max-num-iterations", 40, "--load-dir", part]
    moved, striped = train_many(
        [
            [
                *goes_on,
                "--timestamp",
                "moved",
                "--pipeline.model.layout",
                "space",
            ],  # keeps rows where they are
            [*goes_on, "--timestamp", "striped"],
        ],
        folder,
        MGPU_DEVICES="cpu:3",
    )
    for result, order in (
        (moved, "order of space. "),
        (striped, "order of space, in stripes of 256 over 3 shards. "),
    ):
        assert result["code"] == 0, result
        said = " ".join(str(result["out"]).split())
        assert "saved on 1 shard, this is 3" in said
        assert f"Gaussians are kept in {order}" in said
    return folder / "tiny" / "mgpu-splat"


def last(folder: Path, name: str) -> dict:
    return checkpoint.read(checkpoint.find(folder / name / "nerfstudio_models"))


def test_training_goes_to_step_n_and_a_resumed_run_counts_from_the_beginning(resumed: Path) -> None:
    assert [last(resumed, n)["step"] for n in ("whole", "part", "again", "moved", "done")] == [
        39,
        19,
        39,
        39,
        19,
    ]


def test_resuming_changes_the_parameters(resumed: Path) -> None:
    before, after = columns(last(resumed, "part")), columns(last(resumed, "again"))
    for name, column in before.items():
        assert not torch.equal(column, after[name][: len(column)]), name
    assert len(after["means"]) > len(before["means"])


def test_a_resumed_run_equals_the_uninterrupted_one(resumed: Path) -> None:
    """Both save after 20 steps: the noise that rows out of view missed is drawn when they catch up, as in saving."""
    whole, again = last(resumed, "whole"), last(resumed, "again")
    for kind in (columns, moments):
        expected, found = kind(whole), kind(again)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_a_run_resumed_on_other_shards_stays_close_to_the_uninterrupted_one(resumed: Path) -> None:
    """Gradients agree to 1e-4 of the largest between meshes; twenty Adam steps later means agree to a few rates."""
    whole, moved = columns(last(resumed, "whole")), columns(last(resumed, "moved"))
    assert len(moved["means"]) == len(whole["means"])
    off = (moved["means"] - whole["means"]).abs().max()
    assert off < 20 * 1.6e-4 * 2
    typical = (moved["features_dc"] - whole["features_dc"]).abs().median()
    assert typical < 1e-4


def test_a_run_on_several_shards_has_its_rows_in_stripes_and_trains_as_well(resumed: Path) -> None:
    """Rows are others by number, so they are compared by what they are together, within 10 % of its spread: multiplying draws
    by row number, and other orders of rows on one shard differ by up to 5 %."""
    whole, striped = columns(last(resumed, "whole")), columns(last(resumed, "striped"))
    assert last(resumed, "striped")["strategy"]["order"]["layout"] == "stripes"
    assert last(resumed, "striped")["strategy"]["order"]["shards"] == 3
    assert last(resumed, "moved")["strategy"]["order"]["layout"] == "space"
    for name, column in whole.items():
        assert striped[name].shape == column.shape
        spread = float(column.std()) + 1e-6
        assert abs(float(striped[name].mean() - column.mean())) < 0.1 * spread, name
        assert abs(float(striped[name].std()) - spread) < 0.1 * spread, name


def test_a_run_on_several_shards_logs_its_links_and_its_placement(resumed: Path) -> None:
    """In tensorboard; a run on one shard has no such numbers."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def last_values(run: str) -> dict[str, float]:
        events = EventAccumulator(str(resumed / run))
        events.Reload()
        return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}

    moved = last_values("moved")
    found = {tag.split("Train Metrics Dict/")[-1]: value for tag, value in moved.items()}
    assert found["cull/candidate_rows"] > 0
    # renders for evaluation have no way back
    assert found["links/records_mib"] >= found["links/gradients_mib"] > 0.5 * found["links/records_mib"]
    assert found["links/remote_rows"] > 0
    assert 0 < found["links/remote_share"] <= 1
    assert 1 <= found["links/load_imbalance"] <= 3
    assert 1 <= found["placement/home_row_imbalance"] <= 2.1
    assert found["placement/pages_moved"] >= 0
    assert not [tag for tag in last_values("whole") if "links/" in tag or "placement/" in tag]


def test_checkpoints_load_with_weights_only_and_hold_what_resuming_needs(resumed: Path) -> None:
    path = checkpoint.find(resumed / "whole" / "nerfstudio_models")
    state = torch.load(path, map_location="cpu", weights_only=True)
    assert {"pipeline", "optimizers", "strategy", "random", "sampler", "step"} <= state.keys()
    assert all(v.device.type == "cpu" for v in state["pipeline"].values())


def test_a_smaller_cap_than_the_checkpoints_is_refused_with_its_name(
    resumed: Path, nerfstudio_folder: scene.Scene, tmp_path: Path
) -> None:
    options = ["--data", nerfstudio_folder.root, "--load-dir", resumed / "part" / "nerfstudio_models"]
    broken = tmp_path / "models"
    state = last(resumed, "part")
    state["pipeline"].pop("_model.gauss_params.quats")
    checkpoint.save(state, broken, 19, True)
    results = train_many(
        [
            [*options, "--pipeline.model.max-gaussians", 100],
            [*options, "--pipeline.model.sh-degree", 1],
            ["--data", nerfstudio_folder.root, "--load-dir", broken],
        ],
        tmp_path,
    )
    for result, word in zip(results, ("max-gaussians", "--pipeline.model.sh-degree 3", "quats"), strict=True):
        assert result["code"] == 1
        assert word in str(result["text"])
        assert "Traceback" not in str(result["text"])


def write_images(root: Path, change) -> None:
    for path in sorted((root / "images").iterdir()):
        pixels = np.asarray(Image.open(path).convert("RGB"))
        change(pixels, path)


def to_grey(pixels: np.ndarray, path: Path) -> None:
    Image.fromarray(pixels).convert("L").save(path)


def to_rgba(pixels: np.ndarray, path: Path) -> None:
    alpha = np.full((*pixels.shape[:2], 1), 255, np.uint8)
    alpha[: pixels.shape[0] // 3] = 0
    Image.fromarray(np.concatenate([pixels, alpha], axis=2)).save(path)


def to_sixteen_bit(pixels: np.ndarray, path: Path) -> None:
    Image.fromarray(pixels.mean(axis=2).astype(np.uint16) * 257).save(path)


def add_masks(made: scene.Scene) -> None:
    """Hide the ten left columns of each image."""
    meta = json.loads((made.root / "transforms.json").read_text())
    for frame in meta["frames"]:
        frame["mask_path"] = frame["file_path"].replace("images/", "masks/")
        (made.root / "masks").mkdir(exist_ok=True)
        mask = np.zeros((made.height, made.width), np.uint8)
        mask[:, 10:] = 255
        Image.fromarray(mask).save(made.root / frame["mask_path"])
    (made.root / "transforms.json").write_text(json.dumps(meta))


def test_native_steps_make_the_run_of_autograd(nerfstudio_folder: scene.Scene, tmp_path: Path) -> None:
    """Depth in training steps needs autograd; the loss does not use it, so both runs must be the same bits.

    With masks, transparent images on random colours, refined poses and accumulated gradients. Poses are refined through
    other operators in the one and in the other: these agree to rounding, which Adam turns into whole steps.
    """
    masked = scene.write_nerfstudio(tmp_path / "masked", points=300, images=3, width=48, height=36)
    add_masks(masked)
    clear = scene.write_nerfstudio(tmp_path / "clear", points=300, images=3, width=48, height=36)
    write_images(clear.root, to_rgba)
    depth = ["--pipeline.model.output-depth-during-training", "True"]
    base = [*OPTIONS, "--max-num-iterations", 25]
    poses = ["--pipeline.model.camera-optimizer.mode", "SO3xR3"]
    exposure = ["--pipeline.model.exposure", True]
    kinds: dict[str, list[object]] = {
        "plain": ["--data", nerfstudio_folder.root],
        "masked": ["--data", masked.root],
        "clear": ["--data", clear.root, "--pipeline.model.rasterize-mode", "antialiased"],
        "poses": ["--data", nerfstudio_folder.root, *poses],
        "exposed": ["--data", masked.root, *exposure],
        "exposed and clear": ["--data", clear.root, *exposure],
    }
    runs = [
        [*base, *options, "--timestamp", f"{kind}-{way}", *(depth if way == "autograd" else [])]
        for kind, options in kinds.items()
        for way in ("native", "autograd")
    ]
    results = train_many(runs, tmp_path)
    assert [r["code"] for r in results] == [0] * len(runs), results
    assert str(results[0]["out"]).count("Steps go through autograd") == len(kinds)
    for i, kind in enumerate(kinds):
        native, autograd = (
            last(tmp_path / "tiny" / "mgpu-splat", f"{kind}-{way}") for way in ("native", "autograd")
        )
        assert results[2 * i]["losses"] == pytest.approx(results[2 * i + 1]["losses"], rel=1e-5), kind
        for name, column in columns(native).items():
            if kind != "poses":
                assert torch.equal(column, columns(autograd)[name]), (kind, name)
        if kind == "poses":
            key = "_model.camera_optimizer.pose_adjustment"
            assert native["pipeline"][key].abs().max() > 0
            assert torch.allclose(native["pipeline"][key], autograd["pipeline"][key], atol=1e-6)
        if "exposed" in kind:
            key = "_model.exposure.maps"
            assert (native["pipeline"][key] - torch.eye(3, 4)).abs().max() > 0.01, kind
            assert torch.equal(native["pipeline"][key], autograd["pipeline"][key]), kind


def test_odd_input_trains(tmp_path: Path) -> None:
    """Zero and three seed points, one image, grey, RGBA and 16-bit images, masks, tiny images, a path with spaces."""
    small = {"images": 3, "width": 48, "height": 36}
    scene.write_nerfstudio(tmp_path / "zero points", points=0, **small)
    scene.write_nerfstudio(tmp_path / "no cloud", points=None, **small)
    scene.write_nerfstudio(tmp_path / "three points", points=3, **small)
    scene.write_nerfstudio(tmp_path / "one image", points=100, images=1)
    scene.write_nerfstudio(tmp_path / "tiny", points=100, images=3, width=9, height=7)
    scene.write_colmap(tmp_path / "colmap with space", **small)
    for name, change in (("grey", to_grey), ("rgba", to_rgba), ("sixteen bit", to_sixteen_bit)):
        scene.write_nerfstudio(tmp_path / name, points=100, **small)
        write_images(tmp_path / name, change)
    add_masks(scene.write_nerfstudio(tmp_path / "masked", points=100, **small))
    names = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert len(names) == 10
    output = tmp_path / "runs of all"
    output.mkdir()
    options = ["--timestamp", "run", "--max-num-iterations", 12, "--steps-per-eval-image", 5]
    options += [
        "--pipeline.datamanager.dataparser.num-random-points",
        500,
        "--pipeline.model.warmup-length",
        3,
    ]
    options += ["--pipeline.model.refine-every", 4]
    results = train_many([["--data", tmp_path / n, *options] for n in names], output)
    for name, result in zip(names, results, strict=True):
        assert result["code"] == 0, (name, result["text"])
        state = last(output / name / "mgpu-splat", "run")
        assert state["gaussians"] >= 3, name
        for column, value in columns(state).items():
            assert bool(torch.isfinite(value).all()), (name, column)
            if column == "means":
                assert len(value) == state["gaussians"]


def test_the_cap_holds_from_the_first_step_on(nerfstudio_folder: scene.Scene, tmp_path: Path) -> None:
    options = ["--data", nerfstudio_folder.root, "--experiment-name", "tiny", "--max-num-iterations", 30]
    options += ["--pipeline.model.warmup-length", 2, "--pipeline.model.refine-every", 3]
    results = train_many(
        [
            [*options, "--timestamp", "below", "--pipeline.model.max-gaussians", 150],  # 1,500 seed points
            # saves in between: what was saved can still grow
            [*options, "--timestamp", "grows", "--pipeline.model.max-gaussians", 1531, "--steps-per-save", 4],
            [*options, "--timestamp", "one", "--pipeline.model.max-gaussians", 1],
        ],
        tmp_path,
    )
    assert [r["code"] for r in results] == [0] * 3, results
    counts = [last(tmp_path / "tiny" / "mgpu-splat", n)["gaussians"] for n in ("below", "grows", "one")]
    assert counts == [150, 1531, 1]


def test_default_densification_grows_to_the_cap_and_resumes(
    nerfstudio_folder: scene.Scene, tmp_path: Path
) -> None:
    model = "--pipeline.model."
    options = ["--data", nerfstudio_folder.root, *OPTIONS, f"{model}strategy", "default"]
    options += [
        f"{model}densify-grad-thresh",
        "1e-9",
        f"{model}reset-alpha-every",
        3,
        f"{model}stop-split-at",
        38,
    ]
    part = tmp_path / "tiny" / "mgpu-splat" / "part" / "nerfstudio_models"
    results = train_many(
        [
            [*options, "--timestamp", "whole", "--max-num-iterations", 40, "--steps-per-save", 24],
            [*options, "--timestamp", "part", "--max-num-iterations", 24],
            [*options, "--timestamp", "again", "--max-num-iterations", 40, "--load-dir", part],
        ],
        tmp_path,
    )
    assert [r["code"] for r in results] == [0] * 3, results
    runs = tmp_path / "tiny" / "mgpu-splat"
    early, whole, again = (last(runs, name) for name in ("part", "whole", "again"))
    assert early["optimizers"]["splats"]["statistics"]["views"].max() > 0
    assert len(columns(whole)["means"]) == 1700  # the cap
    for name, column in columns(whole).items():
        assert torch.equal(column, columns(again)[name]), name
    for name, moment in moments(whole).items():
        assert torch.equal(moment, moments(again)[name]), name


def test_refined_cameras_move_and_are_resumed(nerfstudio_folder: scene.Scene, tmp_path: Path) -> None:
    options = ["--data", nerfstudio_folder.root, "--experiment-name", "tiny"]
    options += ["--pipeline.model.camera-optimizer.mode", "SO3xR3"]
    models = tmp_path / "tiny" / "mgpu-splat" / "a" / "nerfstudio_models"
    warm = ["--optimizers.camera-opt.scheduler.warmup-steps", 0]
    results = train_many(
        [
            [*options, *warm, "--timestamp", "a", "--max-num-iterations", 10],
            [*options, *warm, "--timestamp", "b", "--max-num-iterations", 20, "--load-dir", models],
        ],
        tmp_path,
    )
    assert [r["code"] for r in results] == [0] * 2, results
    key = "_model.camera_optimizer.pose_adjustment"
    first, second = (last(tmp_path / "tiny" / "mgpu-splat", n)["pipeline"][key] for n in "ab")
    assert first.abs().max() > 1e-5
    assert not torch.equal(first, second)
    assert (first - second).abs().max() < 20 * 1e-4, "it went on from where it was"


def test_a_terminated_run_saves_and_says_how_to_resume(
    nerfstudio_folder: scene.Scene, tmp_path: Path
) -> None:
    arguments = [
        "mgpu-splat",
        "--data",
        nerfstudio_folder.root,
        "--output-dir",
        tmp_path,
        "--timestamp",
        "run",
    ]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            command(
                "ns-train", *arguments, "--viewer.websocket-host", "127.0.0.1"
            ),  # and the viewer runs beside it
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 120
            while "step 1/30,000" not in (tmp_path / "log").read_text():
                assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "log").read_text()
    path = checkpoint.find(tmp_path / "tiny town" / "mgpu-splat" / "run" / "nerfstudio_models")
    assert f"Stopped after step {checkpoint.read(path)['step'] + 1:,}" in text
    assert f"ns-train mgpu-splat --load-dir {path.parent}" in text.replace("'", "")
    assert "Traceback" not in text
