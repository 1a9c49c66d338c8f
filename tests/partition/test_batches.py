# SPDX-License-Identifier: Apache-2.0
"""Cameras of a step: each comes once, steps are even where that is possible, and what a camera sees is counted right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from city_scene import city_cameras, city_columns

import ns_mgpu_splat
from ns_mgpu_splat import SplatTable
from ns_mgpu_splat.data.city.town import build_town
from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition.batches import spread_batches, visible_rows


@pytest.mark.parametrize(("cameras", "views"), [(0, 3), (1, 8), (17, 4), (64, 8), (600, 16)])
def test_every_camera_comes_once(cameras: int, views: int) -> None:
    batches = spread_batches(np.random.default_rng(cameras).random((cameras, 5)), views)
    assert sorted(camera for batch in batches for camera in batch) == list(range(cameras))
    assert all(len(batch) == views for batch in batches[:-1])


def test_cameras_of_single_shards_are_put_together_evenly() -> None:
    """Eight shards, each seen by eight cameras alone: every step has one of each, in the order of the shards."""
    home = np.random.default_rng(1).permutation(np.arange(64) % 8)
    batches = spread_batches(1000.0 * np.eye(8)[home], 8, seed=3)
    assert all(home[batch].tolist() == list(range(8)) for batch in batches)


def test_steps_are_more_even_than_those_of_chance() -> None:
    rng = np.random.default_rng(2)
    seen = rng.random((240, 8)) ** 6 * rng.lognormal(8, 0.5, (240, 1))

    def unevenness(batches: list[list[int]]) -> float:
        rows = np.array([seen[batch].sum(0) for batch in batches])
        return float(np.median(rows.max(1) / rows.mean(1)))

    chance = rng.permutation(240).reshape(30, 8).tolist()
    spread = unevenness(spread_batches(seen, 8))
    assert spread < 1 + 0.6 * (unevenness(chance) - 1)


def test_no_cameras_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        spread_batches(np.ones((3, 2)), 0)


def test_visible_rows_are_those_of_the_records() -> None:
    """Counted by home from the row numbers of the records."""
    ns_mgpu_splat.init()
    town = build_town(2)
    table = SplatTable.from_columns(**city_columns(town, 20_000, shuffled=False))
    cameras = city_cameras(town, 4, 80, 60)["aerial"]
    seen = visible_rows(table, cameras)
    ends = torch.tensor([end for _, end in table.homes])
    for camera, found in zip(cameras, seen, strict=True):
        rows = native().splat_project(table.columns(), [camera.arguments()], False, 0).records()[0]
        homes = torch.bucketize(rows, ends, right=True)
        assert found.tolist() == torch.bincount(homes, minlength=len(ends)).tolist()
        assert found.sum() > 100
