# SPDX-License-Identifier: Apache-2.0
"""Images on the device: the right ones in any order, resident or copied ahead, with bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import scene
import torch

import ns_mgpu_splat
from ns_mgpu_splat.data.cache import BoundedCache
from ns_mgpu_splat.data.images import ImageError
from ns_mgpu_splat.nerfstudio.datamanager import MgpuSplatDatamanagerConfig, Picture
from ns_mgpu_splat.nerfstudio.feed import ImageFeed, kAhead

COUNT = 12


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return ns_mgpu_splat.init()


def picture(index: int) -> Picture:
    """Sizes differ; every second one has a mask. Pinned where a GPU is."""
    g = torch.Generator().manual_seed(index)
    image = torch.randint(0, 256, (200 + index, 300, 3), generator=g, dtype=torch.uint8)
    mask = torch.rand(200 + index, 300, 1, generator=g) > 0.5 if index % 2 else None
    if torch.cuda.is_available():
        image = image.pin_memory()
        mask = mask.pin_memory() if mask is not None else None
    return Picture(image, mask)


@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_images_are_those_of_their_index(limit: int, device: torch.device) -> None:
    pictures: BoundedCache[Picture] = BoundedCache(
        picture, lambda p: p.nbytes, 1 << 20, 2
    )  # some are dropped
    feed = ImageFeed(pictures, 1, limit, device)
    order = [
        int(i) for e in range(3) for i in torch.randperm(COUNT, generator=torch.Generator().manual_seed(e))
    ]
    order[5] = order[4]  # twice in a row
    sums = []
    for place, index in enumerate(order):
        found = feed.get(index, order[place + 1 : place + 5])
        sums.append((found.image.float().mean(), None if found.mask is None else found.mask.float().mean()))
        assert found.image.device.type == "mgpu"
        assert len(feed._there) <= (COUNT if feed.resident else kAhead)
    for index, (mean, kept) in zip(order, sums, strict=True):
        expected = picture(index)
        assert float(mean) == pytest.approx(float(expected.image.float().mean()), rel=1e-5)
        assert (kept is None) == (expected.mask is None)
        if kept is not None and expected.mask is not None:
            assert float(kept) == pytest.approx(float(expected.mask.float().mean()), rel=1e-5)
    assert feed.resident == (limit > 0)


def test_a_jump_to_another_image_drops_what_was_on_its_way(device: torch.device) -> None:
    pictures: BoundedCache[Picture] = BoundedCache(picture, lambda p: p.nbytes, 1 << 30, 2)
    feed = ImageFeed(pictures, 1, 0, device)
    for index in range(COUNT):
        pictures.get(index)
    feed.get(0, [1, 2, 3])
    assert set(feed._there) == {1, 2}
    found = feed.get(7, [8])
    assert set(feed._there) == {8}
    assert torch.equal(found.image.cpu(), picture(7).image)


def test_an_unreadable_image_is_named(device: torch.device) -> None:
    def broken(index: int) -> Picture:
        raise OSError("view_3.png cannot be read")

    feed = ImageFeed(BoundedCache(broken, lambda p: p.nbytes, 1, 1), 1, 0, device)
    with pytest.raises(OSError, match="view_3"):
        feed.get(3, [4])


@pytest.mark.parametrize("device_gib", [0.0, 1.0])
def test_an_image_that_goes_bad_while_training_is_left_out_and_said_once(
    tmp_path: Path, device_gib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large captures are not decoded before training: a flipped bit shows when its turn comes."""
    made = scene.write_nerfstudio(tmp_path, images=6, points=20)
    config = MgpuSplatDatamanagerConfig(data=tmp_path, on_bad_image="skip", device_cache_gib=device_gib)
    manager = config.setup(device="mgpu", test_mode="val")
    count, last = len(manager.train_dataset), made.names[-1]
    bad = [p.name for p in manager.train_dataset.image_filenames].index(last)
    file = tmp_path / "images" / last
    file.write_bytes(file.read_bytes()[:-60])
    seen = []
    for step in range(3 * count):
        index, batch = manager.train_index(step), manager.next_train(step)[1]
        assert batch["image_idx"] == index
        assert torch.equal(batch["image"].cpu(), manager.train_dataset.picture(index).image)
        seen.append(index)
    assert bad not in seen
    assert set(seen) == set(range(count)) - {bad}
    assert capsys.readouterr().out.count(last) == 1


def test_an_image_that_goes_bad_while_training_ends_it_unless_told_otherwise(tmp_path: Path) -> None:
    made = scene.write_nerfstudio(tmp_path, images=6, points=20)
    manager = MgpuSplatDatamanagerConfig(data=tmp_path).setup(device="mgpu", test_mode="val")
    (tmp_path / "images" / made.names[-1]).write_bytes(b"")
    with pytest.raises(ImageError, match=made.names[-1]):
        _ = [manager.next_train(step) for step in range(6)]


def test_cache_and_threads_change_neither_order_nor_pictures_and_memory_stays_within_bounds(
    tmp_path: Path,
) -> None:
    scene.write_nerfstudio(tmp_path, images=9, points=20)
    image_bytes = 64 * 48 * 3
    seen = []
    for cache_images, threads in ((0, 1), (3, 4), (100, 2)):
        gib = cache_images * image_bytes * 8 / 7 / 2**30
        config = MgpuSplatDatamanagerConfig(
            data=tmp_path, image_cache_gib=gib, max_thread_workers=threads, device_cache_gib=0
        )
        manager = config.setup(device="mgpu", test_mode="val")
        data = manager.train_dataset
        order = []
        for step in range(3 * len(data)):
            _, batch = manager.next_train(step)
            order.append((batch["image_idx"], batch["image"].cpu().numpy().tobytes()))
            one = data.picture(batch["image_idx"]).nbytes  # more than its pixels where memory is pinned
            assert data.pictures.bytes <= max(cache_images * image_bytes, one)
            assert len(data.pictures._coming) <= data.ahead <= 2 * threads
        seen.append(order)
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == len(data)


@pytest.mark.parametrize("device_gib", [0.0, 1.0])
def test_images_come_before_the_first_step_where_they_stay(tmp_path: Path, device_gib: float) -> None:
    """Those of the steps to come, and no more; one that cannot be read ends its own step, not the start."""
    scene.write_nerfstudio(tmp_path, images=9, points=20)
    config = MgpuSplatDatamanagerConfig(data=tmp_path, device_cache_gib=device_gib)
    manager = config.setup(device="mgpu", test_mode="val")
    count = len(manager.train_dataset)
    wanted = [manager.train_index(step) for step in range(5, 5 + count)]
    bad = manager.train_dataset.image_filenames[wanted[1]]
    bad.write_bytes(b"")
    assert len(list(manager.bring_images(5, 3))) == (3 if device_gib else 0)
    there = manager._feed._there if manager._feed is not None else {}
    assert set(there) == ({wanted[0], wanted[2]} if device_gib else set())
    assert len(list(manager.bring_images(5, 10_000))) == (count if device_gib else 0)
    image = manager.train_image(5, wanted[0]).image
    assert torch.equal(image.cpu(), manager.train_dataset.picture(wanted[0]).image)
    with pytest.raises(ImageError, match=bad.name):
        manager.train_image(6, wanted[1])
