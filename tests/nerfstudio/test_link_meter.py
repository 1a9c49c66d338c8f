# SPDX-License-Identifier: Apache-2.0
"""Figures of the partition in the training metrics: means since the last time they were asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ns_mgpu_splat
from ns_mgpu_splat.nerfstudio.link_meter import LinkMeter


def sums(frames: int, records: int, remote: int, visible: int, imbalance: float) -> dict[str, Any]:
    """As torch.mgpu.link_stats() returns them, for three shards."""
    matrix = [[0, records, 0], [0, 0, records], [0, 0, 0]]
    zero = [[0] * 3 for _ in range(3)]
    return {
        "frames": frames,
        "records": matrix,
        "gradients": zero,
        "pixels": zero,
        "remote_rows": remote,
        "visible_rows": visible,
        "imbalance": imbalance,
        "cells": 40 * frames,
        "cells_kept": 10 * frames,
        "candidates": 7 * frames,
    }


def test_figures_are_means_since_they_were_last_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ns_mgpu_splat.init()
    now: dict[str, Any] = {}
    monkeypatch.setattr(torch.mgpu, "link_stats", lambda: now)  # type: ignore[attr-defined]
    meter = LinkMeter()
    now.update(sums(10, 5 * 2**20, 50, 200, 1.5))
    first = meter.figures(shards=3)
    assert (first["cull/candidate_rows"], first["cull/cells_kept_share"]) == (7.0, 0.25)
    assert first["links/records_mib"] == 1.0  # 10 MiB in 10 frames
    assert first["links/gradients_mib"] == 0.0
    assert (first["links/remote_rows"], first["links/remote_share"]) == (5.0, 0.25)
    assert first["links/load_imbalance"] == pytest.approx(1.5)
    now.update(sums(14, 9 * 2**20, 90, 240, (10 * 1.5 + 4 * 1.1) / 14))  # four frames of 1.1
    second = meter.figures(shards=3)
    assert second["links/records_mib"] == 2.0
    assert (second["links/remote_rows"], second["links/remote_share"]) == (10.0, 1.0)
    assert second["links/load_imbalance"] == pytest.approx(1.1)
    now.update(sums(1, 2**20, 7, 7, 1.2))  # somebody has reset the sums
    assert meter.figures(shards=3)["links/remote_rows"] == 7.0
    now.update(sums(3, 0, 0, 7, 1.0), cells=40)  # no cells since: the table is small
    assert meter.figures(shards=1) == {"cull/candidate_rows": 7.0}


def test_nothing_rendered_is_nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    ns_mgpu_splat.init()
    monkeypatch.setattr(torch.mgpu, "link_stats", lambda: sums(0, 0, 0, 0, 1.0))  # type: ignore[attr-defined]
    assert set(LinkMeter().figures(shards=3).values()) == {0.0}
