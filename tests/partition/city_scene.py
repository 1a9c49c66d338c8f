# SPDX-License-Identifier: Apache-2.0
"""Not a test: the procedural city as columns and cameras, for the tests and benchmarks of placement."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor


def city_columns(town: Any, rows: int, *, shuffled: bool, seed: int = 0) -> dict[str, Tensor]:
    """Columns of `rows` Gaussians on a town (data/city/splats.py), SH degree 0, in random order if `shuffled`."""
    from ns_mgpu_splat.data.city.splats import SplatSampler

    sampler, chunk = SplatSampler(town, rows, seed), 1 << 18
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        begins = range(0, rows, chunk)
        parts = list(pool.map(lambda begin: sampler.rows(begin, min(chunk, rows - begin)), begins))
    names = ("means", "quats", "scales", "opacities", "sh0")
    columns = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in names}
    if shuffled:
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        columns = {name: column[order] for name, column in columns.items()}
    return columns


def city_cameras(town: Any, images: int, width: int, height: int) -> dict[str, list[Any]]:
    """Cameras of the city's own survey and drive: {"aerial": [...], "street": [...]}, as ns_mgpu_splat.Camera."""
    from ns_mgpu_splat import Camera
    from ns_mgpu_splat.data.city.cameras import Lens, place_cameras

    lens, out = Lens(width, height), {"aerial": [], "street": []}
    flip = np.diag([1.0, -1.0, -1.0, 1.0])  # OpenGL's camera axes to OpenCV's
    for pose in place_cameras(town, images):
        viewmat = torch.from_numpy(np.linalg.inv(pose.camera_to_world @ flip)).float()
        cx, cy = lens.center
        out[pose.name.split("_")[0]].append(Camera(viewmat, lens.focal, lens.focal, cx, cy, width, height))
    return out
