# SPDX-License-Identifier: Apache-2.0
"""Seeds: neighbour distances against brute force, even thinning, bad clouds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ns_mgpu_splat.splats import seed


def brute_force(points: np.ndarray) -> np.ndarray:
    """Mean distance to the three nearest others, from the whole distance matrix."""
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(distance, np.inf)
    neighbours = min(3, len(points) - 1)
    return np.sort(distance, axis=1)[:, :neighbours].mean(axis=1)


@pytest.mark.parametrize("rows", [2, 3, 4, 5, 300])
def test_distances_equal_brute_force(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed, "_QUERY_ROWS", 64)  # several pieces
    points = np.random.default_rng(rows).normal(size=(rows, 3))
    assert np.allclose(seed.neighbour_distances(points), brute_force(points), rtol=1e-12)


def test_far_from_the_origin_nothing_is_lost() -> None:
    """Georeferenced clouds: float32 coordinates would merge these points."""
    points = np.random.default_rng(0).uniform(size=(100, 3)) + np.array([4.5e5, 5.4e6, 80.0])
    assert np.allclose(seed.neighbour_distances(points), brute_force(points), rtol=1e-6)


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_points_have_a_width_all_the_same(rows: int) -> None:
    assert (seed.neighbour_distances(np.ones((rows, 3))) > 0).all()


def test_duplicates_never_have_zero_width() -> None:
    points = np.random.default_rng(1).normal(size=(100, 3))
    points[:30] = points[0]
    distance = seed.neighbour_distances(points)
    assert np.allclose(distance[30:], brute_force(points)[30:])
    assert (distance[:30] > 0).all()
    assert distance[:30].max() < np.median(distance[30:])
    assert np.isfinite(np.log(seed.neighbour_distances(np.full((7, 3), 3.0)))).all()


def test_random_orientations_are_unit_and_depend_on_the_seed() -> None:
    quats = seed.random_quats(1000, 5)
    assert np.allclose(np.linalg.norm(quats, axis=1), 1.0, atol=1e-6)
    assert np.array_equal(quats, seed.random_quats(1000, 5))
    assert not np.array_equal(quats, seed.random_quats(1000, 6))
    assert np.abs(quats.mean(axis=0)).max() < 0.08


@pytest.mark.parametrize("count", [1, 7, 500, 1999, 2000, 12_345, 39_999])
def test_thinning_keeps_exactly_the_count(count: int) -> None:
    points = np.random.default_rng(2).normal(size=(40_000, 3))
    kept = seed.thin_evenly(points, count)
    assert len(np.unique(kept)) == len(kept) == count
    assert (np.diff(kept) > 0).all()
    assert kept.min() >= 0
    assert kept.max() < len(points)


def test_thinning_works_on_duplicates_and_to_nothing() -> None:
    points = np.repeat(np.random.default_rng(3).normal(size=(10, 3)), 100, axis=0)
    kept = seed.thin_evenly(points, 300)
    assert len(np.unique(kept)) == 300
    assert len(np.unique(points[kept], axis=0)) == 10
    assert len(seed.thin_evenly(np.zeros((50, 3)), 20)) == 20
    assert len(seed.thin_evenly(points, 0)) == 0


def test_thinning_is_even_in_space() -> None:
    """95 % of the points sit in one corner of a square, but the rest of it keeps its share of the survivors."""
    generator = np.random.default_rng(4)
    wide = np.c_[generator.uniform(0, 1, (5_000, 2)), np.zeros(5_000)]
    dense = np.c_[generator.uniform(0, 0.1, (95_000, 2)), np.zeros(95_000)]
    points = np.concatenate([dense, wide])
    kept = points[seed.thin_evenly(points, 2_000)]
    in_corner = (kept[:, :2] < 0.1).all(axis=1).mean()
    assert in_corner < 0.2  # its area is 1 %; drawing points at random keeps 95 %
    cells = np.unique((kept[:, :2] * 20).astype(int), axis=0)
    assert len(cells) == 400, "every cell of a 20 x 20 grid keeps a point"


def test_bad_clouds_are_named() -> None:
    points = np.random.default_rng(5).normal(size=(20, 3))
    broken = points.copy()
    broken[[7, 9], 1] = np.nan
    with pytest.raises(
        ValueError, match="points has 2 rows with values that are not finite, the first is row 7"
    ):
        seed.check_cloud(broken, None)
    with pytest.raises(ValueError, match=r"points is \[20, 2\], expected \[N, 3\]"):
        seed.check_cloud(points[:, :2], None)
    with pytest.raises(ValueError, match=r"colors is \[19, 3\], expected \[20, 3\]"):
        seed.check_cloud(points, np.zeros((19, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match="colors is int64"):
        seed.check_cloud(points, np.zeros((20, 3), dtype=np.int64))
    assert seed.check_cloud(np.zeros((0, 3)), np.zeros((0, 3), dtype=np.uint8))[0].shape == (0, 3)


def test_colours_outside_their_range_and_points_outside_float32_are_named() -> None:
    """Floats up to 255 are the usual slip: as [0, 1] they would be 255 times too bright, and train."""
    points = np.random.default_rng(6).normal(size=(20, 3))
    with pytest.raises(ValueError, match=r"colors go from 0 to 255; give floats in \[0, 1\], or uint8"):
        seed.check_cloud(points, np.linspace(0.0, 255.0, 60).reshape(20, 3))
    with pytest.raises(ValueError, match="colors go from -1 to 1"):
        seed.check_cloud(points, np.linspace(-1.0, 1.0, 60).reshape(20, 3))
    assert seed.check_cloud(points, np.full((20, 3), 1.004))[1].max() == np.float32(1.004)
    points[11, 2] = 1e39  # infinite in float32
    with pytest.raises(ValueError, match=r"points has 1 rows .* the first is row 11"):
        seed.check_cloud(points, None)


def test_half_precision_tensors_are_read() -> None:
    points = torch.tensor([[0.5, 1.25, -3.0]], dtype=torch.bfloat16)
    xyz, rgb = seed.check_cloud(points, torch.tensor([[0.25, 0.5, 1.0]], dtype=torch.float16))
    assert xyz.tolist() == [[0.5, 1.25, -3.0]]
    assert rgb.tolist() == [[0.25, 0.5, 1.0]]
