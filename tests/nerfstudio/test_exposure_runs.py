# SPDX-License-Identifier: Apache-2.0
"""Photographs of unequal exposure through `ns-train`. Oracle: the gains that the photographs were multiplied with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import scene
import torch
from nerfstudio_tools import train_many
from PIL import Image

from ns_mgpu_splat.nerfstudio import checkpoint

HELD_OUT = (2, 7, 12)
MODEL = "--pipeline.model."


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> tuple[scene.Scene, np.ndarray]:
    """The tiny scene with a gain a channel and photograph; the held-out ones have the mean gain of the others."""
    made = scene.write_nerfstudio(tmp_path_factory.mktemp("unequal") / "town", points=1500, images=16)
    rng = np.random.default_rng(3)
    gains = np.repeat(rng.uniform(0.5, 1.0, (16, 1)), 3, axis=1) * rng.uniform(0.9, 1.0, (16, 3))
    training = [i for i in range(16) if i not in HELD_OUT]
    gains[list(HELD_OUT)] = gains[training].mean(axis=0)
    meta = json.loads((made.root / "transforms.json").read_text())
    for name, gain in zip(made.names, gains, strict=True):
        path = made.root / "images" / name
        pixels = np.asarray(Image.open(path)).astype(np.float64)
        Image.fromarray((pixels * gain + 0.5).astype(np.uint8)).save(path)
    for split, members in (("train", training), ("val", HELD_OUT), ("test", HELD_OUT)):
        meta[f"{split}_filenames"] = [f"images/{made.names[i]}" for i in members]
    (made.root / "transforms.json").write_text(json.dumps(meta))
    return made, gains[training]


def scores(result: dict) -> dict[str, float]:
    """PSNR and, where it is said, PSNR with corrected colours."""
    text = " ".join(str(result["said"]).split())
    found = re.search(
        r"held-out images: PSNR ([\d.]+) dB, SSIM [\d.]+(?:, PSNR ([\d.]+) dB with corrected)?", text
    )
    assert found is not None, text[-2000:]
    return {"psnr": float(found[1]), "cc_psnr": float(found[2] or "nan")}


def test_exposures_are_found_and_held_out_images_are_better_for_it(
    unequal: tuple[scene.Scene, np.ndarray], tmp_path: Path
) -> None:
    """The maps of the photographs are their gains over the mean gain, on the colours of the scene."""
    made, gains = unequal
    options = ["--data", made.root, "--experiment-name", "tiny", "--max-num-iterations", 700]
    options += ["--schedule-steps", 700, f"{MODEL}max-gaussians", 2500, f"{MODEL}warmup-length", 50]
    options += [f"{MODEL}refine-every", 50, f"{MODEL}sh-degree", 0, f"{MODEL}background-color", "black"]
    with_, without = train_many(
        [
            [*options, "--timestamp", "with", f"{MODEL}exposure", True],
            [*options, "--timestamp", "without", f"{MODEL}color-corrected-metrics", True],
        ],
        tmp_path,
    )
    assert with_["code"] == without["code"] == 0, (with_["text"], without["text"])
    assert "through autograd" not in with_["said"]
    found, plain = scores(with_), scores(without)
    assert found["psnr"] > plain["psnr"] + 1, (found, plain)
    assert found["cc_psnr"] > plain["cc_psnr"] + 0.5, (found, plain)

    state = checkpoint.read(checkpoint.find(tmp_path / "tiny" / "mgpu-splat" / "with" / "nerfstudio_models"))
    maps = state["pipeline"]["_model.exposure.maps"].double()
    assert maps.shape == (13, 3, 4)
    assert torch.allclose(maps.mean(dim=0), torch.eye(3, 4, dtype=torch.float64), atol=1e-5)
    # floor and balls, as the mean photograph has them
    colors = torch.tensor([[205.0, 200, 180], [70, 110, 80], [180, 54, 45], [45, 72, 180]]).double() / 255
    mean = torch.from_numpy(gains.mean(axis=0))
    errors = []
    for map_, gain in zip(maps, torch.from_numpy(gains), strict=True):
        exposed = colors * mean @ map_[:, :3].T + map_[:, 3]
        errors.append(((exposed - colors * gain) / (colors * gain)).abs().flatten())
    worst = torch.stack(errors)
    unmoved = ((colors * mean)[None] / (colors[None] * torch.from_numpy(gains)[:, None]) - 1).abs()
    assert float(worst.median()) < 0.04, worst
    assert float(worst.median()) < 0.3 * float(unmoved.median())


def test_exposures_of_another_capture_are_refused(
    unequal: tuple[scene.Scene, np.ndarray], nerfstudio_folder: scene.Scene, tmp_path: Path
) -> None:
    options = ["--experiment-name", "tiny", f"{MODEL}exposure", True, f"{MODEL}max-gaussians", 2000]
    models = tmp_path / "tiny" / "mgpu-splat" / "one" / "nerfstudio_models"
    first, other = train_many(
        [
            ["--data", unequal[0].root, *options, "--timestamp", "one", "--max-num-iterations", 3],
            [
                *(
                    "--data",
                    nerfstudio_folder.root,
                    *options,
                    "--timestamp",
                    "two",
                    "--max-num-iterations",
                    6,
                ),
                *("--load-dir", models),
            ],
        ],
        tmp_path,
    )
    assert first["code"] == 0, first["text"]
    assert other["code"] == 1
    assert "exposures of 13 photographs, the capture has 12 training images" in other["text"]
