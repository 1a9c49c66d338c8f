# SPDX-License-Identifier: Apache-2.0
"""project(): the first half of a render, for those who want the Gaussians and not the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.camera import Camera, stack_viewmats
from ns_mgpu_splat.splats.render import check_columns, check_sh_degree

if TYPE_CHECKING:
    from ns_mgpu_splat.splats.table import SplatTable


@dataclass(frozen=True)
class Records:
    """R visible Gaussians of one camera, ascending by row; on `mgpu`."""

    row: Tensor
    """(R,) int64, row of the table."""
    means2d: Tensor
    """(R, 2), pixels."""
    conics: Tensor
    """(R, 3), inverse of the dilated 2D covariance: xx, xy, yy, per square pixel."""
    opacities: Tensor
    """(R,), at least 1/255, after the antialiased mode's compensation."""
    colors: Tensor
    """(R, 3), at least 0."""
    depths: Tensor
    """(R,), z in the camera, of a fisheye the distance to it; scene units."""


def project(
    table: SplatTable, camera: Camera, *, antialias: bool = False, sh_degree: int | None = None
) -> Records:
    """Project the Gaussians of `table` and keep the visible ones.

    Visible: at a depth of more than 0.01, finite, and with an alpha of at least 1/255 in reach of a pixel centre.

    Args:
        table: N rows on `mgpu`, float32, world frame; N may be 0.
        camera: one view; OpenCV axes, pixels; pixel centres at +0.5.
        antialias: dim opacities by sqrt(det / dilated det) (Mip-Splatting, arXiv 2311.16493).
        sh_degree: use the bands up to this one; None: all of the table's.
    Returns: R <= N records, ascending by row; differentiable in all columns and `camera.viewmat`.
    Raises: ValueError if a column does not have N rows; the message names it.
    """
    columns = check_columns(table)
    degree = check_sh_degree(sh_degree, columns[5])
    if not isinstance(camera, Camera):
        raise ValueError(f"camera is a {type(camera).__name__}, expected ns_mgpu_splat.Camera.")
    viewmats = stack_viewmats([camera])
    return Records(*_Project.apply(camera, bool(antialias), degree, table.cells, viewmats, *columns))


class _Project(torch.autograd.Function):
    """Columns and a viewmat [1, 4, 4] to the fields of Records."""

    @staticmethod
    def forward(
        ctx: Any,
        camera: Camera,
        antialias: bool,
        degree: int,
        cells: Any,
        viewmats: Tensor | None,
        *columns: Tensor,
    ) -> tuple[Tensor, ...]:
        """Stage 2 of the design's flow."""
        ctx.frame = native().splat_project(columns, [camera.arguments()], antialias, degree, cells)
        row, _, *values = ctx.frame.records()
        row = row.to(columns[0].device)
        ctx.save_for_backward(*columns)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(row)
        return row, *values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _row: None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Its adjoint."""
        _ = ctx.saved_tensors
        module = native()
        module.splat_records_backward(ctx.frame, list(grads))
        columns, viewmats = module.splat_param_grads(
            ctx.frame, list(ctx.needs_input_grad[5:]), ctx.needs_input_grad[4]
        )
        return None, None, None, None, viewmats, *columns
