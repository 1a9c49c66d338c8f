# SPDX-License-Identifier: Apache-2.0
"""Strategies of densification, both under a hard cap: 3DGS-MCMC's, and the default of 3D Gaussian Splatting.

`McmcStrategy` (Kheradmand et al. 2024) moves dead rows onto living ones and grows by copies of these. `DefaultStrategy`
(Kerbl et al. 2023, with gsplat's thresholds) clones small rows and splits large ones where the gradient on the screen is
large, and prunes. What they draw depends on (seed, step, row) alone: the same on any mesh, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition.order import RowOrder
from ns_mgpu_splat.partition.placement import Placement
from ns_mgpu_splat.splats.arguments import seed_number, whole_number
from ns_mgpu_splat.splats.optimizer import SplatAdam
from ns_mgpu_splat.splats.statistics import RowStatistics
from ns_mgpu_splat.splats.table import SplatTable


@dataclass
class McmcStrategy:
    """When and how much to move and to grow."""

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
    order: RowOrder | None = None
    """Sorts rows in space again after a refinement, where it has spoilt their order; None: never."""
    placement: Placement | None = None
    """Deals rows to the shards anew after each refinement; None: they stay as they are dealt."""

    def __post_init__(self) -> None:
        _check_common(self)
        if not 0.0 < self.min_opacity < 1.0:
            raise ValueError(f"min_opacity is {self.min_opacity}, expected a value between 0 and 1.")
        if not 1.0 <= self.grow_factor < math.inf:
            raise ValueError(f"grow_factor is {self.grow_factor}, expected a finite factor of at least 1.")

    def refines_at(self, step: int) -> bool:
        """Whether `post_step` of this step changes the table."""
        return self.refine_start < step < self.refine_stop and step % self.refine_every == 0

    def post_step(self, table: SplatTable, optimizer: SplatAdam, step: int) -> dict[str, int]:
        """Call after `optimizer.step()` of each step; returns the numbers of rows `relocated`, `added` and in `total`.

        Rows whose geometry is not finite count as dead, so they heal here.
        Raises: ValueError if the table has more rows than the cap.
        """
        _check_cap(table, self.max_gaussians)
        report = {"relocated": 0, "added": 0, "total": table.num_rows}
        if self.refines_at(step):
            with _in_place(self, table, optimizer):
                report = self._refine(table, optimizer, step)
        return report

    def _refine(self, table: SplatTable, optimizer: SplatAdam, step: int) -> dict[str, int]:
        optimizer.flush()
        dead = native().dead_rows(table.columns(), self.min_opacity)
        if len(dead) == table.num_rows:  # nothing lives: there is nothing to copy
            return {"relocated": 0, "added": 0, "total": table.num_rows}
        self._relocate(table, optimizer, dead, step)
        added = self._add(table, optimizer, step)
        return {"relocated": len(dead), "added": added, "total": table.num_rows}

    def _relocate(self, table: SplatTable, optimizer: SplatAdam, dead: Any, step: int) -> None:
        """Make dead rows copies of living ones."""
        sources = native().sample_rows(table.columns(), self.min_opacity, len(dead), self.seed, 2 * step)
        self._copy(table, optimizer, sources, dead)

    def _add(self, table: SplatTable, optimizer: SplatAdam, step: int) -> int:
        """Grow by copies of living rows; returns by how many."""
        old = table.num_rows
        target = min(self.max_gaussians, table.capacity, math.ceil(old * self.grow_factor))
        if target <= old:
            return 0
        count = target - old
        sources = native().sample_rows(table.columns(), self.min_opacity, count, self.seed, 2 * step + 1)
        table.grow(target)
        optimizer.grow(target)
        self._copy(table, optimizer, sources, native().RowList.consecutive(old, target))
        return count

    def _copy(self, table: SplatTable, optimizer: SplatAdam, sources: Any, to: Any) -> None:
        native().relocate(table.columns(), optimizer.state(), sources, to, self.min_opacity, optimizer.steps)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the seed (draws depend on it and on the step alone), and how wide sorted rows were."""
        return _state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the draws of the saved run."""
        _load_state(self, state)


@dataclass
class DefaultStrategy:
    """When to clone, split and prune, and at which thresholds.

    The optimizer's steps gather what it needs (`SplatAdam.statistics`), from the first `post_step` on until `refine_stop`.
    """

    max_gaussians: int
    """Hard cap of the table's rows; where it binds, rows with the highest gradients come first. Give the table at least
    this capacity."""
    scene_scale: float = 1.0
    """World units that the thresholds of size are relative to: the radius of the cameras' places, say."""
    refine_start: int = 500
    """First refinement comes after this step."""
    refine_stop: int = 15_000
    """No refinement and no reset from this step on."""
    refine_every: int = 100
    """Steps between refinements."""
    reset_every: int = 3000
    """Steps between two times that all opacities are lowered to twice `prune_opacity`."""
    pause_after_reset: int = 0
    """Steps after a reset without a refinement; the number of images lets each be seen once."""
    grow_gradient: float = 2e-4
    """A row grows where its mean gradient on the screen, in half image sizes, is above; 8e-4 suits `absgrad`."""
    split_scale: float = 0.01
    """A row that grows is split if its largest axis is above this share of `scene_scale`, else cloned."""
    prune_opacity: float = 0.005
    """A row below this opacity goes."""
    prune_scale: float = 0.1
    """A row whose largest axis is above this share of `scene_scale` goes, once opacities have been reset."""
    split_radius: float = 0.05
    """A row wider than this share of the image's longer side is split, until `screen_stop`."""
    prune_radius: float = 0.15
    """A row wider than this share of the image's longer side goes, until `screen_stop`, once opacities have been reset."""
    screen_stop: int = 0
    """Step at which sizes on the screen no longer matter; 0: they never do."""
    absgrad: bool = False
    """Sum the magnitudes of the pixels' pulls (AbsGS), which splits more where pulls cancel out."""
    seed: int = 0
    """Of the places of a split row's children."""
    order: RowOrder | None = None
    """Sorts rows in space again after a refinement, where it has spoilt their order; None: never."""
    placement: Placement | None = None
    """Deals rows to the shards anew after each refinement; None: they stay as they are dealt."""

    def __post_init__(self) -> None:
        _check_common(self)
        if not 0.0 < self.prune_opacity < 0.5:
            raise ValueError(f"prune_opacity is {self.prune_opacity}, expected a value between 0 and 0.5.")
        if self.reset_every < 1:
            raise ValueError(f"reset_every is {self.reset_every}, expected at least 1.")
        if not self.scene_scale > 0.0:
            raise ValueError(f"scene_scale is {self.scene_scale}, expected a length above 0.")

    def refines_at(self, step: int) -> bool:
        """Whether `post_step` of this step may change the number of rows."""
        within = self.refine_start < step < self.refine_stop and step % self.refine_every == 0
        return within and step % self.reset_every >= self.pause_after_reset

    def resets_at(self, step: int) -> bool:
        """Whether `post_step` of this step lowers opacities."""
        return 0 < step < self.refine_stop and step % self.reset_every == 0

    def post_step(self, table: SplatTable, optimizer: SplatAdam, step: int) -> dict[str, int]:
        """Call after `optimizer.step()` of each step; returns the numbers of rows `pruned`, `added` and in `total`.

        Rows whose geometry is not finite are pruned.
        Raises: ValueError if the table has more rows than the cap.
        """
        _check_cap(table, self.max_gaussians)
        report = {"pruned": 0, "added": 0, "total": table.num_rows}
        if step >= self.refine_stop:
            optimizer.statistics = None
        elif optimizer.statistics is None or optimizer.statistics.absgrad != self.absgrad:
            optimizer.statistics = RowStatistics(
                table.num_rows, table.capacity, absgrad=self.absgrad, radius=self.screen_stop > 0
            )
        elif self.refines_at(step):
            with _in_place(self, table, optimizer):
                report = self._refine(table, optimizer, optimizer.statistics, step)
        if self.resets_at(step):
            optimizer.flush()
            native().reset_opacities(table.columns(), optimizer.state(), 2 * self.prune_opacity)
        return report

    def _refine(
        self, table: SplatTable, optimizer: SplatAdam, statistics: RowStatistics, step: int
    ) -> dict[str, int]:
        optimizer.flush()
        on_screen, large_go = step < self.screen_stop, step > self.reset_every
        plan = native().plan_densification(
            table.columns(),
            statistics.tensors(),
            grow_gradient=self.grow_gradient,
            split_scale=self.split_scale * self.scene_scale,
            split_radius=self.split_radius if on_screen else math.inf,
            prune_opacity=self.prune_opacity,
            prune_scale=self.prune_scale * self.scene_scale if large_go else math.inf,
            prune_radius=self.prune_radius if on_screen and large_go else math.inf,
            max_rows=min(self.max_gaussians, table.capacity),
        )
        if plan.rows_after > plan.rows_before:
            table.grow(plan.rows_after)
            optimizer.grow(plan.rows_after)
        native().densify(table.columns(), optimizer.state(), plan, self.seed, step, optimizer.steps)
        table.shrink(plan.rows_after)
        optimizer.shrink(plan.rows_after)
        statistics.clear()
        return {"pruned": plan.pruned, "added": plan.doubled, "total": plan.rows_after}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the optimizer's state: the seed, and how wide sorted rows were."""
        return _state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the draws of the saved run."""
        _load_state(self, state)


@contextmanager
def _in_place(
    strategy: McmcStrategy | DefaultStrategy, table: SplatTable, optimizer: SplatAdam
) -> Iterator[None]:
    """Around a refinement: look at the rows before they change; sort them and deal them anew afterwards."""
    if strategy.placement is not None:
        strategy.placement.observe(table, optimizer)
    yield
    if strategy.order is not None:
        strategy.order.keep(table, optimizer)
    if strategy.placement is not None:
        strategy.placement.update(table, optimizer)


def _check_common(strategy: McmcStrategy | DefaultStrategy) -> None:
    """Refuse what is impossible in either strategy, before steps are spent on it."""
    for field in fields(strategy):
        value = getattr(strategy, field.name)
        if field.type == "int":
            setattr(strategy, field.name, whole_number(field.name, value))
        elif field.type == "float" and math.isnan(value):
            raise ValueError(f"{field.name} is {value}, expected a number.")
    strategy.seed = seed_number("seed", strategy.seed)
    if strategy.max_gaussians < 1:
        raise ValueError(f"max_gaussians is {strategy.max_gaussians}, expected at least 1.")
    if strategy.refine_every < 1:
        raise ValueError(f"refine_every is {strategy.refine_every}, expected at least 1.")
    order, placement = strategy.order, strategy.placement
    if order is not None and placement is not None and order.layout != placement.settings.layout:
        raise ValueError(
            f'The order has layout "{order.layout}" and the placement "{placement.settings.layout}". Give both the same: '
            "RowOrder(layout=...), PlacementSettings(layout=...)."
        )


def _check_cap(table: SplatTable, max_gaussians: int) -> None:
    if table.num_rows > max_gaussians:
        raise ValueError(
            f"The table has {table.num_rows:,} rows, above the cap of {max_gaussians:,}. Raise max_gaussians, or make the "
            "table with from_points(..., max_gaussians=...)."
        )


def _state_of(strategy: McmcStrategy | DefaultStrategy) -> dict[str, Any]:
    order = None if strategy.order is None else strategy.order.state_dict()
    return {"version": 1, "seed": strategy.seed, "order": order}


def _load_state(strategy: McmcStrategy | DefaultStrategy, state: Mapping[str, Any]) -> None:
    if state.get("version") != 1:
        raise ValueError(f"The strategy's state has version {state.get('version')}, expected 1.")
    strategy.seed = int(state["seed"])
    if strategy.order is not None:  # a run without one left none: its rows are sorted at the next refinement
        strategy.order.load_state_dict(state.get("order") or {})
