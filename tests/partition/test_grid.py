# SPDX-License-Identifier: Apache-2.0
"""What a SparseGrid promises, on the built-in grid, on fVDB's and on a stub of it: against a dict filled in Python's numbers."""

from __future__ import annotations

import itertools
from collections import Counter

import fvdb_stub
import numpy as np
import pytest
import torch
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat.device import native
from ns_mgpu_splat.partition import SparseGrid, voxel_counts
from ns_mgpu_splat.partition import grid as grid_module
from ns_mgpu_splat.partition.grid import CHUNK, fvdb_module, grid_in_use, why_no_fvdb

places = pytest.mark.parametrize("place", ["mgpu", "cpu"])


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


FVDB = fvdb_module() is not None


@pytest.fixture(params=["built-in", "fvdb stub", *(["fvdb"] if FVDB else [])])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The built-in grid, fVDB's where it imports, and our way of calling it, on a stub."""
    if request.param == "fvdb stub":
        monkeypatch.setattr(grid_module, "_import_fvdb", lambda: (fvdb_stub, ""))
        return "fvdb"
    return request.param


@pytest.mark.skipif(FVDB, reason="fvdb is there, and all tests below run on it, too")
def test_fvdb_itself_is_checked_where_it_is() -> None:
    pytest.skip(
        f"fvdb {why_no_fvdb()}: the tests below run on the built-in grid and on a stub of fvdb, not on fvdb"
    )


def cloud(count: int, seed: int = 0, spread: float = 4.0) -> Tensor:
    """Points of which none lies where voxels of 0.5 around (0.1, -0.2, 0.3) meet, so that all roundings agree."""
    points = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)) * spread
    fraction = ((points - torch.tensor([0.1, -0.2, 0.3])) / 0.5) % 1
    return torch.where((fraction - 0.5).abs() < 1e-3, points + 0.01, points)


SIZE, ORIGIN = 0.5, (0.1, -0.2, 0.3)


def voxel_of(point: Tensor, size: tuple[float, ...], origin: tuple[float, ...]) -> tuple[int, ...]:
    """The voxel of a point in Python's numbers; its coordinate in the points' type, as the grid gives it."""
    kind = np.float32 if point.dtype == torch.float32 else np.float64
    return tuple(int(np.rint(kind((float(point[a]) - origin[a]) / size[a]))) for a in range(3))


def dict_of(
    points: Tensor, size: float = SIZE, origin: tuple[float, ...] = ORIGIN
) -> Counter[tuple[int, ...]]:
    return Counter(voxel_of(point, (size,) * 3, origin) for point in points.cpu())


@places
@pytest.mark.parametrize("count", [1, 2, 3_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_voxels_are_those_that_hold_points(provider: str, place: str, count: int, dtype: torch.dtype) -> None:
    points = cloud(count).to(dtype)
    grid = SparseGrid.from_points(points.to(place), SIZE, ORIGIN, provider=provider)
    expected = dict_of(points)
    ijk = grid.ijk
    assert ijk.device.type == place
    assert ijk.dtype == torch.int32
    assert grid.num_voxels == len(expected) == len(ijk)
    assert {tuple(voxel) for voxel in ijk.tolist()} == set(expected)
    low, high = np.array(list(expected)).min(0), np.array(list(expected)).max(0)
    assert grid.bbox.tolist() == [low.tolist(), high.tolist()]
    counts = voxel_counts(grid, points.to(place))
    assert {tuple(v): int(c) for v, c in zip(ijk.tolist(), counts.tolist(), strict=True)} == expected
    assert grid.voxel_size.tolist() == pytest.approx([SIZE] * 3)
    assert grid.origin.tolist() == pytest.approx(ORIGIN)


@places
def test_index_space_goes_both_ways(provider: str, place: str) -> None:
    points = cloud(2_000).to(place)
    grid = SparseGrid.from_points(points, SIZE, ORIGIN, provider=provider)
    numbers = torch.arange(grid.num_voxels)
    for ijk in (grid.ijk, grid.ijk.long()):
        assert torch.equal(grid.ijk_to_index(ijk).cpu(), numbers)
        assert torch.equal(grid.ijk_to_index(ijk, cumulative=True).cpu(), numbers)
    assert bool((grid.ijk_to_index(grid.world_to_voxel(points).round().int()) >= 0).all())
    active = {tuple(voxel) for voxel in grid.ijk.tolist()}
    asked = torch.randint(-12, 13, (3_000, 3), generator=torch.Generator().manual_seed(1))
    found = grid.ijk_to_index(asked.to(place)).tolist()
    listed = grid.ijk.tolist()
    for voxel, index in zip(asked.tolist(), found, strict=True):
        assert (index >= 0) == (tuple(voxel) in active)
        assert index < 0 or listed[index] == voxel
    far = torch.tensor([[2**40, 0, 0], [0, -(2**62), 0]], device=place)
    assert grid.ijk_to_index(far).tolist() == [-1, -1]


@places
def test_world_and_voxel_space_go_both_ways(provider: str, place: str) -> None:
    points = cloud(500)
    grid = SparseGrid.from_points(points.to(place), (0.5, 0.25, 2.0), ORIGIN, provider=provider)
    voxels = grid.world_to_voxel(points.to(place))
    expected = (points.double() - torch.tensor(ORIGIN)) / torch.tensor([0.5, 0.25, 2.0])
    torch.testing.assert_close(voxels.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grid.voxel_to_world(voxels).cpu(), points, rtol=1e-5, atol=1e-5)
    centres = grid.voxel_to_world(grid.ijk.float())
    assert torch.equal(grid.world_to_voxel(centres).round().int().cpu(), grid.ijk.cpu())
    assert bool(grid.points_in_grid(centres).all())


@places
def test_points_outside_are_told_apart(provider: str, place: str) -> None:
    points = cloud(1_000)
    grid = SparseGrid.from_points(points.to(place), SIZE, ORIGIN, provider=provider)
    others = torch.cat(
        [cloud(1_000, seed=7), torch.tensor([[float("nan"), 0, 0], [0, float("inf"), 0], [3e38, 0, 0]])]
    )
    expected = dict_of(points)
    inside = grid.points_in_grid(others.to(place)).tolist()
    assert inside[-3:] == [False] * 3
    assert inside[:-3] == [voxel_of(point, (SIZE,) * 3, ORIGIN) in expected for point in others[:-3]]
    assert 0 < sum(inside) < 1_000
    assert int(voxel_counts(grid, others.to(place)).sum()) == sum(inside)


@places
@pytest.mark.parametrize("extent", [0, 1, 2])
@pytest.mark.parametrize("bitshift", [0, 1])
def test_neighbours_are_listed_by_i_j_k(provider: str, place: str, extent: int, bitshift: int) -> None:
    grid = SparseGrid.from_points(cloud(600).to(place), SIZE, ORIGIN, provider=provider)
    index_of = {tuple(voxel): i for i, voxel in enumerate(grid.ijk.tolist())}
    asked = torch.cat([grid.ijk.cpu()[:40], torch.tensor([[-100, 3, 0]], dtype=torch.int32)])
    found = grid.neighbor_indexes(asked.to(place), extent, bitshift=bitshift)
    reach = range(-extent, extent + 1)
    expected = [
        [
            index_of.get(tuple((v << bitshift) + d for v, d in zip(voxel, step, strict=True)), -1)
            for step in itertools.product(reach, reach, reach)
        ]
        for voxel in asked.tolist()
    ]
    assert found.tolist() == expected


@places
@pytest.mark.parametrize("factor", [1, 2, 3, (2, 1, 4)])
def test_coarse_voxels_are_blocks_of_fine_ones(
    provider: str, place: str, factor: int | tuple[int, ...]
) -> None:
    """Negative voxels, too: block -1 holds voxels -2 and -1; and its centre is the block's."""
    grid = SparseGrid.from_points(cloud(800).to(place), SIZE, ORIGIN, provider=provider)
    coarse = grid.coarsened_grid(factor)
    by = (factor,) * 3 if isinstance(factor, int) else factor
    fine = grid.ijk.tolist()
    assert min(map(min, fine)) < 0
    expected = {tuple(v // f for v, f in zip(voxel, by, strict=True)) for voxel in fine}
    assert {tuple(voxel) for voxel in coarse.ijk.tolist()} == expected
    assert coarse.num_voxels == len(expected)
    block = np.array(next(iter(expected)))
    members = [np.array(block * by) + np.array(step) for step in itertools.product(*(range(f) for f in by))]
    centre = np.mean([m * SIZE + np.array(ORIGIN) for m in members], axis=0)
    got = coarse.voxel_to_world(torch.tensor(block[None], dtype=torch.float64, device=place))
    np.testing.assert_allclose(got.cpu().numpy()[0], centre, rtol=1e-6, atol=1e-6)


@places
def test_codes_are_those_of_the_curves_from_the_least_corner(provider: str, place: str) -> None:
    grid = SparseGrid.from_points(cloud(2_000).to(place), SIZE, ORIGIN, provider=provider)
    cells = (grid.ijk.cpu().long() - grid.bbox[0].cpu().long()).contiguous()
    assert torch.equal(grid.hilbert.cpu(), native().hilbert_codes(cells))
    assert torch.equal(grid.morton.cpu(), native().morton_codes(cells))


@places
def test_a_cloud_without_points_is_a_grid_without_voxels(provider: str, place: str) -> None:
    grid = SparseGrid.from_points(torch.empty(0, 3, device=place), SIZE, ORIGIN, provider=provider)
    some = torch.zeros(2, 3, dtype=torch.int32, device=place)
    assert grid.num_voxels == 0
    assert grid.ijk.shape == (0, 3)
    assert grid.hilbert.shape == grid.morton.shape == (0,)
    assert grid.bbox.tolist() == [[0] * 3] * 2
    assert grid.ijk_to_index(some).tolist() == [-1, -1]
    assert grid.points_in_grid(some.float()).tolist() == [False, False]
    assert grid.neighbor_indexes(some, 1).tolist() == [[-1] * 27] * 2
    assert grid.coarsened_grid(2).num_voxels == 0
    assert voxel_counts(grid, some.float()).shape == (0,)
    full = SparseGrid.from_points(torch.ones(1, 3, device=place), SIZE, ORIGIN, provider=provider)
    assert full.ijk_to_index(some[:0]).shape == (0,)
    assert full.points_in_grid(some[:0].float()).shape == (0,)
    assert full.neighbor_indexes(some[:0], 1).shape == (0, 27)
    assert full.world_to_voxel(some[:0].float()).shape == (0, 3)


@places
def test_far_and_negative_voxels(provider: str, place: str) -> None:
    """Three million voxels along an axis, and voxels near the ends of 32 bits."""
    points = torch.tensor(
        [[-1.5e6, 0.0, 0.0], [1.5e6, 0.0, 0.0], [1.5e6, 1.0, -2.0], [0.0, -2.1e9, 0.0]], dtype=torch.float64
    )
    grid = SparseGrid.from_points(points.to(place), provider=provider)
    assert {tuple(voxel) for voxel in grid.ijk.tolist()} == dict_of(points, 1.0, (0, 0, 0)).keys()
    assert torch.equal(grid.ijk_to_index(grid.ijk).cpu(), torch.arange(4))
    with pytest.raises(
        ValueError, match=r"hilbert codes have 21 bits an axis, and the voxels span 2,100,000,002"
    ):
        _ = grid.hilbert
    with pytest.raises(ValueError, match="morton codes have 21 bits"):
        _ = grid.morton
    wide = SparseGrid.from_points(points[:2].to(place), 2.0, provider=provider)
    assert len(set(wide.hilbert.tolist())) == 2


@places
def test_points_that_no_voxel_holds_are_refused_in_words(provider: str, place: str) -> None:
    points = torch.zeros(CHUNK + 10, 3)
    points[CHUNK + 3, 1] = float("nan")
    with pytest.raises(ValueError, match=r"not finite in row 1,048,579.*isfinite"):
        SparseGrid.from_points(points.to(place), provider=provider)
    points[CHUNK + 3, 1] = float("-inf")
    with pytest.raises(ValueError, match=r"not finite in row 1,048,579"):
        SparseGrid.from_points(points.to(place), provider=provider)
    points[CHUNK + 3, 1] = 1e20
    with pytest.raises(ValueError, match=r"32 bits.*larger voxel_size"):
        SparseGrid.from_points(points.to(place), provider=provider)


def test_misuse_is_refused_in_words(provider: str) -> None:
    points = torch.zeros(4, 3)
    for wrong, text in (
        (torch.zeros(4, 2), r"points is torch.float32 \[4, 2\], expected floating point \[N, 3\]"),
        (torch.zeros(4, 3, dtype=torch.int64), "expected floating point"),
        (torch.zeros(3), r"points is torch.float32 \[3\]"),
    ):
        with pytest.raises(ValueError, match=text):
            SparseGrid.from_points(wrong, provider=provider)
    for size in (0.0, -1.0, (1.0, 1.0, 0.0)):
        with pytest.raises(ValueError, match="expected sides above 0"):
            SparseGrid.from_points(points, size, provider=provider)
    for size in ((1.0, 2.0), float("nan"), "wide"):
        with pytest.raises(ValueError, match="voxel_size is"):
            SparseGrid.from_points(points, size, provider=provider)
    with pytest.raises(ValueError, match="origin is"):
        SparseGrid.from_points(points, 1.0, (0.0, float("inf"), 0.0), provider=provider)
    grid = SparseGrid.from_points(points, provider=provider)
    with pytest.raises(ValueError, match=r"ijk is torch.float32 \[4, 3\], expected integers"):
        grid.ijk_to_index(points)
    with pytest.raises(ValueError, match="extent is -1"):
        grid.neighbor_indexes(points.int(), -1)
    for factor in (0, 1.5, (1, 2)):
        with pytest.raises(ValueError, match="coarsening_factor is"):
            grid.coarsened_grid(factor)  # type: ignore[arg-type]


def test_more_cells_than_63_bits_count_are_refused_by_the_built_in_grid() -> None:
    ends = torch.tensor([[-2.1e9, -2.1e9, 0.0], [2.1e9, 2.1e9, 10.0]], dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"span 4,200,000,001 x 4,200,000,001 x 11, more than the 2\^63 cells"
    ):
        SparseGrid.from_points(ends, provider="built-in")


def test_many_points_are_read_in_chunks() -> None:
    """Beside the points, no more than some chunks are alive: the peak is far below one int64 for each coordinate."""
    count = 6 * CHUNK
    points = torch.rand(count, 3, device="mgpu")
    torch.mgpu.reset_peak_memory_stats()
    before = torch.mgpu.memory_allocated()
    grid = SparseGrid.from_points(points, 0.05, provider="built-in")
    peak = torch.mgpu.max_memory_allocated() - before
    assert grid.num_voxels == 21**3
    assert int(voxel_counts(grid, points).sum()) == count
    assert peak < count * 24


def test_the_grid_in_use_is_named() -> None:
    grid = SparseGrid.from_points(torch.zeros(1, 3))
    assert grid.provider in grid_in_use()
    assert repr(grid) == f"SparseGrid(1 voxels of (1, 1, 1), {grid.provider}, cpu)"
    with pytest.raises(ValueError, match="provider is 'nano', expected"):
        SparseGrid.from_points(torch.zeros(1, 3), provider="nano")  # type: ignore[arg-type]
    if fvdb_module() is None:
        with pytest.raises(ImportError, match=r"fvdb .*; docs/install\.md"):
            SparseGrid.from_points(torch.zeros(1, 3), provider="fvdb")
