# SPDX-License-Identifier: Apache-2.0
"""The model: a splat table on `mgpu`, rendered by our operators, in the shape that Nerfstudio's tools expect.

It subclasses SplatfactoModel because the exporter and the viewer ask for one, keeps the names of its properties, and
overrides everything that computes. The model lives on `mgpu`, whatever device a tool passes or moves it to: `.to()`
neither moves nor copies it. In training nothing here touches all N rows; regularisers, noise and the optimizer step
happen inside `SplatAdam.step`.
"""

from __future__ import annotations

import math
import random
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer, CameraOptimizerConfig
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.models.splatfacto import SH2RGB, SplatfactoModel, SplatfactoModelConfig
from nerfstudio.viewer.render_state_machine import RenderStateMachine
from nerfstudio.viewer_legacy.server.viewer_utils import IOChangeException
from torch import Tensor, nn
from torch.nn import Parameter
from tyro.conf import Suppress

from ns_mgpu_splat.nerfstudio.device import run_layout, shard_memory, shard_names, start_device
from ns_mgpu_splat.nerfstudio.link_meter import LinkMeter
from ns_mgpu_splat.nerfstudio.names import kColumnOf
from ns_mgpu_splat.nerfstudio.older_runs import FillsIn
from ns_mgpu_splat.nerfstudio.say import say
from ns_mgpu_splat.nerfstudio.tools import speaker

if TYPE_CHECKING:
    from ns_mgpu_splat.data.depth import DepthSamples
    from ns_mgpu_splat.nerfstudio.viewer_controls import Look
    from ns_mgpu_splat.splats.camera import CameraModel
    from ns_mgpu_splat.splats.exposure import Exposures
    from ns_mgpu_splat.splats.table import SplatTable

kSsimWindow = 11
kNoDistortion = (0.0, 0.0, 0.0, 0.0)
kErrorWidth = 480  # pixels, of a picture with an error's text, at least
kLpipsWeights = "alexnet-owt-7be5be79.pth"


@dataclass
class MgpuSplatModelConfig(FillsIn, SplatfactoModelConfig):
    """How many Gaussians, how they grow, and how they are rendered."""

    _target: type = field(default_factory=lambda: MgpuSplatModel)
    """Class of the model."""
    max_gaussians: int | Literal["auto"] = 1_000_000
    """Hard cap on the number of Gaussians, kept from the first step on: a larger seed cloud is thinned evenly. A
    Gaussian with SH degree 3 takes about 0.7 KiB with its optimizer state. Raise it for detail, lower it for memory;
    "auto" takes as many as fit in what is free when training starts."""
    half: bool = False
    """Keep higher SH coefficients in float16 and first moments in bfloat16, stochastically rounded: about 0.5 KiB a Gaussian
    with SH degree 3. Set it where memory bounds the number of Gaussians."""
    strategy: Literal["mcmc", "default"] = "mcmc"
    """How Gaussians multiply: "mcmc" moves dead ones onto live ones and walks at random; "default" clones, splits, prunes
    and resets opacities as 3DGS did, and does without grow-factor, min-opacity, noise-lr and the two regularisers."""
    sh_degree: int = 3
    """Highest degree of the view-dependent colour, 0 to 3. 0 takes a quarter of the memory and cannot show shine."""
    sh_degree_interval: int = 1000
    """Steps between two degrees of view-dependent colour: colours settle before they may depend on the view. Lower it
    in runs much shorter than 5,000 steps."""
    warmup_length: int = 500
    """Step at which Gaussians begin to move to where they are needed and to multiply."""
    refine_every: int = 100
    """Steps between two rounds of moving and multiplying Gaussians."""
    stop_split_at: int | None = None  # type: ignore[assignment]
    """Step at which their number stops growing; None takes 5/6 of --schedule-steps (strategy "default": half of them).
    Training after it sharpens."""
    grow_factor: float = 1.05
    """Growth of the number of Gaussians in a round, up to max-gaussians. 1 keeps the number of the seed points."""
    min_opacity: float = 0.005
    """Opacity below which a Gaussian is dead and moves to a live one. Raise it if haze stays in the air."""
    noise_lr: float = 5e5
    """Strength of the random walk of faint Gaussians, times the rate of the means. 0 switches exploration off."""
    opacity_reg: float = 0.01
    """Weight of the mean opacity of the visible Gaussians in the loss: frees Gaussians that nothing needs."""
    scale_reg: float = 0.01
    """Weight of the mean size of the visible Gaussians, in world units, in the loss: keeps them compact."""
    densify_grad_thresh: float = 0.0002
    """Strategy "default": mean pull on the screen above which a Gaussian multiplies. Lower it for more of them; 0.0008
    suits --use-absgrad."""
    use_absgrad: bool = False
    """Strategy "default": add the pulls of pixels up without their signs, which splits blurred regions sooner (AbsGS)."""
    densify_size_thresh: float = 0.01
    """Strategy "default": a Gaussian that multiplies is split above this share of the scene's radius, cloned below."""
    cull_alpha_thresh: float = 0.005
    """Strategy "default": opacity below which a Gaussian is removed; resets lower all opacities to twice this."""
    reset_alpha_every: int = 30
    """Strategy "default": rounds between two resets of the opacities, which clear what no image needs."""
    reorder_decay: float = 1.5
    """Keep neighbouring Gaussians together in memory: they are sorted in space at first, and again once a round has made
    runs of 256 this many times as wide. 0 never sorts; lower it towards 1 if steps slow down between two sorts."""
    placement: bool = True
    """On several shards: keep each one's share of Gaussians and of work equal, by moving pages of 2 MiB after a round of
    multiplying. False leaves equal numbers of Gaussians on all shards, wherever these are in the scene."""
    placement_tolerance: float = 0.05
    """How far a shard's share may be off before pages move, in 0 to 0.5. Raise it if pages move in every round."""
    layout: Literal["auto", "space", "stripes"] = "auto"
    """On several shards: what lies on each. "stripes": stretches of neighbours go to the shards in turn, so that each has a part
    of what any photograph shows. "space": a piece of the scene each, for less traffic over slow links. "auto" takes
    stripes. Either trains to the same quality and can be resumed as the other."""
    ssim_lambda: float = 0.2
    """Weight of D-SSIM against L1 in the loss, 0 to 1. Higher favours structure over exact colour."""
    background_color: Literal["auto", "random", "black", "white"] = "auto"  # type: ignore[assignment]
    """Colour behind everything in training steps. "random", another one in each step and what "auto" takes, leaves nothing for
    the background to fill in: surfaces get solid, and look the same in any viewer. With "black" or "white" dark or bright
    surfaces may stay translucent; take them where the photographs show nothing but that colour around an object. Evaluation is
    over black, or over white for "white"."""
    rasterize_mode: Literal["classic", "antialiased"] = "classic"
    """"antialiased" dims Gaussians smaller than a pixel by what the screen filter widens them: for scenes seen from
    near and far, such as aerial and street views together. Other viewers need to know it of the exported file."""
    output_depth_during_training: bool = False
    """Also return depth in training steps, for methods built on this one; costs a tenth of a step."""
    camera_optimizer: CameraOptimizerConfig = field(default_factory=lambda: CameraOptimizerConfig(mode="off"))
    """Refine the camera poses while training: use it when poses are inexact and the images look doubled."""
    exposure: bool = False
    """Learn an affine map of colours for each training photograph: use it when exposure or white balance differs between
    photographs and the scene gets haze and floaters that explain it. Held-out images are rendered without one, so read
    cc_psnr, which this adds to evaluation."""
    depth_weight: float = 0.0
    """Weight in the loss of how far depths are from measured ones, as shares of a typical distance: from the capture's depth
    maps, or without them from COLMAP's points where an image saw them. 0.1 suits captures whose surfaces have little
    texture or few views. 0 does without, and with the slower steps that it takes."""
    color_corrected_metrics: bool = False  # type: ignore[assignment]
    """Also measure cc_psnr in evaluation: PSNR after the affine map of colours that fits each render best to its photograph."""
    lpips: bool = True
    """Also measure LPIPS in evaluation, if AlexNet's weights are in torch's cache; nothing is downloaded."""

    # Parts of splatfacto that this method does without
    resolution_schedule: Suppress[int] = 0
    num_downscales: Suppress[int] = 0
    cull_scale_thresh: Suppress[float] = 0.5
    n_split_samples: Suppress[int] = 2
    cull_screen_size: Suppress[float] = 0.15
    split_screen_size: Suppress[float] = 0.05
    stop_screen_size_at: Suppress[int] = 4000
    random_init: Suppress[bool] = False
    num_random: Suppress[int] = 50_000
    random_scale: Suppress[float] = 10.0
    use_scale_regularization: Suppress[bool] = False
    max_gauss_ratio: Suppress[float] = 10.0
    use_bilateral_grid: Suppress[bool] = False
    grid_shape: Suppress[tuple[int, int, int]] = (16, 16, 8)
    enable_collider: Suppress[bool] = False
    collider_params: Suppress[dict[str, float] | None] = None
    loss_coefficients: Suppress[dict[str, float]] = field(default_factory=dict)
    eval_num_rays_per_chunk: Suppress[int] = 4096
    prompt: Suppress[str | None] = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Exit with one sentence if an option is impossible."""
        if self.max_gaussians != "auto" and self.max_gaussians < 1:
            raise SystemExit('mgpu-splat: --pipeline.model.max-gaussians must be at least 1, or "auto".')
        if not 0 <= self.sh_degree <= 3:
            raise SystemExit(
                f"mgpu-splat: --pipeline.model.sh-degree is {self.sh_degree}, it must be 0, 1, 2 or 3."
            )
        if not 0 <= self.ssim_lambda <= 1:
            raise SystemExit(
                f"mgpu-splat: --pipeline.model.ssim-lambda is {self.ssim_lambda}, it must be in 0 to 1."
            )
        if not 0 <= self.depth_weight < math.inf:
            raise SystemExit(
                f"mgpu-splat: --pipeline.model.depth-weight is {self.depth_weight}, it must be 0 or more."
            )
        if not 0 <= self.placement_tolerance < 0.5:
            raise SystemExit(
                f"mgpu-splat: --pipeline.model.placement-tolerance is {self.placement_tolerance}, it must be at least 0 and "
                "below 0.5."
            )
        if self.reorder_decay != 0 and not self.reorder_decay > 1:
            raise SystemExit(
                f"mgpu-splat: --pipeline.model.reorder-decay is {self.reorder_decay}, it must be above 1, or 0 to never sort."
            )
        if self.layout == "stripes" and self.reorder_decay == 0:
            raise SystemExit(
                "mgpu-splat: --pipeline.model.layout stripes deals rows that are in order, and --pipeline.model.reorder-decay 0 "
                "never sorts them. Leave one of the two out."
            )
        for option, value, wanted, fits in (
            ("refine-every", self.refine_every, "at least 1", self.refine_every >= 1),
            ("grow-factor", self.grow_factor, "1 or more", 1 <= self.grow_factor < math.inf),
            ("min-opacity", self.min_opacity, "between 0 and 1", 0 < self.min_opacity < 1),
            ("noise-lr", self.noise_lr, "0 or more", 0 <= self.noise_lr < math.inf),
            ("opacity-reg", self.opacity_reg, "0 or more", 0 <= self.opacity_reg < math.inf),
            ("scale-reg", self.scale_reg, "0 or more", 0 <= self.scale_reg < math.inf),
            ("densify-grad-thresh", self.densify_grad_thresh, "0 or more", 0 <= self.densify_grad_thresh < math.inf),
            ("densify-size-thresh", self.densify_size_thresh, "0 or more", 0 <= self.densify_size_thresh < math.inf),
            ("cull-alpha-thresh", self.cull_alpha_thresh, "above 0 and below 0.5", 0 < self.cull_alpha_thresh < 0.5),
            ("reset-alpha-every", self.reset_alpha_every, "at least 1", self.reset_alpha_every >= 1),
        ):  # fmt: skip
            if not fits:
                raise SystemExit(f"mgpu-splat: --pipeline.model.{option} is {value}, it must be {wanted}.")


class CameraError(ValueError):
    """A camera that cannot be drawn. `str()` is the sentence for its owner."""


def psnr_of(squared_error: float) -> float:
    """PSNR in dB of a mean squared error; at most 100."""
    return float(-10 * np.log10(max(squared_error, 1e-10)))


class GaussParams(nn.ParameterDict):
    """The table's columns under Nerfstudio's names. Moving the module neither moves nor re-creates them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GaussParams:
        return self


class uncached_property(cached_property):
    """A property that the viewer does not evaluate: it skips `cached_property` when it looks for controls."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else self.func(instance)


class MgpuSplatModel(SplatfactoModel):
    """See the module's text.

    Attributes:
        table: the Gaussians; its columns are the model's parameters.
        optimizer: the trainer's SplatAdam, or None in tools that only render.
        strategy: densification, McmcStrategy or DefaultStrategy.
    """

    config: MgpuSplatModelConfig

    def populate_modules(self) -> None:
        """Build the table from the seed points; empty where a checkpoint will fill it (`load_only=True`)."""
        from ns_mgpu_splat.nerfstudio import patches
        from ns_mgpu_splat.nerfstudio.viewer_controls import ViewerControls
        from ns_mgpu_splat.splats.table import SplatTable

        device = start_device()
        patches.apply()
        config = self.config
        self.load_only: bool = self.kwargs.get("load_only", False)
        metadata: Mapping[str, Any] = self.kwargs.get("metadata") or {}
        self.extent = float(metadata.get("camera_extent", 1.0))
        self.schedule_steps: int = self.kwargs.get("schedule_steps", 30_000)
        # the pipeline's, which fits the memory; where a checkpoint will fill the table, any
        asked = 1 if config.max_gaussians == "auto" else config.max_gaussians
        self.cap: int = self.kwargs.get("max_gaussians") or asked
        points, colors = torch.zeros((0, 3)), torch.zeros((0, 3), dtype=torch.uint8)
        if self.seed_points is not None and not self.load_only:
            points, colors = self.seed_points
        self.seed_points = None
        self.table = SplatTable.from_points(
            points,
            colors,
            sh_degree=config.sh_degree,
            max_gaussians=self.cap,
            capacity=self.cap,
            half=config.half,
        )
        if config.reorder_decay > 0:
            self.table.reorder()
        columns = self.table.named_columns()
        self.gauss_params = GaussParams({name: columns[column] for name, column in kColumnOf.items()})
        self.optimizer: Any = None
        self.strategy: Any = None
        self._densify_due: list[int] = []
        self.placement: Any = None
        self.link_meter = LinkMeter()
        self.camera_optimizer: CameraOptimizer = config.camera_optimizer.setup(
            num_cameras=self.num_train_data, device=device
        )
        self.exposure: Exposures | None = None
        if config.exposure and not self.load_only:
            from ns_mgpu_splat.splats.exposure import Exposures

            self.exposure = Exposures(max(1, self.num_train_data), device)
        self.step = 0
        self.last_size = (1, 1)
        self.metrics_every = (
            10  # the trainer sets its own: an image is compared only where the numbers are shown
        )
        self.last_step = -1  # the trainer sets it: its numbers are shown, too
        self.crop_box: OrientedBox | None = None
        self.background_color = torch.ones(3) if config.background_color == "white" else torch.zeros(3)
        self._viewer_background = self.background_color
        self._lpips: _Lpips | None = None
        self._error_shown = ""
        self.drawing = ViewerControls(config.sh_degree, lambda: self.step + 1)
        self.picture_seconds = (
            0.0  # that the viewer's latest picture took, without waiting for a training step
        )
        self._dressed: tuple[tuple, SplatTable] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MgpuSplatModel:
        return self  # the model stays on mgpu: see the module's text

    @property
    def device(self) -> torch.device:
        """`mgpu`, whatever the tool passed."""
        return self.table.means.device

    @property
    def num_points(self) -> int:
        """Number of Gaussians."""
        return self.table.num_rows

    @property
    def opacities(self) -> Tensor:
        """Logits (N, 1); a view of the table's column."""
        return self.table.opacities[:, None]

    @uncached_property
    def colors(self) -> Tensor:
        """RGB (N, 3) of SH degree 0; computed on each access."""
        return SH2RGB(self.features_dc)

    @property
    def shs_0(self) -> Tensor:
        """SH coefficients of degree 0, (N, 3)."""
        return self.features_dc

    @uncached_property
    def shs_rest(self) -> Tensor:
        """SH coefficients above degree 0, (N, K, 3) float32, on the host: only Nerfstudio's exporter may ask for them.

        It wants them transposed in memory, so that they lie like that: the device holds no second copy of its largest column,
        and the host one.
        """
        from ns_mgpu_splat.splats.table import COPY_ROWS

        column = self.table.shN.detach()
        out = torch.empty((column.shape[0], 3, column.shape[1]))
        for first in range(0, column.shape[0], COPY_ROWS):
            piece = column[first : first + COPY_ROWS].cpu().float()
            out[first : first + COPY_ROWS] = piece.transpose(1, 2)
        return out.transpose(1, 2)

    # ---- training -------------------------------------------------------------------------------------------------

    def get_param_groups(self) -> dict[str, list[Parameter]]:
        """Nerfstudio's groups: the table's columns, camera_opt where poses are refined, exposure where it is learned."""
        groups = {name: [self.gauss_params[name]] for name in kColumnOf}
        self.camera_optimizer.get_param_groups(param_groups=groups)
        if self.exposure is not None:
            groups["exposure"] = [self.exposure.maps]
        return groups

    def start_training(self, optimizer: Any, schedule_steps: int, seed: int) -> None:
        """Take the optimizer of the table and set densification up; called once, by the trainer."""
        from ns_mgpu_splat.partition.order import RowOrder
        from ns_mgpu_splat.partition.placement import Placement, PlacementSettings
        from ns_mgpu_splat.splats.densify import DefaultStrategy, McmcStrategy

        self.optimizer = optimizer
        self.schedule_steps = schedule_steps
        config = self.config
        layout = run_layout(config.layout, config.reorder_decay)
        if config.placement and len(shard_names()) > 1:
            settings = PlacementSettings(config.placement_tolerance, config.refine_every, layout=layout)
            self.placement = Placement(settings)
        common: dict[str, Any] = {
            "placement": self.placement,
            "max_gaussians": self.cap,
            "refine_start": config.warmup_length,
            "refine_every": config.refine_every,
            "order": RowOrder(config.reorder_decay, layout) if config.reorder_decay > 0 else None,
            "seed": seed,
        }
        stop = config.stop_split_at
        kind: type[McmcStrategy | DefaultStrategy]
        if config.strategy == "mcmc":
            kind, usual_stop = McmcStrategy, schedule_steps * 5 // 6
            common |= {"min_opacity": config.min_opacity, "grow_factor": config.grow_factor}
        else:
            kind, usual_stop = DefaultStrategy, schedule_steps // 2
            common |= {
                "scene_scale": self.extent,
                "grow_gradient": config.densify_grad_thresh,
                "absgrad": config.use_absgrad,
                "split_scale": config.densify_size_thresh,
                "prune_opacity": config.cull_alpha_thresh,
                "reset_every": config.reset_alpha_every * config.refine_every,
            }
        self.strategy = kind(refine_stop=usual_stop if stop is None else stop, **common)

    def place_rows(self) -> None:
        """Deal rows to the shards, as before the first step."""
        if self.strategy is not None and self.strategy.order is not None:
            self.strategy.order.begin(self.table, self.optimizer)
        if self.placement is not None:
            self.placement.update(self.table, self.optimizer)

    def grid_text(self) -> str:
        """A line for the log: the sparse grid in use, and its voxels at a size that suits these Gaussians."""
        from ns_mgpu_splat.partition.stripes import stripe_rows
        from ns_mgpu_splat.partition.summary import summarise

        order = "kept in order of space" if self.config.reorder_decay > 0 else "left in any order"
        if run_layout(self.config.layout, self.config.reorder_decay) == "stripes":
            shards = len(shard_names())
            order += f", in stripes of {stripe_rows(self.num_points, shards):,} over {shards} shards"
        return f"Sparse grid: {summarise(self.table.means)}. Gaussians are {order}."

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        """Set the step before an iteration, densify after it."""
        where = TrainingCallbackLocation
        return [
            TrainingCallback([where.BEFORE_TRAIN_ITERATION], self._set_step),
            TrainingCallback([where.AFTER_TRAIN_ITERATION], self._densify),
        ]

    def _set_step(self, step: int) -> None:
        self.step = step

    def _densify(self, step: int) -> None:
        if self.strategy is None:
            return
        self._densify_due.append(step)
        if self.optimizer.pending:
            return  # rows stay as they are while gradients of theirs accumulate
        for due in self._densify_due:
            self.strategy.post_step(self.table, self.optimizer, due)
        self._densify_due.clear()

    @property
    def _wants_depth(self) -> bool:
        """Whether training steps render depth."""
        return self.config.output_depth_during_training or self.config.depth_weight > 0

    def active_sh_degree(self) -> int:
        """The SH degree of the current step."""
        interval = self.config.sh_degree_interval
        return self.config.sh_degree if interval <= 0 else min(self.step // interval, self.config.sh_degree)

    def background(self) -> Tensor:
        """Colour (3,) behind everything, on the host. Random colours depend on the step alone."""
        if self.training:
            return torch.tensor(self.step_background())
        return self._viewer_background if _in_viewer() else self.background_color

    def step_background(self) -> tuple[float, float, float]:
        """The colour of `background()` in a training step, without a tensor."""
        if self.config.background_color in ("auto", "random"):
            draw = random.Random(self.step)  # cheaper to seed than numpy's or torch's
            return draw.random(), draw.random(), draw.random()
        return (1.0, 1.0, 1.0) if self.config.background_color == "white" else (0.0, 0.0, 0.0)

    def get_outputs(self, camera: Cameras) -> dict[str, Tensor | list]:  # type: ignore[override]
        """Render one camera.

        Args:
            camera: batch shape (1,), on any device; OpenGL axes.
        Returns: "rgb" (H, W, 3), "depth" (H, W, 1) (None in training unless asked for), "accumulation" (H, W, 1) and
            "background" ((3,) in training, (H, W, 3) else), on `mgpu`. rgb is clamped to [0, 1] in evaluation only:
            clamping would stop the gradient of pixels that are too bright.
        """
        return self._render(camera, self.crop_box)

    def _render(self, camera: Cameras, crop: OrientedBox | None, look: Look | None = None) -> dict[str, Any]:
        """`get_outputs` of what is inside of a box, drawn as the viewer wants it."""
        import ns_mgpu_splat
        from ns_mgpu_splat.nerfstudio import viewer_controls as controls

        if not isinstance(camera, Cameras) or camera.shape != (1,):
            raise ValueError(
                f"get_outputs renders one camera of batch shape (1,), not {getattr(camera, 'shape', camera)}."
            )
        view = self._camera(camera)
        self.last_size = (view.height, view.width)
        background = self.background().to(self.device)
        if self.table.num_rows == 0:
            return self._nothing(view.width, view.height, background)
        look = look or controls.Look()
        flat = look.color_by != controls.kAsTrained
        (out,) = ns_mgpu_splat.render(
            self.table if self.training else self._as_drawn(look, crop),
            [view],
            background=background,
            # what vanishes in size would vanish in opacity, too
            antialiased=self.config.rasterize_mode == "antialiased" and not look.points,
            sh_degree=0 if flat else min(look.sh_degree, self.active_sh_degree()),
            depth=not self.training or self._wants_depth,
            optimizer=self.optimizer,
        )
        if self.training:
            depth = out.depth if self._wants_depth else None
            return {
                "rgb": out.rgb,
                "depth": depth,
                "accumulation": out.accumulation,
                "background": background,
            }
        depth = out.depth
        empty = out.accumulation <= 0
        far = depth.max() if depth.numel() else depth.new_zeros(())
        rgb = out.rgb
        if look.color_by == controls.kByDepth:
            rgb = controls.color_by_depth(depth, out.accumulation, background)
        return {
            "rgb": rgb.clamp(0, 1),
            "depth": torch.where(empty, far, depth),
            "accumulation": out.accumulation,
            "background": background.expand(view.height, view.width, 3),
        }

    def _camera(self, camera: Cameras) -> Any:
        """Nerfstudio's camera (OpenGL, camera-to-world) as ours (OpenCV, world-to-camera)."""
        from ns_mgpu_splat.splats.camera import Camera

        def value(tensor: Tensor) -> float:
            return float(tensor.reshape(-1)[0].item())

        refined = self.training and self.config.camera_optimizer.mode != "off"
        if refined:
            index = (camera.metadata or {}).get("cam_idx")
            c2w = camera.camera_to_worlds.to(self.device)[0]
            if index is not None:
                delta = self.camera_optimizer(torch.tensor([index], dtype=torch.long, device=self.device))[0]
                c2w = torch.cat([delta[:, :3] @ c2w[:, :3], c2w[:, 3:] + delta[:, 3:]], dim=1)
            viewmat = view_matrix(c2w)
        else:
            viewmat = view_matrix(camera.camera_to_worlds[0].detach().cpu().double()).float()
        return Camera(
            viewmat,
            value(camera.fx),
            value(camera.fy),
            value(camera.cx),
            value(camera.cy),
            int(value(camera.width)),
            int(value(camera.height)),
            *lens_of(camera),
        )

    def _as_drawn(self, look: Look, box: OrientedBox | None) -> SplatTable:
        """The table, or a stand-in whose replaced columns are kept until look, box, step or rows change."""
        from ns_mgpu_splat.nerfstudio.viewer_controls import dressed

        of_box = (
            ()
            if box is None
            else tuple(tensor.detach().cpu().numpy().tobytes() for tensor in (box.R, box.T, box.S))
        )
        key = (look.points, look.color_by, of_box, self.step, self.num_points, tuple(self.table.homes))
        kept = self._dressed
        if kept is None or kept[0] != key:
            self._dressed = None  # the former columns go before the new ones come
            table = dressed(self.table, look, box)
            kept = (key, table)
            self._dressed = kept if table is not self.table else None
        return kept[1]

    def _nothing(self, width: int, height: int, background: Tensor) -> dict[str, Any]:
        rgb = background.expand(height, width, 3).clone()
        depth, accumulation = rgb.new_full((height, width, 1), 10.0), rgb.new_zeros((height, width, 1))
        behind = background if self.training else background.expand(height, width, 3)
        return {"rgb": rgb, "depth": depth, "accumulation": accumulation, "background": behind}

    def get_loss_dict(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Any], metrics_dict: Any = None
    ) -> dict[str, Tensor]:
        """0.8 L1 + 0.2 (1 - SSIM) over the pixels that count; regularisers are part of the optimizer's step."""
        from ns_mgpu_splat.splats.loss import l1_ssim_loss

        target = self._target(batch, outputs["background"])
        mask = batch["mask"].to(self.device) if "mask" in batch else None
        rgb = self._exposed(outputs["rgb"], batch)
        losses = {"main_loss": l1_ssim_loss(rgb, target, ssim_weight=self.config.ssim_lambda, mask=mask)}
        if self.training:
            if self.config.depth_weight > 0 and "depths" in batch:
                losses["depth_loss"] = self.config.depth_weight * self._depth_loss(outputs, batch["depths"])
            self.camera_optimizer.get_loss_dict(losses)
        return losses

    def _depth_loss(self, outputs: Mapping[str, Any], samples: DepthSamples) -> Tensor:
        """Of a render in training against what was measured in its image."""
        from ns_mgpu_splat.splats.loss import disparity_loss

        pixels, depths, weights = (
            torch.from_numpy(values).to(self.device)
            for values in (samples.pixels, samples.depths, samples.weights)
        )
        return disparity_loss(
            outputs["depth"], outputs["accumulation"], pixels, depths, weights, samples.typical
        )

    def _target(self, batch: Mapping[str, Any], background: Tensor) -> Tensor:
        """The photograph (H, W, 3) on `mgpu`: uint8 as it is, or float on the background where it has alpha.

        A rendered image goes through the exposure with its background, so that the photograph's goes, too.
        """
        image = batch["image"].to(self.device)
        if image.shape[2] == 3:
            return image
        if background.dim() == 1:
            with torch.no_grad():
                background = self._exposed(background[None, None], batch)[0, 0]
        image = image.float() / 255 if image.dtype == torch.uint8 else image
        alpha = image[..., 3:]
        return image[..., :3] * alpha + background * (1 - alpha)

    def _exposed(self, rgb: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """In training: an image (H, W, 3) as its photograph's exposure has it, if that is learned."""
        if not self.training or self.exposure is None:
            return rgb
        from ns_mgpu_splat.splats.exposure import expose

        return expose(rgb.to(self.device), self.exposure.row(int(batch["image_idx"])))

    # ---- metrics --------------------------------------------------------------------------------------------------

    def shows(self, step: int) -> bool:
        """Whether the numbers of a training step are shown."""
        return step % self.metrics_every == 0 or step == self.last_step

    def get_metrics_dict(self, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
        """PSNR of this image (on the steps whose numbers are shown), Gaussians, and memory of each shard in MiB."""
        metrics: dict[str, Any] = {"gaussian_count": self.num_points}
        if self.training and not self.shows(self.step):
            return metrics
        with torch.no_grad():
            rgb = self._exposed(outputs["rgb"], batch).clamp(0, 1)
            metrics["psnr"] = self._psnr(rgb, self._target(batch, outputs["background"]), batch)
        for shard, used in enumerate(shard_memory()):
            metrics[f"memory_mib/shard_{shard}"] = used / 2**20
        metrics.update(self.partition_metrics())
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def partition_metrics(self) -> dict[str, float]:
        """What was culled and, on several shards, what goes over the links and how rows are dealt; asks no GPU."""
        shards = len(shard_names())
        figures = self.link_meter.figures(shards=shards)
        if shards > 1 and self.placement is not None:
            figures |= {f"placement/{name}": value for name, value in self.placement.figures().items()}
        return figures

    @classmethod
    def _psnr(cls, rgb: Tensor, target: Tensor, batch: Mapping[str, Any]) -> float:
        """PSNR in dB of images (H, W, 3), over the mask's pixels where there is one; at most 100."""
        return psnr_of(float(cls._squared_error(rgb, target, batch.get("mask"))))

    @staticmethod
    def _squared_error(rgb: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Mean squared error of images (H, W, 3), over the pixels of a mask (H, W, 1); on the device, not waited for."""
        target = target / 255 if target.dtype == torch.uint8 else target
        squared = (rgb - target).square_()
        if mask is None:
            return squared.mean()
        mask = mask.to(rgb.device).float()
        return (squared * mask).sum() / (3 * mask.sum()).clamp_min(1)

    @torch.no_grad()
    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """PSNR in dB, SSIM (images of 11 pixels a side and more), LPIPS (where its weights are), and both images.

        With `exposure` or `color_corrected_metrics` also "cc_psnr", PSNR after `color_corrected`.
        """
        from ns_mgpu_splat.splats.loss import l1_ssim_loss

        rgb = outputs["rgb"]
        target = self._target(batch, outputs["background"])
        target = target.float() / 255 if target.dtype == torch.uint8 else target
        metrics = {"psnr": self._psnr(rgb, target, batch)}
        if self.config.exposure or self.config.color_corrected_metrics:
            from ns_mgpu_splat.splats.exposure import color_corrected

            metrics["cc_psnr"] = self._psnr(color_corrected(rgb, target, batch.get("mask")), target, batch)
        if min(rgb.shape[:2]) >= kSsimWindow:
            metrics["ssim"] = 1 - float(l1_ssim_loss(rgb, target, ssim_weight=1.0))
        if self.config.lpips:
            if self._lpips is None:
                self._lpips = _Lpips()
            value = self._lpips(rgb, target)
            if value is not None:
                metrics["lpips"] = value
        return metrics, {"img": torch.cat([target, rgb], dim=1)}

    # ---- tools and viewer -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_outputs_for_camera(
        self, camera: Cameras, obb_box: OrientedBox | None = None
    ) -> dict[str, Tensor]:
        """Render a camera for a tool or the viewer.

        In the viewer's threads the panel's controls count, pictures come to the host, and an error becomes a grey picture
        with its text: it would end that browser's thread silently else. On the host, because what the viewer does with
        pictures it does beside a training step, without a lock, and because a GPU reports some errors only then.
        Nothing here changes the model, so the viewer may interrupt it at any line.
        """
        if not _in_viewer():
            try:
                return self._render(camera, obb_box)
            except CameraError as error:
                raise SystemExit(f"{speaker()}: {error}") from None
        start = perf_counter()
        try:
            outputs = self._render(camera, obb_box, self.drawing.look())
            on_host = {name: outputs[name].cpu() for name in ("rgb", "depth", "accumulation")}
            self.picture_seconds = perf_counter() - start
            return on_host
        except IOChangeException:
            raise
        except Exception as error:
            foreseen = isinstance(error, CameraError)
            text = str(error) if foreseen else f"{type(error).__name__}: {error}"
            if text != self._error_shown:
                self._error_shown = text
                where = text if foreseen else traceback.format_exc()
                say(f"The viewer could not render; training goes on.\n{where}", markup=False)
            return error_picture(int(camera.width[0].item()), int(camera.height[0].item()), text)

    def get_rgba_image(self, outputs: dict[str, Tensor], output_name: str = "rgb") -> Tensor:
        """The image (H, W, 4) with the accumulation as alpha; colours are freed from the background."""
        alpha = outputs["accumulation"].clamp(0, 1)
        color = outputs[output_name]
        if color.shape[2] == 1:
            return torch.cat([color.repeat(1, 1, 3), alpha], dim=2)
        straight = (color - outputs["background"] * (1 - alpha)) / alpha.clamp_min(1e-3)
        return torch.cat([torch.where(alpha > 1e-3, straight, color).clamp(0, 1), alpha], dim=2)

    def set_crop(self, crop_box: OrientedBox | None) -> None:
        """Show only what is inside of a box, in evaluation."""
        self.crop_box = crop_box

    def set_background(self, background_color: Tensor) -> None:
        """Colour (3,) behind everything in the viewer; training and evaluation set their own."""
        if _in_viewer():
            self._viewer_background = background_color.detach().cpu().float()

    # ---- state ----------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Tensor], **kwargs: Any) -> None:  # type: ignore[override]
        """Load a checkpoint in place: the table's columns keep their identity and get the checkpoint's rows.

        Args:
            state_dict: on the host. Checkpoints of splatfacto are accepted too.
        Raises: CheckpointError if columns are missing or disagree, or if the SH degree is another one.
        """
        from ns_mgpu_splat.nerfstudio.checkpoint import CheckpointError

        found = {}
        for name, column in kColumnOf.items():
            tensor = state_dict.get(f"gauss_params.{name}", state_dict.get(name))
            if tensor is None:
                raise CheckpointError(f"The checkpoint has no {name}: it is of another method.")
            found[column] = tensor.detach()
        rows = len(found["means"])
        found["opacities"] = (
            found["opacities"].reshape(rows, -1)[:, 0] if rows else found["opacities"].reshape(0)
        )
        wrong = [f"{name} is {tuple(c.shape)}" for name, c in found.items() if len(c) != rows]
        if wrong:
            raise CheckpointError(
                f"The checkpoint has {rows:,} Gaussians, but {', '.join(wrong)}. It is damaged."
            )
        expected = (self.config.sh_degree + 1) ** 2 - 1
        if found["shN"].shape[1] != expected:
            degree = round((found["shN"].shape[1] + 1) ** 0.5) - 1
            raise CheckpointError(
                f"The checkpoint has SH degree {degree}, but the model is set up for {self.config.sh_degree}. "
                f"Use --pipeline.model.sh-degree {degree}."
            )
        if rows > self.cap and not self.load_only:
            raise CheckpointError(
                f"The checkpoint has {rows:,} Gaussians, above the cap of {self.cap:,}. Use "
                f"--pipeline.model.max-gaussians {rows} or more."
            )
        if rows != self.table.num_rows:
            self.table.resize(rows, capacity=max(rows, self.cap))
        self.table.write_rows(0, {name: found[name] for name in kColumnOf.values()})
        if self.load_only:
            drop_bad_rows(self.table, found)
        if hasattr(self.camera_optimizer, "pose_adjustment"):
            poses = state_dict.get("camera_optimizer.pose_adjustment")
            if poses is not None and poses.shape == self.camera_optimizer.pose_adjustment.shape:
                with torch.no_grad():
                    self.camera_optimizer.pose_adjustment.copy_(poses)
            elif poses is not None and not self.load_only:
                raise CheckpointError(
                    f"The checkpoint refines {len(poses)} camera poses, the capture has {self.num_train_data} "
                    "training images. Use the capture it was trained on."
                )

        if self.exposure is not None:
            maps = state_dict.get("exposure.maps")
            if maps is not None and maps.shape != self.exposure.maps.shape:
                raise CheckpointError(
                    f"The checkpoint has exposures of {len(maps):,} photographs, the capture has {self.num_train_data:,} "
                    "training images. Use the capture it was trained on."
                )
            if maps is not None:
                with torch.no_grad():
                    self.exposure.maps.copy_(maps)

    def update_to_step(self, step: int) -> None:
        """Continue as after this step: the SH degree follows."""
        self.step = step


def view_matrix(camera_to_world: Tensor) -> Tensor:
    """World-to-camera (4, 4), OpenCV axes, of a camera-to-world (3, 4) with OpenGL axes; differentiable."""
    flip = torch.tensor([1.0, -1.0, -1.0], dtype=camera_to_world.dtype, device=camera_to_world.device)
    inverse = (camera_to_world[:, :3] * flip).transpose(0, 1)
    top = torch.cat([inverse, -(inverse @ camera_to_world[:, 3:])], dim=1)
    bottom = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=top.dtype, device=top.device)
    return torch.cat([top, bottom], dim=0)


def lens_of(camera: Cameras) -> tuple[CameraModel, tuple[float, float, float, float]]:
    """The operators' camera model for a Nerfstudio camera of batch shape (1,), and k1..k4 of a fisheye.

    Raises: CameraError for panoramas, stereo panoramas and FISHEYE624: drawn as a pinhole, they would be wrong silently.
    """
    kind = int(camera.camera_type.reshape(-1)[0])
    if kind == CameraType.ORTHOPHOTO.value:
        return "ortho", kNoDistortion
    if kind == CameraType.PERSPECTIVE.value:
        return "pinhole", kNoDistortion
    if kind != CameraType.FISHEYE.value:
        raise CameraError(
            f"{CameraType(kind).name} cameras cannot be drawn. Choose a perspective or a fisheye camera: camera_type in the "
            "camera path, Camera type in the viewer's Render tab."
        )
    if camera.distortion_params is None:
        return "fisheye", kNoDistortion
    k1, k2, k3, k4 = camera.distortion_params.reshape(-1)[:4].tolist()
    return "fisheye", (k1, k2, k3, k4)


def drop_bad_rows(table: Any, columns: Mapping[str, Tensor]) -> None:
    """Remove rows with a NaN or infinite entry, and say how many; for tools that render or export.

    Nerfstudio's exporter drops every Gaussian if one position is NaN.

    Args:
        table: changed in place. columns: what it was filled from, on the host.
    """
    from ns_mgpu_splat.splats.table import COPY_ROWS

    good = torch.ones(table.num_rows, dtype=torch.bool)
    for column in columns.values():
        for first in range(
            0, len(good), COPY_ROWS
        ):  # the host holds no second copy of what may be its largest thing
            piece = column[first : first + COPY_ROWS]
            good[first : first + COPY_ROWS] &= torch.isfinite(piece).reshape(len(piece), -1).all(dim=1)
    bad = int((~good).sum())
    if bad > 0:
        say(f"[bold yellow]{bad:,} of {len(good):,} Gaussians have NaN or infinite values and are left out.")
        table.compact(good)


def _in_viewer() -> bool:
    """Whether this is one of the viewer's render threads."""
    return isinstance(threading.current_thread(), RenderStateMachine)


def error_picture(width: int, height: int, text: str) -> dict[str, Tensor]:
    """A grey picture that says what went wrong, with all outputs a viewer wants, on the host.

    It has the shape that was asked for, in at least 480 pixels across: while a scene moves, the viewer asks for as few as 40.
    """
    import textwrap

    from PIL import Image, ImageDraw, ImageFont

    scale = max(1, -(-kErrorWidth // max(width, 1)))
    size = max(width, 1) * scale, max(height, 1) * scale
    letters = max(12, size[0] // 40)
    picture = Image.new("RGB", size, (90, 90, 90))
    lines = textwrap.wrap(f"This view could not be rendered. {text}", max(10, int(size[0] / (0.6 * letters))))
    ImageDraw.Draw(picture).text(
        (8, 8), "\n".join(lines), fill=(255, 255, 255), font=ImageFont.load_default(letters)
    )
    rgb = torch.from_numpy(np.array(picture)).float() / 255
    depth = torch.full((*rgb.shape[:2], 1), 1000.0)
    return {"rgb": rgb, "depth": depth, "accumulation": torch.zeros_like(depth)}


class _Lpips:
    """LPIPS with AlexNet, on the host or a GPU, outside of the model's state; None where its weights are not there."""

    def __init__(self) -> None:
        self.metric: Any = None
        weights = Path(torch.hub.get_dir()) / "checkpoints" / kLpipsWeights
        if not weights.is_file():
            say(
                "PSNR and SSIM are measured; LPIPS is not, as its network is not on this machine. To have it: "
                f"wget -P {weights.parent} https://download.pytorch.org/models/{kLpipsWeights}",
                soft_wrap=True,
            )
            return
        from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

        self.metric = LearnedPerceptualImagePatchSimilarity(normalize=True)

    @torch.no_grad()
    def __call__(self, rgb: Tensor, target: Tensor) -> float | None:
        if self.metric is None:
            return None
        pair = [image.cpu().permute(2, 0, 1)[None].clamp(0, 1) for image in (rgb, target)]
        return float(self.metric(*pair))
