# SPDX-License-Identifier: Apache-2.0
"""Read photographs as uint8, whatever they are stored as, and keep a bounded number of bytes of them in memory.

Grey, palette, CMYK, 16-bit and float images become 8-bit RGB; alpha is kept when it says something. Rescaling uses
an area filter, in memory: no `images_2` folder. Lens distortion is removed while reading, after the rescaling.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ns_mgpu_splat.data.lens import Lens, Pinhole, premultiplied, undistort, unmultiplied

kExifOrientation = 0x0112
# A JPEG ends with the marker FF D9; cameras append padding or thumbnails behind it, rarely more than this.
kTailBytes = 1 << 16
kSixteenBitStep = 257  # 65535 / 255: exact, unlike dropping the low byte

Image.MAX_IMAGE_PIXELS = None  # an orthophoto of a gigapixel is no attack


class ImageError(Exception):
    """A file that is no readable image; `str()` says why, without the file's name."""


@dataclass(frozen=True)
class ImageInfo:
    """What the header of an image file says. Sizes are (width, height) in pixels, as stored."""

    size: tuple[int, int]
    has_alpha: bool
    orientation: int  # EXIF 1..8; 1 is upright

    @property
    def turned_size(self) -> tuple[int, int]:
        """The size after EXIF's rotation."""
        return (self.size[1], self.size[0]) if self.orientation in (5, 6, 7, 8) else self.size


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except UnidentifiedImageError:
        kind = "it is empty" if path.stat().st_size == 0 else "its format is not a known image format"
        raise ImageError(kind) from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageError(_reason(error)) from None


def _reason(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or type(error).__name__
    return "it is cut short" if "truncated" in text.lower() else text[0].lower() + text[1:]


def probe(path: Path) -> ImageInfo:
    """Read the header of an image file. Raises ImageError."""
    with _open(path) as image:
        has_alpha = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
        # for PNG, getexif() decodes all pixels unless the chunk came first
        has_exif = image.format in ("JPEG", "TIFF") or "exif" in image.info
        orientation = image.getexif().get(kExifOrientation, 1) if has_exif else 1
        return ImageInfo(image.size, has_alpha, orientation if orientation in range(1, 9) else 1)


def why_unreadable(path: Path, decode: bool) -> str | None:
    """Return why the pixels of an image cannot be read, or None.

    Args:
        decode: read all pixels. Otherwise only look whether the file ends as its format ends, which finds a download
            that stopped but not a flipped bit.
    """
    try:
        with _open(path) as image:
            if decode:
                image.load()
                return None
            ending = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}.get(image.format or "")
    except ImageError as error:
        return str(error)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return _reason(error)
    if ending is None:
        return None
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - kTailBytes))
        return None if ending in file.read() else "it is cut short"


def to_uint8(image: Image.Image) -> np.ndarray:
    """The pixels of a PIL image as (H, W, 3) uint8, or (H, W, 4) where alpha is not opaque everywhere."""
    mode = image.mode
    if mode.startswith("I;16") or mode == "I":
        grey = np.asarray(image).astype(np.int64).clip(0, 65535)
        pixels = ((grey + kSixteenBitStep // 2) // kSixteenBitStep).astype(np.uint8)
        return np.repeat(pixels[..., None], 3, axis=2)
    if mode == "F":
        grey = np.nan_to_num(np.asarray(image, dtype=np.float32)).clip(0, 1)
        return np.repeat((grey * 255 + 0.5).astype(np.uint8)[..., None], 3, axis=2)
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        pixels = np.asarray(image.convert("RGBA"))
        return pixels if (pixels[..., 3] < 255).any() else np.ascontiguousarray(pixels[..., :3])
    return np.asarray(image if mode == "RGB" else image.convert("RGB"))


def area_resize(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Rescale (H, W, C) uint8 with an area filter; colours are weighted with alpha, so that none bleeds in."""
    import cv2

    if pixels.shape[:2] == (height, width):
        return pixels
    if pixels.shape[2] == 4:
        return unmultiplied(cv2.resize(premultiplied(pixels), (width, height), interpolation=cv2.INTER_AREA))
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


@dataclass(frozen=True)
class ImageSource:
    """Where the pixels of one training image come from, and how to make them fit its camera."""

    image: Path
    mask: Path | None
    camera: Pinhole  # as distorted by `lens`, at the final size
    lens: Lens
    orientation: int = 1  # EXIF rotation to undo; 1: leave as stored

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the image (H, W, 3 or 4) uint8 and the mask (H, W, 1) bool or None. Raises ImageError."""
        pixels = self._read(self.image)
        pixels = area_resize(pixels, self.camera.width, self.camera.height)
        pixels = np.ascontiguousarray(undistort(pixels, self.camera, self.lens))
        if self.mask is None:
            return pixels, None
        import cv2

        mask = np.ascontiguousarray(self._read(self.mask)[..., :3].max(axis=2))
        size = (self.camera.width, self.camera.height)
        if mask.shape != size[::-1]:
            mask = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
        mask = undistort(mask[..., None], self.camera, self.lens, nearest=True)
        return pixels, mask > 0

    def _read(self, path: Path) -> np.ndarray:
        try:
            with _open(path) as image:
                return to_uint8(ImageOps.exif_transpose(image) if self.orientation != 1 else image)
        except ImageError as error:
            raise ImageError(f"{path} cannot be read: {error}") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise ImageError(f"{path} cannot be read: {_reason(error)}") from None


Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values by index, read by a few threads ahead of use, the least recently used dropped beyond a byte limit.

    Args:
        load: makes the value of an index; called from worker threads.
        size: bytes of a value.
        limit: bytes to keep; at least one value is always kept.
        workers: threads.
    """

    def __init__(
        self, load: Callable[[int], Value], size: Callable[[Value], int], limit: int, workers: int = 2
    ) -> None:
        self._load, self._size, self.limit = load, size, limit
        self._ready: OrderedDict[int, Value] = OrderedDict()
        self._coming: dict[int, Future[Value]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="read-images")
        self.bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a BoundedCache belongs to one process")

    def prefetch(self, indices: Iterable[int]) -> None:
        """Start reading these, unless they are there or on their way."""
        with self._lock:
            for index in indices:
                if index not in self._ready and index not in self._coming:
                    self._coming[index] = self._pool.submit(self._load, index)

    def ready(self, index: int) -> Value | None:
        """Return a value if it is there or has just come, without waiting. Errors of `load` are raised here."""
        with self._lock:
            if index in self._ready:
                return self._ready[index]
            future = self._coming.get(index)
        return self.get(index) if future is not None and future.done() else None

    def get(self, index: int) -> Value:
        """Return a value, waiting for it if need be. Errors of `load` are raised here."""
        with self._lock:
            if index in self._ready:
                self._ready.move_to_end(index)
                return self._ready[index]
            future = self._coming.get(index)
            if future is None:
                future = self._coming[index] = self._pool.submit(self._load, index)
        try:
            value = future.result()
        finally:
            with self._lock:
                self._coming.pop(index, None)
        with self._lock:
            if index not in self._ready:
                self._ready[index] = value
                self.bytes += self._size(value)
            self._ready.move_to_end(index)
            while self.bytes > self.limit and len(self._ready) > 1:
                _, dropped = self._ready.popitem(last=False)
                self.bytes -= self._size(dropped)
        return value

    def close(self) -> None:
        """Stop the threads; values stay readable."""
        self._pool.shutdown(wait=False, cancel_futures=True)
