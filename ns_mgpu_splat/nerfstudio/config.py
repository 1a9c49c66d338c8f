# SPDX-License-Identifier: Apache-2.0
"""The entry points `mgpu-splat` and `mgpu-splat-big`. Builds and loads nothing native; must not import Nerfstudio's table of
methods."""

from __future__ import annotations

import copy
from typing import Any

from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.plugins.types import MethodSpecification

from ns_mgpu_splat.nerfstudio import help_texts, tools
from ns_mgpu_splat.nerfstudio.schedule import ColumnRateConfig, DecayConfig, ExposureRateConfig
from ns_mgpu_splat.nerfstudio.trainer_config import MgpuSplatTrainerConfig
from ns_mgpu_splat.quiet import hide_future_warnings

hide_future_warnings()
help_texts.join_lines()
tools.watch()


def _column(rate: float, final: float | None = None) -> dict[str, object]:
    return {"optimizer": ColumnRateConfig(lr=rate), "scheduler": DecayConfig(lr_final=final)}


mgpu_splat = MethodSpecification(
    config=MgpuSplatTrainerConfig(
        optimizers={
            "means": _column(1.6e-4, 1.6e-6),
            "features_dc": _column(2.5e-3),
            "features_rest": _column(2.5e-3 / 20),
            "opacities": _column(5e-2),
            "scales": _column(5e-3),
            "quats": _column(1e-3),
            "camera_opt": {
                "optimizer": AdamOptimizerConfig(lr=1e-4, eps=1e-15),
                "scheduler": DecayConfig(lr_final=5e-7, warmup_steps=1000),
            },
            "exposure": {"optimizer": ExposureRateConfig(lr=0.01), "scheduler": DecayConfig(lr_final=0.001)},
        },
    ),
    description="Gaussian splatting on all GPUs of a host as if they were one, or on the CPU. Needs no option but --data.",
)


def _big() -> TrainerConfig:
    """More Gaussians, and as many more steps as they need to multiply and to settle."""
    config: Any = copy.deepcopy(mgpu_splat.config)
    config.method_name = "mgpu-splat-big"
    config.max_num_iterations = config.schedule_steps = 45_000
    config.pipeline.model.max_gaussians = 5_000_000
    big: TrainerConfig = config
    return big


mgpu_splat_big = MethodSpecification(
    config=_big(),
    description="mgpu-splat with up to 5 million Gaussians and 45,000 steps: finer, and several times as long.",
)


def defaults_of(method_name: str | None) -> TrainerConfig:
    """The options of a method as they are without a command line."""
    big = mgpu_splat_big.config
    return big if method_name == big.method_name else mgpu_splat.config
