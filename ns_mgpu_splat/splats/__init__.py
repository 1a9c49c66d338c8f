# SPDX-License-Identifier: Apache-2.0
"""Splats without Nerfstudio: the table, cameras, render, project, losses, exposures, optimizer and densification."""

from ns_mgpu_splat.splats.camera import Camera
from ns_mgpu_splat.splats.exposure import ExposureAdam, Exposures, expose
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.project import Records, project
from ns_mgpu_splat.splats.render import Rendered, render
from ns_mgpu_splat.splats.table import SplatTable
from ns_mgpu_splat.splats.train import TrainReport, train_step

__all__ = [
    "Camera",
    "ExposureAdam",
    "Exposures",
    "Records",
    "Rendered",
    "SplatAdam",
    "SplatTable",
    "TrainReport",
    "expose",
    "project",
    "render",
    "train_step",
]
