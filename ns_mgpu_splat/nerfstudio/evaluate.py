# SPDX-License-Identifier: Apache-2.0
"""Score a run image by image: what `ns-eval` averages away, and the score of the untrained seed points."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from ns_mgpu_splat.nerfstudio.saved_run import RunError, read_options
from ns_mgpu_splat.quiet import hide_future_warnings


@dataclass(frozen=True)
class ImageScore:
    """Scores of one held-out image: its file name, PSNR in dB, SSIM in [0, 1]."""

    name: str
    psnr: float
    ssim: float


def evaluate(config_path: Path, *, untrained: bool = False) -> list[ImageScore]:
    """Render every held-out view of a run and compare it with its photograph.

    Args:
        config_path: the `config.yml` of a run.
        untrained: score the model as it was initialised from its seed points, instead of its latest checkpoint.
    Returns: one score per held-out image, in the order of the data set.
    Raises: RunError if the config cannot be read or is none of a run; what Nerfstudio raises for a run without checkpoint.
    """
    read_options(config_path)
    if untrained:
        config = yaml.load(config_path.read_text(), Loader=yaml.Loader)
        # "val" is the mode of training: the model starts from the seed points instead of waiting for a checkpoint
        pipeline = config.pipeline.setup(device="cpu", test_mode="val")
        pipeline.eval()
    else:
        from nerfstudio.utils.eval_utils import eval_setup

        _, pipeline, _, _ = eval_setup(config_path, test_mode="test")
    return [
        ImageScore(name, metrics["psnr"], metrics["ssim"])
        for name, metrics in metrics_by_photograph(pipeline)
    ]


def metrics_by_photograph(pipeline: Any) -> list[tuple[str, dict[str, float]]]:
    """File name and all metrics of each held-out photograph, in the order of the data set; `ns-eval` prints their means."""
    files = pipeline.datamanager.eval_dataset.image_filenames
    found = []
    with torch.no_grad():
        for camera, batch in pipeline.datamanager.fixed_indices_eval_dataloader:
            outputs = pipeline.model.get_outputs_for_camera(camera=camera)
            metrics, _ = pipeline.model.get_image_metrics_and_images(outputs, batch)
            name = Path(files[int(batch["image_idx"])]).name
            found.append((name, {key: float(value) for key, value in metrics.items()}))
    return found


def mean_psnr(scores: list[ImageScore], prefix: str = "") -> float:
    """Mean PSNR in dB over the images whose name starts with `prefix`; ValueError if there is none."""
    chosen = [score.psnr for score in scores if score.name.startswith(prefix)]
    if not chosen:
        raise ValueError(f"No held-out image has a name that starts with {prefix!r}.")
    return statistics.fmean(chosen)


def main() -> None:
    """`python -m ns_mgpu_splat.nerfstudio.evaluate`: a table, or JSON, of the held-out images of a run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--load-config", type=Path, required=True, help="config.yml of a run")
    parser.add_argument(
        "--untrained", action="store_true", help="score the seed points instead of the checkpoint"
    )
    parser.add_argument("--json", type=Path, help="write the scores to this file too")
    arguments = parser.parse_args()
    hide_future_warnings()
    try:
        scores = evaluate(arguments.load_config, untrained=arguments.untrained)
    except RunError as error:
        sys.exit(f"evaluate: {error}")
    for score in scores:
        print(f"{score.name:32} {score.psnr:6.2f} dB  SSIM {score.ssim:.4f}")
    print(f"{'mean of ' + str(len(scores)):32} {mean_psnr(scores):6.2f} dB")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(score) for score in scores], indent=1))


if __name__ == "__main__":
    main()
