# SPDX-License-Identifier: Apache-2.0
"""Densification of 3DGS-MCMC (Kheradmand et al. 2024): dead rows are moved, the table grows to a hard cap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.table import SplatTable


@dataclass
class McmcStrategy:
    """When and how much to densify. Draws depend on (seed, step) alone: the same on any mesh, and after a resume."""

    max_gaussians: int
    """Hard cap of the table's rows. Give the table at least this capacity."""
    refine_start: int = 500
    """First refinement comes after this step."""
    refine_stop: int = 25_000
    """No refinement from this step on."""
    refine_every: int = 100
    """Steps between refinements."""
    min_opacity: float = 0.005
    """A row at or below this opacity is dead."""
    grow_factor: float = 1.05
    """Rows after a refinement per row before, until the cap."""
    seed: int = 0
    """Of the draws of rows to copy."""

    def __post_init__(self) -> None:
        if self.max_gaussians < 1:
            raise ValueError(f"max_gaussians is {self.max_gaussians}, expected at least 1.")
        if self.refine_every < 1:
            raise ValueError(f"refine_every is {self.refine_every}, expected at least 1.")
        if not 0.0 < self.min_opacity < 1.0:
            raise ValueError(f"min_opacity is {self.min_opacity}, expected a value between 0 and 1.")
        if self.grow_factor < 1.0:
            raise ValueError(f"grow_factor is {self.grow_factor}, expected at least 1.")

    def refines_at(self, step: int) -> bool:
        """Whether `post_step` of this step changes the table."""
        return self.refine_start < step < self.refine_stop and step % self.refine_every == 0

    def post_step(self, table: SplatTable, optimizer: SplatAdam, step: int) -> dict[str, int]:
        """Call after `optimizer.step()` of each step; returns the numbers of rows `relocated`, `added` and in `total`.

        Rows whose geometry is not finite count as dead, so they heal here.
        Raises: ValueError if the table has more rows than the cap.
        """
        if table.num_rows > self.max_gaussians:
            raise ValueError(
                f"The table has {table.num_rows:,} rows, above the cap of {self.max_gaussians:,}. Raise max_gaussians, or make "
                "the table with from_points(..., max_gaussians=...)."
            )
        if not self.refines_at(step):
            return {"relocated": 0, "added": 0, "total": table.num_rows}
        optimizer.flush()
        dead = native().dead_rows(_columns(table), self.min_opacity)
        if len(dead) == table.num_rows:  # nothing lives: there is nothing to copy
            return {"relocated": 0, "added": 0, "total": table.num_rows}
        self._relocate(table, optimizer, dead, step)
        added = self._add(table, optimizer, step)
        return {"relocated": len(dead), "added": added, "total": table.num_rows}

    def _relocate(self, table: SplatTable, optimizer: SplatAdam, dead: Any, step: int) -> None:
        """Make dead rows copies of living ones."""
        sources = native().sample_rows(_columns(table), self.min_opacity, len(dead), self.seed, 2 * step)
        self._copy(table, optimizer, sources, dead)

    def _add(self, table: SplatTable, optimizer: SplatAdam, step: int) -> int:
        """Grow by copies of living rows; returns by how many."""
        old = table.num_rows
        target = min(self.max_gaussians, table.capacity, math.ceil(old * self.grow_factor))
        if target <= old:
            return 0
        count = target - old
        sources = native().sample_rows(_columns(table), self.min_opacity, count, self.seed, 2 * step + 1)
        table.grow(target)
        optimizer.grow(target)
        self._copy(table, optimizer, sources, native().RowList.consecutive(old, target))
        return count

    def _copy(self, table: SplatTable, optimizer: SplatAdam, sources: Any, to: Any) -> None:
        native().relocate(_columns(table), optimizer.state(), sources, to, self.min_opacity, optimizer.steps)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the seed (draws depend on it and on the step alone)."""
        return {"version": 1, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the draws of the saved run."""
        if state.get("version") != 1:
            raise ValueError(f"The strategy's state has version {state.get('version')}, expected 1.")
        self.seed = int(state["seed"])


def _columns(table: SplatTable) -> list[torch.Tensor]:
    return [column.detach() for column in table.columns()]
