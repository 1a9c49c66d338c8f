# SPDX-License-Identifier: Apache-2.0
"""What goes over the links, counted: against what the frames' own records and ranges say, and what must cancel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import splat_scenes as scenes
import torch
import torch.nn.functional as F
from torch import Tensor

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.device import native
from ns_mgpu_splat.splats.loss import l1_ssim_loss

LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}
RECORD_BYTES, GRADIENT_BYTES = 48, 48
BESIDE_RECORD = 8  # on GPUs that reach each other: which tiles and, of several views, which view
TILE, WINDOWS = 16, 10  # pixels; two windows of D-SSIM reach so far
VIEWS = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(330, 190), (64, 48)])]


def shards() -> int:
    ns_mgpu_splat.init()
    return len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]


def total(matrix: list[list[int]]) -> int:
    return sum(map(sum, matrix))


def bytes_sent(records: list[list[int]]) -> list[list[int]]:
    """What so many records come to on their way, of two views."""
    ns_mgpu_splat.init()
    reaches = torch.mgpu.mesh().peer_matrix if native().flavour == "cuda" else ()  # type: ignore[attr-defined]
    return [
        [n * (RECORD_BYTES + (BESIDE_RECORD if reaches and reaches[s][o] else 0)) for o, n in enumerate(row)]
        for s, row in enumerate(records)
    ]


def records_of(gradients: list[list[int]]) -> list[list[int]]:
    """[home][owner], of the bytes that came back."""
    return [[size // GRADIENT_BYTES for size in column] for column in zip(*gradients, strict=True)]


def frame_of(columns: dict[str, torch.Tensor]):
    """A frame rendered for its way back."""
    table = scenes.table_of(columns)
    cameras = [scenes.camera_of(view).arguments() for view in VIEWS]
    frame, images = native().splat_forward(table.columns(), None, None, cameras, None, False, 3, True)
    return frame, images


def test_records_are_those_that_left_their_home() -> None:
    count = shards()
    frame, images = frame_of(scenes.random_columns(4000, 1))
    native().splat_backward(frame, [(torch.ones_like(rgb), None, None) for rgb, _, _ in images])
    links, counts = frame.links(), frame.counts()
    sent = records_of(links["gradients"])
    assert total(sent) == links["records_sent"]
    assert links["records"] == bytes_sent(sent)
    assert total(links["records"]) == counts["exchanged_bytes"]
    assert all(links["records"][s][s] == 0 for s in range(count))
    assert links["visible_rows"] == sum(counts["visible"])
    into = [sum(row[owner] for row in sent) for owner in range(count)]
    assert all(received >= remote for received, remote in zip(counts["received"], into, strict=True))
    assert links["remote_rows"] <= min(links["records_sent"], links["visible_rows"])
    assert (links["remote_rows"] == 0) == (links["records_sent"] == 0)
    if count > 1:
        assert links["records_sent"] > 0


def test_gradients_take_the_records_way_back() -> None:
    shards()
    frame, images = frame_of(scenes.random_columns(4000, 2))
    assert total(frame.links()["gradients"]) == 0
    frame_grads = [(torch.ones_like(rgb), None, None) for rgb, _, _ in images]
    native().splat_backward(frame, frame_grads)
    links = frame.links()
    assert total(links["gradients"]) == GRADIENT_BYTES * links["records_sent"]
    assert links["records"] == bytes_sent(records_of(links["gradients"]))


def test_load_is_pairs_and_tiles() -> None:
    count = shards()
    frame, _ = frame_of(scenes.random_columns(4000, 3))
    links, counts = frame.links(), frame.counts()
    assert links["load"] == [p + 4 * t for p, t in zip(counts["intersections"], counts["tiles"], strict=True)]
    assert links["imbalance"] == max(links["load"]) * count / sum(links["load"])


def owners_of(frame: Any, view: int, width: int, height: int) -> Tensor:
    """(height, width) shard that blends each pixel."""
    across, down = -(-width // TILE), -(-height // TILE)
    first = sum(-(-v.width // TILE) * -(-v.height // TILE) for v in VIEWS[:view])
    owner = torch.full((across * down,), -1)
    for shard, (tiles, _, _) in enumerate(frame.tile_lists()):
        mine = torch.tensor(tiles, dtype=torch.int64) - first
        owner[mine[(mine >= 0) & (mine < across * down)]] = shard
    tile_map = owner.view(down, across).repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return tile_map[:height, :width]


def test_pixels_are_those_around_a_shards_tiles_that_others_blend() -> None:
    """What is within two windows (10 pixels) of a shard's own pixels comes, little else, and nothing for L1 alone."""
    count = shards()
    table = SplatTable.from_columns(**scenes.random_columns(2000, 4)).requires_grad_(True)
    cameras = [scenes.camera_of(view) for view in VIEWS]
    targets = [torch.zeros(c.height, c.width, 3, device="mgpu") for c in cameras]
    adam = SplatAdam(table, LRS)
    l1_alone = train_step(table, adam, cameras, targets, ssim_weight=0.0, accumulate=True).links["pixels"]
    assert total(l1_alone) == 0
    links = train_step(table, adam, cameras, targets, ssim_weight=0.2, accumulate=True).links
    frame = adam.pending[-1]
    counted = [[0] * count for _ in range(count)]
    came = [torch.zeros(count, v.height, v.width, dtype=torch.bool) for v in VIEWS]
    owners = [owners_of(frame, v, view.width, view.height) for v, view in enumerate(VIEWS)]
    for start, end, v, (x0, y0, x1, y1) in frame.halo():
        assert (owners[v][y0:y1, x0:x1] == start).all()
        assert not came[v][end, y0:y1, x0:x1].any()  # nothing twice
        came[v][end, y0:y1, x0:x1] = True
        counted[start][end] += 12 * (x1 - x0) * (y1 - y0)
    assert counted == links["pixels"]
    assert (total(counted) > 0) == (count > 1)
    for v in range(len(VIEWS)):
        for shard in range(count):
            own = (owners[v] == shard).float()[None, None]
            if not own.any():
                assert not came[v][shard].any()
                continue
            within = [F.max_pool2d(own, 2 * reach + 1, 1, reach)[0, 0] > 0 for reach in (WINDOWS, TILE)]
            needed = within[0] & (owners[v] != shard)
            assert came[v][shard][needed].all()
            assert not came[v][shard][~within[1]].any()


def test_sums_are_over_frames_until_they_are_reset() -> None:
    count = shards()
    table = scenes.table_of(scenes.random_columns(1000, 5), requires_grad=False)
    camera = scenes.camera_of(VIEWS[0])
    torch.mgpu.reset_link_stats()  # type: ignore[attr-defined]
    render(table, camera)
    one = torch.mgpu.link_stats()  # type: ignore[attr-defined]
    render(table, camera)
    two = torch.mgpu.link_stats(reset=True)  # type: ignore[attr-defined]
    assert (one["frames"], two["frames"]) == (1, 2)
    assert two["records"] == [[2 * bytes for bytes in row] for row in one["records"]]
    for name in ("records_sent", "remote_rows", "visible_rows"):
        assert two[name] == 2 * one[name]
    assert two["load"] == [2 * load for load in one["load"]]
    assert two["imbalance"] == one["imbalance"] == one["imbalance_max"]
    assert len(one["load"]) == count
    assert torch.mgpu.link_stats()["frames"] == 0  # type: ignore[attr-defined]


def test_what_is_culled_is_summed() -> None:
    shards()
    table = scenes.table_of(scenes.random_columns(2000, 7))
    table.cells.least_rows = 0
    camera = scenes.camera_of(VIEWS[0])
    torch.mgpu.reset_link_stats()  # type: ignore[attr-defined]
    frames = [render(table, camera)[0].rgb.grad_fn.frame for _ in range(3)]
    sums = torch.mgpu.link_stats(reset=True)  # type: ignore[attr-defined]
    for name in ("cells", "cells_kept", "candidates"):
        assert sums[name] == sum(sum(frame.counts()[name]) for frame in frames), name
    assert 0 < sums["cells_kept"] <= sums["cells"]
    assert sums["visible_rows"] <= sums["candidates"] <= 3 * 2000
    assert torch.mgpu.link_stats()["candidates"] == 0  # type: ignore[attr-defined]


def test_loss_where_the_tiles_are_is_that_of_the_whole_images() -> None:
    """Values and gradients of the records are those of a render whose images are compared as a whole."""
    shards()
    columns = scenes.random_columns(3000, 6)
    cameras = [scenes.camera_of(view) for view in VIEWS]
    g = torch.Generator().manual_seed(1)
    targets = [
        torch.randint(0, 256, (c.height, c.width, 3), generator=g, dtype=torch.uint8).to("mgpu")
        for c in cameras
    ]
    masks = [torch.rand(c.height, c.width, generator=g).to("mgpu") > 0.2 for c in cameras]
    torch.use_deterministic_algorithms(True)
    try:
        for weight, mask in itertools.product((0.0, 0.2, 1.0), (None, masks)):
            table = SplatTable.from_columns(**columns).requires_grad_(True)
            adam = SplatAdam(table, LRS)
            report = train_step(
                table, adam, cameras, targets, masks=mask, ssim_weight=weight, accumulate=True
            )
            whole = scenes.table_of(columns)
            frame, images = native().splat_forward(
                whole.columns(), None, None, [c.arguments() for c in cameras], None, False, 3, True
            )
            grads, losses = [], []
            for v, (rgb, _, _) in enumerate(images):
                leaf = rgb.detach().requires_grad_(True)
                loss = l1_ssim_loss(leaf, targets[v], mask=mask and mask[v], ssim_weight=weight)
                (loss / len(cameras)).backward()
                grads.append((leaf.grad, None, None))
                losses.append(float(loss.detach()))
            native().splat_backward(frame, grads)
            assert report.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
            assert torch.equal(adam.pending[-1].record_grads(), frame.record_grads())
    finally:
        torch.use_deterministic_algorithms(False)
