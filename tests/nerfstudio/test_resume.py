# SPDX-License-Identifier: Apache-2.0
"""A run in pieces is the run in one piece. Oracle: the run that was not interrupted, bit for bit on one host shard."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import scene
import torch
from lives import Lives
from test_kill import assert_same

from ns_mgpu_splat.nerfstudio import checkpoint

MODEL = "--pipeline.model."
# refinements fall before, between and after the interruptions at 21 and 28; steps 0 to 39
COMMON: list[object] = [
    *("--vis", "tensorboard", "--viewer.quit-on-train-completion", True, "--experiment-name", "tiny"),
    *("--steps-per-eval-image", 9, "--eval-at-end", False, f"{MODEL}background-color", "random"),
    *(f"{MODEL}max-gaussians", 9000, f"{MODEL}warmup-length", 5, f"{MODEL}refine-every", 10),
    *(f"{MODEL}sh-degree-interval", 8, "--schedule-steps", 60),
]
CLONE: list[object] = [
    *(f"{MODEL}strategy", "default", f"{MODEL}densify-grad-thresh", "1e-7", f"{MODEL}reset-alpha-every", 2),
    *(f"{MODEL}stop-split-at", 38),
]
ORDER: list[object] = [f"{MODEL}reorder-decay", 1.001]  # after nearly every refinement


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> scene.Scene:
    root = tmp_path_factory.mktemp("resume") / "town"
    return scene.write_nerfstudio(root, points=1500, images=5, width=48, height=36)


def train(lives: Lives, town: scene.Scene, folder: Path, name: str, *more: object) -> Path:
    """Train as `name`; the folder of its checkpoints."""
    fixed = ["mgpu-splat", "--data", town.root, "--output-dir", folder, "--timestamp", name]
    life = lives.begin([*fixed, *COMMON, *more])
    assert lives.end() == 0, life.output.read_text()[-3000:]
    return folder / "tiny" / "mgpu-splat" / name / "nerfstudio_models"


def last(models: Path) -> dict:
    return checkpoint.read(checkpoint.find(models))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([f"{MODEL}half", True], id="half"),
        pytest.param([f"{MODEL}half", True, *CLONE], id="half, clone and split"),
        pytest.param([*ORDER, f"{MODEL}camera-optimizer.mode", "SO3xR3"], id="reordered, refined poses"),
        pytest.param([f"{MODEL}exposure", True], id="exposures"),
    ],
)
def test_a_run_in_three_pieces_is_the_run_in_one(
    options: list[object], lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """Both save after 21 and after 28 steps: the noise that rows out of view missed is drawn when they catch up."""
    every = ["--steps-per-save", 7, *options]
    whole = train(lives, town, tmp_path, "whole", *every, "--max-num-iterations", 40)
    first = train(lives, town, tmp_path, "pieces", *every, "--max-num-iterations", 21)
    rows = [last(first)["gaussians"]]
    for end in (28, 40):
        models = train(
            lives, town, tmp_path, "pieces", *every, "--load-dir", first, "--max-num-iterations", end
        )
        rows.append(last(models)["gaussians"])
    assert rows[0] < rows[-1], "it grew in between"
    expected, found = last(whole), last(models)
    assert found["step"] == expected["step"] == 39
    for part in ("pipeline", "optimizers", "schedulers"):
        assert_same(found[part], expected[part])


def test_when_it_is_saved_makes_no_difference_without_noise(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """Catching up early and late are the same Adam steps, in float32: agreement to rounding, through two refinements.

    Adam turns the rounding of a tiny gradient into whole steps of a rate, hence the typical difference, not the largest.
    """
    quiet = [f"{MODEL}noise-lr", 0]
    whole = train(lives, town, tmp_path, "whole", *quiet, "--max-num-iterations", 40)
    part = train(lives, town, tmp_path, "part", *quiet, "--max-num-iterations", 17)
    again = train(lives, town, tmp_path, "again", *quiet, "--load-dir", part, "--max-num-iterations", 40)
    expected, found = last(whole)["pipeline"], last(again)["pipeline"]
    for name, column in expected.items():
        if column.numel() > 0:
            assert found[name].shape == column.shape
            assert float((found[name] - column).abs().median()) <= 1e-6, name


def test_accumulated_gradients_are_whole_where_something_is_due(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """Three views a step: refinements after step 10 and 20, evaluations and saves wait for the third view."""
    three = ["--gradient-accumulation-steps", "splats", 3, "--steps-per-save", 7]
    whole = train(lives, town, tmp_path, "whole", *three, "--max-num-iterations", 36)
    # the save after step 28 comes with step 30; what a run ends on in the middle of three is dropped
    part = train(
        lives,
        town,
        tmp_path,
        "part",
        *three,
        "--max-num-iterations",
        29,
        "--save-only-latest-checkpoint",
        False,
    )
    assert [step for step, _ in checkpoint.checkpoints(part)] == [28, 20, 14, 8]
    again = train(
        lives,
        town,
        tmp_path,
        "again",
        *three,
        "--load-dir",
        part,
        "--load-step",
        20,
        "--max-num-iterations",
        36,
    )
    expected, found = last(whole), last(again)
    assert found["gaussians"] > 1500
    assert found["optimizers"]["splats"]["steps"] == 12
    for kind in ("pipeline", "optimizers"):
        assert_same(found[kind], expected[kind])


def test_a_resumed_run_says_nothing_of_seeds_that_it_does_not_use(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """The cloud of 1,500 points was thinned to the cap and sorted for nothing, and a line said so."""
    cap = [f"{MODEL}max-gaussians", 900]
    first = train(lives, town, tmp_path, "first", *cap, "--max-num-iterations", 3)
    assert "1,500 points: thinned evenly to the cap of 900" in lives.living.output.read_text()
    again = train(lives, town, tmp_path, "again", *cap, "--load-dir", first, "--max-num-iterations", 6)
    said = lives.living.output.read_text()
    assert "thinned" not in said
    assert "with 900 Gaussians from" in " ".join(said.split())
    assert last(again)["gaussians"] == 900


def test_a_run_changes_to_a_half_table_and_back(lives: Lives, town: scene.Scene, tmp_path: Path) -> None:
    """Half to whole keeps every bit; whole to half rounds to the nearest float16, relative error 2^-11 at most."""
    name = "_model.gauss_params.features_rest"
    whole = train(lives, town, tmp_path, "whole", "--max-num-iterations", 15)
    half = [f"{MODEL}half", True, "--load-dir", whole, "--max-num-iterations", 15]
    narrow = train(lives, town, tmp_path, "half", *half)  # nothing to train: what was loaded is saved
    before, after = (last(models)["pipeline"][name] for models in (whole, narrow))
    assert after.dtype == torch.float16
    assert torch.allclose(after.float(), before, rtol=2**-11, atol=2**-24)
    wide = train(lives, town, tmp_path, "wide", "--load-dir", narrow, "--max-num-iterations", 15)
    assert torch.equal(last(wide)["pipeline"][name], after.float())
    further = train(lives, town, tmp_path, "on", *half[:2], "--load-dir", narrow, "--max-num-iterations", 22)
    assert last(further)["step"] == 21


def test_the_config_of_a_run_goes_together_with_a_checkpoint(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    """It used to replace the whole command line: --load-dir was ignored, and the run began anew over its own files."""
    part = train(lives, town, tmp_path, "run", "--max-num-iterations", 12, "--load-step", 0)
    config = part.parent / "config.yml"
    options = ["--load-config", config, "--load-dir", part, "--max-num-iterations", 15]
    life = lives.begin(["mgpu-splat", *options])
    assert lives.end() == 0, life.output.read_text()[-3000:]
    assert life.steps() == [12, 13, 14]
    assert [step for step, _ in checkpoint.checkpoints(part)] == [14], "in the run's own folder"
    assert last(part)["gaussians"] == last(part)["pipeline"]["_model.gauss_params.means"].shape[0]


def test_a_checkpoint_of_another_state_ends_in_a_sentence(
    lives: Lives, town: scene.Scene, tmp_path: Path
) -> None:
    part = train(lives, town, tmp_path, "run", "--max-num-iterations", 3)
    sound = last(part)
    broken: dict[str, dict] = {
        "moments": {**sound, "optimizers": {"splats": {**sound["optimizers"]["splats"], "exp_avg": {}}}},
        "version": {**sound, "optimizers": {"splats": {**sound["optimizers"]["splats"], "version": 99}}},
        "random": {**sound, "random": {}},
        "a later strategy": {**sound, "strategy": {**sound["strategy"], "version": 2}},
        "another strategy": {**sound, "strategy": "annealing"},
        "columns": {**sound, "pipeline": {"_model.gauss_params.means": torch.zeros(3, 3)}},
    }
    for name, state in broken.items():
        path = checkpoint.save(state, tmp_path / name, 2, True)
        options = ["--data", town.root, "--output-dir", tmp_path, "--load-checkpoint", path]
        life = lives.begin(["mgpu-splat", *options, *COMMON])
        assert lives.end() == 1
        text = " ".join(life.output.read_text().split())
        assert "Traceback" not in text, name
        assert re.search(
            f"mgpu-splat: (Checkpoint )?{re.escape(str(path))}|The checkpoint has no scales", text
        ), text[-500:]
        assert life.steps() == []
