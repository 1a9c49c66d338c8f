# SPDX-License-Identifier: Apache-2.0
"""Which cameras to put into one training step of several: some that look at each shard's part of the scene.

A camera in a street sees the rows of two or three shards. Alone in a step it keeps these shards only busy, or else sends
their rows to all others. Cameras whose rows lie on all shards in equal shares can be blended where the rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ns_mgpu_splat.device import native

if TYPE_CHECKING:
    from ns_mgpu_splat.splats.camera import Camera
    from ns_mgpu_splat.splats.table import SplatTable

CANDIDATES = 256  # cameras that are weighed for one place in a step


def visible_rows(table: SplatTable, cameras: Sequence[Camera]) -> NDArray[np.float64]:
    """(C, S) rows of each shard that each camera sees; projects the table once a camera."""
    degree = table.sh_degree
    return np.array(
        [
            native()
            .splat_project(table.columns(), [camera.arguments()], False, degree, table.cells)
            .counts()["visible"]
            for camera in cameras
        ],
        np.float64,
    )


def spread_batches(seen: NDArray[np.float64], views: int, seed: int = 0) -> list[list[int]]:
    """All cameras once, `views` a step, so that each step's rows are spread over the shards as evenly as a greedy choice does.

    Args:
        seen: (C, S) rows of each shard that a camera sees.
        views: cameras of a step; the last step may have fewer.
        seed: of the order in which cameras come.
    Returns: lists of camera numbers. Within a step they are in the order of the shards that they look at, so that a run of
        their tiles is blended by neighbours.
    Raises: ValueError if `views` is below 1.
    """
    if views < 1:
        raise ValueError(f"views is {views}, expected at least 1 camera a step.")
    left = np.random.default_rng(seed).permutation(len(seen)).tolist()
    middle = (seen * np.arange(seen.shape[1])).sum(1) / np.maximum(seen.sum(1), 1.0)
    out: list[list[int]] = []
    while left:
        batch = [left.pop(0)]
        rows = seen[batch[0]].copy()
        while left and len(batch) < views:
            together = rows + seen[left[:CANDIDATES]]
            unevenness = (together**2).sum(1) / np.maximum(together.sum(1), 1.0) ** 2
            camera = left.pop(int(unevenness.argmin()))
            rows += seen[camera]
            batch.append(camera)
        out.append(sorted(batch, key=lambda camera: float(middle[camera])))
    return out
