# SPDX-License-Identifier: Apache-2.0
"""Read photographs as uint8, whatever they are stored as.

Grey, palette, CMYK, 16-bit and float images become 8-bit RGB; alpha is kept when it says something. Rescaling uses
an area filter, in memory: no `images_2` folder. Lens distortion is removed while reading, after the rescaling, but that of
a fisheye, which is rendered.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ns_mgpu_splat.data.lens import Lens, Pinhole, premultiplied, shown_by_lens, undistort, unmultiplied
from ns_mgpu_splat.data.memory import available_memory
from ns_mgpu_splat.words import shown_bytes

kExifOrientation = 0x0112
# A JPEG ends with the marker FF D9; cameras append padding or thumbnails behind it, rarely more than this.
kTailBytes = 1 << 16
kEndings = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
kPlanar = 2  # TIFF's PlanarConfiguration: one plane a channel, which Pillow reads wrong beyond 8 bits
kDecodedBytes = 8  # a pixel, while decoding: Pillow's 4 and ours
kSmall = 256 << 20  # bytes; smaller images are decoded without asking whether there is memory
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
        image = Image.open(path)
    except UnidentifiedImageError:
        kind = "it is empty" if path.stat().st_size == 0 else "its format is not a known image format"
        raise ImageError(kind) from None
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        raise ImageError(_reason(error)) from None
    reason = _why_unsupported(image)
    if reason is not None:
        image.close()
        raise ImageError(reason)
    return image


def _why_unsupported(image: Image.Image) -> str | None:
    if image.mode == "LAB":
        return "its colours are CIE L*a*b*. Save it as RGB"
    tags = getattr(image, "tag_v2", {})
    if tags.get(284) == kPlanar and max(np.atleast_1d(tags.get(258, 8))) > 8:
        return "it is a TIFF of 16 bits stored plane by plane. Save it as PNG"
    need = image.width * image.height * kDecodedBytes
    if need > kSmall and need > available_memory():
        return (
            f"it has {image.width}x{image.height} pixels, which take {shown_bytes(need)} of memory to decode; "
            f"{shown_bytes(available_memory())} is free"
        )
    return None


def _reason(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or type(error).__name__
    return "it is cut short" if "truncated" in text.lower() else text[0].lower() + text[1:]


def probe(path: Path) -> ImageInfo:
    """Read the header of an image file. Raises ImageError."""
    with _open(path) as image:
        has_alpha = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
        # for PNG, getexif() decodes all pixels unless the chunk came first
        has_exif = image.format in ("JPEG", "MPO", "TIFF") or "exif" in image.info
        orientation = image.getexif().get(kExifOrientation, 1) if has_exif else 1
        return ImageInfo(image.size, has_alpha, orientation if orientation in range(1, 9) else 1)


def why_unreadable(path: Path, decode: bool) -> str | None:
    """Return why the pixels of an image cannot be read, or None.

    Args:
        decode: read all pixels. Otherwise only look whether the file ends as its format ends, which finds a download
            that stopped but not a flipped bit.
    """
    try:
        if decode:
            decoded(path)
            return None
        with _open(path) as image:
            ending = kEndings.get(image.format or "")
    except ImageError as error:
        return str(error)
    if ending is None:
        return None
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - kTailBytes))
        return None if ending in file.read() else "it is cut short"


def decoded(path: Path, upright: bool = False) -> np.ndarray:
    """The pixels of an image file as (H, W, 3 or 4) uint8 (`to_uint8`).

    Args:
        upright: undo the rotation that EXIF tells.
    Raises: ImageError, without the file's name.
    """
    try:
        with _open(path) as image:
            return to_uint8(ImageOps.exif_transpose(image) if upright else image)
    except MemoryError:
        raise ImageError("memory ran out while it was decoded") from None
    except (OSError, SyntaxError, ValueError, TypeError, EOFError, struct.error) as error:
        raise ImageError(_reason(error)) from None


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
        pixels = _bytes(image.convert("RGBA"))
        return pixels if (pixels[..., 3] < 255).any() else np.ascontiguousarray(pixels[..., :3])
    return _bytes(image if mode == "RGB" else image.convert("RGB"))


def _bytes(image: Image.Image) -> np.ndarray:
    """`np.asarray` of an RGB or RGBA image, read-only; in one piece.

    Pillow's own conversion goes in pieces of 64 KiB and takes longer than decoding: 35 ms of 55 for 3840x2160 (Pillow 13).
    """
    try:
        image.load()
        encoder = Image._getencoder(image.mode, "raw", (image.mode, 0, 1))
        encoder.setimage(image.im, (0, 0, *image.size))
        count = image.width * image.height * len(image.mode)
        _, status, data = encoder.encode(count + 1024)
        if status == 1 and len(data) == count:  # 1: that was all
            return np.frombuffer(data, np.uint8).reshape(image.height, image.width, len(image.mode))
    except (AttributeError, TypeError):  # a Pillow whose inside is another
        pass
    return np.asarray(image)


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
    camera: Pinhole  # of the photograph as `lens` took it, at the final size
    lens: Lens
    orientation: int = 1  # EXIF rotation to undo; 1: leave as stored
    mask_orientation: int = 1  # the same of the mask

    @property
    def has_mask(self) -> bool:
        """Whether some pixels may not count."""
        return self.mask is not None or shown_by_lens(self.camera, self.lens) is not None

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the image (H, W, 3 or 4) uint8 and the mask (H, W, 1) bool or None. Raises ImageError."""
        pixels = self._read(self.image, self.orientation)
        pixels = area_resize(pixels, self.camera.width, self.camera.height)
        pixels = np.ascontiguousarray(undistort(pixels, self.camera, self.lens))
        shown = shown_by_lens(self.camera, self.lens)
        if self.mask is None:
            return pixels, None if shown is None else shown[..., None]
        import cv2

        mask = self._read_mask(self.mask)
        size = (self.camera.width, self.camera.height)
        if mask.shape != size[::-1]:
            mask = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
        mask = undistort(mask[..., None], self.camera, self.lens, nearest=True) > 0
        return pixels, mask if shown is None else mask & shown[..., None]

    def _read_mask(self, path: Path) -> np.ndarray:
        """(H, W) uint8, 0 where a pixel does not count: black; in JPEG files, which blur, the darker half."""
        pixels = self._read(path, self.mask_orientation)
        mask = np.ascontiguousarray(pixels[..., :3].max(axis=2))
        with _open(path) as image:
            lossy = image.format in ("JPEG", "MPO")
        return (mask > 127).astype(np.uint8) if lossy else mask

    @staticmethod
    def _read(path: Path, orientation: int) -> np.ndarray:
        try:
            return decoded(path, upright=orientation != 1)
        except ImageError as error:
            raise ImageError(f"{path} cannot be read: {error}.") from None
        except OSError as error:
            raise ImageError(f"{path} cannot be read: {_reason(error)}.") from None
