# SPDX-License-Identifier: Apache-2.0
"""Nerfstudio's pipeline: data first, so that a bad capture is refused before anything is compiled; then the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from nerfstudio.pipelines.base_pipeline import Pipeline, VanillaPipeline, VanillaPipelineConfig
from nerfstudio.utils.rich_utils import CONSOLE
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.cuda.amp.grad_scaler import GradScaler
from tyro.conf import Suppress

from ns_mgpu_splat.nerfstudio import preflight, tools
from ns_mgpu_splat.nerfstudio.datamanager import MgpuSplatDatamanager, MgpuSplatDatamanagerConfig
from ns_mgpu_splat.nerfstudio.device import start_device
from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel, MgpuSplatModelConfig
from ns_mgpu_splat.nerfstudio.older_runs import FillsIn
from ns_mgpu_splat.nerfstudio.presets import first_wrong_value
from ns_mgpu_splat.nerfstudio.say import say
from ns_mgpu_splat.words import counted


@dataclass
class MgpuSplatPipelineConfig(FillsIn, VanillaPipelineConfig):
    """The data and the model."""

    _target: type = field(default_factory=lambda: MgpuSplatPipeline)
    """Class of the pipeline."""
    datamanager: MgpuSplatDatamanagerConfig = field(default_factory=MgpuSplatDatamanagerConfig)
    """Where images come from."""
    model: MgpuSplatModelConfig = field(default_factory=MgpuSplatModelConfig)
    """What is trained."""
    resumed_gaussians: Suppress[int] = 0  # of the checkpoint that will be loaded; the trainer sets it


class EvaluationStopped(Exception):
    """An evaluation was left because the run is to end."""


class MgpuSplatPipeline(VanillaPipeline):
    """Data and model. The model waits for a checkpoint in the tools' modes, "test" and "inference"."""

    config: MgpuSplatPipelineConfig
    datamanager: MgpuSplatDatamanager

    def __init__(
        self,
        config: MgpuSplatPipelineConfig,
        device: torch.device | str,
        test_mode: Literal["test", "val", "inference"] = "val",
        world_size: int = 1,
        local_rank: int = 0,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        Pipeline.__init__(self)
        self.stop_wanted: Callable[[], bool] = lambda: False  # asked between images; the trainer sets its own
        self.config, self.test_mode, self.world_size = config, test_mode, world_size
        wrong = first_wrong_value(config, tools.config_argument() or "The run's config.yml", "pipeline.")
        if wrong is not None:  # of a tool: ns-train has looked already
            raise SystemExit(f"{tools.speaker()}: {wrong}")
        config.datamanager.wants_depth = config.model.depth_weight > 0
        self.datamanager = config.datamanager.setup(
            device=device, test_mode=test_mode, world_size=world_size, local_rank=local_rank
        )
        start_device()
        dataset = self.datamanager.train_dataset
        metadata = self.datamanager.train_dataparser_outputs.metadata
        seeds = (metadata["points3D_xyz"], metadata["points3D_rgb"]) if "points3D_xyz" in metadata else None
        cap = self._preflight(0 if seeds is None else len(seeds[0])) if test_mode == "val" else None
        self._model = config.model.setup(
            scene_box=dataset.scene_box,
            num_train_data=len(dataset),
            metadata=dataset.metadata,
            device=device,
            grad_scaler=grad_scaler,
            # a checkpoint's Gaussians take their place: seeds would be thinned, measured and sorted for nothing
            seed_points=None if self.config.resumed_gaussians else seeds,
            load_only=test_mode != "val",
            max_gaussians=cap,
        )
        # the clouds are in the table now: give their memory back
        for key in ("points3D_xyz", "points3D_rgb"):
            metadata.pop(key, None)
            dataset.metadata.pop(key, None)

    def _preflight(self, seeds: int) -> int:
        """Say what the run needs, before anything large is allocated; the cap on Gaussians that fits."""
        data, model = self.datamanager, self.config.model
        size = data.train_dataset.cameras
        try:
            found = preflight.plan(
                preflight.Demand(
                    seeds=seeds,
                    cap=model.max_gaussians,
                    sh_degree=model.sh_degree,
                    half=model.half,
                    largest_view=int((size.width.long() * size.height.long()).max()),
                    images=data.train_dataset.total + data.eval_dataset.total,
                    largest_image=max(data.train_dataset.largest, data.eval_dataset.largest),
                    host_cache=data.cache_bytes,
                    device_cache=data.device_bytes(),
                    resumed=self.config.resumed_gaussians,
                    clone_and_split=model.strategy == "default",
                ),
                preflight.free_on_shards(),
            )
        except preflight.PreflightError as error:
            raise SystemExit(f"mgpu-splat: {error}") from None
        preflight.announce(found)
        return found.cap

    @property
    def model(self) -> MgpuSplatModel:
        """The model, on `mgpu`."""
        return self._model  # type: ignore[return-value]

    def _flush(self) -> None:
        if self.model.optimizer is not None:
            self.model.optimizer.flush()

    def metrics_line(self, metrics: Mapping[str, float]) -> str:
        """Mean metrics of an evaluation in one line, with what they were measured on; those that were not are left out."""
        held, trained = self.datamanager.eval_dataset, self.datamanager.train_dataset
        seen = len(set(held.image_filenames) & set(trained.image_filenames))
        on = counted(len(held), "held-out image")
        if seen:  # of --pipeline.datamanager.dataparser.eval-mode all, or of files that say so
            on = f"{counted(len(held), 'image')}, {'all' if seen == len(held) else f'{seen:,}'} of them trained on"
        texts = (
            ("psnr", "PSNR {:.2f} dB"),
            ("ssim", "SSIM {:.4f}"),
            ("cc_psnr", "PSNR {:.2f} dB with corrected colours"),
            ("lpips", "LPIPS {:.4f}"),
        )
        said = ", ".join(text.format(metrics[name]) for name, text in texts if name in metrics)
        return f"Mean over {on}: {said}."

    def get_average_eval_image_metrics(
        self, step: int | None = None, output_path: Path | None = None, get_std: bool = False
    ) -> dict[str, float]:
        """Mean metrics over the held-out photographs. In a tool, `ns-eval` above all, it also says them in one line."""
        metrics: dict[str, float] = super().get_average_eval_image_metrics(step, output_path, get_std)
        if self.test_mode != "val":  # that is training's, which has its own words at its end
            say(self.metrics_line(metrics), soft_wrap=True)
        return metrics

    @torch.no_grad()
    def get_average_image_metrics(
        self,
        data_loader: Iterable,
        image_prefix: str,
        step: int | None = None,
        output_path: Path | None = None,
        get_std: bool = False,
    ) -> dict[str, float]:
        """Mean metrics over images that are read one after the other.

        Unlike Nerfstudio's, it never returns NaN (the deviation of one image is 0), so that `ns-eval` writes valid
        JSON, and says so where no image is held out.

        Args:
            data_loader: (camera, batch) pairs, with a length.
            image_prefix: of the names of saved images. step: unused.
            output_path: folder for saved images, or None. get_std: also return `<metric>_std`.
        """
        count = len(data_loader)  # type: ignore[arg-type]
        if count == 0:
            raise SystemExit(
                f"{tools.speaker()}: no image is held out, so there is nothing to measure on. Use "
                "--pipeline.datamanager.dataparser.eval-mode all to measure on the training images."
            )
        self.eval()
        self._flush()
        values: dict[str, list[float]] = {}
        if output_path is not None:
            output_path.mkdir(exist_ok=True, parents=True)
        columns = (
            TextColumn("[green]Evaluating all images"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, transient=True, console=CONSOLE, disable=not CONSOLE.is_terminal) as progress:
            task = progress.add_task("", total=count)
            for index, (camera, batch) in enumerate(data_loader):
                if self.stop_wanted():
                    self.train()
                    raise EvaluationStopped
                start = perf_counter()
                outputs = self.model.get_outputs_for_camera(camera=camera)
                metrics, images = self.model.get_image_metrics_and_images(outputs, batch)
                seconds = max(perf_counter() - start, 1e-9)
                if output_path is not None:
                    from torchvision.utils import save_image

                    for name, image in images.items():
                        save_image(
                            image.permute(2, 0, 1).cpu(),
                            output_path / f"{image_prefix}_{name}_{index:04d}.png",
                        )
                pixels = int(camera.height[0].item() * camera.width[0].item())
                metrics = {**metrics, "num_rays_per_sec": pixels / seconds, "fps": 1 / seconds}
                for name, value in metrics.items():
                    values.setdefault(name, []).append(float(value))
                progress.advance(task)
        self.train()
        result = {}
        for name, series in values.items():
            mean = sum(series) / len(series)
            result[name] = mean
            if get_std:
                spread = sum((v - mean) ** 2 for v in series) / max(len(series) - 1, 1)
                result[f"{name}_std"] = spread**0.5
        return result
