# SPDX-License-Identifier: Apache-2.0
"""Train some steps of the plug-in's model and print `torch.mgpu.op_stats()` of them as JSON."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch

from ns_mgpu_splat.nerfstudio.config import mgpu_splat
from ns_mgpu_splat.nerfstudio.optimizers import SplatOptimizers


def print_stats(data: str) -> None:
    """30 steps on the capture `data`; the last line is the JSON of {"stats", "losses", "gradients", "rows"}."""
    config = copy.deepcopy(mgpu_splat.config)
    config.pipeline.datamanager.data = Path(data)
    pipeline = config.pipeline.setup(device="mgpu")
    model = pipeline.model
    optimizers = SplatOptimizers(config.optimizers, pipeline.get_param_groups(), model, 100, 0)
    model.start_training(optimizers.table, 100, 0)
    pipeline.train()
    losses = []
    for step in range(30):
        if step == 1:
            torch.mgpu.reset_op_stats()
        model.step = step
        optimizers.zero_grad_all()
        _, loss, _ = pipeline.get_train_loss_dict(step)
        loss["main_loss"].backward()
        optimizers.step_some(["splats"], step)
        losses.append(float(loss["main_loss"].detach()))
    gradients = [name for name, p in model.gauss_params.items() if p.grad is not None]
    print(
        json.dumps(
            {
                "stats": torch.mgpu.op_stats(),
                "losses": losses,
                "gradients": gradients,
                "rows": model.num_points,
            }
        )
    )
