# SPDX-License-Identifier: Apache-2.0
"""Cameras: where they are, and how they map to pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

CameraModel = Literal["pinhole", "fisheye", "ortho"]
MODELS: tuple[CameraModel, ...] = get_args(CameraModel)  # in the order of cuda/math/view.h


@dataclass
class Camera:
    """A camera and its image.

    Axes are OpenCV's (x right, y down, z forward), pixel centres lie at +0.5, and units are pixels. `viewmat` (4, 4) takes
    world to camera; its last row is (0, 0, 0, 1) and is not read. It may be on the CPU or on `mgpu`, and may require grad.

    `model` says where a point (x, y, z) of the camera meets the image, in focal lengths from the principal point:

    - "pinhole": at (x, y) / z.
    - "fisheye": OpenCV's. A point at an angle t to the axis meets the image t (1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8) from
      the principal point; `distortion` is (k1, k2, k3, k4). It sees up to 170 degrees off the axis, or to where this
      stops growing with t. Depth is the distance to the camera's centre, for all that z is negative beside the lens.
    - "ortho": at (x, y): `fx` and `fy` are pixels a scene unit. Colours are those seen along the axis.

    What lies at a depth of 0.01 or less is not seen.

    Raises: ValueError naming the field that is wrong.
    """

    viewmat: Tensor
    fx: float
    fy: float
    cx: float
    cy: float
    width: int
    height: int
    model: CameraModel = "pinhole"
    distortion: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        """Check the fields, and make plain numbers of them."""
        if not isinstance(self.viewmat, Tensor) or tuple(self.viewmat.shape) != (4, 4):
            got = (
                list(self.viewmat.shape) if isinstance(self.viewmat, Tensor) else type(self.viewmat).__name__
            )
            raise ValueError(f"viewmat is {got}, expected a [4, 4] tensor, world to camera in OpenCV axes.")
        if self.viewmat.device.type == "cpu" and not bool(torch.isfinite(self.viewmat.detach()).all()):
            raise ValueError("viewmat has NaN or infinite entries.")
        for name in ("fx", "fy", "cx", "cy"):
            setattr(self, name, float(getattr(self, name)))
        for name in ("width", "height"):
            value = getattr(self, name)
            try:
                whole = int(value) == value and 1 <= value <= 1048560
            except (TypeError, ValueError, OverflowError):  # None, text, NaN, infinity
                whole = False
            if not whole:
                raise ValueError(f"{name} is {value}, expected a whole number of pixels from 1 to 1,048,560.")
            setattr(self, name, int(value))
        for name in ("fx", "fy"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, expected a positive focal length in pixels."
                )
        for name in ("cx", "cy"):
            if not abs(getattr(self, name)) < float("inf"):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, expected a finite principal point in pixels."
                )
        if self.model not in MODELS:
            raise ValueError(f"model is {self.model!r}, expected one of {', '.join(MODELS)}.")
        try:
            k1, k2, k3, k4 = (float(k) for k in self.distortion)
        except (TypeError, ValueError):
            raise ValueError(
                f"distortion is {self.distortion!r}, expected the 4 numbers k1 k2 k3 k4 of a fisheye."
            ) from None
        self.distortion = (k1, k2, k3, k4)
        if not all(abs(k) < float("inf") for k in self.distortion):
            raise ValueError(f"distortion is {self.distortion}, expected 4 finite numbers.")
        if self.model != "fisheye" and any(self.distortion):
            raise ValueError(
                f"distortion is {self.distortion}, but the model is {self.model}; only a fisheye has one. Undistort the image."
            )

    @classmethod
    def from_K(
        cls, viewmat: Tensor, K: Tensor, width: int, height: int, model: CameraModel = "pinhole"
    ) -> Camera:
        """From a [3, 3] calibration matrix without skew: fx 0 cx / 0 fy cy / 0 0 1."""
        if tuple(K.shape) != (3, 3):
            raise ValueError(f"K is {list(K.shape)}, expected [3, 3].")
        k = K.detach().cpu().double()
        return cls(
            viewmat, k[0, 0].item(), k[1, 1].item(), k[0, 2].item(), k[1, 2].item(), width, height, model
        )

    def arguments(self) -> tuple[Tensor, float, float, float, float, int, int, int, tuple[float, ...]]:
        """As the native functions take a camera; they refuse a viewmat that is not finite."""
        sizes = (self.viewmat, self.fx, self.fy, self.cx, self.cy, self.width, self.height)
        return *sizes, MODELS.index(self.model), self.distortion

    @property
    def intrinsics(self) -> tuple[float, float, float, float]:
        """fx, fy, cx, cy."""
        return self.fx, self.fy, self.cx, self.cy

    @property
    def size(self) -> tuple[int, int]:
        """Width, height."""
        return self.width, self.height


def stack_viewmats(cameras: list[Camera]) -> Tensor | None:
    """Viewmats of the cameras as [C, 4, 4] float32 on the CPU, for autograd; None if none of them wants a gradient."""
    if not torch.is_grad_enabled() or not any(camera.viewmat.requires_grad for camera in cameras):
        return None
    return torch.stack([camera.viewmat.to(device="cpu", dtype=torch.float32) for camera in cameras])
