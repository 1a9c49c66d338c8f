# SPDX-License-Identifier: Apache-2.0
"""Exposures of photographs: an affine map of colours for each, learned beside the scene (cuda/splat/exposure.h).

A map (3, 4) takes a rendered colour to the photograph's: `colour' = map[:, :3] @ colour + map[:, 3]`. Maps begin as the
identity. A scene and all its maps could change together and no photograph would tell; so after each step all maps move by
the same amount, such that their mean is the identity: the scene has the colours of the mean photograph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from ns_mgpu_splat.device import native

FIT_PIXELS = 1 << 20  # that a fit of colours has in float64 at a time


class _Expose(torch.autograd.Function):
    """The native map and its way back."""

    @staticmethod
    def forward(ctx: Any, rgb: Tensor, exposure: Tensor) -> Tensor:
        ctx.save_for_backward(rgb, exposure)
        return native().expose(rgb, exposure)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dL_dexposed: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rgb, exposure = ctx.saved_tensors
        return native().expose_backward(rgb, exposure, dL_dexposed)


def expose(rgb: Tensor, exposure: Tensor) -> Tensor:
    """An image as a photograph of this exposure has it: (H, W, 3) float32, on `mgpu`; differentiable in both.

    Args:
        rgb: (H, W, 3) float32 on `mgpu`, as rendered.
        exposure: (3, 4) float32 on `mgpu`: gains and, in the last column, offsets.
    Raises: ValueError naming the argument and its shape.
    """
    return _Expose.apply(rgb.contiguous(), exposure.contiguous())


class Exposures(nn.Module):
    """The maps of all training photographs: `maps`, a parameter (N, 3, 4) on `mgpu`.

    No step reads or writes the gradient of all of them: `row(i)` is a leaf over the memory of one map, and an
    `ExposureAdam` steps the rows that were asked for since it last did.

    Args:
        count: N, the number of photographs; at least 1.
        device: `mgpu`.
    """

    def __init__(self, count: int, device: torch.device | str) -> None:
        super().__init__()
        self.maps = nn.Parameter(torch.eye(3, 4).repeat(count, 1, 1).to(device))
        self.maps.rows = {}  # type: ignore[attr-defined]
        self._leaves: dict[int, Tensor] = {}

    def row(self, index: int) -> Tensor:
        """The map (3, 4) of a photograph, a leaf that requires grad; the next step of `ExposureAdam` moves it."""
        leaf = self._leaves.get(index)
        if leaf is None:
            leaf = self._leaves[index] = self.maps.detach()[index].requires_grad_()
        self.maps.rows[index] = leaf  # type: ignore[attr-defined]
        return leaf

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Add what a native step found (3, 4) to the gradient of `row(index)`."""
        row = self.row(index)
        row.grad = gradient if row.grad is None else row.grad + gradient

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exposures:
        return self  # it stays on mgpu, as the model does


class ExposureAdam(Optimizer):
    """Adam on the rows of `Exposures.maps` that have a gradient; the others wait, with their moments.

    Dense Adam would go on pushing a photograph that is out of sight, by some 30 rates for every look at it where there are
    hundreds; here each has steps, and their corrections, of its own.

    Args:
        params: `Exposures.maps`.
        lr: learning rate, of gains and offsets alike.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-15,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps})
        for group in self.param_groups:
            for maps in group["params"]:
                if not hasattr(maps, "rows"):
                    raise ValueError("ExposureAdam steps Exposures.maps alone.")
                self.state[maps] = {
                    "step": torch.zeros(len(maps)),  # on the host: nothing waits for it
                    "exp_avg": torch.zeros_like(maps, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(maps, requires_grad=False),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of each row with a gradient, in the order of rows; afterwards the mean map is the identity."""
        for group in self.param_groups:
            for maps in group["params"]:
                state = self.state[maps]
                steps, table = state["step"].numpy(), maps.detach()
                for index, row in sorted(maps.rows.items()):
                    if row.grad is None:
                        continue
                    steps[index] += 1
                    native().exposure_step(
                        table,
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        index,
                        row.grad.contiguous(),
                        float(group["lr"]),
                        *group["betas"],
                        group["eps"],
                        int(steps[index]),
                    )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but nothing is shared with `state_dict` afterwards: steps write in place."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: value.clone() for name, value in state.items()})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all rows."""
        for group in self.param_groups:
            for maps in group["params"]:
                for row in maps.rows.values():
                    row.grad = None
                maps.rows.clear()


def color_corrected(rgb: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """`rgb` under the affine map of colours that brings it nearest to `target`, by least squares; clamped to [0, 1].

    What is left is what no exposure explains; the field measures photographs of unequal exposure so.

    Args:
        rgb, target: (H, W, 3) float32, on any device.
        mask: (H, W) or (H, W, 1), true where a pixel counts; None: all do. Where none counts, rgb stays as it is.
    Returns: (H, W, 3) float32 on the device of `rgb`.
    """
    given, wanted = rgb.detach().cpu().reshape(-1, 3), target.detach().cpu().reshape(-1, 3)
    counts = given.new_ones(len(given)) if mask is None else mask.detach().cpu().reshape(-1).float()
    normal, right = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    for x, y, weight in zip(
        given.split(FIT_PIXELS), wanted.split(FIT_PIXELS), counts.split(FIT_PIXELS), strict=True
    ):
        with_one = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
        weighted = with_one * weight.double()[:, None]
        normal += with_one.T @ weighted
        right += weighted.T @ (y.double() - x.double())
    # the least change among the best: a picture of one colour has many
    change = torch.linalg.lstsq(normal, right, rcond=1e-10, driver="gelsd").solution.float()
    return (given + given @ change[:3] + change[3]).clamp(0, 1).reshape(rgb.shape).to(rgb.device)
