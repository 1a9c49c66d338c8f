# SPDX-License-Identifier: Apache-2.0
"""The loss of depths: against float64 by finite differences, and what it does to a plane in the wrong place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import Camera, SplatAdam, SplatTable, render
from ns_mgpu_splat.splats.loss import disparity_loss

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def twin(depth: Tensor, solid: Tensor, pixels: Tensor, measured: Tensor, weights: Tensor) -> float:
    """The definition, pixel by pixel in float64; typical depth 2."""
    total, weight = 0.0, 0.0
    for pixel, truth, w in zip(pixels.tolist(), measured.tolist(), weights.tolist(), strict=True):
        if float(solid.flatten()[pixel]) >= 0.5:
            total += w * abs(2 / float(depth.flatten()[pixel]) - 2 / truth)
            weight += w
    return total / max(weight, 1e-12)


def test_value_and_gradient_are_those_of_the_definition() -> None:
    """With a pixel that is measured twice, one that is not solid, and one that nothing was rendered in."""
    g = torch.Generator().manual_seed(0)
    depth = (1 + torch.rand(5, 7, 1, generator=g)).double()
    solid = torch.rand(5, 7, 1, generator=g) * 0.5 + 0.5
    pixels = torch.tensor([3, 3, 9, 20, 34, 11])
    solid.view(-1)[20], solid.view(-1)[11], depth.view(-1)[11] = 0.4, 0.0, 0.0
    measured, weights = 1 + torch.rand(6, generator=g), torch.rand(6, generator=g)
    mine = depth.float().to("mgpu").requires_grad_()
    loss = disparity_loss(mine, *(t.to("mgpu") for t in (solid, pixels, measured, weights)), 2.0)
    loss.backward()
    assert mine.grad is not None
    assert float(loss.detach()) == pytest.approx(twin(depth, solid, pixels, measured, weights), rel=1e-5)
    slopes = torch.zeros(35, dtype=torch.float64)
    for pixel in range(35):
        both = []
        for step in (1e-6, -1e-6):
            moved = depth.clone()
            moved.view(-1)[pixel] += step
            both.append(twin(moved, solid, pixels, measured, weights))
        slopes[pixel] = (both[0] - both[1]) / 2e-6
    assert torch.allclose(mine.grad.cpu().double().flatten(), slopes, atol=1e-5)
    assert float(slopes[20]) == float(slopes[11]) == 0


def test_nothing_measured_and_nothing_solid_are_zero() -> None:
    depth = torch.ones(3, 3, 1).to("mgpu").requires_grad_()
    none = [torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0)]
    some = [torch.tensor([1, 2]), torch.ones(2), torch.ones(2)]
    for solid, samples in ((torch.ones(3, 3, 1), none), (torch.zeros(3, 3, 1), some)):
        depth.grad = None
        loss = disparity_loss(depth, solid.to("mgpu"), *(t.to("mgpu") for t in samples), 1.0)
        loss.backward()
        assert float(loss.detach()) == 0
        assert depth.grad is not None
        assert float(depth.grad.abs().max()) == 0


def test_a_plane_moves_to_its_depth() -> None:
    """A wall at 3 units, measured at 2 in a pixel of four: after 150 steps the whole of it is there."""
    across = torch.linspace(-1.6, 1.6, 33)
    y, x = torch.meshgrid(across, across, indexing="ij")
    count = x.numel()
    table = SplatTable.from_columns(
        means=torch.stack([x.flatten(), y.flatten(), torch.full((count,), 3.0)], dim=1),
        quats=torch.tensor([[1.0, 0, 0, 0]]).repeat(count, 1),
        scales=torch.full((count, 3), 0.08).log(),
        opacities=torch.full((count,), 3.0),
        sh0=torch.zeros(count, 3),
        shN=torch.zeros(count, 0, 3),
    ).requires_grad_(True)
    adam = SplatAdam(table, {"means": 1e-2})
    camera = Camera(torch.eye(4), 40.0, 40.0, 16.0, 16.0, 32, 32)
    pixels = torch.arange(0, 32 * 32, 4).to("mgpu")
    measured, weights = torch.full((256,), 2.0).to("mgpu"), torch.ones(256).to("mgpu")
    losses = []
    for step in range(150):
        (image,) = render(table, camera, optimizer=adam)
        loss = disparity_loss(image.depth, image.accumulation, pixels, measured, weights, 2.0)
        loss.backward()
        adam.step({"means": 4e-2 * 0.97**step})
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(1 - 2 / 3, abs=0.01)
    assert losses[-1] < 0.01
    with torch.no_grad():
        (image,) = render(table, camera, optimizer=adam)
    # from 1 at the start; the order of atomic sums moves it by some hundredths
    assert float((image.depth.cpu() - 2).abs().mean()) < 0.1
