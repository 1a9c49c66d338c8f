# SPDX-License-Identifier: Apache-2.0
"""Gaussians sampled from the surfaces of a town, row by row, for scenes of any size. NumPy only: no open3d, no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ns_mgpu_splat.data.city import light, texture
from ns_mgpu_splat.data.city.town import METRES_PER_UNIT, RIM, Town

Array = NDArray[np.float32]
SH_C0 = 0.28209479177387814
FLATNESS = 0.1  # thickness of a disc over its radius
_CHUNK = 1 << 18
_FALL_OFF = 3.0  # world units outside the town at which splats are a quarter as dense
_GOLDEN = (0.7548776662466927, 0.5698402909980532)  # R2 sequence: 1/p, 1/p^2 with p^3 = p + 1
PLY_PROPERTIES = (
    ["x", "y", "z", "nx", "ny", "nz", "f_dc_0", "f_dc_1", "f_dc_2", "opacity"]
    + [f"scale_{k}" for k in range(3)]
    + [f"rot_{k}" for k in range(4)]
)


class SplatSampler:
    """Prepares a town for sampling; `rows(start, count)` may then be called in any order."""

    def __init__(self, town: Town, n: int, seed: int = 0) -> None:
        """`n` is the number of Gaussians on the whole town, at least 1; raises ValueError otherwise."""
        if n < 1:
            raise ValueError(f"Cannot sample {n} Gaussians; ask for at least 1.")
        self.town, self.n = town, n
        self._heights = light.height_map(town)
        e1 = town.corners[:, 1] - town.corners[:, 0]
        e2 = town.corners[:, 2] - town.corners[:, 0]
        normals = np.cross(e1, e2)
        length = np.linalg.norm(normals, axis=1)
        self._normals = normals / np.maximum(length, 1e-20)[:, None]
        # Triangles in the order of the blocks they stand in, so that neighbours in the table are neighbours in the town.
        self._density = _density(town)
        self._upper = np.cumsum(length.astype(np.float64) * 0.5 * self._density)
        self._shift = np.random.default_rng([seed & 0xFFFFFFFFFFFFFFFF, 5]).random(3)
        self._radius = float(np.sqrt(self._upper[-1] / n / np.pi)) * 1.25

    def tables(self) -> dict[str, NDArray[np.floating]]:
        """What `rows` draws from, for samplers on other devices.

        Returns: `corners` [T, 3, 3] and `facets` [T, 3], world units; `upper` [T], the area up to the end of each triangle,
            weighed by `density` [T]; `shift` [3] of the sequences; `radius` [1] of a disc where the density is 1.
        """
        radius = np.array([self._radius])
        return {
            "corners": self.town.corners,
            "facets": self._normals,
            "upper": self._upper,
            "density": self._density,
            "shift": self._shift,
            "radius": radius,
        }

    def rows(self, start: int, count: int) -> dict[str, Array]:
        """Rows [start, start + count) of the table of n; the same numbers however the table is cut into calls.

        Returns: float32 arrays `means` [count, 3] in world units, `quats` [count, 4] wxyz, `scales` [count, 3] as logs,
            `opacities` [count] as logits, `sh0` [count, 3], `normals` [count, 3].
        Raises: ValueError if the rows are not within [0, n].
        """
        if start < 0 or count < 0 or start + count > self.n:
            raise ValueError(f"Rows {start:,} to {start + count:,} are not within a table of {self.n:,}.")
        town = self.town
        i = np.arange(start, start + count, dtype=np.int64)
        # Even steps along the summed area choose the triangle, a low-discrepancy sequence the place on it.
        at = (i + self._shift[0]) * (self._upper[-1] / self.n)
        triangle = np.minimum(np.searchsorted(self._upper, at, side="right"), town.num_triangles - 1).astype(
            np.int32
        )
        a = np.mod(i * _GOLDEN[0] + self._shift[1], 1.0)
        b = np.mod(i * _GOLDEN[1] + self._shift[2], 1.0)
        fold = a + b > 1
        a[fold], b[fold] = 1 - a[fold], 1 - b[fold]
        weights = np.stack([a, b], 1).astype(np.float32)
        corners = town.corners[triangle]
        origin = corners[:, 0]
        means = origin + (corners[:, 1] - origin) * weights[:, :1] + (corners[:, 2] - origin) * weights[:, 1:]
        facets = self._normals[triangle]
        normals = light.shading_normals(town, triangle, means, facets)
        lit = light.march_sun(town, self._heights, means, facets)
        color = light.shade(
            town, self._heights, texture.albedo(town, triangle, weights, means), means, normals, lit
        )
        scales = np.empty((count, 3), np.float32)
        scales[:] = (np.log(self._radius) - 0.5 * np.log(self._density[triangle]))[:, None]
        scales[:, 2] += np.float32(np.log(FLATNESS))
        return {
            "means": means,
            "quats": _turn_z_to(facets),
            "scales": scales,
            "opacities": np.full(count, 2.9444390, np.float32),  # logit of 0.95
            "sh0": ((color - np.float32(0.5)) / np.float32(SH_C0)).astype(np.float32),
            "normals": facets,
        }


def _density(town: Town) -> NDArray[np.float64]:
    """Splats an area of each triangle, relative to the town: 1 within it, falling off in the fields around, whose area is
    many times larger than the town's."""
    middle = town.corners[:, :, :2].mean(1)
    edge = np.array(town.layout.half_size) / METRES_PER_UNIT + RIM / METRES_PER_UNIT
    outside = np.linalg.norm(np.maximum(np.abs(middle) - edge, 0), axis=1).astype(np.float64)
    return 1 / (1 + outside / _FALL_OFF) ** 2


def _turn_z_to(normals: Array) -> Array:
    """Unit quaternions wxyz [n, 4] that turn the z axis to `normals`."""
    q = np.stack([1 + normals[:, 2], -normals[:, 1], normals[:, 0], np.zeros(len(normals), np.float32)], 1)
    down = normals[:, 2] < -0.99999
    q[down] = [0, 1, 0, 0]
    return (q / np.linalg.norm(q, axis=1, keepdims=True)).astype(np.float32)


def sample_splats(
    town: Town, n: int, seed: int = 0, start: int = 0, count: int | None = None
) -> dict[str, Array]:
    """Rows [start, start + count) of n Gaussians on a town: see `SplatSampler.rows`, which is quicker for many calls."""
    return SplatSampler(town, n, seed).rows(start, n - start if count is None else count)


def write_splats(
    town: Town, n: int, path: Path, seed: int = 0, progress: Callable[[int], None] | None = None
) -> None:
    """Stream n Gaussians to a binary 3DGS .ply (SH degree 0) with memory that does not depend on n.

    Args:
        path: written in place; the caller names it finally. progress: told the number of rows after each chunk.
    """
    sampler = SplatSampler(town, n, seed)
    header = ["ply", "format binary_little_endian 1.0", "comment mgpu-splat-city", f"element vertex {n}"]
    header += [f"property float {name}" for name in PLY_PROPERTIES] + ["end_header"]
    with open(path, "wb") as file:
        file.write(("\n".join(header) + "\n").encode("ascii"))
        for start in range(0, n, _CHUNK):
            count = min(_CHUNK, n - start)
            c = sampler.rows(start, count)
            block = np.concatenate(
                [c["means"], c["normals"], c["sh0"], c["opacities"][:, None], c["scales"], c["quats"]], axis=1
            )
            file.write(block.astype("<f4").tobytes())
            if progress:
                progress(count)
        file.flush()
        os.fsync(file.fileno())
