# SPDX-License-Identifier: Apache-2.0
"""What goes over the links, counted: against what the frames' own records and ranges say, and what must cancel."""

from __future__ import annotations

import splat_scenes as scenes
import torch

import ns_mgpu_splat
from ns_mgpu_splat import SplatAdam, SplatTable, render, train_step
from ns_mgpu_splat.device import native

LRS = {"means": 1e-3, "quats": 1e-3, "scales": 5e-3, "opacities": 5e-2, "sh0": 2.5e-3, "shN": 1e-4}
RECORD_BYTES = 48
VIEWS = [scenes.random_twin_camera(i, *size) for i, size in enumerate([(330, 190), (64, 48)])]


def shards() -> int:
    ns_mgpu_splat.init()
    return len(torch.mgpu.mesh().shards)  # type: ignore[attr-defined]


def total(matrix: list[list[int]]) -> int:
    return sum(map(sum, matrix))


def frame_of(columns: dict[str, torch.Tensor]):
    """A frame rendered for its way back."""
    table = scenes.table_of(columns)
    cameras = [scenes.camera_of(view).arguments() for view in VIEWS]
    frame, images = native().splat_forward(table.columns(), None, None, cameras, None, False, 3, True)
    return frame, images


def test_records_are_those_that_left_their_home() -> None:
    count = shards()
    frame, _ = frame_of(scenes.random_columns(4000, 1))
    links, counts = frame.links(), frame.counts()
    assert total(links["records"]) == counts["exchanged_bytes"] == RECORD_BYTES * links["records_sent"]
    assert all(links["records"][s][s] == 0 for s in range(count))
    assert links["visible_rows"] == sum(counts["visible"])
    into = [sum(row[owner] for row in links["records"]) // RECORD_BYTES for owner in range(count)]
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
    assert links["gradients"] == [list(column) for column in zip(*links["records"], strict=True)]


def test_load_is_pairs_and_tiles() -> None:
    count = shards()
    frame, _ = frame_of(scenes.random_columns(4000, 3))
    links, counts = frame.links(), frame.counts()
    assert links["load"] == [p + 4 * t for p, t in zip(counts["intersections"], counts["tiles"], strict=True)]
    assert links["imbalance"] == max(links["load"]) * count / sum(links["load"])


def test_pixels_are_what_bands_read_of_other_owners() -> None:
    """Every gradient of a colour goes from its band to its owner, and the halo makes the way there longer."""
    count = shards()
    table = SplatTable.from_columns(**scenes.random_columns(2000, 4)).requires_grad_(True)
    cameras = [scenes.camera_of(view) for view in VIEWS]
    targets = [torch.zeros(c.height, c.width, 3, device="mgpu") for c in cameras]
    pixels = {}
    for weight in (0.0, 0.2):
        report = train_step(
            table, SplatAdam(table, LRS), cameras, targets, ssim_weight=weight, accumulate=True
        )
        pixels[weight] = report.links["pixels"]
    assert pixels[0.0] == [list(column) for column in zip(*pixels[0.0], strict=True)]
    everything = 12 * sum(c.height * c.width for c in cameras)
    assert total(pixels[0.0]) <= 2 * everything
    if count > 1:
        assert 0 < total(pixels[0.0]) < total(pixels[0.2])


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


def test_the_loss_follows_the_owners_of_several_views() -> None:
    """Where each shard blends a view or two, it takes their losses too: few pixels travel, and none has much more to do."""
    count = shards()
    table = SplatTable.from_columns(**scenes.random_columns(3000, 6)).requires_grad_(True)
    cameras = [scenes.camera_of(scenes.random_twin_camera(i, 96, 80 + i)) for i in range(2 * count)]
    targets = [torch.zeros(c.height, c.width, 3, device="mgpu") for c in cameras]
    adam = SplatAdam(table, LRS)
    links = train_step(table, adam, cameras, targets, accumulate=True).links
    pixels = sum(c.height * c.width for c in cameras)
    assert total(links["pixels"]) <= 0.6 * (
        2 * 12 * pixels * (count - 1) / count
    )  # of what equal bands would cost

    bands = adam.pending[-1].bands()
    assert len(bands) == (len(cameras) if count > 1 else 0)
    work = [0] * count
    for camera, of_view in zip(cameras, bands, strict=False):
        rows = [row for begin, end in of_view for row in range(begin, end)]
        assert sorted(rows) == list(range(camera.height))
        assert all(begin % 16 == 0 for begin, end in of_view if begin < end)
        work = [w + (end - begin) * camera.width for w, (begin, end) in zip(work, of_view, strict=True)]
    rounding = sum(16 * c.width for c in cameras)
    assert max(work) <= 1.1 * pixels / count + rounding
