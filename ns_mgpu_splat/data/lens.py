# SPDX-License-Identifier: Apache-2.0
"""Lenses that are no pinhole: their distortion, the pinhole that a photograph is turned into, and the turning.

Models as COLMAP (https://github.com/colmap/colmap/blob/main/src/colmap/sensor/models.h), OpenCV and Nerfstudio define
them. The operators render pinholes and OpenCV's fisheye (k1..k4), whose photographs stay as they are; those of all other
lenses are resampled when they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

kMostZoom = 4.0  # a pinhole this much longer than the lens leaves a sixteenth of the photograph
kWidest = 2.0  # tangent of half the pinhole's view, 127 degrees across: beyond, its rim is all stretch
kSlack = 0.02  # of the image's size: OpenCV finds the pinhole on a coarse grid
kMapsKept = 2  # of the latest cameras; a 12-megapixel one takes 96 MB
kFisheyeLimit = 2.967  # 170 degrees off the axis, as in cuda/math/view.h
kLeastShown = 1 / kMostZoom**2  # of a photograph


@dataclass(frozen=True)
class Lens:
    """How far a lens is from a pinhole.

    `kind` and the order of the coefficients: "pinhole": none; "opencv": k1 k2 p1 p2 k3 k4 k5 k6; "fisheye": k1 k2 k3 k4;
    "thin_prism_fisheye": k1 k2 p1 p2 k3 k4 sx sy; "fisheye624": k1..k6 p1 p2 s1..s4; "fov": omega; "division": k;
    "eucm": alpha beta.
    """

    kind: str = "pinhole"
    coefficients: tuple[float, ...] = ()

    @property
    def removed(self) -> bool:
        """Whether photographs are freed of the lens while they are read."""
        if self.kind == "fisheye":
            return False
        if self.kind in ("pinhole", "opencv", "division"):
            return any(c != 0 for c in self.coefficients)
        return True


@dataclass(frozen=True)
class Pinhole:
    """Intrinsics in pixels; the principal point counts from the image's corner (pixel centres at +0.5)."""

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float

    def scaled(self, width: int, height: int) -> Pinhole:
        """The same camera with another image size."""
        sx, sy = width / self.width, height / self.height
        return Pinhole(width, height, self.fx * sx, self.fy * sy, self.cx * sx, self.cy * sy)

    def opencv(self) -> np.ndarray:
        """The (3, 3) intrinsic matrix in OpenCV's convention (pixel centres at integers)."""
        return np.array([[self.fx, 0, self.cx - 0.5], [0, self.fy, self.cy - 0.5], [0, 0, 1.0]])


# ---- distortion: where a ray (x, y, 1) meets the image, in units of the focal length -------------------------------------


def _padded(lens: Lens, count: int) -> tuple[float, ...]:
    return (*lens.coefficients, *[0.0] * count)[:count]


def _opencv(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    k1, k2, p1, p2, k3, k4, k5, k6 = _padded(lens, 8)
    r2 = x * x + y * y
    radial = (1 + r2 * (k1 + r2 * (k2 + r2 * k3))) / (1 + r2 * (k4 + r2 * (k5 + r2 * k6)))
    return (
        x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x * x),
        y * radial + p1 * (r2 + 2 * y * y) + 2 * p2 * x * y,
    )


def _by_angle(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale (x, y) so that its length is the angle to the axis: the ideal fisheye."""
    r = np.hypot(x, y)
    factor = np.where(r > 1e-9, np.arctan(r) / np.maximum(r, 1e-9), 1.0)
    return x * factor, y * factor


def _fisheye(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    k1, k2, k3, k4 = _padded(lens, 4)
    x, y = _by_angle(x, y)
    t2 = x * x + y * y
    radial = 1 + t2 * (k1 + t2 * (k2 + t2 * (k3 + t2 * k4)))
    return x * radial, y * radial


def _thin_prism(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    k1, k2, p1, p2, k3, k4, sx, sy = _padded(lens, 8)
    x, y = _by_angle(x, y)
    t2 = x * x + y * y
    radial = 1 + t2 * (k1 + t2 * (k2 + t2 * (k3 + t2 * k4)))
    return (
        x * radial + 2 * p1 * x * y + p2 * (t2 + 2 * x * x) + sx * t2,
        y * radial + p1 * (t2 + 2 * y * y) + 2 * p2 * x * y + sy * t2,
    )


def _fisheye624(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    k1, k2, k3, k4, k5, k6, p1, p2, s1, s2, s3, s4 = _padded(lens, 12)
    x, y = _by_angle(x, y)
    t2 = x * x + y * y
    radial = 1 + t2 * (k1 + t2 * (k2 + t2 * (k3 + t2 * (k4 + t2 * (k5 + t2 * k6)))))
    x, y = x * radial, y * radial
    r2 = x * x + y * y
    return (
        x + p1 * (r2 + 2 * x * x) + 2 * p2 * x * y + r2 * (s1 + r2 * s2),
        y + p2 * (r2 + 2 * y * y) + 2 * p1 * x * y + r2 * (s3 + r2 * s4),
    )


def _fov(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    (omega,) = _padded(lens, 1)
    if abs(omega) < 1e-6:
        return x, y
    r = np.hypot(x, y)
    slope = 2 * np.tan(omega / 2)
    factor = np.where(r > 1e-9, np.arctan(r * slope) / np.maximum(r * omega, 1e-12), slope / omega)
    return x * factor, y * factor


def _division(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """The image point (u, v) of the ray (u, v, 1 + k (u^2 + v^2)): the root nearer to the axis."""
    (k,) = _padded(lens, 1)
    root = np.sqrt(1 - 4 * k * (x * x + y * y))  # NaN where the model shows no image
    return x * 2 / (1 + root), y * 2 / (1 + root)


def _eucm(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    alpha, beta = _padded(lens, 2)
    depth = alpha * np.sqrt(beta * (x * x + y * y) + 1) + (1 - alpha)
    return x / depth, y / depth


kDistortions: dict[str, Callable[[np.ndarray, np.ndarray, Lens], tuple[np.ndarray, np.ndarray]]] = {
    "opencv": _opencv,
    "fisheye": _fisheye,
    "thin_prism_fisheye": _thin_prism,
    "fisheye624": _fisheye624,
    "fov": _fov,
    "division": _division,
    "eucm": _eucm,
}


def distort(x: np.ndarray, y: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """Where rays (x, y, 1) meet the image, in units of the focal length from the principal point; x right, y down.

    Args:
        x, y: float64, of one shape. lens: any.
    Returns: two arrays of that shape; NaN where the lens shows nothing.
    """
    if lens.kind == "pinhole":
        return x, y
    with np.errstate(all="ignore"):
        return kDistortions[lens.kind](x, y, lens)


# ---- the pinhole of the undistorted image --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def undistorted_pinhole(camera: Pinhole, lens: Lens) -> Pinhole:
    """The pinhole camera of the undistorted image: same size, and no pixel without data.

    OpenCV's choice where it has a sound one (it also moves the principal point), else one of the same principal point.
    """
    import cv2

    if not lens.removed:
        return camera
    if lens.kind == "opencv":
        size = (camera.width, camera.height)
        k, _ = cv2.getOptimalNewCameraMatrix(camera.opencv(), np.array(_padded(lens, 8)), size, 0)
        if k[0, 0] > 0 and k[1, 1] > 0:
            found = Pinhole(*size, float(k[0, 0]), float(k[1, 1]), float(k[0, 2]) + 0.5, float(k[1, 2]) + 0.5)
            if _overhang(found, camera, lens) <= kSlack:
                return found
    return _zoomed(camera, lens)


def _border(camera: Pinhole, points: int = 65) -> tuple[np.ndarray, np.ndarray]:
    """Pixel coordinates along the image's four edges."""
    along = np.linspace(0, 1, points)
    zero, one = np.zeros(points), np.ones(points)
    x = np.concatenate([along, along, zero, one]) * camera.width
    y = np.concatenate([zero, one, along, along]) * camera.height
    return x, y


def _overhang(target: Pinhole, camera: Pinhole, lens: Lens) -> float:
    """How far the target's edges lie outside the photograph, as a share of its size.

    Infinite where the lens shows nothing, or folds: a ray farther out that meets the image farther in shows what is there
    twice.
    """
    px, py = _border(target)
    x, y = (px - target.cx) / target.fx, (py - target.cy) / target.fy
    outwards = np.linspace(0, 1, 17)[1:, None]
    u, v = distort(outwards * x, outwards * y, lens)
    radius = np.hypot(u, v)
    if not np.isfinite(radius).all() or (np.diff(radius, axis=0) <= 0).any():
        return np.inf
    x, y = (u[-1] * camera.fx + camera.cx) / camera.width, (v[-1] * camera.fy + camera.cy) / camera.height
    return max(float(np.max(-x)), float(np.max(x - 1)), float(np.max(-y)), float(np.max(y - 1)))


def _zoomed(camera: Pinhole, lens: Lens) -> Pinhole:
    """The shortest pinhole with the same principal point whose edges lie inside the photograph; at most `kWidest`."""

    def at(zoom: float) -> Pinhole:
        return Pinhole(camera.width, camera.height, camera.fx * zoom, camera.fy * zoom, camera.cx, camera.cy)

    px, py = _border(camera)
    widest = np.hypot((px - camera.cx) / camera.fx, (py - camera.cy) / camera.fy).max()
    low, high = float(widest) / kWidest, 2 * kMostZoom
    if _overhang(at(low), camera, lens) <= 0:
        return at(low)
    for _ in range(50):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _overhang(at(middle), camera, lens) <= 0 else (middle, high)
    return at(high)


def why_no_pinhole(camera: Pinhole, lens: Lens) -> str | None:
    """Return why a photograph through this lens cannot be undistorted, or None."""
    if not lens.removed:
        return None
    target = undistorted_pinhole(camera, lens)
    if _overhang(target, camera, lens) > kSlack:
        return "reach beyond what the photograph shows"
    if target.fx > kMostZoom * camera.fx or target.fy > kMostZoom * camera.fy:
        return f"show no more than {(camera.fx / target.fx) ** 2:.1%} of the photograph"
    return None


# ---- the fisheye that is rendered as it is -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _fisheye_curve(lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """Angles to the axis, ascending from 0, and their distances from the principal point in focal lengths, ascending, too:
    up to where the lens folds, or to `kFisheyeLimit`."""
    angle = np.linspace(0.0, kFisheyeLimit, 4096)
    radius = angle * np.polynomial.polynomial.polyval(angle**2, (1.0, *_padded(lens, 4)))
    folds = np.flatnonzero(~(np.diff(radius) > 0))
    end = int(folds[0]) + 1 if len(folds) else len(angle)
    return angle[:end], radius[:end]


def fisheye_angle(radius: np.ndarray, lens: Lens) -> np.ndarray:
    """The angle to the axis, radians, of what a fisheye shows at a distance from the principal point in focal lengths.

    Beyond the last angle that it shows: that angle.
    """
    angles, radii = _fisheye_curve(lens)
    return np.interp(radius, radii, angles)


def _radii(camera: Pinhole) -> np.ndarray:
    """Distances (H, W) of the pixels' centres from the principal point, in focal lengths."""
    x = (np.arange(camera.width) + 0.5 - camera.cx) / camera.fx
    y = (np.arange(camera.height) + 0.5 - camera.cy) / camera.fy
    return np.hypot(x[None, :], y[:, None])


def along_rays(camera: Pinhole, lens: Lens) -> np.ndarray:
    """The distance (H, W) float32 to what lies at depth 1 along a fisheye's z at each pixel; NaN beyond 85 degrees."""
    angle = fisheye_angle(_radii(camera), lens)
    return np.where(angle < np.radians(85), 1 / np.cos(angle), np.nan).astype(np.float32)


def seen_by_lens(points: np.ndarray, lens: Lens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where a pinhole or a fisheye sees points (M, 3) of the camera, OpenCV axes.

    Returns: x and y in focal lengths from the principal point, and the depth, each (M,); NaN where a fisheye sees nothing.
    """
    x, y, z = points.T
    if lens.kind != "fisheye":
        return x / z, y / z, z
    across = np.hypot(x, y)
    angles, radii = _fisheye_curve(lens)
    angle = np.arctan2(across, z)
    scale = np.interp(angle, angles, radii, right=np.nan) / np.maximum(across, 1e-12)
    return x * scale, y * scale, np.hypot(across, z)


def shown_by_lens(camera: Pinhole, lens: Lens) -> np.ndarray | None:
    """Which pixels (H, W) a fisheye's model has a direction for; None: all. No ray leads to the others."""
    if lens.kind != "fisheye":
        return None
    px, py = _border(camera)
    last = _fisheye_curve(lens)[1][-1]
    if np.hypot((px - camera.cx) / camera.fx, (py - camera.cy) / camera.fy).max() <= last:
        return None
    return _radii(camera) <= last


def why_no_fisheye(camera: Pinhole, lens: Lens) -> str | None:
    """Return why a fisheye's coefficients cannot be those of a photograph, or None."""
    if lens.kind != "fisheye":
        return None
    small = camera.scaled(min(camera.width, 256), min(camera.height, 256))
    shown = shown_by_lens(small, lens)
    if shown is not None and shown.mean() < kLeastShown:
        last = np.degrees(_fisheye_curve(lens)[0][-1])
        return f"they show {last:.3g} degrees around the axis, {shown.mean():.1%} of the photograph"
    widest = float(np.minimum(_radii(small), kFisheyeLimit).max())
    if fisheye_angle(np.array(widest), lens) * kMostZoom < widest:
        return f"they stretch the photograph more than {kMostZoom:g} times"
    return None


# ---- resampling ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=kMapsKept)
def _maps(camera: Pinhole, lens: Lens) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel of the undistorted image, where it lies in the photograph (OpenCV's pixels), float32."""
    import cv2

    pinhole = undistorted_pinhole(camera, lens)
    target, size = pinhole.opencv(), (camera.width, camera.height)
    if lens.kind == "opencv":
        return cv2.initUndistortRectifyMap(
            camera.opencv(), np.array(_padded(lens, 8)), np.eye(3), target, size, cv2.CV_32FC1
        )
    columns = (np.arange(camera.width) + 0.5 - pinhole.cx) / pinhole.fx
    maps = np.empty((2, camera.height, camera.width), np.float32)
    for row in range(camera.height):  # a row at a time: no float64 image
        u, v = distort(columns, np.full_like(columns, (row + 0.5 - pinhole.cy) / pinhole.fy), lens)
        maps[0, row], maps[1, row] = u * camera.fx + camera.cx - 0.5, v * camera.fy + camera.cy - 0.5
    return maps[0], maps[1]


def undistort(pixels: np.ndarray, camera: Pinhole, lens: Lens, nearest: bool = False) -> np.ndarray:
    """Remove lens distortion from (H, W, C) uint8; the result belongs to `undistorted_pinhole(camera, lens)`.

    Colours are weighted with alpha where there is one, so that those of invisible pixels do not bleed in.
    """
    import cv2

    if not lens.removed:
        return pixels
    maps = _maps(camera, lens)
    flag = cv2.INTER_NEAREST if nearest else cv2.INTER_LINEAR
    if pixels.shape[2] == 4:
        weighted = cv2.remap(premultiplied(pixels), maps[0], maps[1], flag, borderMode=cv2.BORDER_REPLICATE)
        return unmultiplied(weighted)
    result = cv2.remap(pixels, maps[0], maps[1], flag, borderMode=cv2.BORDER_REPLICATE)
    return result.reshape(*pixels.shape[:2], pixels.shape[2])


def premultiplied(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 4) uint8 as float32 in 0 to 255, colours times alpha."""
    scaled = pixels.astype(np.float32)
    scaled[..., :3] *= scaled[..., 3:] / 255
    return scaled


def unmultiplied(pixels: np.ndarray) -> np.ndarray:
    """Undo `premultiplied`: (H, W, 4) uint8."""
    scaled = np.array(pixels, dtype=np.float32)
    scaled[..., :3] *= 255 / np.maximum(scaled[..., 3:], 1e-3)
    return (scaled + 0.5).clip(0, 255).astype(np.uint8)
