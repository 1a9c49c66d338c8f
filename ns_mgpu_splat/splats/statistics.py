# SPDX-License-Identifier: Apache-2.0
"""What default densification wants to know of each row, gathered by the optimizer's steps (cuda/splat/statistics.h)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ns_mgpu_splat.splats.table import grow_parameter, reserve, shrink_parameter


class RowStatistics:
    """One value a row of each, on `mgpu`, since `clear()`.

    Args:
        rows: of the table.
        capacity: rows to which they can grow.
        absgrad: sum the magnitudes of each pixel's pull rather than the pulls (AbsGS, arXiv 2404.10484).
        radius: also keep the largest size on the screen.
    """

    gradient: Tensor
    """(N,) sum over views of the length of dL/d(position on the screen), in half image widths and heights."""
    views: Tensor
    """(N,) int32, the views that these are of: those in which the row was visible."""
    radius: Tensor | None
    """(N,) largest three standard deviations on the screen, as a share of the longer image side."""

    def __init__(self, rows: int, capacity: int, *, absgrad: bool = False, radius: bool = False) -> None:
        self.absgrad = absgrad
        self.gradient = reserve((rows,), capacity)
        self.views = reserve((rows,), capacity, torch.int32)
        self.radius = reserve((rows,), capacity) if radius else None

    def tensors(self) -> list[Tensor]:
        """As the native functions take them."""
        return [self.gradient, self.views] + ([] if self.radius is None else [self.radius])

    def grow(self, rows: int) -> None:
        """Follow the table; new rows have been seen by no view."""
        for tensor in self.tensors():
            grow_parameter(tensor, rows)

    def shrink(self, rows: int) -> None:
        """Follow the table."""
        for tensor in self.tensors():
            shrink_parameter(tensor, rows)

    def clear(self) -> None:
        """Begin anew."""
        for tensor in self.tensors():
            tensor.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {
            "absgrad": self.absgrad,
            "gradient": self.gradient,
            "views": self.views,
            "radius": self.radius,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], capacity: int) -> RowStatistics:
        """What `state_dict` told of; tensors are copied."""
        rows = int(state["gradient"].shape[0])
        out = cls(rows, capacity, absgrad=bool(state["absgrad"]), radius=state["radius"] is not None)
        out.gradient.copy_(state["gradient"])
        out.views.copy_(state["views"])
        if out.radius is not None:
            out.radius.copy_(state["radius"])
        return out
