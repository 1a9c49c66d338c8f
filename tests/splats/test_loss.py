# SPDX-License-Identifier: Apache-2.0
"""The fused loss against pytorch_msssim and a float64 twin written with torch's convolution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat.splats.loss import l1_ssim_loss

# Unequal sides, the smallest image with an SSIM centre, more rows than a thread's piece, wider than two of a GPU's strips.
SIZES = [(11, 11), (11, 40), (37, 53), (97, 130), (50, 331)]
# float32 sums of 121 products: relative rounding of some 1e-6 in a pixel's gradient.
GRADIENT_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def device() -> torch.device:
    return ns_mgpu_splat.init()


def images(height: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A smooth image with noise, and a target near it, so that SSIM is neither 0 nor 1; the target as uint8."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.linspace(0, 5, height), torch.linspace(0, 7, width), indexing="ij")
    base = torch.stack([0.5 + 0.4 * torch.sin(rows + k * columns) for k in (1.0, 0.3, 2.0)], dim=-1)
    rgb = (base + 0.05 * torch.randn(base.shape, generator=generator)).clamp(0, 1)
    target = (base.flip(0) * 0.3 + base * 0.7 + 0.05 * torch.randn(base.shape, generator=generator)).clamp(
        0, 1
    )
    return rgb, (target * 255).round().to(torch.uint8)


def twin_loss(rgb: Tensor, target: Tensor, ssim_weight: float, mask: Tensor | None = None) -> Tensor:
    """The definition in float64: windows by conv2d; a mask renormalises the window's weights."""
    keep = torch.ones(rgb.shape[:2], dtype=torch.float64) if mask is None else mask.to(torch.float64)
    x = torch.where(keep[..., None] > 0, rgb, 0.0).permute(2, 0, 1)[:, None]
    y = torch.where(keep[..., None] > 0, target, 0.0).permute(2, 0, 1)[:, None]
    if keep.sum() == 0:
        return rgb.sum() * 0.0
    l1 = ((x - y).abs().sum()) / (3 * keep.sum())
    offset = torch.arange(-5, 6, dtype=torch.float64)
    weight = torch.exp(-(offset**2) / (2 * 1.5**2))
    window = torch.outer(weight, weight) / weight.sum() ** 2
    if min(rgb.shape[:2]) < 11 or ssim_weight == 0:
        return l1
    centre = keep[5:-5, 5:-5]
    if centre.sum() == 0:
        return l1
    share = F.conv2d(keep[None, None], window[None, None])
    share = torch.where(centre > 0, share, 1.0)

    def mean(image: Tensor) -> Tensor:
        return F.conv2d(image, window[None, None]) / share

    mu_x, mu_y = mean(x), mean(y)
    var_x, var_y, cov = mean(x * x) - mu_x**2, mean(y * y) - mu_y**2, mean(x * y) - mu_x * mu_y
    c1, c2 = 0.01**2, 0.03**2
    ssim = (2 * mu_x * mu_y + c1) * (2 * cov + c2) / ((mu_x**2 + mu_y**2 + c1) * (var_x + var_y + c2))
    ssim = (ssim * centre).sum() / (3 * centre.sum())
    return (1 - ssim_weight) * l1 + ssim_weight * (1 - ssim)


def fused(rgb: Tensor, target: Tensor, device: torch.device, mask: Tensor | None = None, **settings: float):
    """Loss and gradient of the code under test, on the host."""
    leaf = rgb.detach().clone().to(device).requires_grad_(True)
    loss = l1_ssim_loss(leaf, target.to(device), mask=None if mask is None else mask.to(device), **settings)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach().cpu(), leaf.grad.cpu()


def twin(rgb: Tensor, target: Tensor, mask: Tensor | None = None, ssim_weight: float = 0.2):
    leaf = rgb.detach().double().requires_grad_(True)
    loss = twin_loss(leaf, target.double(), ssim_weight, mask)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def relative(value: Tensor, oracle: Tensor) -> float:
    return float((value.double() - oracle.double()).norm() / oracle.double().norm().clamp(min=1e-300))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_equals_pytorch_msssim(height: int, width: int, device: torch.device) -> None:
    from pytorch_msssim import ssim

    rgb, target = images(height, width)
    loss, gradient = fused(rgb, target, device)
    x = rgb.detach().double().requires_grad_(True)
    y = target.double() / 255
    planes = [image.permute(2, 0, 1)[None] for image in (x, y)]
    oracle = 0.8 * (x - y).abs().mean() + 0.2 * (1 - ssim(*planes, data_range=1.0))
    oracle.backward()
    assert abs(float(loss - oracle)) < 1e-6
    assert x.grad is not None
    assert relative(gradient, x.grad) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("ssim_weight", [0.0, 0.2, 1.0])
def test_equals_float64_twin(ssim_weight: float, device: torch.device) -> None:
    rgb, target = images(45, 61, seed=1)
    loss, gradient = fused(rgb, target / 255.0, device, ssim_weight=ssim_weight)
    oracle, oracle_gradient = twin(rgb, target / 255.0, ssim_weight=ssim_weight)
    assert abs(float(loss - oracle)) < 1e-6
    assert relative(gradient, oracle_gradient) < GRADIENT_TOLERANCE


def test_gradient_equals_finite_differences_of_the_twin(device: torch.device) -> None:
    rgb, target = images(23, 31, seed=2)
    target = target / 255.0
    _, gradient = fused(rgb, target, device)
    step = 1e-6  # float64: rounding 1e-10, curvature 1e-12 times the third derivative
    for row, column, channel in [(0, 0, 0), (4, 7, 1), (11, 15, 2), (22, 30, 0), (18, 2, 1)]:
        values = []
        for sign in (1, -1):
            moved = rgb.double().clone()
            moved[row, column, channel] += sign * step
            values.append(float(twin_loss(moved, target.double(), 0.2)))
        numeric = (values[0] - values[1]) / (2 * step)
        assert abs(float(gradient[row, column, channel]) - numeric) < 1e-4 * float(gradient.abs().max())


def test_bytes_count_as_255ths(device: torch.device) -> None:
    rgb, target = images(30, 41)
    from_bytes = fused(rgb, target, device)
    from_floats = fused(rgb, target / 255.0, device)
    assert torch.equal(from_bytes[0], from_floats[0])
    assert torch.equal(from_bytes[1], from_floats[1])


@pytest.mark.parametrize("ssim_weight", [0.0, 0.2])
def test_images_need_no_alignment(ssim_weight: float, device: torch.device) -> None:
    """A photograph may be a part of a larger tensor, at any byte of it."""
    rgb, target = images(33, 47, seed=6)
    want = fused(rgb, target, device, ssim_weight=ssim_weight)
    moved = torch.cat([torch.zeros(1, dtype=torch.uint8), target.flatten()]).to(device)[1:].view(target.shape)
    leaf = torch.cat([torch.zeros(1), rgb.flatten()]).to(device)[1:].view(rgb.shape).requires_grad_(True)
    loss = l1_ssim_loss(leaf, moved, ssim_weight=ssim_weight)
    loss.backward()
    assert leaf.grad is not None
    assert torch.equal(loss.detach().cpu(), want[0])
    assert torch.equal(leaf.grad.cpu(), want[1])


@pytest.mark.parametrize("ssim_weight", [0.0, 0.2])
def test_the_value_does_not_need_the_gradient(ssim_weight: float, device: torch.device) -> None:
    rgb, target = images(45, 61, seed=7)
    value = l1_ssim_loss(rgb.to(device), target.to(device), ssim_weight=ssim_weight)
    assert not value.requires_grad
    assert torch.equal(value.cpu(), fused(rgb, target, device, ssim_weight=ssim_weight)[0])


@pytest.mark.parametrize(("height", "width"), [(10, 50), (50, 10), (1, 1), (7, 3)])
def test_small_images_have_l1_alone(height: int, width: int, device: torch.device) -> None:
    rgb, target = images(height, width, seed=3)
    loss, gradient = fused(rgb, target, device)
    difference = rgb.double() - target.double() / 255
    assert abs(float(loss) - float(difference.abs().mean())) < 1e-7
    assert relative(gradient, difference.sign() / difference.numel()) < 1e-6


def test_equal_images_cost_nothing(device: torch.device) -> None:
    _, target = images(40, 40)
    loss, gradient = fused(target / 255.0, target, device)
    assert abs(float(loss)) < 1e-6
    assert float(gradient.abs().max()) < 1e-6


def holes(height: int, width: int) -> Tensor:
    mask = torch.ones(height, width, dtype=torch.bool)
    mask[3:20, 10:25] = False
    mask[::7, ::5] = False
    mask[-1] = False
    return mask


def test_masked_equals_twin(device: torch.device) -> None:
    rgb, target = images(48, 57, seed=4)
    mask = holes(48, 57)
    loss, gradient = fused(rgb, target, device, mask=mask)
    oracle, oracle_gradient = twin(rgb, target / 255.0, mask=mask)
    assert abs(float(loss - oracle)) < 1e-6
    assert relative(gradient, oracle_gradient) < GRADIENT_TOLERANCE


def test_masked_pixels_have_no_influence(device: torch.device) -> None:
    rgb, target = images(48, 57, seed=5)
    mask = holes(48, 57)
    before = fused(rgb, target, device, mask=mask)
    junk, junk_target = rgb.clone(), target.clone()
    junk[~mask] = float("nan")
    junk_target[~mask] = 255 - junk_target[~mask]
    after = fused(junk, junk_target, device, mask=mask[..., None].float())
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert float(before[1][~mask].abs().max()) == 0.0
    assert float(before[1][mask].abs().min()) > 0.0


def test_full_mask_is_no_mask(device: torch.device) -> None:
    rgb, target = images(33, 44)
    plain, masked = fused(rgb, target, device), fused(rgb, target, device, mask=torch.ones(33, 44))
    assert abs(float(plain[0] - masked[0])) < 1e-6
    assert relative(masked[1], plain[1]) < GRADIENT_TOLERANCE


def test_everything_masked_is_zero(device: torch.device) -> None:
    rgb, target = images(33, 44)
    loss, gradient = fused(rgb, target, device, mask=torch.zeros(33, 44))
    assert float(loss) == 0.0
    assert float(gradient.abs().max()) == 0.0


def test_gradient_scales_with_the_outer_one(device: torch.device) -> None:
    rgb, target = images(20, 20)
    leaf = rgb.detach().clone().to(device).requires_grad_(True)
    (3.0 * l1_ssim_loss(leaf, target.to(device))).backward()
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad.cpu(), 3.0 * fused(rgb, target, device)[1], rtol=1e-6, atol=0)


def test_wrong_inputs_are_named(device: torch.device) -> None:
    rgb = torch.rand(20, 30, 3, device="cpu").to(device)
    with pytest.raises(ValueError, match=r"target is .*expected contiguous uint8 or float32 \[20, 30, 3\]"):
        l1_ssim_loss(rgb, torch.zeros(20, 31, 3).to(device))
    with pytest.raises(ValueError, match="target is"):
        l1_ssim_loss(rgb, torch.zeros(20, 30, 3, dtype=torch.int64).to(device))
    with pytest.raises(ValueError, match="mask is"):
        l1_ssim_loss(rgb, rgb, mask=torch.ones(30, 20).to(device))
    with pytest.raises(ValueError, match="rgb is"):
        l1_ssim_loss(rgb[..., :2], rgb[..., :2])
