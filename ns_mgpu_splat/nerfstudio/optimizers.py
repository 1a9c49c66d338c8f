# SPDX-License-Identifier: Apache-2.0
"""One SplatAdam for the table and torch optimizers for the rest, behind the interface of Nerfstudio's Optimizers.

The table's gradient is never stored: `loss.backward()` leaves the records' gradients in `SplatAdam.pending`, and the
step turns them into parameter changes. The rates are those of the groups "means", "scales", ... in the config.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.utils import writer
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel
from ns_mgpu_splat.nerfstudio.names import kColumnOf
from ns_mgpu_splat.nerfstudio.schedule import DecayConfig

kTable = "splats"
kBetas = (0.9, 0.999)
kEps = 1e-15  # as in 3DGS: gradients are tiny, and a larger value would slow faint Gaussians down


class SplatOptimizers(Optimizers):
    """All optimizers of a run.

    Args:
        config: Nerfstudio's mapping of group name to {"optimizer", "scheduler"}.
        groups: the model's parameters by group.
        model: its table is trained by one SplatAdam.
        schedule_steps: length of schedules that have none of their own.
        seed: of the noise of the means.
    Raises: RuntimeError if a group has no config.
    """

    def __init__(
        self,
        config: dict[str, Any],
        groups: dict[str, list[Parameter]],
        model: MgpuSplatModel,
        schedule_steps: int,
        seed: int,
    ) -> None:
        from ns_mgpu_splat.splats.optimizer import SplatAdam

        missing = [name for name in groups if name not in config]
        if missing:
            raise RuntimeError(
                f"The config's optimizers lack {', '.join(missing)}. Add them, or use the defaults."
            )
        self.config = config
        self.schedule_steps = schedule_steps
        self.model = model
        # columns whose rate never changes, and the others
        self._fixed: dict[str, float] = {}
        self._moving: list[tuple[str, float, float, Any]] = []
        for name, column in kColumnOf.items():
            initial, schedule = float(config[name]["optimizer"].lr), config[name]["scheduler"]
            scale = model.extent if name == "means" else 1.0
            if schedule is None or schedule.is_constant(initial):
                self._fixed[column] = initial * scale
            else:
                self._moving.append((column, initial, scale, schedule))
        explores = model.config.strategy == "mcmc"
        self.table = SplatAdam(
            model.table,
            self.rates(0),
            betas=kBetas,
            eps=kEps,
            opacity_reg=model.config.opacity_reg if explores else 0.0,
            scale_reg=model.config.scale_reg if explores else 0.0,
            noise_lr=model.config.noise_lr if explores else 0.0,
            seed=seed,
            report_means=False,
        )
        self.optimizers: dict[str, Optimizer] = {}
        self.schedulers: dict[str, LRScheduler] = {}
        self.parameters: dict[str, list[Parameter]] = {
            kTable: [p for name in kColumnOf for p in groups[name]]
        }
        for name, parameters in groups.items():
            if name in kColumnOf:
                continue
            optimizer = config[name]["optimizer"].setup(params=parameters)
            self.optimizers[name], self.parameters[name] = optimizer, parameters
            schedule = config[name]["scheduler"]
            if schedule is not None:
                rate = config[name]["optimizer"].lr
                extra = {"schedule_steps": schedule_steps} if isinstance(schedule, DecayConfig) else {}
                self.schedulers[name] = schedule.setup().get_scheduler(
                    optimizer=optimizer, lr_init=rate, **extra
                )

    def rates(self, step: int) -> dict[str, float]:
        """Learning rates of the table's columns at a step; that of the means is per unit of the cameras' extent."""
        rates = dict(self._fixed)
        for column, initial, scale, schedule in self._moving:
            rates[column] = schedule.rate(step, initial, self.schedule_steps) * scale
        return rates

    def zero_grad_some(self, param_groups: Iterable[str]) -> None:
        """Forget the gradients of these groups."""
        for name in param_groups:
            if name == kTable:
                self.table.zero_pending()
            else:
                self.optimizers[name].zero_grad(set_to_none=True)

    def zero_grad_all(self) -> None:
        """Forget all gradients."""
        self.zero_grad_some(self.parameters)

    def step_some(self, param_groups: Iterable[str], step: int) -> None:
        """Apply the gradients of these groups, with the rates of a step."""
        for name in param_groups:
            if name == kTable:
                self.table.step(self.rates(step))
            elif any(p.grad is not None or getattr(p, "rows", None) for p in self.parameters[name]):
                self.optimizers[name].step()

    def scheduler_step_all(self, step: int) -> None:
        """Advance torch's schedulers."""
        for scheduler in self.schedulers.values():
            scheduler.step()

    def log_rates(self, step: int) -> None:
        """Log all rates."""
        others = {name: float(s.get_last_lr()[0]) for name, s in self.schedulers.items()}
        for name, rate in {**self.rates(step), **others}.items():
            writer.put_scalar(name=f"learning_rate/{name}", scalar=rate, step=step)

    def flush(self) -> None:
        """Replay the steps that rows out of view have missed, so that all rows are as dense Adam has them."""
        self.table.flush()

    def state(self) -> dict[str, Any]:
        """State of all optimizers and schedulers; call `flush` before."""
        return {
            "optimizers": {
                kTable: self.table.state_dict(),
                **{k: o.state_dict() for k, o in self.optimizers.items()},
            },
            "schedulers": {k: s.state_dict() for k, s in self.schedulers.items()},
        }

    def load_optimizers(self, loaded_state: dict[str, Any]) -> None:
        """Load in place; groups that this run does not train are left out."""
        if kTable in loaded_state:
            self.table.load_state_dict(loaded_state[kTable])
        for name, optimizer in self.optimizers.items():
            if name in loaded_state:
                optimizer.load_state_dict(loaded_state[name])

    def load_schedulers(self, loaded_state: dict[str, Any]) -> None:
        """Load in place; groups that this run does not train are left out."""
        for name, scheduler in self.schedulers.items():
            if name in loaded_state:
                scheduler.load_state_dict(loaded_state[name])
