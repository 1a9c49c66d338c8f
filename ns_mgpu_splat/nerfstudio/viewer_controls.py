# SPDX-License-Identifier: Apache-2.0
"""What the viewer's panel offers beside Nerfstudio's own controls, and the tables that draw it.

Nothing here changes the model. A look other than the usual one replaces a column or two for each of its parts (colours 12
bytes a Gaussian, dots 16, a crop box 4) and shares the rest with the table; the replaced columns are filled in pieces, shard
by shard where the rows are at home, and kept until the look, the box or the training step changes. Colouring by depth happens
in the picture and replaces nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from nerfstudio.viewer.viewer_elements import ViewerCheckbox, ViewerControl, ViewerDropdown, ViewerSlider
from torch import Tensor, nn

from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition.colors import shard_color
from ns_mgpu_splat.splats.seed import SH_C0
from ns_mgpu_splat.splats.table import COLUMNS, SplatTable, place_rows, reserve

if TYPE_CHECKING:
    from nerfstudio.data.scene_box import OrientedBox
    from nerfstudio.viewer.control_panel import ControlPanel
    from nerfstudio.viewer.viewer import Viewer

kAsTrained, kByShard, kByDepth, kByOpacity = "as trained", "home shard", "depth", "opacity"
kDepthBuffer = "gl_z_buf_depth"  # Nerfstudio's, for what stands in front of what
kPieceRows = 1 << 21  # rows whose colours are computed at a time
kDotLogScale = -20.0  # a width that vanishes: the screen filter alone makes the dot
kSolid = 5.0  # a logit: of dots
kDead = -5.3  # a logit, of opacity 0.005: what is fainter is about to be moved, and gets no dot
kInvisible = -30.0  # a logit: an opacity far below the 1/255 that is drawn


@dataclass(frozen=True)
class Look:
    """How a scene is drawn."""

    sh_degree: int = 3
    """Bands of view-dependent colour above this one are left out."""
    points: bool = False
    """Draw each Gaussian that is not dead as a solid dot of about two pixels, whatever its size and opacity."""
    color_by: str = kAsTrained
    """`kAsTrained`, `kByShard`, `kByDepth` or `kByOpacity`."""


def nothing_trains(viewer: Viewer, steps: int) -> None:
    """Take training's buttons from the panel, which would do nothing, and show how many steps have been trained."""
    for button in (viewer.pause_train, viewer.resume_train):
        button.visible = False
    for element in (viewer.control_panel._train_speed, viewer.control_panel._train_util):
        element.set_hidden(True)
    viewer.update_step(steps)


def offer_pictures_only(panel: ControlPanel) -> None:
    """Leave the viewer's own depth buffer out of what can be shown: it is smaller than a picture, and split screen, whose
    other half it would be at first, ends the browser's thread for it."""
    update = panel.update_output_options

    def updated(options: list[str]) -> None:
        update([name for name in options if name != kDepthBuffer])

    panel.update_output_options = updated  # type: ignore[method-assign, assignment]


class OpenedRun(ViewerControl):
    """Is told of the viewer once it has a panel, and takes from that what would mislead."""

    def __init__(self, steps: Callable[[], int]) -> None:
        """steps: says how many have been trained."""
        self._steps = steps

    def _setup(self, viewer: Viewer) -> None:
        super()._setup(viewer)
        offer_pictures_only(viewer.control_panel)
        if viewer.trainer is None:
            nothing_trains(viewer, self._steps())


class ViewerControls(nn.Module):
    """The controls, under "Custom Elements / model / drawing" in the viewer's panel; Nerfstudio finds them by their types.

    It has no parameters, and is a module because Nerfstudio looks for controls in modules only.
    """

    def __init__(self, sh_degree: int, steps: Callable[[], int]) -> None:
        """sh_degree: that of the model, from which the slider begins. steps: says how many have been trained."""
        super().__init__()
        self.opened_run = OpenedRun(steps)
        self.color_by = ViewerDropdown(
            "Colour by",
            kAsTrained,
            [kAsTrained, kByShard, kByDepth, kByOpacity],
            hint="Home shard: one colour for each GPU (orange is the first). Depth: near is bright, far is dark. Opacity: "
            "solid Gaussians are bright, faint ones dark. The model stays as it is.",
        )
        self.points = ViewerCheckbox(
            "Points",
            False,
            hint="Draw each Gaussian as a small solid dot at its centre: shows where they are, and how many.",
        )
        self.degree: ViewerSlider | None = None
        if sh_degree > 0:
            self.degree = ViewerSlider(
                "SH degree",
                sh_degree,
                0,
                sh_degree,
                1,
                hint="Detail of the view-dependent colour (shine, reflections). 0 shows the same colour from all sides. "
                "Early in training, degrees that have not begun yet add nothing.",
            )

    def look(self) -> Look:
        """What is chosen now."""
        degree = 0 if self.degree is None else int(self.degree.value)
        return Look(degree, bool(self.points.value), self.color_by.value)


class StandIn(SplatTable):
    """A table that shares its columns with another one, except for some; to render from, not to train or grow."""

    def __init__(self, table: SplatTable, replaced: dict[str, Tensor]) -> None:
        """replaced: columns by name, shaped as the table's."""
        for name in COLUMNS:
            setattr(self, name, replaced.get(name, getattr(table, name)))
        # boxes of its own, as they follow means, scales and opacities
        self.cells = native().TableCells()


def dressed(table: SplatTable, look: Look, box: OrientedBox | None) -> SplatTable:
    """The table as `look` wants it drawn, without what is outside of `box`; the table itself if that changes no column.

    Render the result with the table's optimizer, if there is one, as rows may be behind: a column that was replaced then
    drifts by the few steps that its row is behind, which is less than a picture shows.
    """
    replaced: dict[str, Tensor] = {}
    if look.color_by == kByShard:
        replaced["sh0"] = _shard_colors(table)
    elif look.color_by == kByOpacity:
        replaced["sh0"] = _opacity_colors(table)
    if look.points:
        replaced["scales"] = _column(table, 3).fill_(kDotLogScale)
    if look.points or box is not None:
        replaced["opacities"] = _opacities(table, look.points, box)
    return StandIn(table, replaced) if replaced else table


def color_by_depth(depth: Tensor, accumulation: Tensor, background: Tensor) -> Tensor:
    """A picture (H, W, 3) of depths (H, W, 1): bright is near. Where nothing was hit it is the background (3,).

    The scale is logarithmic, between the 2nd and 98th percentile of what is hit (of every 64th pixel of a large picture).
    """
    stride = 8 if min(depth.shape[:2]) >= 128 else 1
    seen = depth[::stride, ::stride].reshape(-1).cpu()
    seen = seen[(accumulation[::stride, ::stride].reshape(-1).cpu() > 0.5) & (seen > 0)].log()
    if len(seen) == 0:
        return background.expand(*depth.shape[:2], 3).clone()
    near, far = torch.quantile(seen, torch.tensor([0.02, 0.98])).tolist()
    share = (depth[..., 0].clamp_min(1e-10).log() - near) / max(far - near, 1e-6)
    return ramp(1 - share) * accumulation + background * (1 - accumulation)


def ramp(values: Tensor) -> Tensor:
    """Colours (..., 3) of values (...): 0 and below dark violet, 1 and above yellow (matplotlib's viridis)."""
    table = _ramp_table().to(values.device)
    return table[(values.clamp(0, 1) * (len(table) - 1)).round().long()]


@cache
def _ramp_table() -> Tensor:
    import matplotlib

    return torch.tensor(matplotlib.colormaps["viridis"].colors, dtype=torch.float32)  # type: ignore[attr-defined]


def _column(table: SplatTable, width: int | None = None) -> Tensor:
    """A column to fill, (N, width) or (N,), with its rows where the table's are."""
    rows = table.num_rows
    column = reserve((rows,) if width is None else (rows, width), rows)
    place_rows(column, table.homes)
    return column


def _fill(column: Tensor, values: Callable[[int, int], Tensor]) -> Tensor:
    """Fill a column with `values(begin, end)`, piece by piece."""
    for begin in range(0, len(column), kPieceRows):
        end = min(begin + kPieceRows, len(column))
        column[begin:end] = values(begin, end)
    return column


def _shard_colors(table: SplatTable) -> Tensor:
    column = _column(table, 3)
    for shard, (begin, end) in enumerate(table.homes):
        color = torch.tensor(shard_color(shard))
        for channel, value in enumerate(((color - 0.5) / SH_C0).tolist()):
            column[begin:end, channel] = value
    return column


def _opacity_colors(table: SplatTable) -> Tensor:
    logits = table.opacities.detach()
    return _fill(_column(table, 3), lambda begin, end: (ramp(logits[begin:end].sigmoid()) - 0.5) / SH_C0)


def _opacities(table: SplatTable, solid: bool, box: OrientedBox | None) -> Tensor:
    """Logits (N,): solid if asked for, and too low to be drawn where a centre is outside of the box."""
    means, logits = table.means.detach(), table.opacities.detach()
    frame = None if box is None else [part.to(means.device, torch.float32) for part in (box.R, box.T, box.S)]

    def values(begin: int, end: int) -> Tensor:
        out = logits[begin:end]
        if solid:
            out = torch.where(out > kDead, kSolid, out)
        if frame is not None:
            rotation, center, size = frame
            inside = (((means[begin:end] - center) @ rotation).abs() <= size / 2).all(dim=1)
            out = torch.where(inside, out, kInvisible)
        return out

    return _fill(_column(table), values)
