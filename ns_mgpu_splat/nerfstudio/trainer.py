# SPDX-License-Identifier: Apache-2.0
"""The training loop: trains to step N, never loses a run, and continues where it stopped on any number of shards.

Nerfstudio's Trainer would resume with fresh parameters that no optimizer holds, count iterations from the resumed
step on, and save straight over the last checkpoint. This one loads before the optimizers are made, in place, and saves
atomically. A first Ctrl-C or SIGTERM ends the run after the current step, with a checkpoint; so does whatever goes wrong
in a step. Each end says what is saved and with which command to go on.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from nerfstudio.engine.callbacks import TrainingCallbackLocation
from nerfstudio.engine.trainer import Trainer
from nerfstudio.utils import writer
from nerfstudio.utils.misc import step_check
from nerfstudio.utils.writer import EventName, TimeWriter
from rich.markup import escape

from ns_mgpu_splat.data.images import ImageError
from ns_mgpu_splat.nerfstudio import checkpoint, preflight
from ns_mgpu_splat.nerfstudio.checkpoint import CheckpointError
from ns_mgpu_splat.nerfstudio.console import ProgressWriter
from ns_mgpu_splat.nerfstudio.device import shard_names, synchronise
from ns_mgpu_splat.nerfstudio.optimizers import SplatOptimizers
from ns_mgpu_splat.nerfstudio.picture_clock import PictureClock
from ns_mgpu_splat.nerfstudio.pipeline import EvaluationStopped, MgpuSplatPipeline
from ns_mgpu_splat.nerfstudio.quick_end import end_quickly, let_interrupts_end
from ns_mgpu_splat.nerfstudio.say import say
from ns_mgpu_splat.nerfstudio.scalars import write_out
from ns_mgpu_splat.nerfstudio.schedule import schedule_advice
from ns_mgpu_splat.nerfstudio.soundness import RowCheck, why_diverged
from ns_mgpu_splat.nerfstudio.step_clock import StepClock
from ns_mgpu_splat.nerfstudio.steps import NativeSteps, StepResult, autograd_step, why_autograd
from ns_mgpu_splat.nerfstudio.stop_signals import first_signal_stops, no_interrupt
from ns_mgpu_splat.nerfstudio.trainer_config import (  # noqa: F401 (config.yml of older runs names all three here)
    MgpuLoggingConfig,
    MgpuMachineConfig,
    MgpuSplatTrainerConfig,
)
from ns_mgpu_splat.words import counted

kRatesEvery = (
    10  # of the steps that are logged: learning rates change slowly, and a number takes tensorboard 60 us
)
kCheckRowsEvery = 500  # steps; reads 44 bytes a Gaussian and waits for the device
kServices = {  # of --vis: the package, and what to do about it
    "wandb": ("wandb", "Run `wandb login`, set WANDB_MODE=offline"),
    "comet": ("comet_ml", "Set COMET_API_KEY"),
}
# Numbers of steps are read from the device and written out after so many seconds, or when there are those of so many steps:
# tensorboard's writer lets the training loop wait if it is handed more than ten at once.
kWriteEvery, kWriteTogether = 0.25, 8


def _raised_in(error: BaseException, package: str) -> bool:
    """Whether an error comes from code of a package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return any(name.partition(".")[0] == package for name in (raised, type(error).__module__))


class MgpuSplatTrainer(Trainer):
    """See the module's text."""

    config: MgpuSplatTrainerConfig
    pipeline: MgpuSplatPipeline
    optimizers: SplatOptimizers

    def __init__(self, config: MgpuSplatTrainerConfig, local_rank: int = 0, world_size: int = 1) -> None:
        if world_size != 1:
            raise SystemExit("mgpu-splat: one process drives all GPUs. Choose them with MGPU_DEVICES=0,1.")
        end_quickly()
        super().__init__(config, local_rank, world_size)
        self.device = "mgpu"
        self.mixed_precision = self.use_grad_scaler = False
        self._loaded: dict[str, Any] | None = None
        self._stop_signal: int | None = None
        self._saved_step: int | None = None
        self._native: NativeSteps | None = None
        self._unlogged: list[tuple[int, StepResult, float]] = []
        self._written = -math.inf  # when numbers were last written out
        self._pictures = PictureClock()
        self._clock = StepClock(config.logging.max_buffer_size)
        self._row_check = RowCheck()
        self._whole_step = -1  # the latest one after which no gradients waited
        self._former_schedule = self.config.schedule_steps  # the checkpoint's
        self._evaluation_due: int | None = None
        self._save_due = False
        self.stop_training = False

    # ---- setting up -----------------------------------------------------------------------------------------------

    def setup(self, test_mode: Literal["test", "val", "inference"] = "val") -> None:
        """Look at the disk and the checkpoint first: they are refused before images are read and code is compiled."""
        with self._folder_of_nothing_goes():
            self._setup(test_mode)

    @contextmanager
    def _folder_of_nothing_goes(self) -> Iterator[None]:
        """A run that ends without a step leaves no folder behind, and no traceback where Ctrl-C ended it."""
        try:
            yield
        except BaseException as error:
            if self._whole_step < self._start_step:
                with no_interrupt():  # once more while this goes on: a traceback, and a folder that stays
                    self.config.remove_folder()
                if isinstance(error, KeyboardInterrupt):
                    say("Ended before the first step: there is nothing to save.")
                    raise SystemExit(128 + signal.SIGINT) from None
            raise

    def _setup(self, test_mode: Literal["test", "val", "inference"]) -> None:
        try:
            checkpoint.check_folder(self.checkpoint_dir)
        except CheckpointError as error:
            raise SystemExit(f"mgpu-splat: {error}") from None
        self._loaded = self._read_checkpoint()
        self.config.pipeline.resumed_gaussians = (
            0 if self._loaded is None else checkpoint.rows_of(self._loaded)
        )
        try:
            super().setup(test_mode)
        except Exception as error:
            package, cure = kServices.get(self.config.vis.removeprefix("viewer+"), ("", ""))
            if not package or not _raised_in(error, package):
                raise
            said = str(error).splitlines()[0].rstrip(".")
            raise SystemExit(
                f"mgpu-splat: --vis {self.config.vis}: {said}. {cure}, or train with --vis viewer+tensorboard."
            ) from None
        self.pipeline.stop_wanted = lambda: self._stop_signal is not None
        self.pipeline.model.metrics_every = max(1, self.config.logging.steps_per_log)
        end, schedule = self.config.max_num_iterations, self.config.schedule_steps
        self.pipeline.model.last_step = end - 1
        if advice := schedule_advice(end, schedule, self._former_schedule):
            say(advice, style="bold yellow" if self._former_schedule != schedule else None)

    def _check_room(self) -> None:
        """Warn of a disk that the run will outgrow. Raises CheckpointError for one that is too small for what it has now."""
        config, model = self.config, self.pipeline.model
        steps = config.max_num_iterations - self._start_step
        if steps <= 0:
            return
        every = max(1, config.steps_per_save)
        saves = config.max_num_iterations // every - self._start_step // every
        saves += config.max_num_iterations % every != 0

        row = preflight.row_bytes(
            model.config.sh_degree, model.config.half, model.config.strategy == "default"
        )
        now, cap = model.num_points * row, model.cap * row
        keep = not config.save_only_latest_checkpoint
        warning = checkpoint.check_room(self.checkpoint_dir, now, cap, saves, keep)
        if warning is not None:
            say(f"[bold yellow]{warning}[/bold yellow]")

    def _read_checkpoint(self) -> dict[str, Any] | None:
        config = self.config
        try:
            if config.load_dir is not None:
                path = checkpoint.find(Path(config.load_dir), config.load_step)
            elif config.load_checkpoint is not None:
                path = Path(config.load_checkpoint)
            else:
                return None
            checkpoint.remove_leftovers(path.parent)
            state = checkpoint.read(path)
        except CheckpointError as error:
            raise SystemExit(f"mgpu-splat: {error}") from None
        state["path"] = path
        return state

    def setup_optimizers(self) -> SplatOptimizers:
        """Load the model, make the optimizers on its parameters, and load their state.

        Then the size of a checkpoint is known, and Nerfstudio starts its viewer next: a disk that is too small is refused here.
        """
        model = self.pipeline.model
        state = self._loaded
        try:
            if state is not None:
                self.pipeline.load_pipeline(state["pipeline"], state["step"])
            optimizers = SplatOptimizers(
                self.config.optimizers.copy(),
                self.pipeline.get_param_groups(),
                model,
                self.config.schedule_steps,
                self.config.machine.seed,
            )
            model.start_training(optimizers.table, self.config.schedule_steps, self.config.machine.seed)
            if state is not None:
                try:
                    self._restore(state, optimizers)
                except torch.OutOfMemoryError:
                    raise
                except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                    raise CheckpointError(
                        f"{state['path']} has Gaussians, but a state of training that does not fit them "
                        f"({type(error).__name__}: {error}). It is of another method or damaged: go on from another one."
                    ) from error
            self._check_room()
            self.pipeline.datamanager.read_ahead(self._start_step)
            model.place_rows()
            say(model.grid_text())
        except CheckpointError as error:
            raise SystemExit(f"mgpu-splat: {error}") from None
        return optimizers

    def _restore(self, state: dict[str, Any], optimizers: SplatOptimizers) -> None:
        self._start_step = self.step = int(state["step"]) + 1
        optimizers.load_optimizers(state.get("optimizers", {}))
        if self.config.load_scheduler:
            optimizers.load_schedulers(state.get("schedulers", {}))
        strategy = checkpoint.strategy_of(state, state["path"])
        if strategy is not None:
            self.pipeline.model.strategy.load_state_dict(strategy)
        if "random" in state:
            checkpoint.restore_random_state(state["random"])
        sampler = state.get("sampler")
        if sampler is not None and sampler != self.pipeline.datamanager.state():
            say(
                f"[bold yellow]The checkpoint saw {sampler['images']:,} training images in the order of seed "
                f"{sampler['seed']}; this run goes on with {self.pipeline.datamanager.state()}."
            )

    def _load_checkpoint(self) -> None:
        """Say what was loaded; loading happened when the optimizers were made."""
        if self._loaded is None:
            say("No checkpoint was asked for: training from the seed points.")
            if checkpoint.checkpoints(self.checkpoint_dir):
                say(
                    f"[bold yellow]{self.checkpoint_dir} holds checkpoints of an earlier run, which this one replaces. To keep "
                    "them, stop now (Ctrl-C twice) and leave --timestamp out; to go on from them, add --load-dir and that "
                    "folder."
                )
            return
        state, self._loaded = self._loaded, None
        schedule = state.get("schedule_steps", self.config.schedule_steps)
        self._former_schedule = schedule
        before, now = state.get("shards"), list(shard_names())
        moved = (
            f" (it was saved on {counted(len(before), 'shard')}, this is {len(now)})"
            if before and before != now
            else ""
        )
        say(
            f"Resuming after step {self._start_step:,} with {self.pipeline.model.num_points:,} Gaussians from "
            f"{state['path']}{moved}.",
            markup=False,
            soft_wrap=True,
        )
        if self.config.other_options is not None:
            say(
                f"[bold yellow]{escape(self.config.other_options)}[/bold yellow]",
                highlight=False,
                soft_wrap=True,
            )

    # ---- training -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to step `max_num_iterations`."""
        try:
            with self._folder_of_nothing_goes():
                self._train()
        finally:
            let_interrupts_end()

    def _train(self) -> None:
        end = self.config.max_num_iterations
        self.pipeline.datamanager.train_dataparser_outputs.save_dataparser_transform(
            self.base_dir / "dataparser_transforms.json"
        )
        self._init_viewer_state()
        if self._start_step >= end:
            say(
                f"The checkpoint has {self._start_step:,} steps already: nothing to train up to {end:,}. Raise "
                "--max-num-iterations to go on."
            )
            self.step = self._start_step - 1
            self.training_state = "completed"
            self._clock.start(self._start_step)
            self._after_train()
            return
        self._check_rows(self._start_step - 1)
        self._choose_steps()
        with TimeWriter(writer, EventName.TOTAL_TRAIN_TIME), self._signals():
            for _ in self.pipeline.datamanager.bring_images(self._start_step, end - self._start_step):
                if self._stopping():
                    break
            self._clock.start(self._start_step)
            for step in range(self._start_step, end):
                self.step = step
                while self.training_state == "paused" and not self._stopping():
                    time.sleep(0.01)
                if self._stopping() and not self._accumulating():
                    self.step = step - 1
                    break
                self._one_step(step)
            if self._stop_signal is not None:
                self._end_early()
            if self.step < self._start_step:
                raise SystemExit(
                    "mgpu-splat: training was ended before its first step: there is nothing new to save."
                )
            self.training_state = "completed"  # from here on a failed save ends the command with an error
            with self._clock.stopped():
                self.save_checkpoint(self.step)
            if self._stop_signal is not None:  # it came during the last save
                self._end_early()
        self._after_train()

    def _end_early(self) -> None:
        """Save, and end as a signal wants it. Saving comes first: the terminal may be gone."""
        assert self._stop_signal is not None
        said = "Stopped before the first step: there is nothing new to save."
        if self.step >= self._start_step:
            try:
                if self._saved_step != self.step:
                    self._save(self.step)
            except (CheckpointError, RuntimeError, MemoryError) as error:
                raise SystemExit(f"mgpu-splat: {error} {self._saved_before()}") from None
            done = self.step + 1 >= self.config.max_num_iterations
            how = "That was the last one."
            if not done:
                how = f"To go on:\n  {self._resume_command(self.checkpoint_dir)}"
            said = f"Stopped after step {self.step + 1:,}, which is saved. {how}"
        with suppress(OSError):
            self._log_waiting()
            self._say_how_long()
            say(said, markup=False, soft_wrap=True)
        raise SystemExit(128 + self._stop_signal)

    def _resume_command(self, folder: Path) -> str:
        """What to type to go on from the newest checkpoint of a folder."""
        fallback = f"ns-train {self.config.method_name}"
        if self.config.data is not None:
            fallback += f" --data {shlex.quote(str(self.config.data))}"
        return checkpoint.resume_command(folder, sys.argv, dict(os.environ), fallback)

    def _say_how_long(self) -> None:
        """Below the last line of numbers; also what evaluations and checkpoints on the way took."""
        self._finish_lines()
        synchronise()
        steps, seconds, rate = self._clock.total(self.step)
        if steps > 0:
            say(
                f"Trained {steps:,} steps in {seconds:.2f} s, {rate:.1f} steps/s while not saving or evaluating."
            )

    def _finish_lines(self) -> None:
        for event_writer in writer.EVENT_WRITERS:
            if isinstance(event_writer, ProgressWriter):
                event_writer.finish(self.step)

    def _stopping(self) -> bool:
        return self.stop_training or self._stop_signal is not None

    def _choose_steps(self) -> None:
        """Steps are native unless something needs autograd: then one line says what."""
        why = why_autograd(self.pipeline.model, self.pipeline, self.optimizers)
        if why is None:
            self._native = NativeSteps(self.pipeline, self.optimizers)
        else:
            say(f"Steps go through autograd, which is slower: {why}.")

    def _accumulating(self) -> bool:
        """Whether gradients wait for the optimizer's step: rows must stay as they are, and no checkpoint is whole."""
        return bool(self.optimizers.table.pending)

    def _one_step(self, step: int) -> None:
        try:
            with self.train_lock:
                if not self.pipeline.model.training:
                    self.pipeline.train()
                self._call_back(step, TrainingCallbackLocation.BEFORE_TRAIN_ITERATION)
                result = self.train_iteration(step)
                self._call_back(step, TrainingCallbackLocation.AFTER_TRAIN_ITERATION)
            self._after_step(step, result)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._give_up(step, f"memory ran out. {error}")
        except ImageError as error:
            self._give_up(step, str(error))
        except Exception as error:  # whatever it was, hours of training are worth a try to save them
            self._give_up(step, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _after_step(self, step: int, result: StepResult) -> None:
        """Show, evaluate and save what is due; where gradients accumulate, once they have been applied."""
        # numbers are read some steps late, many at a time: reading waits for the device, and writing wakes a thread
        waiting = len(self._unlogged)
        if waiting >= kWriteTogether or (waiting and time.monotonic() - self._written >= kWriteEvery):
            self._log_waiting()
        end = self.config.max_num_iterations
        if step_check(step, self.config.logging.steps_per_log, run_at_zero=True) or step + 1 == end:
            self._unlogged.append((step, result, self._clock.lap(step)))
        self._update_viewer_state(step)
        if self._evaluates_at(step) and len(self.pipeline.datamanager.eval_dataset) > 0:
            self._evaluation_due = step
        # after N, 2N, ... steps, so that a run of N steps ends where a longer one saves
        self._save_due |= (step + 1) % max(1, self.config.steps_per_save) == 0 and step + 1 < end
        if self._accumulating():
            return
        self._whole_step = step
        if (step + 1) % kCheckRowsEvery == 0:
            self._check_rows(step)
        if self._evaluation_due is not None:
            self._log_waiting()
            with self._clock.stopped():
                self._evaluate(self._evaluation_due)
            self._evaluation_due = None
        if self._save_due:
            self._save_due = False
            self._log_waiting()
            self._check_loss(step, result)
            self._check_rows(step)
            with self._clock.stopped():
                self.save_checkpoint(step)
        elif self._stopping() or step + 1 == end:  # it will be saved
            for logged, its_result, _ in self._unlogged:
                self._check_loss(logged, its_result)
            self._check_loss(step, result)
            self._check_rows(step)

    def _check_rows(self, step: int) -> None:
        """End the run if there is no Gaussian that could be drawn."""
        self._end_if(self._row_check.why_hopeless(self.pipeline.model.table, step, self._start_step))

    def _check_loss(self, step: int, result: StepResult) -> None:
        """End the run if the loss of a step is no number."""
        self._end_if(why_diverged(step, result))

    def _end_if(self, why: str | None) -> None:
        if why is not None:
            raise SystemExit(f"mgpu-splat: {why} {self._saved_before()}")

    def _saved_before(self) -> str:
        """A sentence on the newest checkpoint of this run, or the one it came from."""
        there = checkpoint.checkpoints(self.checkpoint_dir)
        if there:
            step, path = there[0]
            return (
                f"Step {step + 1:,} is saved: {path}. To go on from it: {self._resume_command(path.parent)}"
            )
        if self._start_step > 0:
            return "This run has saved nothing; the checkpoint that it came from is as it was."
        return "Nothing is saved yet."

    def _evaluate(self, step: int) -> None:
        try:
            with self.train_lock, self._random_state_kept():
                self.eval_iteration(step)
        except EvaluationStopped:
            say("The evaluation was left.")
        except Exception as error:
            say(f"[bold red]Evaluation after step {step + 1:,} failed; training goes on.[/bold red]")
            foreseen = isinstance(error, (torch.OutOfMemoryError, MemoryError, ImageError))
            say(str(error) if foreseen else traceback.format_exc(), markup=False)
        write_out()

    def _update_viewer_state(self, step: int) -> None:
        if self.viewer_state is None:
            return
        if hasattr(self.viewer_state, "control_panel"):  # not the legacy viewer
            self._pictures.hurry(
                self.viewer_state, step, self.pipeline.model.picture_seconds, time.perf_counter()
            )
        super()._update_viewer_state(step)

    def _log_waiting(self) -> None:
        """Write the numbers of the steps that are to be logged, where that was not done yet."""
        waiting, self._unlogged = self._unlogged, []
        for step, result, seconds in waiting:
            self._put_numbers(step, result, seconds)
        if waiting:
            write_out()
        self._written = time.monotonic()

    def _put_numbers(self, step: int, result: StepResult, seconds: float) -> None:
        self._check_loss(step, result)
        # not `put_time`, which takes a mean of means: a lap of one step in it counts as much as one of ten
        left = self.config.max_num_iterations - step - 1
        pixels = self.pipeline.datamanager.get_train_rays_per_batch() / seconds
        writer.put_scalar(name=EventName.ITER_TRAIN_TIME, scalar=seconds, step=step)
        writer.put_scalar(name=EventName.ETA, scalar=left * seconds, step=step)
        writer.put_scalar(name="Train Iter / Sec", scalar=1 / seconds, step=step)
        writer.put_scalar(name=EventName.TRAIN_RAYS_PER_SEC, scalar=pixels, step=step)
        # where the viewer looks for it
        writer.GLOBAL_BUFFER["events"][EventName.TRAIN_RAYS_PER_SEC.value] = {
            "buffer": [pixels],
            "avg": pixels,
        }
        writer.put_scalar(name="Train Loss", scalar=result.loss, step=step)
        writer.put_dict(name="Train Loss Dict", scalar_dict=result.losses, step=step)
        writer.put_dict(name="Train Metrics Dict", scalar_dict=result.metrics, step=step)
        if step_check(step, kRatesEvery * self.config.logging.steps_per_log, run_at_zero=True):
            self.optimizers.log_rates(step)

    def _call_back(self, step: int, location: TrainingCallbackLocation) -> None:
        for callback in self.callbacks:
            if location in callback.where_to_run:
                callback.run_callback(step)

    def train_iteration(self, step: int) -> StepResult:  # type: ignore[override]
        """Forward, backward and optimizer step."""
        if self._native is not None:
            return self._native(self.gradient_accumulation_steps, step)
        return autograd_step(self.pipeline, self.optimizers, self.gradient_accumulation_steps, step)

    def _give_up(self, step: int, why: str, where: str = "") -> None:
        """End the run with what the last whole step left; older checkpoints stay."""
        saved, whole = "No step was finished: there is nothing to save.", self._whole_step
        if whole >= self._start_step:
            try:
                self.optimizers.table.zero_pending()
                path = self._save(whole, keep_others=True)
                saved = (
                    f"Step {whole + 1:,} is saved: {path}. To go on:\n  {self._resume_command(path.parent)}"
                )
            except Exception as error:  # a device that has failed fails again
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                saved = f"It could not be saved either ({first}). {self._saved_before()}"
        with suppress(OSError):  # it may have been the terminal that failed
            say(where, markup=False, soft_wrap=True)
        why = why.strip().rstrip(".")
        raise SystemExit(f"mgpu-splat: step {step + 1:,} failed: {why}. {saved}")

    @contextmanager
    def _random_state_kept(self) -> Iterator[None]:
        """Evaluation must not change what training draws."""
        state = checkpoint.random_state() if self._evaluates_at(self.step) else None
        try:
            yield
        finally:
            if state is not None:
                checkpoint.restore_random_state(state)

    def _evaluates_at(self, step: int) -> bool:
        config = self.config
        return (
            step_check(step, config.steps_per_eval_image)
            or step_check(step, config.steps_per_eval_all_images)
            or step_check(step, config.steps_per_eval_batch)
        )

    def _signals(self) -> AbstractContextManager[None]:
        """In here the first signal is a stop after the current step."""

        def stop(number: int) -> None:
            self._stop_signal = number

        return first_signal_stops(stop)

    def _after_train(self) -> None:
        """Evaluate, and leave the viewer open if it is to stay; what was trained is saved already.

        Saving comes first: what goes wrong in an evaluation, or a kill during it, must not cost the run.
        """
        self.save_checkpoint(self.step)
        try:
            self._log_waiting()
            self._say_how_long()
            self._final_evaluation()
            if self.viewer_state is not None:
                from ns_mgpu_splat.nerfstudio.viewer_controls import nothing_trains

                nothing_trains(self.viewer_state, self.step + 1)
            super()._after_train()
        except (
            KeyboardInterrupt,
            EvaluationStopped,
        ):  # the second by a signal that came when steps were over
            let_interrupts_end()
            said = f"Ended. Step {self.step + 1:,} is saved in {self.checkpoint_dir}."
            say(said, markup=False, soft_wrap=True)

    def _final_evaluation(self) -> None:
        if not self.config.eval_at_end or len(self.pipeline.datamanager.eval_dataset) == 0:
            return
        try:
            with self.train_lock, self._random_state_kept():
                metrics = self.pipeline.get_average_eval_image_metrics(step=self.step)
        except (torch.OutOfMemoryError, MemoryError, ImageError) as error:
            say("[bold red]The final evaluation failed.[/bold red]")
            say(str(error), markup=False)
            return
        writer.put_dict(name="Eval Images Metrics Dict (all images)", scalar_dict=metrics, step=self.step)
        say(self.pipeline.metrics_line(metrics), soft_wrap=True)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int) -> None:
        """Save all that is needed to go on after this step. A full disk is said, and does not end training."""
        if self._saved_step == step:
            return  # Nerfstudio's end of training saves once more
        try:
            self._save(step)
        except (CheckpointError, RuntimeError, MemoryError) as error:
            if self.training_state == "completed":
                raise SystemExit(f"mgpu-splat: {error} {self._saved_before()}") from None
            say(
                f"Step {step + 1:,} could not be saved; training goes on. {error}",
                style="bold red",
                markup=False,
            )

    def _save(self, step: int, keep_others: bool = False) -> Path:
        with self.train_lock:
            if (
                self._accumulating()
            ):  # only at the end of the run: a group of gradients that never became whole
                self.optimizers.table.zero_pending()
            self.optimizers.flush()
            state = {
                "format": checkpoint.kFormat,
                "step": step,
                "pipeline": self.pipeline.state_dict(),
                **self.optimizers.state(),
                "scalers": {},
                "strategy": self.pipeline.model.strategy.state_dict(),
                "random": checkpoint.random_state(),
                "sampler": self.pipeline.datamanager.state(),
                "shards": list(shard_names()),
                "gaussians": self.pipeline.model.num_points,
                "sh_degree": self.pipeline.model.config.sh_degree,
                "schedule_steps": self.config.schedule_steps,
            }
            keep = keep_others or not self.config.save_only_latest_checkpoint
            path = checkpoint.save(state, self.checkpoint_dir, step, keep)
            self._saved_step = step
            return path
