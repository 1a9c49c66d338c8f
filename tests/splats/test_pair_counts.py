# SPDX-License-Identifier: Apache-2.0
"""What benchmarks count in a view, against a walk over all pixels and records in float64."""

from __future__ import annotations

import pytest
import splat_scenes as scenes
import torch

import ns_mgpu_splat
from ns_mgpu_splat import render

WIDTH, HEIGHT = 61, 47  # tiles and patches are cut at both edges


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def test_counts_equal_a_walk_over_all_pixels_and_records() -> None:
    table = scenes.table_of(scenes.random_columns(300, 5))
    camera = scenes.camera_of(scenes.random_twin_camera(2, WIDTH, HEIGHT))
    frame = render(table, camera)[0].rgb.grad_fn.frame  # type: ignore[union-attr]
    row, _, *columns = frame.records()
    means, conics, opacities, _, depths = (column.cpu().double() for column in columns)
    order = sorted(range(len(row)), key=lambda i: (float(depths[i]), int(row[i])))
    y, x = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    light = torch.ones(HEIGHT, WIDTH, dtype=torch.float64)
    lit = patches = 0
    for i in order:
        dx, dy = x - means[i, 0], y - means[i, 1]
        sigma = 0.5 * (conics[i, 0] * dx * dx + conics[i, 2] * dy * dy) + conics[i, 1] * dx * dy
        alpha = (opacities[i] * torch.exp(-sigma)).clamp(max=0.99)
        hit = alpha >= 1 / 255
        after = light * (1 - alpha)
        contributes = hit & (after > 1e-4)
        light = torch.where(contributes, after, torch.where(hit, 0.0, light))
        lit += int(contributes.sum())
        padded = torch.zeros(48, 64, dtype=torch.bool)
        padded[:HEIGHT, :WIDTH] = contributes
        patches += int(padded.reshape(12, 4, 8, 8).any(3).any(1).sum())
    assert lit > 10_000
    got_lit, got_patches = frame.pair_counts()
    # float32 moves few alphas across a threshold
    assert abs(got_lit - lit) <= 1e-3 * lit
    assert abs(got_patches - patches) <= 1e-2 * patches
