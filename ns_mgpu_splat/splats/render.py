# SPDX-License-Identifier: Apache-2.0
"""render(): images of a splat table, differentiable, on all shards of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.arguments import finite_number
from ns_mgpu_splat.splats.camera import Camera, stack_viewmats

if TYPE_CHECKING:
    from ns_mgpu_splat.splats.optimizer import SplatAdam
    from ns_mgpu_splat.splats.table import SplatTable

COLUMN_SHAPES = {
    "means": "[N, 3]",
    "quats": "[N, 4]",
    "scales": "[N, 3]",
    "opacities": "[N]",
    "sh0": "[N, 3]",
    "shN": "[N, K, 3]",
}


class Rendered:
    """One camera's images, float32 on `mgpu`: what `render` returns for it."""

    rgb: Tensor
    """(H, W, 3), over the background; not clamped above."""
    accumulation: Tensor
    """(H, W, 1), 1 minus the light that passes, in [0, 1]."""
    depth_sum: Tensor | None
    """(H, W, 1), depths weighted like colours: depth times accumulation, in scene units; None of `render(depth=False)`."""

    def __init__(self, rgb: Tensor, depth_sum: Tensor | None, accumulation: Tensor) -> None:
        """From the operator's images."""
        self.rgb, self.depth_sum, self.accumulation = rgb, depth_sum, accumulation

    @cached_property
    def depth(self) -> Tensor:
        """(H, W, 1), expected depth, z in the camera or a fisheye's distance, in scene units; 0 where nothing was hit.

        Made when first read.

        Raises: ValueError after `render(depth=False)`.
        """
        if self.depth_sum is None:
            raise ValueError("This was rendered with depth=False; render with depth=True to have it.")
        return self.depth_sum / self.accumulation.clamp_min(1e-10)


def render(
    table: SplatTable,
    cameras: Camera | Sequence[Camera],
    *,
    background: Tensor | Sequence[float] | None = None,
    antialiased: bool = False,
    sh_degree: int | None = None,
    depth: bool = True,
    optimizer: SplatAdam | None = None,
) -> list[Rendered]:
    """Render the Gaussians of `table` in each camera.

    Args:
        table: N rows on `mgpu`, float32, world frame; N may be 0.
        cameras: one or several, of any sizes.
        background: 3 colour values behind everything; None: black. A tensor may require grad.
        antialiased: dim opacities by sqrt(det / dilated det) (Mip-Splatting, arXiv 2311.16493).
        sh_degree: use the bands up to this one; None: all of the table's.
        depth: accumulate depth, too; False is cheaper, above all on the way back.
        optimizer: read rows as they are after its latest step, although not all of them have been written yet; in grad
            mode backward leaves the rows' gradients in `optimizer.pending` for `optimizer.step()`, and no column gets a
            `.grad`. None: plain autograd.
    Returns: one `Rendered` per camera, differentiable in all columns, in every viewmat and in `background`. Do not change
        its images in place before `backward()`, which reads them; autograd refuses that.
        Images are the same bits on any number of shards.
    Raises: ValueError naming the argument and its shape.
    """
    cameras = camera_list(cameras)
    columns = check_columns(table)
    degree = check_sh_degree(sh_degree, columns[5])
    if not cameras:
        return []
    fixed_background, learned_background = _split_background(background)
    call = _Call(
        [camera.arguments() for camera in cameras],
        fixed_background,
        bool(antialiased),
        degree,
        bool(depth),
        optimizer is not None and optimizer.wants_absgrad,
        optimizer,
        torch.is_grad_enabled(),
        table.cells,
    )
    images = _Render.apply(call, stack_viewmats(cameras), *columns)
    results = [Rendered(*images[3 * i : 3 * i + 3]) for i in range(len(cameras))]
    if learned_background is not None:
        for result in results:
            result.rgb = result.rgb + (1 - result.accumulation) * learned_background.to(result.rgb.device)
    return results


@dataclass(frozen=True)
class _Call:
    """What one call of the operator takes besides tensors that may require grad."""

    cameras: list[tuple[Any, ...]]
    background: tuple[float, ...] | None
    antialiased: bool
    sh_degree: int
    wanted_depth: bool
    wanted_absgrad: bool
    optimizer: SplatAdam | None
    wanted_backward: bool
    cells: Any


class _Render(torch.autograd.Function):
    """Columns and viewmats to rgb, accumulated depth and accumulation of each camera, in turn."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, viewmats: Tensor | None, *columns: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Stages 2 to 6 of the design's flow."""
        optimizer = call.optimizer
        ctx.frame, images = native().splat_forward(
            columns,
            None if optimizer is None else optimizer.state(),
            None if optimizer is None else optimizer.history,
            call.cameras,
            call.background,
            call.antialiased,
            call.sh_degree,
            call.wanted_depth,
            wanted_backward=call.wanted_backward,
            wanted_absgrad=call.wanted_absgrad,
            cells=call.cells,
        )
        ctx.optimizer, ctx.returned = optimizer, False
        flat = tuple(image for triple in images for image in triple)
        # backward reads columns and images again: autograd keeps them, and notices if they were changed in place
        ctx.save_for_backward(*columns, *flat)
        ctx.set_materialize_grads(False)
        return flat

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Stages 7 and 8, and the adjoint of projection where no optimizer takes it over."""
        _ = ctx.saved_tensors
        module = native()
        module.splat_backward(ctx.frame, [grads[i : i + 3] for i in range(0, len(grads), 3)])
        wanted, wants_viewmats = list(ctx.needs_input_grad[2:]), ctx.needs_input_grad[1]
        if ctx.optimizer is not None and any(wanted):
            if ctx.returned:
                raise RuntimeError(
                    "This render was already walked back into optimizer.pending; render again for a second backward()."
                )
            ctx.optimizer.pending.append(ctx.frame)
            ctx.returned = True
            wanted = [False] * len(wanted)
        columns, viewmats = module.splat_param_grads(ctx.frame, wanted, wants_viewmats)
        return None, viewmats, *columns


def camera_list(cameras: Camera | Sequence[Camera]) -> list[Camera]:
    listed = [cameras] if isinstance(cameras, Camera) else list(cameras)
    for i, camera in enumerate(listed):
        if not isinstance(camera, Camera):
            raise ValueError(f"cameras[{i}] is a {type(camera).__name__}, expected ns_mgpu_splat.Camera.")
    return listed


def _split_background(
    background: Tensor | Sequence[float] | None,
) -> tuple[tuple[float, ...] | None, Tensor | None]:
    """The background as the operator takes it, and as autograd must see it: one of the two is None."""
    if isinstance(background, Tensor) and background.requires_grad and torch.is_grad_enabled():
        _check_background(tuple(background.shape))
        return None, background.to(torch.float32)
    return fixed_background(background), None


def fixed_background(background: Tensor | Sequence[float] | None) -> tuple[float, ...] | None:
    """Three colour values as the operators take them; None is black.

    Raises: ValueError for another shape or kind, or a value that is not finite.
    """
    if background is None:
        return None
    if isinstance(background, Tensor):
        _check_background(tuple(background.shape))
        background = background.detach().tolist()
    try:
        values = tuple(map(float, background))
    except (TypeError, ValueError):
        raise ValueError(f"background is {background!r}, expected 3 colour values in [0, 1].") from None
    _check_background((len(values),))
    return tuple(finite_number(f"background[{i}]", value) for i, value in enumerate(values))


def _check_background(shape: tuple[int, ...]) -> None:
    if shape != (3,):
        raise ValueError(f"background is {list(shape)}, expected [3]: red, green, blue.")


def check_columns(table: SplatTable) -> tuple[Tensor, ...]:
    """The six columns of `table`, after a look at their shapes, types and device.

    Raises: ValueError naming the column.
    """
    columns = tuple(table.columns())
    means = columns[0]
    rows = means.shape[0] if means.dim() else -1
    rest = columns[5].shape[1] if columns[5].dim() == 3 else -1
    shapes = ((rows, 3), (rows, 4), (rows, 3), (rows,), (rows, 3), (rows, rest, 3))
    for (name, letters), column, shape in zip(COLUMN_SHAPES.items(), columns, shapes, strict=True):
        if tuple(column.shape) != shape:
            order = " Order is w, x, y, z: docs/conventions.md." if name == "quats" else ""
            raise ValueError(
                f"{name} is {list(column.shape)}, expected {letters} with N = {rows} as in means.{order}"
            )
        half = name == "shN" and column.dtype == torch.float16
        if not (column.dtype == torch.float32 or half) or not column.is_contiguous():
            kind = str(column.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} is {kind}, strides {list(column.stride())}; expected contiguous float32."
            )
        if column.device.type != "mgpu":
            raise ValueError(
                f"{name} is on {column.device}, expected mgpu. SplatTable puts its columns there."
            )
    if rest not in (0, 3, 8, 15):
        raise ValueError(
            f"shN is {list(columns[5].shape)}, expected [N, K, 3] with K = 0, 3, 8 or 15 (degree 0 to 3)."
        )
    return columns


def check_sh_degree(sh_degree: int | None, sh_rest: Tensor) -> int:
    """The degree to use: that of the table, or the one asked for if the table has it.

    Raises: ValueError if it does not.
    """
    of_table = {0: 0, 3: 1, 8: 2, 15: 3}[sh_rest.shape[1]]
    if sh_degree is None:
        return of_table
    if sh_degree not in range(of_table + 1):
        raise ValueError(
            f"sh_degree is {sh_degree!r}, but the table's shN is {list(sh_rest.shape)}: degree 0 to {of_table}."
        )
    return int(sh_degree)
