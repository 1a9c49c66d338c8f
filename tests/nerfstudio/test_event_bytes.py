# SPDX-License-Identifier: Apache-2.0
"""Events and checksums against protobuf's own reader and tensorboard's own sum."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as tensorboards

from ns_mgpu_splat.nerfstudio.event_bytes import event_of, kPiece, masked_crc32c, picture_event_of


@pytest.mark.parametrize("size", [4, 5, 8, kPiece - 1, kPiece, kPiece + 1, 3 * kPiece + 77, 20_000])
@pytest.mark.parametrize("kind", ["zeros", "ones", "noise"])
def test_the_checksum_is_tensorboards(size: int, kind: str) -> None:
    noise = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    data = {"zeros": bytes(size), "ones": b"\xff" * size, "noise": noise}[kind]
    assert masked_crc32c(data) == tensorboards(data)


def test_the_checksum_is_that_of_the_standard() -> None:
    """RFC 3720, B.4: CRC-32C of 32 bytes that count up is 0x46dd794e."""
    crc = 0x46DD794E
    assert masked_crc32c(bytes(range(32))) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("step", [0, 127, 128, 29_999, 1 << 40])
def test_protobuf_reads_the_events(step: int) -> None:
    numbers = {"Train Loss": 0.25, "ä" * 90: -3.5, "learning_rate/means": 1e-30, "x" * 200: float("nan")}
    before = time.time()
    event = Event.FromString(event_of(step, numbers))
    assert event.step == step
    assert before <= event.wall_time <= time.time()
    values = event.summary.value
    assert [value.tag for value in values] == list(numbers)
    found = [value.simple_value for value in values]
    assert found == pytest.approx([np.float32(number) for number in numbers.values()], rel=0, nan_ok=True)


def test_protobuf_reads_the_pictures() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (40, 300, 3), dtype=np.uint8)
    event = Event.FromString(picture_event_of(500, "Eval Images/img", picture))
    (value,) = event.summary.value
    assert (event.step, value.tag) == (500, "Eval Images/img")
    assert (value.image.height, value.image.width, value.image.colorspace) == (40, 300, 3)
    with Image.open(io.BytesIO(value.image.encoded_image_string)) as shown:
        assert shown.format == "PNG"
        assert np.array_equal(np.asarray(shown), picture)
