# SPDX-License-Identifier: Apache-2.0
"""Takes pictures of a town by casting rays with open3d's RaycastingScene; the only file here that needs open3d."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ns_mgpu_splat.data.city import light, texture
from ns_mgpu_splat.data.city.cameras import Lens
from ns_mgpu_splat.data.city.town import Town

Array = NDArray[np.float32]
SUPERSAMPLING = 2  # rays a pixel and axis
_CHUNK = 160_000  # rays at once: bounds memory whatever the size of the picture
_SKIN = 2e-3  # world units (2 cm): shadow rays start that far above the surface


SYSTEM_LIBRARIES = "libusb-1.0-0 libgl1 libegl1"
"""Debian's and Ubuntu's packages of what open3d's wheel loads and a server may lack."""


class RaycastUnavailable(RuntimeError):
    """open3d cannot be imported."""


def import_open3d() -> Any:
    """Import open3d or say in one sentence what is missing."""
    try:
        import open3d
    except (ImportError, OSError) as error:
        raise RaycastUnavailable(why_no_open3d(error)) from error
    return open3d


def why_no_open3d(error: Exception) -> str:
    """What is missing where open3d cannot be imported: itself, or a system library, which the linker names."""
    library = re.search(r"(\S+\.so[.\d]*): cannot open shared object file", str(error))
    if library is not None:
        what = f"needs the system library {library[1]}, which is missing: `sudo apt install {SYSTEM_LIBRARIES}` (Debian, Ubuntu)"
        what += " gives all that it needs"
    elif isinstance(error, ModuleNotFoundError):
        what = f"is not installed: `pip install open3d`, and `sudo apt install {SYSTEM_LIBRARIES}` (Debian, Ubuntu)"
    else:
        what = f"cannot be imported ({error})"
    return f"open3d, which takes the pictures, {what}; `--splats N` alone works without it."


@dataclass
class Picture:
    """A rendered view.

    Attributes:
        rgb: uint8 [H, W, 3], sRGB.
        depth: float32 [H, W], along the viewing axis, world units; 0 where there is sky.
        smooth: bool [H, W], whether the pixel's rays met one surface.
    """

    rgb: NDArray[np.uint8]
    depth: Array
    smooth: NDArray[np.bool_]


class Renderer:
    """Holds the town's triangles for ray casting; `render` may be called from several threads."""

    def __init__(self, town: Town) -> None:
        self._o3d = import_open3d()
        self.town = town
        self.heights = light.height_map(town)
        self._sun = light.sun_direction(town)
        vertices = np.ascontiguousarray(town.corners.reshape(-1, 3))
        faces = np.arange(len(vertices), dtype=np.uint32).reshape(-1, 3)
        self._scene = self._o3d.t.geometry.RaycastingScene()
        self._scene.add_triangles(self._o3d.core.Tensor(vertices), self._o3d.core.Tensor(faces))

    def _trace(self, origin: Array, directions: Array) -> tuple[Array, Array]:
        """Colour [n, 3] and distance [n] in lengths of `directions` (0: sky) of rays from one point."""
        n = len(directions)
        rays = np.empty((n, 6), np.float32)
        rays[:, :3] = origin
        rays[:, 3:] = directions
        answer = self._scene.cast_rays(self._o3d.core.Tensor(rays))
        distance = answer["t_hit"].numpy()
        # The sky is a sphere around the town, so that it has a place, like everything else.
        a = np.einsum("ij,ij->i", directions, directions)
        half_b = directions @ origin
        c = float(origin @ origin) - self.town.dome_radius**2
        sky_distance = (np.sqrt(np.maximum(half_b * half_b - a * c, 0)) - half_b) / a
        hit = distance < sky_distance
        color = np.empty((n, 3), np.float32)
        miss = np.flatnonzero(~hit)
        if len(miss):
            on_dome = origin + directions[miss] * sky_distance[miss, None]
            color[miss] = texture.sky(on_dome / np.float32(self.town.dome_radius))
        rows = np.flatnonzero(hit)
        if len(rows):
            triangle = answer["primitive_ids"].numpy()[rows].astype(np.int32)
            weights = answer["primitive_uvs"].numpy()[rows]
            normals = answer["primitive_normals"].numpy()[rows]
            d = directions[rows]
            normals *= -np.sign(np.einsum("ij,ij->i", normals, d))[:, None]  # thin things have two sides
            points = origin + d * distance[rows, None]
            color[rows] = self._shade(triangle, weights, points, normals)
        return color, np.where(hit, distance, 0).astype(np.float32)

    def _shade(self, triangle: NDArray[np.int32], weights: Array, points: Array, facets: Array) -> Array:
        albedo = texture.albedo(self.town, triangle, weights, points)
        normals = light.shading_normals(self.town, triangle, points, facets)
        lit = np.zeros(len(points), bool)
        facing = np.flatnonzero((normals @ self._sun > 0) & (facets @ self._sun > -0.3))
        if len(facing):
            rays = np.empty((len(facing), 6), np.float32)
            rays[:, :3] = points[facing] + facets[facing] * np.float32(_SKIN)
            rays[:, 3:] = self._sun
            lit[facing] = ~self._scene.test_occlusions(self._o3d.core.Tensor(rays)).numpy()
        return light.shade(self.town, self.heights, albedo, points, normals, lit)

    def render(self, camera_to_world: NDArray[np.float64], lens: Lens) -> Picture:
        """Take one picture with `SUPERSAMPLING`^2 rays a pixel; memory does not grow with its size beyond the result."""
        w, h, ss = lens.width, lens.height, SUPERSAMPLING
        cx, cy = lens.center
        rotation = camera_to_world[:3, :3].astype(np.float32)
        origin = camera_to_world[:3, 3].astype(np.float32)
        picture = Picture(np.empty((h, w, 3), np.uint8), np.empty((h, w), np.float32), np.empty((h, w), bool))
        x = ((np.arange(w * ss, dtype=np.float32) + 0.5) / ss - cx) / lens.focal
        step = max(1, _CHUNK // (w * ss * ss))
        for top in range(0, h, step):
            bottom = min(h, top + step)
            y = -((np.arange(top * ss, bottom * ss, dtype=np.float32) + 0.5) / ss - cy) / lens.focal
            local = np.empty((len(y), len(x), 3), np.float32)
            local[..., 0], local[..., 1], local[..., 2] = x[None, :], y[:, None], -1.0
            # The direction has length 1 along the viewing axis, so distances are depths.
            color, depth = self._trace(origin, local.reshape(-1, 3) @ rotation.T)
            shape = (bottom - top, ss, w, ss)
            samples = color.reshape(*shape, 3)
            mean = np.zeros((bottom - top, w, 3), np.float32)
            for i in range(ss):
                for j in range(ss):
                    mean += samples[:, i, :, j]
            mean *= np.float32(1 / ss**2)
            picture.rgb[top:bottom] = (mean * 255 + 0.5).astype(np.uint8)
            d = depth.reshape(shape).transpose(0, 2, 1, 3).reshape(bottom - top, w, ss * ss)
            picture.depth[top:bottom], picture.smooth[top:bottom] = _pixel_depth(d)
        return picture


def _pixel_depth(d: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Depth of a pixel from those of its rays [..., k], and whether they agree.

    On a plane 1/depth is linear in the picture, so the harmonic mean is the depth at the pixel's centre. At an edge: the nearest
    of the hits, if they are at least half of the rays.
    """
    hits = d > 0
    nearest = np.where(hits, d, np.inf).min(-1)
    farthest = d.max(-1)
    smooth = hits.all(-1) & (farthest < nearest * np.float32(1.03))
    with np.errstate(divide="ignore"):
        mean = d.shape[-1] / (1 / np.where(hits, d, 1)).sum(-1)
    solid = hits.sum(-1) * 2 >= d.shape[-1]
    return np.where(smooth, mean, np.where(solid, nearest, 0)).astype(np.float32), smooth
