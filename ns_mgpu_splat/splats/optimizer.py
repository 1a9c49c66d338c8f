# SPDX-License-Identifier: Apache-2.0
"""Adam over a splat table, at the cost of the rows that were seen (cuda/splat/step.h)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.arguments import finite_number, seed_number
from ns_mgpu_splat.splats.statistics import RowStatistics
from ns_mgpu_splat.splats.table import (
    COLUMNS,
    COPY_ROWS,
    SplatTable,
    grow_parameter,
    reserve,
    resized,
    shrink_parameter,
)

STATE_VERSION = 1
FLUSH_EVERY = 1000  # steps; bounds the history (native limit: AdamHistory.max_steps)


class SplatAdam:
    """Dense Adam's semantics (`torch.optim.Adam`, zero gradient for rows that were not seen) without dense work.

    Of a half table, first moments are kept in bfloat16; they and `shN` are rounded stochastically, by bits that depend on
    (seed, step, row) alone.

    Render with `render(..., optimizer=this)`, call `backward()` on the loss, then `step()`. Rows that a step does not see
    catch up when they are next read; `flush()` brings all of them up to date, which anything that looks at the columns
    directly needs before (densification, checkpoints and exports; `state_dict()` does it by itself).

    Args:
        table: the parameters; it and this object must grow together.
        lrs: learning rate by column name; a column that is not named stays as it is.
        opacity_reg: weight of the mean opacity of the rows seen in a step, added to the loss.
        scale_reg: weight of their mean scale, over rows and axes.
        noise_lr: 3DGS-MCMC's exploration noise on the means, times their learning rate; 0: none. 5e5 in the paper.
        seed: of the noise; a draw depends on (seed, step, row) alone.
        report_means: have the means of opacity and scale in `report`; on GPUs, reading them makes a step wait.
    Raises: ValueError for an unknown column, impossible betas or a weight or rate that is not finite.
    """

    def __init__(
        self,
        table: SplatTable,
        lrs: Mapping[str, float],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-15,
        opacity_reg: float = 0.0,
        scale_reg: float = 0.0,
        noise_lr: float = 0.0,
        seed: int = 0,
        report_means: bool = True,
    ) -> None:
        self.table = table
        if len(betas) != 2:
            raise ValueError(f"betas is {betas!r}, expected two numbers.")
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = float(eps)
        self.opacity_reg = finite_number("opacity_reg", opacity_reg)
        self.scale_reg = finite_number("scale_reg", scale_reg)
        self.noise_lr = finite_number("noise_lr", noise_lr, 0)
        self.seed = seed_number("seed", seed)
        self.report_means = bool(report_means)
        self.lrs = dict.fromkeys(COLUMNS, 0.0)
        self.set_lrs(lrs)
        self.history = native().AdamHistory(0, *self.betas, self.eps, self.seed)
        self.exp_avg: dict[str, Tensor] = {}
        self.exp_avg_sq: dict[str, Tensor] = {}
        moment = torch.bfloat16 if table.half else torch.float32
        for name, column in table.named_columns().items():
            self.exp_avg[name] = reserve(tuple(column.shape), table.capacity, moment)
            self.exp_avg_sq[name] = reserve(tuple(column.shape), table.capacity)
        self.last_step = reserve((table.num_rows,), table.capacity, torch.int32)
        self.pending: list[Any] = []
        """Frames whose gradients wait for `step()`; backward of a render with this optimizer adds them."""
        self.report: dict[str, float] = {"rows_seen": 0, "mean_opacity": 0.0, "mean_scale": 0.0}
        """Of the latest step: rows seen, and the means that the regularisers weigh, before the step."""

        self.statistics: RowStatistics | None = None
        """What steps add up for default densification; a strategy that wants it puts it here."""
        table.optimizers.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse copies and pickles: their frames and history would be another optimizer's."""
        raise TypeError(
            "A SplatAdam cannot be copied or pickled. Make one of the other table, and load this one's state_dict()."
        )

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.history.now

    def state(self) -> list[Tensor]:
        """The state as the native functions take it: exp_avg by column, exp_avg_sq by column, last_step."""
        return [*(self.exp_avg[n] for n in COLUMNS), *(self.exp_avg_sq[n] for n in COLUMNS), self.last_step]

    @property
    def wants_absgrad(self) -> bool:
        """Whether renders are to keep sums of absolute gradients, which cost a little."""
        return self.statistics is not None and self.statistics.absgrad

    def other_rows(self) -> list[Tensor]:
        """What else has a value a row, and moves with the table's rows."""
        return [] if self.statistics is None else self.statistics.tensors()

    def rows_of_all(self) -> list[Tensor]:
        """Every tensor here that has a value a row."""
        return [*self.state(), *self.other_rows()]

    # ---- stepping

    def step(self, lrs: Mapping[str, float] | None = None) -> None:
        """Apply the gradients of all pending frames in one Adam step, with new learning rates if given.

        Raises: ValueError if a pending frame was not rendered at the present step, or the table has grown since.
        """
        if lrs is not None:
            self.set_lrs(lrs)
        report = native().splat_step(
            self.pending,
            self.table.columns(),
            self.state(),
            self.history,
            *self.step_arguments(),
            self.table.cells,
        )
        self.stepped(report)

    def step_arguments(self) -> tuple[Any, ...]:
        """What the native functions that step take last: rates, noise, regularisers, report_means, statistics."""
        return (
            [self.lrs[name] for name in COLUMNS],
            self.lrs["means"] * self.noise_lr,
            self.opacity_reg,
            self.scale_reg,
            self.report_means,
            self.other_rows(),
            self.wants_absgrad,
        )

    def stepped(self, report: dict[str, float]) -> None:
        """Take note of a step that a native function has taken with all that was pending."""
        self.report = report
        self.pending.clear()
        if self.history.now - self.history.base >= FLUSH_EVERY:
            self.flush()

    def zero_pending(self) -> None:
        """Forget the gradients of all pending frames."""
        self.pending.clear()

    def flush(self) -> None:
        """Bring every row up to date with the latest step."""
        if self.pending:
            raise ValueError("flush() with gradients pending: call step() or zero_pending() first.")
        native().splat_flush(self.table.columns(), self.state(), self.history, self.table.cells)

    # ---- growing and shrinking

    def grow(self, rows: int) -> None:
        """Follow the table to `rows` rows, in place: the new rows have zero moments and are up to date."""
        if self.pending:
            raise ValueError("grow() with gradients pending: call step() or zero_pending() first.")
        old = self.last_step.shape[0]
        if rows < old:
            raise ValueError(f"grow({rows:,}) on an optimizer of {old:,} rows; use shrink().")
        if rows == old:
            return
        for tensor in self.state():
            grow_parameter(tensor, rows)
        self.last_step[old:].fill_(self.steps)
        if self.statistics is not None:
            self.statistics.grow(rows)

    def shrink(self, rows: int) -> None:
        """Follow the table to its first `rows` rows, in place."""
        if self.pending:
            raise ValueError("shrink() with gradients pending: call step() or zero_pending() first.")
        old = self.last_step.shape[0]
        if rows > old:
            raise ValueError(f"shrink({rows:,}) on an optimizer of {old:,} rows; use grow().")
        if rows == old:
            return
        for tensor in self.state():
            shrink_parameter(tensor, rows)
        if self.statistics is not None:
            self.statistics.shrink(rows)

    def reset_rows(self, index: Tensor) -> None:
        """Set the moments of the rows `index` (int64, any order) to zero; they count as up to date."""
        if not isinstance(index, Tensor) or index.is_floating_point() or index.dtype == torch.bool:
            got = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(f"index is {got}, expected int64 numbers of rows.")
        rows = index.detach().cpu().to(torch.int64).unique()
        listed = native().RowList(rows, self.table.num_rows)
        native().reset_rows(self.table.columns(), self.state(), listed, self.steps)

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors (`weights_only`-safe), after a flush, so save the table's columns after this call."""
        self.flush()
        return {
            "version": STATE_VERSION,
            "steps": self.steps,
            "betas": list(self.betas),
            "eps": self.eps,
            "seed": self.seed,
            "lrs": copy.copy(self.lrs),
            "exp_avg": dict(self.exp_avg),
            "exp_avg_sq": dict(self.exp_avg_sq),
            "statistics": None if self.statistics is None else self.statistics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load in place, on any number of shards. Load the table first: its rows must be those of the state.

        Raises: ValueError for another version, or naming the moment that does not fit the table.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"The optimizer state has version {state.get('version')}, expected {STATE_VERSION}."
            )
        for moment in ("exp_avg", "exp_avg_sq"):
            for name, column in self.table.named_columns().items():
                if tuple(state[moment][name].shape) != tuple(column.shape):
                    raise ValueError(
                        f"{moment} of {name} is {list(state[moment][name].shape)} in the state, but the table's column is "
                        f"{list(column.shape)}. Load the table of the same checkpoint first (SplatTable.resize)."
                    )
        self.pending.clear()
        rows, capacity = self.table.num_rows, self.table.capacity
        with torch.no_grad():
            for mine, theirs in ((self.exp_avg, state["exp_avg"]), (self.exp_avg_sq, state["exp_avg_sq"])):
                for name in COLUMNS:
                    if mine[name].shape != theirs[name].shape:
                        mine[name].data = resized(mine[name].data, rows, capacity)
                    for first in range(0, rows, COPY_ROWS):
                        mine[name][first : first + COPY_ROWS].copy_(theirs[name][first : first + COPY_ROWS])
            if self.last_step.shape[0] != rows:
                self.last_step.data = resized(self.last_step.data, rows, capacity)
            self.last_step.fill_(int(state["steps"]))
        gathered = state.get("statistics")
        self.statistics = None if gathered is None else RowStatistics.from_state_dict(gathered, capacity)
        self.betas = (float(state["betas"][0]), float(state["betas"][1]))
        self.eps = float(state["eps"])
        self.seed = int(state["seed"])
        self.set_lrs(state["lrs"])
        self.history = native().AdamHistory(int(state["steps"]), *self.betas, self.eps, self.seed)

    # ---- inside

    def set_lrs(self, lrs: Mapping[str, float]) -> None:
        """Set learning rates by column; raises ValueError for an unknown column, or a rate that is not finite."""
        unknown = set(lrs) - set(COLUMNS)
        if unknown:
            raise ValueError(f"lrs names {sorted(unknown)}; the columns are {', '.join(COLUMNS)}.")
        self.lrs.update({name: finite_number(f"lrs[{name!r}]", lr) for name, lr in lrs.items()})
