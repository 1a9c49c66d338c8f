# SPDX-License-Identifier: Apache-2.0
"""When the viewer's picture is made again while training."""

from __future__ import annotations

from typing import Any

kLeastPeriod = 0.5  # seconds between two pictures while training
kLongAgo = -(1 << 60)  # a step


class PictureClock:
    """When the viewer's picture is due again while training, so that pictures take no more than their share of the time.

    Nerfstudio reckons in rays a second, into which the wait for a training step goes: the first small picture then stops all
    further ones for minutes.
    """

    def __init__(self) -> None:
        self._seen_step: int | None = None
        self._since = 0.0

    def hurry(self, viewer: Any, step: int, picture_seconds: float, now: float) -> None:
        """Let Nerfstudio's `update_scene(step)` show a picture if one is due; called before it, after every step.

        Args:
            viewer: Nerfstudio's, with `last_step` (of the latest picture) and the panel's "Train Util", training's share.
            picture_seconds: that the latest picture took. now: a clock's seconds.
        """
        if viewer.last_step != self._seen_step:
            self._seen_step, self._since = viewer.last_step, now
        share = max(1 - viewer.control_panel.train_util, 1e-3)
        if now - self._since >= max(kLeastPeriod, picture_seconds / share):
            viewer.last_step = self._seen_step = kLongAgo
            self._since = now
