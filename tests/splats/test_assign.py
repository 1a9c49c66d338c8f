# SPDX-License-Identifier: Apache-2.0
"""Tile ownership: the curve, the choice of ranges against brute force and its bound, frames on many meshes, a city."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import splat_scenes as scenes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_render import run_script

import ns_mgpu_splat
from ns_mgpu_splat.device import native

TILE_COST, SHARE = 4, 256
Counts = NDArray[np.uint64]


# ---- the curve


def places(tiles_x: int, tiles_y: int) -> NDArray[np.int64]:
    """(x, y) of the tiles along the curve."""
    tiles = np.asarray(native().tile_curve(tiles_x, tiles_y), dtype=np.int64)
    return np.stack([tiles % tiles_x, tiles // tiles_x], 1)


@pytest.mark.any_mesh
@given(st.integers(1, 70), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_curve_visits_every_tile_once_and_steps_to_neighbours(tiles_x: int, tiles_y: int) -> None:
    at = places(tiles_x, tiles_y)
    assert len({tuple(place) for place in at.tolist()}) == len(at) == tiles_x * tiles_y
    steps = np.abs(np.diff(at, axis=0))
    assert steps.max(initial=0) <= 1  # a diagonal at most
    if tiles_x % 2 == tiles_y % 2 == 0:
        assert (steps.sum(1) == 1).all()


@pytest.mark.parametrize(("tiles_x", "tiles_y"), [(120, 68), (68, 120), (240, 135), (57, 38)])
@pytest.mark.parametrize("shards", [4, 8])
def test_ranges_of_the_curve_are_compact(tiles_x: int, tiles_y: int, shards: int) -> None:
    """Their borders are shorter than those of bands of rows, and near those of squares of the same area."""
    at = places(tiles_x, tiles_y)
    owner = np.empty((tiles_x, tiles_y), np.int64)
    owner[at[:, 0], at[:, 1]] = np.arange(len(at)) * shards // len(at)
    border = int((owner[1:] != owner[:-1]).sum() + (owner[:, 1:] != owner[:, :-1]).sum())
    bands = (shards - 1) * min(tiles_x, tiles_y)  # cut the shorter way
    squares = (4 * shards * np.sqrt(tiles_x * tiles_y / shards) - 2 * (tiles_x + tiles_y)) / 2
    assert border <= 1.5 * squares
    assert border < bands or shards < 8


def test_curves_of_nothing_and_of_one_tile() -> None:
    assert native().tile_curve(1, 1) == [0]
    assert native().tile_curve(0, 3) == []


# ---- the choice of ranges


def packed(pairs: NDArray[np.int64], shares: NDArray[np.int64]) -> Counts:
    """What the stage hands over: [shards, positions]."""
    return pairs.astype(np.uint64) << np.uint64(32) | shares.astype(np.uint64)


def cost_of(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Blending cost of each position."""
    return pairs.sum(0) + TILE_COST


def cuts_of(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


def least_largest(cost: NDArray[np.int64], ranges: int) -> int:
    """The least that the dearest of so many ranges can cost: by trying every place of the last cut."""
    before = np.concatenate([[0], np.cumsum(cost)])
    best = before.copy()  # of one range, up to each position
    for _ in range(ranges - 1):
        best = np.array(
            [min(max(best[i], before[j] - before[i]) for i in range(j + 1)) for j in range(len(before))]
        )
    return int(best[-1])


def kept_by(shares: NDArray[np.int64], ends: list[int], owner: list[int]) -> int:
    return sum(int(shares[o, a:b].sum()) for (a, b), o in zip(cuts_of(ends), owner, strict=True))


def every_cut(cost: NDArray[np.int64], shards: int, bound: float) -> Iterator[list[int]]:
    for inner in itertools.combinations_with_replacement(range(len(cost) + 1), shards - 1):
        ends = [*inner, len(cost)]
        if max(int(cost[a:b].sum()) for a, b in cuts_of(ends)) <= bound:
            yield ends


counted = st.integers(1, 9).flatmap(
    lambda shards: st.lists(
        st.lists(st.one_of(st.integers(0, 40), st.integers(0, 20_000)), min_size=shards, max_size=shards),
        min_size=1,
        max_size=60,
    )
)


@pytest.mark.any_mesh
@given(counted)
@settings(max_examples=300, deadline=None)
def test_no_range_costs_more_than_a_tenth_over_the_mean_or_than_it_must(columns: list[list[int]]) -> None:
    pairs = np.array(columns, np.int64).T
    shards, positions = pairs.shape
    ends, owner = native().choose_ranges(packed(pairs, pairs * 100))
    cost = cost_of(pairs)
    largest = max(int(cost[a:b].sum()) for a, b in cuts_of(ends))
    assert ends[-1] == positions
    assert all(a <= b for a, b in cuts_of(ends))
    assert sorted(owner) == list(range(shards))
    must = least_largest(cost, shards)
    assert largest <= max(cost.sum() * 11 // (10 * shards), must)
    assert must <= cost.sum() / shards + cost.max()  # what the header promises of tiles that cannot be cut


def random_counts(seed: int, shards: int, positions: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Homes that each see some neighbourhood best, and some tiles that all see."""
    g = np.random.default_rng(seed)
    x = np.arange(positions) / max(positions - 1, 1)
    centre = g.random((shards, 1))
    shares = (2000 * np.exp(-(((x - centre) / 0.3) ** 2)) * g.random((shards, positions))).astype(np.int64)
    return shares // SHARE * g.integers(1, 6) + g.integers(0, 9, shares.shape), shares


@pytest.mark.any_mesh
@pytest.mark.parametrize(("shards", "positions"), [(2, 12), (3, 10), (4, 8), (3, 2), (5, 3)])
def test_choice_against_brute_force(shards: int, positions: int) -> None:
    """Cuts are the best for their owners, owners the best for their cuts; together they are near the best of all."""
    found, best_of_all = [], []
    for seed in range(40):
        pairs, shares = random_counts(seed, shards, positions)
        cost = cost_of(pairs)
        bound = max(int(cost.sum()) * 11 // (10 * shards), least_largest(cost, shards))
        ends, owner = native().choose_ranges(packed(pairs, shares))
        kept = kept_by(shares, ends, owner)
        cuts = list(every_cut(cost, shards, bound))
        assert ends in cuts
        assert kept == max(kept_by(shares, other, owner) for other in cuts)
        orders = list(itertools.permutations(range(shards)))
        assert kept == max(kept_by(shares, ends, list(order)) for order in orders)
        found.append(kept)
        best_of_all.append(max(kept_by(shares, c, list(o)) for c in cuts for o in orders))
    assert sum(found) >= 0.98 * sum(best_of_all)


def test_owners_follow_what_they_hold_and_not_their_number() -> None:
    shares = np.zeros((4, 40), np.int64)
    for shard, first in enumerate([20, 0, 30, 10]):
        shares[shard, first : first + 10] = 1000
    _, owner = native().choose_ranges(packed(shares // SHARE, shares))
    assert owner == [1, 3, 0, 2]


@pytest.mark.any_mesh
@given(counted, st.integers(1, 9), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_runs_of_tiles_are_cut_as_their_tiles_would_be(
    columns: list[list[int]], run: int, missing: int
) -> None:
    """A run's tiles cost what they cost one by one; ranges end between runs, and with the last tile."""
    pairs = np.array(columns, np.int64).T
    shards, runs = pairs.shape
    tiles = runs * run - min(missing, run - 1)
    ends, owner = native().choose_ranges(packed(pairs, pairs * 100), run, tiles)
    assert ends[-1] == tiles
    assert all(a <= b and (b % run == 0 or b == tiles) for a, b in cuts_of(ends))
    assert sorted(owner) == list(range(shards))
    cost = pairs.sum(axis=0) + TILE_COST * np.minimum(run, tiles - run * np.arange(runs))
    largest = max(int(cost[-(-a // run) : -(-b // run)].sum()) for a, b in cuts_of(ends))
    assert largest <= max(cost.sum() * 11 // (10 * shards), least_largest(cost, shards))


@pytest.mark.parametrize("tiles", [0, 1, 2048, 2049, 9360, 37440, 2**31])
def test_there_are_a_thousand_runs_or_a_run_a_tile(tiles: int) -> None:
    run = native().tiles_of_run(tiles)
    assert run == 1 if tiles <= 2048 else 1024 < -(-tiles // run) <= 2048


def test_nothing_to_see_is_cut_evenly() -> None:
    ends, owner = native().choose_ranges(np.zeros((4, 100), np.uint64))
    assert ends == [25, 50, 75, 100]
    assert sorted(owner) == [0, 1, 2, 3]
    assert native().choose_ranges(np.zeros((3, 0), np.uint64))[0] == [0, 0, 0]


@pytest.mark.any_mesh
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 50), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
@settings(max_examples=200, deadline=None)
def test_matching_against_all_permutations(kept: list[list[int]]) -> None:
    count = len(kept)
    owner = native().match_ranges([k for row in kept for k in row], count)
    assert sorted(owner) == list(range(count))
    best = max(sum(kept[o][r] for r, o in enumerate(order)) for order in itertools.permutations(range(count)))
    assert sum(kept[o][r] for r, o in enumerate(owner)) == best


def test_matching_finds_a_planted_order_of_sixty_four() -> None:
    g = np.random.default_rng(3)
    planted = g.permutation(64)
    kept = g.integers(0, 1000, (64, 64))
    kept[planted, np.arange(64)] += 1000  # no other order can have as much
    assert native().match_ranges(kept.ravel().tolist(), 64) == planted.tolist()


# ---- frames


def test_owners_have_every_tile_once_and_their_lists_cover_what_is_seen() -> None:
    """The same lists as one owner would have, tile by tile: counted against the tiles of all owners."""
    ns_mgpu_splat.init()
    table = scenes.table_of(scenes.random_columns(3000, 7), requires_grad=False)
    views = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(330, 190), (64, 48), (5, 7)])]
    cameras = [scenes.camera_of(view).arguments() for view in views]
    frame, _ = native().splat_forward(table.columns(), None, None, cameras, None, False, 3, True)
    tiles = [tile for owned, _, _ in frame.tile_lists() for tile in owned]
    assert sorted(tiles) == list(range(len(tiles)))
    assert len(tiles) == sum(-(-v.width // 16) * -(-v.height // 16) for v in views)


MESH_SCRIPT = """
import sys
import numpy as np
import torch
import splat_scenes as scenes
from ns_mgpu_splat import Camera, render
columns = scenes.random_columns(4000, 5)
views = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(330, 190), (9, 8), (64, 48)])]
table = scenes.table_of(columns)
cameras = [scenes.camera_of(v) for v in views]
away = torch.eye(4)
away[2, 3] = -1e4  # sees nothing
cameras.append(Camera(away, 50.0, 50.0, 20.0, 20.0, 40, 40))
out = {}
for name, some in {"all": cameras, "tiny": cameras[1:2], "nothing": cameras[3:]}.items():
    images = render(table, some, background=[0.1, 0.2, 0.3])
    sum((i.rgb.square().sum() + i.depth_sum.sum() * 0.1) for i in images).backward()
    for i, image in enumerate(images):
        out |= {f"{name}{i}": image.rgb.detach().cpu().numpy(), f"{name}{i}d": image.depth_sum.detach().cpu().numpy()}
    for column, value in zip(scenes.COLUMNS, table.columns(), strict=True):
        out[f"grad {name} {column}"] = value.grad.cpu().numpy()
        value.grad = None
np.savez(sys.argv[1], **out)
"""


@pytest.mark.any_mesh
def test_images_are_bit_equal_whoever_owns_the_tiles(tmp_path: Path) -> None:
    """Also of one tile, of nothing, and on more shards than tiles. Gradients within 1e-4 of the largest."""
    reference: dict[str, NDArray[np.float32]] = {}
    for shards in (1, 3, 4, 8):
        file = tmp_path / f"{shards}.npz"
        done = run_script(MESH_SCRIPT, str(file), MGPU_DEVICES=scenes.mesh_of(shards))
        assert done.returncode == 0, done.stderr
        result = dict(np.load(file))
        reference = reference or result
        scenes.check_equal_on_meshes(result, reference, shards)
    assert reference["all0"].max() > 0.5
    assert np.abs(reference["grad tiny means"]).max() > 0
    assert np.allclose(reference["nothing0"], [0.1, 0.2, 0.3])


CITY_SCRIPT = """
import json
import numpy as np
import torch
from ns_mgpu_splat import Camera, SplatTable, render
from ns_mgpu_splat.data.city.cameras import Lens, place_cameras
from ns_mgpu_splat.data.city.splats import SplatSampler
from ns_mgpu_splat.data.city.town import build_town
town = build_town(4, 0)
rows = SplatSampler(town, 200_000).rows(0, 200_000)
columns = {name: torch.from_numpy(rows[name]) for name in ("means", "quats", "scales", "opacities", "sh0")}
table = SplatTable.from_columns(**columns, shN=torch.zeros(200_000, 0, 3))
lens = Lens(480, 270)
out = {"aerial": [], "street": []}
for pose in place_cameras(town, 40):
    matrix = np.linalg.inv(pose.camera_to_world) * np.array([1, -1, -1, 1])[:, None]
    camera = Camera(torch.from_numpy(matrix).float(), lens.focal, lens.focal, *lens.center, lens.width, lens.height)
    torch.mgpu.reset_link_stats()
    with torch.no_grad():
        render(table, camera, depth=False)
    stats = torch.mgpu.link_stats()
    assert stats["visible_rows"] > 1000
    out[pose.name.split("_")[0]].append(stats["imbalance"])
print(json.dumps(out))
"""


@pytest.mark.any_mesh
def test_load_is_even_over_a_city() -> None:
    """Largest cost of a shard over the mean, cpu:8, 200,000 Gaussians, aerial and street."""
    done = run_script(CITY_SCRIPT, MGPU_DEVICES="cpu:8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for kind in ("aerial", "street"):
        assert len(found[kind]) >= 10
        assert np.median(found[kind]) <= 1.15, found[kind]
        assert np.percentile(found[kind], 95) <= 1.3, found[kind]
