# SPDX-License-Identifier: Apache-2.0
"""train_step(): a whole training step in one native call, without autograd (cuda/splat/train_step.h)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.arguments import finite_number
from ns_mgpu_splat.splats.loss import loss_mask
from ns_mgpu_splat.splats.render import camera_list, check_sh_degree, fixed_background

if TYPE_CHECKING:
    from ns_mgpu_splat.splats.camera import Camera
    from ns_mgpu_splat.splats.optimizer import SplatAdam
    from ns_mgpu_splat.splats.table import SplatTable


class TrainReport:
    """What a training step says about itself. Losses stay on the device: reading one waits for the step."""

    viewmat_grads: Tensor | None
    """(C, 4, 4) float32 on the CPU, dL/d(viewmat) of each camera; None if it was not asked for."""

    images: list[Tensor]
    """(H, W, 3) float32 on `mgpu` for each camera, as rendered before the step; empty if they were not asked for."""

    exposure_grads: Tensor | None
    """(C, 3, 4) float32 on `mgpu`, dL/d(exposure) of each camera, 0 where it has none; None if no exposures were given."""

    def __init__(self, result: Any, viewmat_grads: Tensor | None) -> None:
        """From the native result."""
        self._result, self.viewmat_grads, self.images = result, viewmat_grads, result.take_images()
        self.exposure_grads = result.dL_dexposures

    @cached_property
    def views(self) -> list[dict[str, float]]:
        """Of each camera: `loss`, `l1` and `ssim`."""
        return [dict(zip(("loss", "l1", "ssim"), values, strict=True)) for values in self._result.losses()]

    @property
    def culled(self) -> dict[str, list[int]]:
        """By shard: `cells`, `cells_kept` by some camera, and `candidates`, pairs of a row and a camera that were projected."""
        return self._result.culled

    @property
    def times(self) -> list[tuple[str, float]]:
        """Seconds by stage: the host's, or with MGPU_STAGE_TIMES=1 the GPUs'."""
        return self._result.times

    @property
    def links(self) -> dict[str, Any]:
        """What the step sent between shards, with the keys of `torch.mgpu.link_stats()`, of this step alone."""
        return self._result.links

    @property
    def loss(self) -> float:
        """Mean loss of the cameras, as before the step, without regularisers."""
        return _mean(self.views, "loss")

    @property
    def l1(self) -> float:
        """Mean absolute difference."""
        return _mean(self.views, "l1")

    @property
    def ssim(self) -> float:
        """Mean SSIM; 1 where no window fits into the image, or its weight is 0."""
        return _mean(self.views, "ssim")


def _mean(views: list[dict[str, float]], name: str) -> float:
    return sum(view[name] for view in views) / len(views) if views else math.nan


def train_step(
    table: SplatTable,
    optimizer: SplatAdam,
    cameras: Camera | Sequence[Camera],
    targets: Tensor | Sequence[Tensor],
    *,
    masks: Tensor | Sequence[Tensor | None] | None = None,
    ssim_weight: float = 0.2,
    background: Tensor | Sequence[float] | None = None,
    antialiased: bool = False,
    sh_degree: int | None = None,
    lrs: Mapping[str, float] | None = None,
    viewmat_grads: bool = False,
    images: bool = False,
    accumulate: bool = False,
    exposures: Tensor | Sequence[Tensor | None] | None = None,
) -> TrainReport:
    """Render `cameras`, compare with `targets`, go back, and take one step of `optimizer`.

    The same update as `render(..., optimizer=optimizer)`, the mean of `l1_ssim_loss` over the cameras, `backward()` and
    `optimizer.step(lrs)`, at less cost: nothing goes through autograd, no image becomes a tensor.

    Args:
        table: the table that `optimizer` trains.
        optimizer: takes the step; gradients that it has pending take part.
        cameras: one or several, of any sizes. Gradients of viewmats: see `viewmat_grads`.
        targets: a photograph (H, W, 3) for each camera, uint8 or float32 in [0, 1], contiguous, on `mgpu`.
        masks: (H, W) for each camera or None, as in `l1_ssim_loss`.
        ssim_weight: of D-SSIM against L1, in [0, 1].
        background, antialiased, sh_degree: as in `render`.
        lrs: new learning rates by column, as in `SplatAdam.step`.
        viewmat_grads: have `TrainReport.viewmat_grads`, for the poses' own optimizer; reading them makes the step wait.
        images: have `TrainReport.images`.
        accumulate: take no step yet: leave the gradients in `optimizer.pending`, for the next step.
        exposures: (3, 4) on `mgpu` for each camera or None, what `expose` does to its image before it is compared. They are
            not changed; have `TrainReport.exposure_grads` for their own optimizer.
    Returns: losses and, if asked, pose gradients.
    Raises: ValueError naming the argument and its shape.
    """
    if optimizer.table is not table:
        raise ValueError("optimizer trains another table; make a SplatAdam of this one.")
    cameras = camera_list(cameras)
    if not cameras:
        raise ValueError("cameras is empty; a step needs one at least.")
    targets = _tensor_list("targets", targets)
    masks = [loss_mask(mask) for mask in _tensor_list("masks", () if masks is None else masks, optional=True)]
    exposures = _tensor_list("exposures", () if exposures is None else exposures, optional=True)
    ssim_weight = finite_number("ssim_weight", ssim_weight, 0, 1)
    if lrs is not None:
        optimizer.set_lrs(lrs)
    result = native().train_step(
        table.columns(),
        optimizer.state(),
        optimizer.history,
        [camera.arguments() for camera in cameras],
        targets,
        masks,
        () if accumulate else optimizer.pending,
        ssim_weight,
        fixed_background(background),
        antialiased,
        check_sh_degree(sh_degree, table.shN),
        viewmat_grads,
        not accumulate,
        images,
        *optimizer.step_arguments(),
        table.cells,
        exposures,
    )
    if accumulate:
        optimizer.pending.append(result.frame)
    else:
        optimizer.stepped(result.report)
    return TrainReport(result, result.dL_dviewmats if viewmat_grads else None)


def _tensor_list(name: str, given: Any, *, optional: bool = False) -> list[Any]:
    """One tensor or several as a list. Raises ValueError naming the entry that is none (nor None, if `optional`)."""
    if isinstance(given, Tensor):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(
            f"{name} is a {type(given).__name__}, expected a tensor, or a list of one for each camera."
        )
    for i, entry in enumerate(given):
        if not isinstance(entry, Tensor) and not (optional and entry is None):
            raise ValueError(
                f"{name}[{i}] is a {type(entry).__name__}, expected a tensor{' or None' if optional else ''}."
            )
    return list(given)
