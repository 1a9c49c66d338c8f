# SPDX-License-Identifier: Apache-2.0
"""One training step of a run: in one native call where nothing stands against it, else through autograd.

Both make the same update. What a step says about itself is read when it is asked for: reading waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from ns_mgpu_splat.nerfstudio.datamanager import MgpuSplatDatamanager
from ns_mgpu_splat.nerfstudio.device import shard_memory
from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel, psnr_of
from ns_mgpu_splat.nerfstudio.optimizers import SplatOptimizers, kTable
from ns_mgpu_splat.nerfstudio.pipeline import MgpuSplatPipeline

# What the native step does in one: where one of these is replaced, its replacement must run.
kReplaced: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        MgpuSplatModel,
        (
            *("get_outputs", "get_loss_dict", "get_metrics_dict", "_render", "_camera", "_target", "forward"),
            "background",
        ),
    ),
    (MgpuSplatPipeline, ("get_train_loss_dict",)),
    (MgpuSplatDatamanager, ("next_train", "train_index")),
    (SplatOptimizers, ("step_some", "zero_grad_some", "rates")),
)


class StepResult:
    """Losses and metrics of one step, by name; read from the device when first asked for."""

    def __init__(
        self, losses: Callable[[], dict[str, float]], metrics: Callable[[StepResult], dict[str, Any]]
    ) -> None:
        self._losses, self._metrics = losses, metrics

    @cached_property
    def losses(self) -> dict[str, float]:
        """The parts of the loss."""
        return self._losses()

    @property
    def loss(self) -> float:
        """Their sum."""
        return sum(self.losses.values())

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """PSNR in dB, number of Gaussians, memory of each shard, ..."""
        return self._metrics(self)


def why_autograd(
    model: MgpuSplatModel, pipeline: MgpuSplatPipeline, optimizers: SplatOptimizers
) -> str | None:
    """What keeps steps from being native, in a few words; None if nothing does."""
    if model.config.output_depth_during_training:
        return "depth is wanted in training steps"
    if model.config.depth_weight > 0:
        return "depth is supervised"
    for mine, (standard, names) in zip(
        (model, pipeline, pipeline.datamanager, optimizers), kReplaced, strict=True
    ):
        for name in names:
            if getattr(type(mine), name) is not getattr(standard, name) or name in vars(mine):
                return f"{type(mine).__name__}.{name} is replaced"
    return None


def autograd_step(
    pipeline: MgpuSplatPipeline, optimizers: SplatOptimizers, every: dict[str, int], step: int
) -> StepResult:
    """Forward, backward and optimizer step through Nerfstudio's interfaces.

    Args:
        every: by group: in how many steps gradients accumulate before they are applied.
    """
    groups = list(optimizers.parameters)
    optimizers.zero_grad_some([g for g in groups if step % every[g] == 0])
    _, loss_dict, metrics = pipeline.get_train_loss_dict(step=step)
    functools.reduce(torch.add, loss_dict.values()).backward()
    optimizers.step_some([g for g in groups if step % every[g] == every[g] - 1], step)
    optimizers.scheduler_step_all(step)
    detached = {name: loss.detach() for name, loss in loss_dict.items()}
    return StepResult(lambda: {name: float(loss) for name, loss in detached.items()}, lambda _result: metrics)


class NativeSteps:
    """Training steps in one native call each. The cameras are prepared once."""

    def __init__(self, pipeline: MgpuSplatPipeline, optimizers: SplatOptimizers) -> None:
        self.model, self.data, self.optimizers = pipeline.model, pipeline.datamanager, optimizers
        self.refines = self.model.config.camera_optimizer.mode != "off"
        self.others = [group for group in optimizers.parameters if group != kTable]
        self._cameras: dict[int, Any] = {}

    def camera(self, index: int) -> Any:
        """The camera of a training image; its viewmat requires grad where poses are refined."""
        if self.refines:
            camera = self.data.train_cameras[index : index + 1]
            camera.metadata = {"cam_idx": index}
            return self.model._camera(camera)
        found = self._cameras.get(index)
        if found is None:
            found = self._cameras[index] = self.model._camera(self.data.train_cameras[index : index + 1])
        return found

    def __call__(self, every: dict[str, int], step: int) -> StepResult:
        """The step; `every` as in `autograd_step`."""
        from ns_mgpu_splat.splats.exposure import expose
        from ns_mgpu_splat.splats.train import train_step

        model, optimizers, others = self.model, self.optimizers, self.others
        accumulates = every[kTable]
        if step % accumulates == 0:
            optimizers.table.zero_pending()
        if others:
            optimizers.zero_grad_some([g for g in others if step % every[g] == 0])

        index = self.data.train_index(step)
        view = self.camera(index)
        found = self.data.train_image(step, index)
        background, target = model.step_background(), found.image
        if target.shape[2] != 3:
            behind = torch.tensor(background, device=target.device)
            target = model._target({"image": target, "image_idx": index}, behind)
        shown = model.shows(step)
        exposure = None if model.exposure is None else model.exposure.row(index)
        report = train_step(
            model.table,
            optimizers.table,
            view,
            target,
            masks=found.mask,
            ssim_weight=model.config.ssim_lambda,
            background=background,
            antialiased=model.config.rasterize_mode == "antialiased",
            sh_degree=model.active_sh_degree(),
            lrs=optimizers.rates(step),
            viewmat_grads=self.refines,
            images=shown,
            accumulate=step % accumulates != accumulates - 1,
            exposures=exposure,
        )
        image = report.images.pop() if shown else None
        if model.exposure is not None and exposure is not None and report.exposure_grads is not None:
            image = None if image is None else expose(image, exposure.detach())  # before it is stepped
            model.exposure.add_gradient(index, report.exposure_grads[0])
        poses: dict[str, torch.Tensor] = {}
        if self.refines:
            self._refine(view.viewmat, report.viewmat_grads, poses)
        if others:
            optimizers.step_some([g for g in others if step % every[g] == every[g] - 1], step)
            optimizers.scheduler_step_all(step)
        # figures are taken now and read later; the image goes back at once
        figures: dict[str, Any] = {"gaussian_count": model.num_points}
        error: torch.Tensor | None = None
        if image is not None:
            mask = None if found.mask is None else found.mask[..., None]
            error = model._squared_error(image.clamp_(0, 1), target, mask)
            self._add_figures(figures)

        def losses() -> dict[str, float]:
            return {"main_loss": report.loss, **{name: float(loss) for name, loss in poses.items()}}

        def metrics(_result: StepResult) -> dict[str, Any]:
            return figures if error is None else {**figures, "psnr": psnr_of(float(error))}

        return StepResult(losses, metrics)

    def _add_figures(self, figures: dict[str, Any]) -> None:
        """Add what is shown of a step beside its loss and PSNR; nothing here waits for the device."""
        for shard, used in enumerate(shard_memory()):
            figures[f"memory_mib/shard_{shard}"] = used / 2**20
        figures.update(self.model.partition_metrics())
        self.model.camera_optimizer.get_metrics_dict(figures)

    def _refine(
        self, viewmat: torch.Tensor, dL_dviewmat: torch.Tensor | None, losses: dict[str, torch.Tensor]
    ) -> None:
        """Carry the pose's gradient back to the camera optimizer's parameters, and add its own losses."""
        assert dL_dviewmat is not None
        self.model.camera_optimizer.get_loss_dict(losses)
        through = (viewmat * dL_dviewmat[0].to(viewmat.device)).sum()
        functools.reduce(torch.add, losses.values(), through).backward()
        losses.update({name: loss.detach() for name, loss in losses.items()})
