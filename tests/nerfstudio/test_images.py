# SPDX-License-Identifier: Apache-2.0
"""Reading images of every kind, rescaling, and the bounded cache."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ns_mgpu_splat.data import images
from ns_mgpu_splat.data.cache import BoundedCache
from ns_mgpu_splat.data.images import ImageError, ImageSource
from ns_mgpu_splat.data.lens import Lens, Pinhole

RAMP = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (8, 1))  # (8, 64)


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return images.to_uint8(image)


def test_sixteen_bit_grey_is_scaled_not_cut(tmp_path: Path) -> None:
    Image.fromarray(RAMP.astype(np.uint16) * 257).save(tmp_path / "a.png")
    assert np.array_equal(read(tmp_path / "a.png"), np.repeat(RAMP[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "LA", "RGBA", "F"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    source = Image.fromarray(RAMP if mode != "1" else (RAMP > 127).astype(np.uint8) * 255)
    if mode == "F":
        source = Image.fromarray(RAMP.astype(np.float32) / 255)
    else:
        source = (
            source.convert("RGB").convert(mode) if mode in ("P", "CMYK", "RGBA") else source.convert(mode)
        )
    suffix = "tif" if mode in ("CMYK", "F") else "png"
    source.save(tmp_path / f"a.{suffix}")
    pixels = read(tmp_path / f"a.{suffix}")
    assert pixels.dtype == np.uint8
    assert pixels.shape == (8, 64, 3)
    expected = RAMP if mode != "1" else (RAMP > 127) * 255
    slack = 6 if mode == "P" else 1  # a palette of web colours is coarse
    off = np.abs(pixels.astype(int) - expected[..., None])
    assert (np.median(off) if mode == "P" else off.max()) <= (26 if mode == "P" else slack)


def test_alpha_that_says_something_is_kept(tmp_path: Path) -> None:
    pixels = np.dstack([RAMP, RAMP, RAMP, RAMP])
    Image.fromarray(pixels, "RGBA").save(tmp_path / "a.png")
    assert images.probe(tmp_path / "a.png").has_alpha
    assert np.array_equal(read(tmp_path / "a.png"), pixels)


def test_area_filter_is_the_mean_of_the_pixels_it_covers() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    mean = pixels.reshape(6, 2, 8, 2, 3).mean(axis=(1, 3))
    assert np.abs(images.area_resize(pixels, 8, 6) - mean).max() <= 0.5


def test_transparent_pixels_do_not_bleed_into_the_rescaled_image() -> None:
    pixels = np.zeros((4, 4, 4), dtype=np.uint8)
    pixels[:, :3] = (200, 100, 50, 255)
    pixels[:, 3] = (0, 0, 0, 0)  # black but invisible
    scaled = images.area_resize(pixels, 2, 2)
    assert np.abs(scaled[..., :3].astype(int) - (200, 100, 50)).max() <= 1
    assert np.array_equal(scaled[0, :, 3], [255, 128])


def test_exif_rotation_is_undone_where_asked(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[images.kExifOrientation] = 6  # the camera was held turned by 90 degrees
    pixels = np.repeat(RAMP[..., None], 3, axis=2)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    info = images.probe(tmp_path / "a.png")
    assert (info.size, info.turned_size, info.orientation) == ((64, 8), (8, 64), 6)
    source = ImageSource(tmp_path / "a.png", None, Pinhole(8, 64, 9, 9, 4, 32), Lens(), orientation=6)
    assert np.array_equal(source.read()[0], np.rot90(pixels, -1))


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
@pytest.mark.parametrize("decode", [True, False])
def test_a_file_cut_short_is_noticed_with_and_without_decoding(
    tmp_path: Path, name: str, decode: bool
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / name
    Image.fromarray(noise).save(path)
    assert images.why_unreadable(path, decode) is None
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert images.why_unreadable(path, decode) == "it is cut short"


def test_what_is_no_image_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("not an image")
    with pytest.raises(ImageError, match="it is empty"):
        images.probe(tmp_path / "empty.jpg")
    with pytest.raises(ImageError, match="not a known image format"):
        images.probe(tmp_path / "text.jpg")


def test_mask_is_rescaled_without_blending(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    mask = np.zeros((8, 8), np.uint8)
    mask[:, 4:] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    source = ImageSource(tmp_path / "a.png", tmp_path / "m.png", Pinhole(4, 4, 9, 9, 2, 2), Lens())
    result = source.read()[1]
    assert result is not None
    assert result.dtype == bool
    assert np.array_equal(result[..., 0], np.tile([False, False, True, True], (4, 1)))


def test_cache_stays_within_its_bytes_and_drops_the_least_recently_used() -> None:
    loads: list[int] = []

    def load(index: int) -> bytes:
        loads.append(index)
        return bytes(100)

    cache: BoundedCache[bytes] = BoundedCache(load, len, limit=300, workers=1)
    for index in (0, 1, 2, 0, 3):  # 1 is the least recently used when 3 comes
        cache.get(index)
    assert cache.bytes == 300
    for index in (0, 2, 3):
        cache.get(index)
    assert loads == [0, 1, 2, 3]
    cache.get(1)
    assert loads == [0, 1, 2, 3, 1]
    cache.close()


INTERRUPTED = """
import os, signal, threading, time
from ns_mgpu_splat.data.cache import BoundedCache

class Interrupted(threading.Thread):
    def start(self):
        super().start()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # the answer comes before the pool has heard of the thread

threading.Thread = Interrupted
cache = BoundedCache(lambda index: index, lambda value: 1, 10)
try:
    {ask}
except KeyboardInterrupt:
    print("answered")
threading.Thread = Interrupted.__base__
assert cache.get(7) == 7
"""


@pytest.mark.parametrize("ask", ["cache.get(3)", "cache.prefetch([3])"])
def test_an_interrupt_while_a_thread_of_the_cache_starts_is_answered_and_the_process_ends(ask: str) -> None:
    """Ctrl-C as the first held-out image was asked for said "Ended." and left a process that waited for that thread."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(ask=ask)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "answered\n", "")


def test_knowing_the_order_the_cache_finds_as_many_as_it_holds() -> None:
    """A new permutation each epoch, room for half: half of the values are found; least recently used finds a seventh."""
    count, epochs = 64, 30
    order = np.concatenate([np.random.default_rng(e).permutation(count) for e in range(epochs + 1)])
    found = {}
    for known in (True, False):
        loads: list[int] = []
        now = [0]

        def load(index: int, loads: list[int] = loads) -> bytes:
            loads.append(index)
            return bytes(1)

        def next_use(indices: np.ndarray, now: list[int] = now) -> np.ndarray:
            return np.array([np.flatnonzero(order[now[0] + 1 :] == i)[0] for i in indices])

        cache: BoundedCache[bytes] = BoundedCache(load, len, count // 2, 1, next_use if known else None)
        for step in range(count * epochs):
            now[0] = step
            cache.get(int(order[step]))
            assert cache.bytes <= count // 2
        cache.close()
        found[known] = 1 - len(loads) / (count * epochs)
    assert found[True] > 0.48
    assert found[False] < 0.2


def test_prefetched_value_is_read_once_and_errors_reach_the_caller() -> None:
    gate, loads = threading.Event(), []

    def load(index: int) -> bytes:
        gate.wait(5)
        loads.append(index)
        if index == 7:
            raise ImageError("broken")
        return b"x"

    cache: BoundedCache[bytes] = BoundedCache(load, len, limit=10, workers=2)
    cache.prefetch([1, 7])
    gate.set()
    assert cache.get(1) == b"x"
    with pytest.raises(ImageError, match="broken"):
        cache.get(7)
    with pytest.raises(ImageError, match="broken"):
        cache.get(7)  # and again: a failure is not remembered as a value
    assert loads.count(1) == 1
    cache.prefetch([7])
    while not cache._coming[7].done():
        time.sleep(0.001)
    assert cache.ready(7) is None, "an error waits for the one who asks for the value"
    cache.close()
