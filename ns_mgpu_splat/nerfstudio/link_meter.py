# SPDX-License-Identifier: Apache-2.0
"""Traffic between shards and culling for the training metrics: what `torch.mgpu.link_stats()` has grown by since it was last
asked.
"""

from __future__ import annotations

from typing import Any

import torch

kKinds = ("records", "gradients", "pixels")
kMib = float(2**20)


class LinkMeter:
    """Means over the frames (training steps and renders) since the last call of `figures`; no GPU is asked."""

    def __init__(self) -> None:
        self._before: dict[str, float] | None = None

    def figures(self, *, shards: int) -> dict[str, float]:
        """By name, for tensorboard: rows projected a step, share of the cells (where there are any) that some camera may
        see; on several shards MiB a step by kind, rows blended elsewhere, share of these, load imbalance."""
        now = totals(torch.mgpu.link_stats())  # type: ignore[attr-defined]
        before, self._before = self._before or dict.fromkeys(now, 0.0), now
        if now["frames"] < before["frames"]:  # somebody has reset the sums
            before = dict.fromkeys(now, 0.0)
        grown = {name: now[name] - before[name] for name in now}
        frames = max(grown["frames"], 1.0)
        out = {"cull/candidate_rows": grown["candidates"] / frames}
        if grown["cells"]:
            out["cull/cells_kept_share"] = grown["cells_kept"] / grown["cells"]
        if shards < 2:
            return out
        out |= {f"links/{kind}_mib": grown[kind] / frames / kMib for kind in kKinds}
        out["links/remote_rows"] = grown["remote_rows"] / frames
        out["links/remote_share"] = grown["remote_rows"] / max(grown["visible_rows"], 1.0)
        out["links/load_imbalance"] = grown["imbalance"] / frames
        return out


def totals(stats: dict[str, Any]) -> dict[str, float]:
    """Sums over all pairs of shards and frames."""
    out = {kind: float(sum(map(sum, stats[kind]))) for kind in kKinds}
    for name in ("frames", "remote_rows", "visible_rows", "cells", "cells_kept", "candidates"):
        out[name] = float(stats[name])
    out["imbalance"] = float(stats["imbalance"]) * stats["frames"]
    return out
