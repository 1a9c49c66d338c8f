# SPDX-License-Identifier: Apache-2.0
"""Stage "bin": which records are in which tile's list, and in which order. Oracle: brute force over pixels, float64."""

from __future__ import annotations

import itertools

import splat_scenes as scenes
import torch

from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats import project

TILE = 16


def tile_lists(columns: dict[str, torch.Tensor], camera) -> list[list[int]]:
    """Rows in each tile's list, front to back, tile by tile over all owners."""
    table = scenes.table_of(columns, requires_grad=False)
    frame, _ = native().splat_forward(table.columns(), None, None, [camera.arguments()], None, False, 0, True)
    of_tile: dict[int, list[int]] = {}
    for tiles, begins, rows in frame.tile_lists():
        assert len(begins) == len(tiles) + 1
        for i, tile in enumerate(tiles):
            assert tile not in of_tile
            of_tile[tile] = rows[begins[i] : begins[i + 1]]
    lists = [of_tile[tile] for tile in range(len(of_tile))]
    assert sum(frame.counts()["intersections"]) == sum(map(len, lists))
    return lists


def scene_with_thin_splats(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Round, large and very elongated Gaussians."""
    columns = scenes.random_columns(rows, seed, degree=0)
    columns["scales"][: rows // 3, 0] += 3.0
    columns["scales"][: rows // 6, 1:] -= 3.0
    return columns


def test_lists_hold_every_pair_that_can_be_seen_and_hardly_any_other() -> None:
    for seed, (width, height) in enumerate([(150, 100), (97, 33), (5, 7)]):
        columns = scene_with_thin_splats(500, seed)
        camera = scenes.camera_of(scenes.random_twin_camera(seed, width, height))
        lists = tile_lists(columns, camera)
        tiles_x, tiles_y = -(-width // TILE), -(-height // TILE)
        assert len(lists) == tiles_x * tiles_y

        records = project(scenes.table_of(columns, requires_grad=False), camera, sh_degree=0)
        x, y = records.means2d.cpu().double().unbind(-1)
        a, b, c = records.conics.cpu().double().unbind(-1)
        opacity, row = records.opacities.cpu().double(), records.row.cpu()
        listed, wanted, near = 0, 0, 0
        for tile, rows in enumerate(lists):
            left, top = tile % tiles_x * TILE, tile // tiles_x * TILE
            right, bottom = min(left + TILE, width), min(top + TILE, height)
            px, py = torch.meshgrid(
                torch.arange(left, right) + 0.5, torch.arange(top, bottom) + 0.5, indexing="xy"
            )
            dx, dy = px.reshape(-1, 1) - x, py.reshape(-1, 1) - y
            alpha = (opacity * torch.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)).amax(0)
            needed = set(row[alpha >= 1 / 255].tolist())
            assert len(rows) == len(set(rows))
            assert needed <= set(rows), (
                f"tile {tile} of {width}x{height} lacks rows {sorted(needed - set(rows))}"
            )
            # a finer grid over the hull of the pixel centres: what the ellipse meets between them
            fx, fy = torch.meshgrid(
                torch.linspace(left + 0.5, right - 0.5, 61),
                torch.linspace(top + 0.5, bottom - 0.5, 61),
                indexing="xy",
            )
            dx, dy = fx.reshape(-1, 1) - x, fy.reshape(-1, 1) - y
            fine = (opacity * torch.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)).amax(0)
            listed, wanted = listed + len(rows), wanted + len(needed)
            near += len(set(rows) - set(row[fine >= 0.9 / 255].tolist()))
        assert wanted > 20
        # a whole column of pixel centres may pass beside an ellipse's tip: the strip test keeps it
        assert near <= 0.03 * listed + 2, f"{near} of {listed} entries are far from their tile"


def test_lists_are_front_to_back_with_ties_by_row() -> None:
    columns = scenes.random_columns(600, 4, degree=0)
    columns["means"][:, 2] = (columns["means"][:, 2] * 2).round() / 2  # many equal depths
    camera = scenes.camera_of(scenes.random_twin_camera(0, 70, 60), torch.eye(4))
    depth = columns["means"][:, 2]
    ties = 0
    for rows in tile_lists(columns, camera):
        keys = [(depth[r].item(), r) for r in rows]
        assert keys == sorted(keys)
        ties += sum(first[0] == second[0] for first, second in itertools.pairwise(keys))
    assert ties > 100


def test_an_opaque_splat_reaches_further_than_a_faint_one() -> None:
    columns = scenes.random_columns(2, 0, degree=0)
    columns["means"] = torch.tensor([[0.0, 0.0, 4.0], [0.0, 0.0, 4.0]])
    columns["scales"] = torch.full((2, 3), -0.5)
    columns["opacities"] = torch.tensor([8.0, -4.5])
    camera = scenes.camera_of(scenes.random_twin_camera(0, 200, 200), torch.eye(4))
    lists = tile_lists(columns, camera)
    opaque, faint = (sum(r in rows for rows in lists) for r in (0, 1))
    assert opaque > 2 * faint > 0
