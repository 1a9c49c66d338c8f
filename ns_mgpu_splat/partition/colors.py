# SPDX-License-Identifier: Apache-2.0
"""One palette of shards, for the viewer's panel and for the picture of `mgpu-splat-info`."""

from __future__ import annotations

kShardColors = (
    (0.90, 0.62, 0.00),  # orange
    (0.34, 0.71, 0.91),  # sky blue
    (0.00, 0.62, 0.45),  # green
    (0.94, 0.89, 0.26),  # yellow
    (0.00, 0.45, 0.70),  # blue
    (0.84, 0.37, 0.00),  # vermilion
    (0.80, 0.47, 0.65),  # pink
    (0.75, 0.75, 0.75),  # grey
)
"""Of the first shards: Okabe and Ito's, told apart with any colour vision."""
kDark = 0.6  # brightness of the next eight


def shard_color(shard: int) -> tuple[float, float, float]:
    """(red, green, blue) in 0 to 1 of a shard: eight colours, then the same ones darker, then again from the first."""
    bright = kDark if shard // len(kShardColors) % 2 else 1.0
    red, green, blue = kShardColors[shard % len(kShardColors)]
    return red * bright, green * bright, blue * bright
