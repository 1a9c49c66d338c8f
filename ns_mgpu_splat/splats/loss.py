# SPDX-License-Identifier: Apache-2.0
"""The training loss of one image: fused L1 + D-SSIM (cuda/splat/loss.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.arguments import finite_number

SOLID = 0.5  # share of light that must be stopped for a depth to count


class _L1Ssim(torch.autograd.Function):
    """One native pass gives value and gradient; backward only scales the latter."""

    @staticmethod
    def forward(ctx: Any, rgb: Tensor, target: Tensor, ssim_weight: float, mask: Tensor | None) -> Tensor:
        loss, gradient, _, _ = native().l1_ssim(rgb, target, ssim_weight, mask, ctx.needs_input_grad[0])
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dL_dloss: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * dL_dloss, None, None, None


def l1_ssim_loss(
    rgb: Tensor, target: Tensor, *, ssim_weight: float = 0.2, mask: Tensor | None = None
) -> Tensor:
    """(1 - ssim_weight) * mean |rgb - target| + ssim_weight * (1 - mean SSIM); a scalar, differentiable in `rgb`.

    SSIM: 11 x 11 Gaussian window of sigma 1.5, means over channels and over the centres whose window is inside the image.
    An image with a side below 11 pixels has none: its loss is L1 alone, with weight 1.

    Args:
        rgb: (H, W, 3) float32, in [0, 1].
        target: (H, W, 3) float32 in [0, 1], or uint8 (divided by 255); on the same device.
        ssim_weight: of D-SSIM against L1, in [0, 1].
        mask: (H, W) or (H, W, 1), bool or number; non-zero where a pixel counts. What the others hold has no influence:
            they are absent from L1, are no centres of SSIM, and in their neighbours' windows the weights of the rest are
            scaled up to sum to one.
    Raises: ValueError for a shape, dtype, device or weight that does not fit; the message names it.
    """
    weight = finite_number("ssim_weight", ssim_weight, 0, 1)
    return _L1Ssim.apply(rgb.contiguous(), target.contiguous(), weight, loss_mask(mask))


def disparity_loss(
    depth: Tensor, accumulation: Tensor, pixels: Tensor, measured: Tensor, weights: Tensor, typical: float
) -> Tensor:
    """How far rendered depths are from measured ones: the weighted mean of |t / depth - t / measured|; a scalar.

    t is a typical depth, so the loss has no unit: 0.01 is one per cent of that distance. It compares 1 / depth, since that
    is what triangulation and most sensors know equally well near and far; by depth itself, a few points on the horizon would
    outweigh everything else. Where less than half of the light is stopped there is no depth to speak of: such a pixel has no
    gradient.

    Args:
        depth, accumulation: (H, W, 1) float32 as rendered (`Rendered`), world units; differentiable in the former.
        pixels: (M,) int64, row * W + column; M may be 0: the loss is 0.
        measured: (M,) float32, depth along the camera's z in world units, above 0.
        weights: (M,) float32, how much each counts.
        typical: t, above 0, world units; the median of what was measured, say.
    """
    if len(pixels) == 0:
        return depth.sum() * 0
    flat = depth.reshape(-1).index_select(0, pixels)
    solid = accumulation.detach().reshape(-1).index_select(0, pixels) >= SOLID
    found = torch.where(solid, flat, measured)
    weights = weights * solid
    difference = (1 / found - 1 / measured).abs() * typical
    return (difference * weights).sum() / weights.sum().clamp_min(1e-12)


def loss_mask(mask: Tensor | None) -> Tensor | None:
    """A mask as the native functions take it: (H, W) bool or uint8, contiguous."""
    if mask is None:
        return None
    if mask.shape[-1:] == (1,) and mask.dim() == 3:
        mask = mask[..., 0]
    if mask.dtype not in (torch.bool, torch.uint8):
        mask = mask != 0
    return mask.contiguous()
