# SPDX-License-Identifier: Apache-2.0
"""Whether what training has made is worth keeping: a loss that is a number, and Gaussians that can be drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ns_mgpu_splat.nerfstudio.say import say

if TYPE_CHECKING:
    from ns_mgpu_splat.nerfstudio.steps import StepResult
    from ns_mgpu_splat.splats.table import SplatTable


class RowCheck:
    """Looks for Gaussians that can be drawn; without any, a run would go on with a finite loss, for nothing."""

    def __init__(self) -> None:
        self._sound: int | None = None  # the latest step after which all rows were known to be finite
        self._said = False

    def why_hopeless(self, table: SplatTable, step: int, start: int) -> str | None:
        """What is wrong after a step if nothing can be drawn any more, or None; the first bad rows are said once.

        Args:
            start: the first step of the run; `step` is the one before it where the run begins.
        """
        bad, count = table.count_bad_rows(), table.num_rows
        if bad == 0 < count:
            self._sound = step
            return None
        if 0 < bad < count:
            if not self._said:
                self._said = True
                say(
                    f"[bold yellow]After step {step + 1:,}, {bad:,} of {count:,} Gaussians have values that are not finite. They "
                    "are not drawn, and move to living ones while Gaussians multiply."
                )
            return None
        what = f"all {count:,} Gaussians have values that are not finite" if count else "no Gaussian is left"
        since = "" if self._sound is None else f", which was not so after step {self._sound + 1:,}"
        when = f"after step {step + 1:,} " if step >= start else ""
        cure = "Lower the learning rates, or look for a damaged image or pose."
        if count == 0:
            cure = "Give it points to start from, or lower what removes them (--pipeline.model.cull-alpha-thresh)."
        return f"{when}{what}{since}: nothing can be drawn, and this is not saved. {cure}"


def why_diverged(step: int, result: StepResult) -> str | None:
    """What is wrong if the loss of a step is no number, or None: what it left must not take a good checkpoint's place."""
    if math.isfinite(result.loss):
        return None
    return (
        f"the loss of step {step + 1:,} is {result.loss}: training has diverged, and this is not saved. Lower the learning "
        "rates, or look for a damaged image or pose."
    )
