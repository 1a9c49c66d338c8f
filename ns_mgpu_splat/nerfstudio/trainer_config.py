# SPDX-License-Identifier: Apache-2.0
"""The options of a run, which are checked when they are set, and the folder that it makes."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nerfstudio.configs.base_config import LoggingConfig, MachineConfig, ViewerConfig
from nerfstudio.engine.trainer import TrainerConfig
from tyro.conf import Suppress

from ns_mgpu_splat.data.capture import find_capture
from ns_mgpu_splat.data.checks import DatasetError
from ns_mgpu_splat.nerfstudio import checkpoint
from ns_mgpu_splat.nerfstudio.console import ProgressWriterConfig
from ns_mgpu_splat.nerfstudio.names import kModels, kNoLegacyViewer
from ns_mgpu_splat.nerfstudio.older_runs import FillsIn
from ns_mgpu_splat.nerfstudio.pipeline import MgpuSplatPipelineConfig
from ns_mgpu_splat.nerfstudio.presets import apply_preset, apply_run, existing, is_preset

kWrittenAtStart = (
    "config.yml",
    "dataparser_transforms.json",
    "events.out.tfevents.*",
    "viewer_log_filename.txt",
    ".step-*.ckpt.*",
)


def _trainer() -> type:
    from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer

    return MgpuSplatTrainer


@dataclass
class MgpuMachineConfig(FillsIn, MachineConfig):
    """The machine. Its GPUs are chosen with the environment variable MGPU_DEVICES."""

    seed: int = 42
    """Seed of everything random: noise, densification, random colours."""
    num_devices: int = 1
    """Processes; must stay 1. All GPUs of the host form one device: choose them with MGPU_DEVICES=0,1."""
    device_type: Literal["mgpu"] = "mgpu"  # type: ignore[assignment]
    """The aggregate device; there is no other to train on. Without a GPU it runs on the CPU."""
    num_machines: Suppress[int] = 1
    machine_rank: Suppress[int] = 0
    dist_url: Suppress[str] = "auto"


@dataclass
class MgpuLoggingConfig(FillsIn, LoggingConfig):
    """What is written down while training."""

    relative_log_dir: Path = Path()
    """Folder for tensorboard's files, below that of the run."""
    steps_per_log: int = 10
    """Steps between two points of the curves in tensorboard, and between two lines of numbers at most. The last step has
    both, too."""
    max_buffer_size: int = 20
    """Points of the curves over which the shown rates are means: steps-per-log steps lie between two."""
    profiler: Literal["none", "basic", "pytorch"] = "none"
    """Nerfstudio's own measurements of its functions, "basic" to print them at the end; "pytorch" also writes traces of a few
    steps."""
    local_writer: ProgressWriterConfig = field(default_factory=ProgressWriterConfig)
    """The line of numbers in the terminal."""


@dataclass
class MgpuSplatTrainerConfig(FillsIn, TrainerConfig):
    """A training run."""

    _target: type = field(default_factory=_trainer)
    """Class of the trainer."""
    output_dir: Path = Path("outputs")
    """Folder for runs. Each has its own in it: experiment-name/method-name/timestamp."""
    method_name: str | None = "mgpu-splat"
    """Name of the method; part of the output path."""
    experiment_name: str | None = None
    """Part of the output path; None takes the name of the data folder."""
    project_name: str | None = "nerfstudio-project"
    """Project of wandb or comet, where --vis sends numbers there."""
    timestamp: str = "{timestamp}"
    """Part of the output path; by default the time at which the run begins."""
    data: Path | None = None
    """The capture: a folder with transforms.json (Nerfstudio) or with images and sparse/0 (COLMAP)."""
    max_num_iterations: int = 30_000
    """Train to this step. A resumed run counts from its beginning, not from where it resumes."""
    schedule_steps: int = 30_000
    """Length of the learning-rate decay and of the growth of the number of Gaussians. Set it to max-num-iterations in
    short runs; leave it alone when a run is cut in pieces, so that the pieces make the same run."""
    load_dir: Path | None = None
    """Go on from the newest checkpoint in this folder: nerfstudio_models of an earlier run. Its other options must be given
    again, or come with --load-config of its config.yml; a run that is interrupted prints the whole command."""
    load_step: int | None = None
    """Go on from the checkpoint in load-dir with this number in its name, instead of the newest. It is one less than the number
    of steps that it has had: 1999 is the one that 2,000 steps have left."""
    load_checkpoint: Path | None = None
    """Go on from this checkpoint; a file, where load-dir is a folder."""
    load_scheduler: bool = True
    """Go on with the learning rates of the checkpoint, too. False begins their decay anew."""
    relative_model_dir: Path = Path(kModels)
    """Folder for checkpoints, below that of the run."""
    start_paused: bool = False
    """Wait for the button "Resume Training" in the viewer before the first step."""
    gradient_accumulation_steps: dict[str, int] = field(default_factory=dict)
    """Views that are put together for one step of an optimizer: "splats 4" moves Gaussians every fourth view, by the sum of
    what the four ask for."""
    load_config: Path | None = None
    """A preset such as configs/city.yml, or the config.yml of an earlier run, which goes on in its folder. Their options
    hold where the command line does not say otherwise."""
    steps_per_save: int = 2_000
    """Steps between checkpoints; there is one more at the end, on Ctrl-C and when memory runs out. Raise it if saving
    takes a noticeable part of the time."""
    steps_per_eval_batch: int = 0
    """Steps between losses of a held-out image; 0 for never, since steps-per-eval-image says more."""
    steps_per_eval_image: int = 500
    """Steps between renderings of one held-out image, in turn, for the logger."""
    steps_per_eval_all_images: int = 10_000
    """Steps between evaluations on all held-out images, which stops training for as long as they take to render."""
    eval_at_end: bool = True
    """Evaluate on all held-out images when training ends, and print their mean PSNR."""
    save_only_latest_checkpoint: bool = True
    """Remove older checkpoints once a newer one is safely on disk."""
    vis: Literal[
        "viewer",
        "wandb",
        "tensorboard",
        "comet",
        "viewer+wandb",
        "viewer+tensorboard",
        "viewer+comet",
    ] = "viewer+tensorboard"
    """Where to show the run. Nerfstudio evaluates only if one of tensorboard, wandb or comet is among them."""
    machine: MgpuMachineConfig = field(default_factory=MgpuMachineConfig)
    """The machine."""
    logging: MgpuLoggingConfig = field(default_factory=MgpuLoggingConfig)
    """Numbers in the terminal and in log files."""
    viewer: ViewerConfig = field(
        default_factory=lambda: ViewerConfig(num_rays_per_chunk=1 << 15, max_num_display_images=64)
    )
    """The web viewer. --viewer.quit-on-train-completion True ends the command when training ends."""
    pipeline: MgpuSplatPipelineConfig = field(default_factory=MgpuSplatPipelineConfig)
    """Data and model."""
    mixed_precision: Suppress[bool] = False
    use_grad_scaler: Suppress[bool] = False
    log_gradients: Suppress[bool] = False
    prompt: Suppress[str | None] = None

    _named_by_time = (
        False  # no fields, and not saved: whether the time names the run, and the topmost folder made for it
    )
    _made = None  # type: Path | None
    # which options differ from those of the run that this one goes on from, in one line
    other_options = None  # type: str | None

    def __post_init__(self) -> None:
        if self.load_config is not None:
            from ns_mgpu_splat.nerfstudio.config import defaults_of

            path = existing(self.load_config)
            apply = apply_preset if is_preset(path) else apply_run
            apply(self, defaults_of(self.method_name), path)
            self.load_config = None  # or Nerfstudio would let the file replace the whole command line
        self.check()

    def check(self) -> None:
        """Exit with one sentence if an option is impossible."""
        if self.machine.num_devices != 1 or self.machine.num_machines != 1:
            raise SystemExit(
                "mgpu-splat: --machine.num-devices must stay 1: one process drives all GPUs as one device. Choose them "
                "with the environment variable MGPU_DEVICES, e.g. MGPU_DEVICES=0,1."
            )
        if self.schedule_steps < 1 or self.max_num_iterations < 1:
            raise SystemExit("mgpu-splat: --schedule-steps and --max-num-iterations must be at least 1.")
        for group, steps in self.gradient_accumulation_steps.items():
            if steps < 1:
                raise SystemExit(
                    f"mgpu-splat: --gradient-accumulation-steps {group} {steps}: the number of steps must be at least 1."
                )
        for group, parts in self.optimizers.items():
            rate, last = parts["optimizer"].lr, getattr(parts.get("scheduler"), "lr_final", None)
            if not 0 <= rate < math.inf:
                raise SystemExit(
                    f"mgpu-splat: --optimizers.{group}.optimizer.lr is {rate}, it must be 0 or more."
                )
            if last is not None and not 0 < last < math.inf:
                raise SystemExit(
                    f"mgpu-splat: --optimizers.{group}.scheduler.lr-final is {last}, it must be above 0, or None."
                )
        if not 0 <= self.machine.seed < 2**32:
            raise SystemExit(
                f"mgpu-splat: --machine.seed is {self.machine.seed}, it must be in 0 to {2**32 - 1}."
            )
        if self.logging.steps_per_log < 1:
            raise SystemExit(
                f"mgpu-splat: --logging.steps-per-log is {self.logging.steps_per_log}, it must be at least 1. "
                "--logging.local-writer.enable False prints no line of numbers."
            )
        if self.vis == "viewer_legacy":  # a file may say so
            raise SystemExit(f"mgpu-splat: {kNoLegacyViewer}")

    def set_timestamp(self) -> None:
        """As Nerfstudio's; that nobody chose the name is remembered until the folder is made."""
        self._named_by_time = self.timestamp == "{timestamp}"
        super().set_timestamp()

    def print_to_terminal(self) -> None:
        """As Nerfstudio's, but a folder that holds no capture is said first and alone, not below a page of options."""
        data = self.pipeline.datamanager
        try:
            find_capture(data.data or data.dataparser.data, data.dataparser.colmap_path)
        except DatasetError as error:
            raise SystemExit(f"mgpu-splat: {error}") from None
        super().print_to_terminal()

    def save_config(self) -> None:
        """As Nerfstudio's, with the data's whole path, so that the run opens from any folder; an output folder that cannot be
        made or written ends in one sentence.

        Before the file is written, which may be that of the earlier run, options that differ from that run's are looked for; the
        trainer says them, below this dump of all options.
        """
        from ns_mgpu_splat.nerfstudio.changed_options import other_options_note

        for part in (self, self.pipeline.datamanager, self.pipeline.datamanager.dataparser):
            if part.data is not None:
                part.data = part.data.absolute()
        note = other_options_note(self)
        named_by_time = self.__dict__.pop("_named_by_time", False)
        try:
            made = self._make_folder(named_by_time)
            super().save_config()
        except OSError as error:
            raise SystemExit(
                f"mgpu-splat: the output folder {self.get_base_dir()} cannot be written ({error.strerror}). Choose another "
                "with --output-dir."
            ) from None
        self._made, self.other_options = made, note

    def _make_folder(self, named_by_time: bool) -> Path | None:
        """Make the run's folder; returns the topmost folder that was made for it, None if the run's was there.

        A run that is named by the time gets a folder of its own, also where another one began in the same second.
        """
        stamp, number = self.timestamp, 1
        while True:
            folder = self.get_base_dir()
            top = folder
            while not top.parent.exists():
                top = top.parent
            try:
                folder.mkdir(parents=True)
                return top
            except FileExistsError:
                if not named_by_time:
                    return None
            number += 1
            self.timestamp = f"{stamp}-{number}"

    def remove_folder(self) -> None:
        """Remove what a run that came to nothing has made: its folder, if it was not there before and nothing is saved in it."""
        if self._made is None or checkpoint.checkpoints(self.get_checkpoint_dir()):
            return
        folder = self.get_base_dir()
        for pattern in kWrittenAtStart:
            for path in folder.glob(pattern):
                with suppress(OSError):
                    path.unlink()
        for path in (self.get_checkpoint_dir(), folder, *folder.parents):
            with suppress(OSError):  # somebody else's files are in it
                path.rmdir()
            if path == self._made:
                return
