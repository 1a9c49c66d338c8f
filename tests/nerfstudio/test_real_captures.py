# SPDX-License-Identifier: Apache-2.0
"""Training on real photographs (`make test-slow`): every mesh the same, and good pictures after a short run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from nerfstudio_tools import train_many

pytestmark = pytest.mark.slow
MESHES = ("cpu:1", "cpu:3", "cpu:4")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "downscale"), [("brighton_small", 1), ("banana_small", 1), ("caliterra_aerial", 2)]
)
def test_losses_agree_on_every_mesh(shared_data: Path, tmp_path: Path, name: str, downscale: int) -> None:
    options = ["--data", shared_data / name, "--max-num-iterations", 100, "--experiment-name", name]
    options += ["--pipeline.datamanager.dataparser.downscale-factor", downscale]
    losses = {}
    for mesh in MESHES:
        (result,) = train_many(
            [[*options, "--timestamp", mesh.replace(":", "")]], tmp_path, timeout=290, MGPU_DEVICES=mesh
        )
        assert result["code"] == 0, result["text"]
        losses[mesh] = np.array(result["losses"])
        assert losses[mesh].shape == (100,)
    assert losses["cpu:1"][-10:].mean() < losses["cpu:1"][:10].mean()  # it did train
    for mesh in MESHES[1:]:
        np.testing.assert_allclose(losses[mesh], losses["cpu:1"], atol=1e-3, err_msg=mesh)


@pytest.mark.timeout(900)
def test_caliterra_trains_from_its_own_points(shared_data: Path, tmp_path: Path, run_tool) -> None:
    run_tool(
        *("ns-train", "mgpu-splat", "--data", shared_data / "caliterra_aerial", "--output-dir", tmp_path),
        *("--experiment-name", "caliterra", "--timestamp", "run", "--vis", "tensorboard"),
        *("--viewer.quit-on-train-completion", "True"),
        *("--max-num-iterations", 1000, "--schedule-steps", 1000),
        *("--pipeline.datamanager.dataparser.downscale-factor", 2),
        timeout=800,
    )
    config = tmp_path / "caliterra" / "mgpu-splat" / "run" / "config.yml"
    run_tool("ns-eval", "--load-config", config, "--output-path", tmp_path / "eval.json")
    results = json.loads((tmp_path / "eval.json").read_text())["results"]
    print(f"caliterra, downscale 2, 1,000 steps: PSNR {results['psnr']:.2f} dB, SSIM {results['ssim']:.4f}")
    assert results["psnr"] >= 24.0
