# SPDX-License-Identifier: Apache-2.0
"""Every dataset of the table (datasets.py) ends in training or in the sentence it should."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import scene
from datasets import CASES, UNUSUAL, Case, write_good
from nerfstudio_tools import train_many
from PIL import Image

from ns_mgpu_splat.nerfstudio.config import mgpu_splat
from ns_mgpu_splat.nerfstudio.datamanager import MgpuSplatDatamanager
from ns_mgpu_splat.nerfstudio.trainer_config import MgpuSplatTrainerConfig

LAYOUTS = ("nerfstudio", "colmap", "text")
FLOAT_NOISE = 2e-5  # of a loss: images and seeds are the same numbers; poses went through other roundings


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, scene.Scene]:
    """The good datasets, by layout; read-only."""
    return {layout: write_good(tmp_path_factory.mktemp("good") / layout, layout) for layout in LAYOUTS}


def make(case: Case, good: dict[str, scene.Scene], folder: Path) -> Path:
    """Write the dataset of a case; what --data names."""
    shutil.copytree(good[case.layout].root, folder)
    case.change(folder)
    return folder / case.data


def test_the_table_is_as_large_as_promised() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(bool(case.says) for case in CASES) >= 40
    assert len(UNUSUAL) >= 20


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_dataset_ends_in_the_pictures_or_the_sentence_it_should(
    case: Case, good: dict[str, scene.Scene], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy.deepcopy(mgpu_splat.config)
    data = config.pipeline.datamanager
    data.data = make(case, good, tmp_path / "data")
    for option, value in case.options.items():
        *path, name = option.replace("-", "_").split(".")
        holder = getattr(data, path[0]) if path else data
        setattr(holder, name, type(getattr(holder, name) or Path())(value))
    if case.says:
        with pytest.raises(SystemExit) as refused:
            start(config)
        check_sentence(case, str(refused.value.code))
        return
    manager = start(config)
    said = " ".join(capsys.readouterr().out.split())
    for words in case.prints:
        assert words in said
    sets = (manager.train_dataset, manager.eval_dataset)
    assert sum(len(s) for s in sets) == case.trained
    metadata = manager.train_dataparser_outputs.metadata
    assert np.isfinite(metadata["points3D_xyz"].numpy()).all()
    for dataset in sets:
        assert np.isfinite(dataset.cameras.camera_to_worlds.numpy()).all()
        for index, file in enumerate(dataset.image_filenames):
            pixels = dataset.picture(index).image.numpy()
            camera = dataset.cameras[index]
            assert pixels.shape[:2] == (int(camera.height), int(camera.width))
            if case.shows is not None:
                check_picture(case, pixels, original(good[case.layout], file))


def start(config: MgpuSplatTrainerConfig) -> MgpuSplatDatamanager:
    """What ns-train does with the data before a model is made."""
    config.print_to_terminal()
    return config.pipeline.datamanager.setup(device="cpu", test_mode="val")


def check_sentence(case: Case, text: str) -> None:
    """A sentence of ours, with the words it should have, one line a problem, at most one of advice below, and no traceback."""
    assert text.startswith("mgpu-splat: ")
    assert "Traceback" not in text
    for words in case.says:
        assert words in text
    first, *rest = text.splitlines()
    if rest and rest[-1].startswith("Bad "):
        assert rest.pop().endswith(" can be left out instead: --pipeline.datamanager.on-bad-image skip.")
    assert all(line.startswith("  - ") for line in rest)
    if rest:
        assert f"{len(rest)} problems" in first
    assert text.rstrip().endswith(".")


def original(made: scene.Scene, file: Path) -> np.ndarray:
    """The picture of the good dataset that a file was made from."""
    where = f"{file.parent.name}/{file.stem}"
    number = next(n for n in made.names if Path(n).stem.split("_")[1] in where)
    return np.asarray(Image.open(made.root / "images" / number).convert("RGB"))


def check_picture(case: Case, pixels: np.ndarray, reference: np.ndarray) -> None:
    assert case.shows is not None
    expected = case.shows(reference)
    assert pixels.shape == expected.shape
    off = np.abs(pixels.astype(int) - expected)
    if expected.shape[2] == 4:
        off = off * (expected[..., 3:] > 0)  # the colour of what is invisible does not matter
    assert off.mean() <= case.off
    if case.off == 0:
        assert off.max() == 0


def test_masks_are_read_as_they_were_painted(good: dict[str, scene.Scene], tmp_path: Path) -> None:
    expected = {
        "masks, all black": 0.0,
        "masks, a part": 1 - 9 / 32,
        "masks as JPEG": 1 - 8 / 32,
        "masks of 0 and 1": 1.0,
    }
    for number, (name, share) in enumerate(expected.items()):
        case = next(c for c in CASES if c.name == name)
        data = copy.deepcopy(mgpu_splat.config.pipeline.datamanager)
        data.data = make(case, good, tmp_path / str(number))
        mask = data.setup(device="cpu", test_mode="val").train_dataset.picture(0).mask
        assert mask is not None
        assert float(mask.float().mean()) == pytest.approx(share), name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_dataset_through_ns_train(good: dict[str, scene.Scene], tmp_path: Path) -> None:
    """Two steps each. Where poses, points and pictures are the good dataset's, the first step's loss is, too."""
    lines = []
    for number, case in enumerate(CASES):
        root = make(case, good, tmp_path / "data" / f"{number:03d}")
        line: list[object] = ["--data", root, "--experiment-name", f"case {number:03d}", "--timestamp", "t"]
        line += ["--max-num-iterations", 2, "--schedule-steps", 2, "--pipeline.model.max-gaussians", 200]
        line += ["--pipeline.datamanager.dataparser.num-random-points", 50]
        for option, value in case.options.items():
            line += [f"--pipeline.datamanager.{option}", value]
        lines.append(line)
    (tmp_path / "out").mkdir()
    results = train_many(lines, tmp_path / "out", timeout=1700)
    reference = {
        c.layout: r for c, r in zip(CASES, results, strict=True) if c.change.__name__ == "nothing" and c.loss
    }
    wrong = []
    for case, result in zip(CASES, results, strict=True):
        try:
            check_run(case, result, reference[case.layout])
        except AssertionError as error:
            wrong.append(f"{case.name}: {error}\n{result['text'][-1500:]}")
    assert not wrong, "\n\n".join(wrong)
    # the comparison can fail: other pictures, masks or points give another loss
    first = {
        case.name: result["losses"][0] for case, result in zip(CASES, results, strict=True) if not case.says
    }
    for other in ("grey", "masks, a part", "three points"):
        assert abs(first[other] - first["as it is"]) > 30 * FLOAT_NOISE


def check_run(case: Case, result: dict, reference: dict) -> None:
    assert "Traceback" not in result["text"], "a traceback"
    if case.says:
        assert result["code"] == 1, "it trained"
        assert result["losses"] == [], "it trained before it was refused"
        check_sentence(case, result["text"])
        return
    assert result["code"] == 0, "it did not train"
    assert len(result["losses"]) == 2, f"it took {len(result['losses'])} steps"
    assert np.isfinite(result["losses"]).all(), f"the losses are {result['losses']}"
    said = " ".join(result["said"].split())
    for words in case.prints:
        assert words in said, f"'{words}' was not said"
    if case.loss:
        first, expected = result["losses"][0], reference["losses"][0]
        assert abs(first - expected) <= FLOAT_NOISE * expected, f"loss {first}, expected {expected}"
