# SPDX-License-Identifier: Apache-2.0
"""Learning rates as plain Python floats of the step.

Nerfstudio's scheduler leaves numpy scalars in checkpoints, which `torch.load(weights_only=True)` refuses. A rate that
is a function of the step also needs no state: a resumed run cannot go on with the wrong one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from nerfstudio.configs.base_config import PrintableConfig
from nerfstudio.engine.schedulers import Scheduler, SchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass
class ColumnRateConfig(PrintableConfig):
    """Adam's rate for one column of the splat table."""

    lr: float = 1e-3
    """Learning rate of this column at the first step. That of the means is a share of the cameras' extent. Lower all of
    them if training diverges."""


@dataclass
class ExposureRateConfig(PrintableConfig):
    """Adam's rate for the photographs' exposures."""

    lr: float = 0.01
    """Learning rate of gains and offsets at the first step in which a photograph is seen. Raise it where exposures differ by
    more than a factor of two and a photograph is seen less than a hundred times."""

    def setup(self, params: Any) -> Optimizer:
        """The optimizer of `Exposures.maps`."""
        from ns_mgpu_splat.splats.exposure import ExposureAdam

        return ExposureAdam(params, lr=self.lr)


@dataclass
class DecayConfig(SchedulerConfig):
    """Exponential decay with an optional warm-up."""

    _target: type = field(default_factory=lambda: Decay)
    """Class of the schedule."""
    lr_final: float | None = None
    """Learning rate at the end of the decay; None keeps the initial one."""
    warmup_steps: int = 0
    """Steps in which the rate rises from 0 to its initial value."""
    max_steps: int | None = None
    """Step at which lr-final is reached; None takes --schedule-steps."""

    def is_constant(self, initial: float) -> bool:
        """Whether every step has the initial rate."""
        return self.warmup_steps == 0 and (self.lr_final is None or initial <= 0)

    def rate(self, step: int, initial: float, schedule_steps: int) -> float:
        """The learning rate of a step (0 is the first)."""
        if step < self.warmup_steps:
            return initial * math.sin(0.5 * math.pi * step / self.warmup_steps)
        if self.lr_final is None or initial <= 0:
            return initial
        length = max(1, (self.max_steps or schedule_steps) - self.warmup_steps)
        t = min(1.0, (step - self.warmup_steps) / length)
        return initial * (self.lr_final / initial) ** t


class Decay(Scheduler):
    """`DecayConfig` as a torch scheduler, for parameters that a torch optimizer trains."""

    config: DecayConfig

    def get_scheduler(self, optimizer: Optimizer, lr_init: float, schedule_steps: int = 30_000) -> LambdaLR:
        """A LambdaLR whose factor is a Python float."""
        return LambdaLR(optimizer, lambda step: self.config.rate(step, lr_init, schedule_steps) / lr_init)


def schedule_advice(end: int, schedule: int, former: int) -> str | None:
    """What to say of a run to step `end` of a schedule that was `former` in the checkpoint that it goes on from: one advice."""
    if schedule != former:
        return (
            f"The checkpoint's run had a schedule of {former:,} steps, this one has {schedule:,}: learning rates jump. To go on "
            f"as before, add --schedule-steps {former}."
        )
    if end < schedule // 2:
        return (
            f"Training to step {end:,} of a schedule of {schedule:,}: learning rates will hardly have decayed. For a run that "
            f"ends here, add --schedule-steps {end}."
        )
    return None
