# SPDX-License-Identifier: Apache-2.0
"""Measured depths of photographs: from depth maps, or from the sparse points of a reconstruction that a photograph saw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ns_mgpu_splat.data.images import ImageError, ImageSource
from ns_mgpu_splat.data.lens import Lens, Pinhole, along_rays, seen_by_lens, undistort

kMostSamples = 1 << 16  # pixels of a depth map that are kept, drawn evenly
kDepthModes = ("I;16", "I;16B", "I;16L", "I", "F", "L")


@dataclass(frozen=True)
class DepthSamples:
    """Depths at pixels of one image: `pixels` (M,) int64, row * width + column; `depths` (M,) float32 along the camera's z,
    of a fisheye distances to it, in the model's units; `weights` (M,) float32 in [0, 1]."""

    pixels: np.ndarray
    depths: np.ndarray
    weights: np.ndarray

    @property
    def typical(self) -> float:
        """The median depth; 1 where there is none."""
        return float(np.median(self.depths)) if len(self.depths) else 1.0


def samples_from_map(path: Path, source: ImageSource, scale: float, seed: int) -> DepthSamples:
    """Depths of a depth map, on the pixels of the image that `source` reads.

    Args:
        path: .npy (H, W) of numbers along the camera's z, whatever the lens, or a picture of one channel, 16 bits or float.
            0, negative and NaN: not measured.
        source: the photograph; a map of another size is sampled, its lens distortion is removed with the photograph's.
        scale: the model's units in one of the file's.
        seed: of the draw, where the map has more than `kMostSamples` depths.
    Raises: ImageError, with the file's name.
    """
    import cv2

    values = _read(path)
    camera = source.camera
    if source.orientation != 1:
        values = _turned(values, source.orientation)
    if values.shape != (camera.height, camera.width):
        values = cv2.resize(values, (camera.width, camera.height), interpolation=cv2.INTER_NEAREST)
    values = undistort(values[..., None], camera, source.lens, nearest=True)[..., 0] * np.float32(scale)
    if source.lens.kind == "fisheye":
        values = values * along_rays(camera, source.lens)
    values = values.reshape(-1)
    pixels = np.flatnonzero(np.isfinite(values) & (values > 0))
    if len(pixels) > kMostSamples:
        pixels = np.sort(np.random.default_rng(seed).choice(pixels, kMostSamples, replace=False))
    return DepthSamples(pixels, values[pixels], np.ones(len(pixels), np.float32))


def _read(path: Path) -> np.ndarray:
    """(H, W) float32, in the file's units."""
    from PIL import Image

    try:
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False)
        else:
            with Image.open(path) as image:
                if image.mode not in kDepthModes:
                    raise ImageError(f"it is a picture of mode {image.mode}, not of one channel of depths")
                values = np.asarray(image)
    except (ImageError, OSError, ValueError, EOFError, SyntaxError) as error:
        raise ImageError(f"{path} cannot be read as a depth map: {str(error).rstrip('.')}.") from None
    values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
    if values.ndim != 2 or values.dtype.kind not in "fiu":
        raise ImageError(
            f"{path} cannot be read as a depth map: it is {values.dtype} {list(values.shape)}, expected numbers [H, W]."
        )
    return np.ascontiguousarray(values, dtype=np.float32)


def _turned(values: np.ndarray, orientation: int) -> np.ndarray:
    """What EXIF's rotation does to a photograph, done to its depth map."""
    if orientation in (5, 6, 7, 8):
        values = values.T
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[::-1]
    return np.ascontiguousarray(values)


def samples_from_points(
    points: np.ndarray,
    errors: np.ndarray,
    typical: float,
    viewmat: np.ndarray,
    camera: Pinhole,
    lens: Lens | None = None,
) -> DepthSamples:
    """Depths of the sparse points that a photograph saw.

    Args:
        points: (M, 3) float64, in the model's world. errors: (M,) mean reprojection error of each in pixels.
        typical: the mean of all points' errors. A point of error e counts exp(-(e / typical)^2), as in DS-NeRF
            (arXiv 2107.02791).
        viewmat: (4, 4), world to camera, OpenCV axes. camera: of the undistorted image. lens: a fisheye's; None: a pinhole.
    """
    local = points @ viewmat[:3, :3].T + viewmat[:3, 3]
    with np.errstate(divide="ignore", invalid="ignore"):
        u, v, z = seen_by_lens(local, lens or Lens())
        x, y = np.floor(camera.fx * u + camera.cx), np.floor(camera.fy * v + camera.cy)
    # NaN fails: a point that is not finite, or not seen, is nowhere
    inside = (z > 0) & (x >= 0) & (x < camera.width) & (y >= 0) & (y < camera.height)
    weights = np.exp(-((np.maximum(errors, 0) / max(typical, 1e-9)) ** 2))
    inside &= np.isfinite(weights)
    pixels = (y[inside] * camera.width + x[inside]).astype(np.int64)
    return DepthSamples(pixels, z[inside].astype(np.float32), weights[inside].astype(np.float32))
