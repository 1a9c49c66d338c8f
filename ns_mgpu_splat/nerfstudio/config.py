# SPDX-License-Identifier: Apache-2.0
"""The entry point `mgpu-splat`. Builds and loads nothing native; must not import Nerfstudio's table of methods."""

from __future__ import annotations

from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.plugins.types import MethodSpecification

from ns_mgpu_splat.nerfstudio.schedule import ColumnRateConfig, DecayConfig
from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainerConfig
from ns_mgpu_splat.quiet import hide_future_warnings

hide_future_warnings()


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
        },
    ),
    description="Gaussian splatting on one aggregate device made of all GPUs of a host; also on the CPU.",
)
