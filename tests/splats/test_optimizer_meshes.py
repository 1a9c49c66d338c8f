# SPDX-License-Identifier: Apache-2.0
"""Training on one shard and on three, the latter with the locality check (host), each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from splat_scenes import mesh_of

import ns_mgpu_splat

pytestmark = pytest.mark.any_mesh
PROBE = Path(__file__).with_name("train_probe.py")


def probe(out: Path, devices: str, **environment: str) -> dict[str, Any]:
    settings = {**os.environ, "MGPU_DEVICES": devices, "MGPU_SHARD_THRESHOLD": "4096", **environment}
    done = subprocess.run(
        [sys.executable, str(PROBE), str(out)], env=settings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr[-2000:]}"
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    ns_mgpu_splat.init()
    folder = tmp_path_factory.mktemp("meshes")
    one = probe(folder / "one.pt", mesh_of(1))
    three = probe(folder / "three.pt", mesh_of(3), MGPU_CHECK_LOCALITY="1" if mesh_of(1) == "cpu:1" else "0")
    return one, three


def test_training_is_local_and_agrees_on_three_shards(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The run with the locality check ended well (the fixture says so); its losses and moments are those of one shard.

    Gradients of a row may be summed in another order: 1e-4 of the tensor's largest, as in the design. Adam makes a
    whole step of a gradient that is only rounding, so parameters may part where the true gradient is zero.
    """
    one, three = runs
    assert one["reports"] == three["reports"]
    assert one["reports"][3]["relocated"] > 0
    assert one["reports"][-1]["total"] == 9_923  # 9,000 x 1.05 x 1.05, rounded up each time
    assert one["waiting"] == three["waiting"] > 0
    for a, b in zip(one["losses"], three["losses"], strict=True):
        assert abs(a - b) < 1e-4
    for name, moment in one["exp_avg"].items():
        assert float((moment - three["exp_avg"][name]).abs().max()) < 1e-4 * float(moment.abs().max()), name


def test_loss_sampling_and_relocation_are_the_same_bits(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    one, three = runs
    assert torch.equal(one["gradient"], three["gradient"])
    assert torch.equal(one["sampled"], three["sampled"])
    assert torch.equal(one["dead"], three["dead"])
    assert len(one["dead"]) == len(one["sampled"]) == 2_000
    for a, b in zip(one["relocated"], three["relocated"], strict=True):
        assert torch.equal(a, b)


def test_a_step_has_no_fallback_on_large_operands(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for run in runs:
        for stats in run["stats"]:
            large = {name: counts for name, counts in stats.items() if counts["large"] > 0}
            assert not large, f"a training step ran these on the lead shard alone: {large}"
