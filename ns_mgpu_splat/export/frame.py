# SPDX-License-Identifier: Apache-2.0
"""Moving Gaussians into another frame: means, orientations, sizes, and the directions of their spherical harmonics."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ns_mgpu_splat.export.rows import Chunk

_FAR = 64.0  # scene sizes from the origin; there float32 resolves 1/100,000 of the scene, and worse beyond


@dataclass(frozen=True)
class Frame:
    """A similarity: x -> scale * rotation @ x + shift, computed in float64.

    Attributes:
        name: what users call the frame.
        rotation: (3, 3), orthogonal; a reflection is allowed. scale: above 0. shift: (3,).
        offset: (3,), subtracted from coordinates before they become float32: zero unless the frame's origin is so far
            away that float32 would blur the Gaussians.
    """

    name: str = "nerfstudio"
    rotation: np.ndarray = field(default_factory=lambda: np.eye(3))
    scale: float = 1.0
    shift: np.ndarray = field(default_factory=lambda: np.zeros(3))
    offset: np.ndarray = field(default_factory=lambda: np.zeros(3))

    @property
    def is_identity(self) -> bool:
        """Whether rows stay as they are, bit by bit."""
        return bool(
            self.scale == 1.0 and (self.rotation == np.eye(3)).all() and not self.shift.any()
        )  # then the offset is zero, too

    def y_up(self) -> Frame:
        """This frame turned so that its z axis becomes y: (x, y, z) goes to (x, z, -y)."""
        turn = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])
        return Frame(
            f"{self.name}, y up", turn @ self.rotation, self.scale, turn @ self.shift, turn @ self.offset
        )

    def positions(self, means: np.ndarray) -> np.ndarray:
        """Coordinates in this frame, (rows, 3) float64, offset not subtracted, of `means` (rows, 3)."""
        wide = means.astype(np.float64)
        return wide if self.is_identity else wide @ (self.scale * self.rotation.T) + self.shift

    def apply(self, chunk: Chunk, sh_degree: int) -> Chunk:
        """The columns of a chunk in this frame, float32, with spherical harmonics up to `sh_degree`.

        The columns that the chunk lacks stay absent. `means` have the offset subtracted.
        """
        out = dict(chunk)
        kept = (sh_degree + 1) ** 2 - 1
        if "shN" in out:
            out["shN"] = out["shN"][:, :kept]
        if self.is_identity:
            return out
        if "means" in out:
            out["means"] = (self.positions(out["means"]) - self.offset).astype(np.float32)
        if "quats" in out:
            out["quats"] = out["quats"] @ self._quat_product.T
        if "scales" in out:
            out["scales"] = out["scales"] + np.float32(np.log(self.scale))
        if "shN" in out and kept:
            rows = len(out["shN"])
            flat = np.ascontiguousarray(out["shN"]).reshape(rows, 3 * kept)
            out["shN"] = (flat @ self._sh_product(sh_degree)).reshape(rows, kept, 3)
        return out

    @property
    def _quat_product(self) -> np.ndarray:
        """(4, 4) float32: the quaternion of the rotation times another one. A Gaussian is its own mirror image through its
        mean, so that -rotation, which is no reflection if rotation is one, turns its axes alike."""
        proper = self.rotation * np.sign(np.linalg.det(self.rotation))
        w, x, y, z = quat_from_rotation(proper)
        product = [[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]]
        return np.array(product, dtype=np.float32)

    def _sh_product(self, sh_degree: int) -> np.ndarray:
        """(3K, 3K) float32, to be multiplied from the right with rows of coefficients (K, 3) laid flat."""
        bands = sh_rotation(self.rotation, sh_degree)[1:, 1:]
        return np.kron(bands.T, np.eye(3)).astype(np.float32)


def world_frame(transform: np.ndarray, scale: float) -> Frame:
    """The capture's own world, out of Nerfstudio's: the undoing of x -> scale * transform @ (x, 1).

    Args:
        transform: (3, 4) float64, as in dataparser_transforms.json. scale: above 0.
    Raises: ValueError if `transform` is no rotation with a shift, or a value is not finite.
    """
    transform = np.asarray(transform, dtype=np.float64)
    if transform.shape != (3, 4) or not np.isfinite(transform).all() or not 0 < scale < np.inf:
        raise ValueError("transform must be 3 x 4 finite numbers, and scale a finite one above 0")
    u, sizes, vt = np.linalg.svd(transform[:, :3])
    if np.abs(sizes - 1).max() > 1e-3:
        raise ValueError("transform must turn and shift, it must not stretch")
    back = (u @ vt).T  # orthogonal again: it comes from float32
    shift = -back @ transform[:, 3]
    # the cameras lie within 1 of Nerfstudio's origin
    far = np.abs(shift).max() * scale > _FAR
    return Frame("world", back, 1.0 / scale, shift, np.round(shift) if far else np.zeros(3))


def quat_from_rotation(rotation: np.ndarray) -> np.ndarray:
    """Unit quaternion wxyz, w >= 0, of a (3, 3) rotation: the eigenvector of Bar-Itzhack's matrix, well-defined for all."""
    m = rotation
    k = np.array([
        [m[0, 0] + m[1, 1] + m[2, 2], 0, 0, 0],
        [m[2, 1] - m[1, 2], m[0, 0] - m[1, 1] - m[2, 2], 0, 0],
        [m[0, 2] - m[2, 0], m[1, 0] + m[0, 1], m[1, 1] - m[0, 0] - m[2, 2], 0],
        [m[1, 0] - m[0, 1], m[2, 0] + m[0, 2], m[2, 1] + m[1, 2], m[2, 2] - m[0, 0] - m[1, 1]],
    ])  # fmt: skip
    quat = np.linalg.eigh(k)[1][:, -1]  # takes the lower triangle
    return quat if quat[0] >= 0 else -quat


def sh_basis(directions: np.ndarray, degree: int) -> np.ndarray:
    """The 3DGS basis (rows, (degree + 1)^2) along unit directions (rows, 3), float64; signs as in docs/conventions.md."""
    x, y, z = directions.T
    xx, yy, zz = x * x, y * y, z * z
    pi = np.pi
    columns = [np.full_like(x, np.sqrt(1 / (4 * pi)))]
    if degree >= 1:
        c = np.sqrt(3 / (4 * pi))
        columns += [-c * y, c * z, -c * x]
    if degree >= 2:
        c = np.sqrt(15 / (4 * pi))
        columns += [
            c * x * y,
            -c * y * z,
            np.sqrt(5 / (16 * pi)) * (2 * zz - xx - yy),
            -c * x * z,
            c / 2 * (xx - yy),
        ]
    if degree >= 3:
        c3, c2, c1 = np.sqrt(35 / (32 * pi)), np.sqrt(105 / (4 * pi)), np.sqrt(21 / (32 * pi))
        columns += [
            -c3 * y * (3 * xx - yy), c2 * x * y * z, -c1 * y * (4 * zz - xx - yy),
            np.sqrt(7 / (16 * pi)) * z * (2 * zz - 3 * xx - 3 * yy),
            -c1 * x * (4 * zz - xx - yy), c2 / 2 * z * (xx - yy), -c3 * x * (xx - 3 * yy),
        ]  # fmt: skip
    return np.stack(columns, axis=1)


def sh_rotation(rotation: np.ndarray, degree: int) -> np.ndarray:
    """Matrix (K, K), K = (degree + 1)^2, that takes coefficients of a function to those of the function turned.

    The turned function has at `rotation @ d` the value that the first has at `d`. A band stays in its band, so its
    matrix (Wigner's, for real harmonics) follows from the band's values along a few directions before and after.

    Args:
        rotation: (3, 3) float64, orthogonal; a reflection is allowed.
    """
    directions = np.random.default_rng(0).normal(size=(64, 3))  # any that span: seven would do
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    before, after = sh_basis(directions, degree), sh_basis(directions @ rotation.T, degree)
    out = np.zeros((before.shape[1], before.shape[1]))
    for band in range(degree + 1):
        members = slice(band * band, (band + 1) ** 2)
        out[members, members] = np.linalg.lstsq(after[:, members], before[:, members], rcond=None)[0]
    return out
