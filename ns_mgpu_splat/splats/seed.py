# SPDX-License-Identifier: Apache-2.0
"""From a point cloud to first Gaussians: checks, thinning to a cap, widths, orientations, colours. All on the host."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

SH_C0 = 0.28209479177387814  # the constant spherical harmonic
NEIGHBOURS = 3
COLOR_SLACK = 0.01  # colours may leave [0, 1] by this, as interpolated ones do
_QUERY_ROWS = 1 << 20  # rows per neighbour query: bounds the memory of the result
_MORTON_BITS = 20  # grid cells per axis: 2^20

_log = logging.getLogger("ns_mgpu_splat")


def check_cloud(points: Any, colors: Any) -> tuple[np.ndarray, np.ndarray]:
    """Points as float64 (N, 3) and colours as float32 (N, 3) in [0, 1]; grey where `colors` is None.

    Raises: ValueError for a wrong shape or dtype, colours outside [0, 1], or naming the first row that is not finite in
        float32.
    """
    xyz = _to_numpy(points).astype(np.float64)
    if xyz.size == 0:
        xyz = xyz.reshape(0, 3)
    if xyz.ndim != 2 or xyz.shape[1] != 3:
        raise ValueError(f"points is {list(xyz.shape)}, expected [N, 3].")
    if colors is None:
        rgb = np.full(xyz.shape, 0.5, dtype=np.float32)
    else:
        given = _to_numpy(colors)
        if given.size == 0:
            given = given.reshape(0, 3)
        if given.shape != xyz.shape:
            raise ValueError(f"colors is {list(given.shape)}, expected {list(xyz.shape)} like points.")
        if given.dtype == np.uint8:
            rgb = given.astype(np.float32) / 255.0
        elif np.issubdtype(given.dtype, np.floating):
            rgb = given.astype(np.float32)
        else:
            raise ValueError(f"colors is {given.dtype}; give uint8, or floats in [0, 1].")
    for name, values in (("points", xyz), ("colors", rgb)):
        finite = (np.abs(values) <= np.finfo(np.float32).max).all(axis=1)  # false for NaN, too
        if not finite.all():
            row = int(np.argmin(finite))
            raise ValueError(
                f"{name} has {int((~finite).sum())} rows with values that are not finite, the first is row {row}: "
                f"{values[row].tolist()}. Remove them from the cloud."
            )
    if rgb.size and not -COLOR_SLACK <= float(rgb.min()) <= float(rgb.max()) <= 1 + COLOR_SLACK:
        raise ValueError(
            f"colors go from {float(rgb.min()):g} to {float(rgb.max()):g}; give floats in [0, 1], or uint8 from 0 to 255."
        )
    return xyz, rgb


def _to_numpy(values: Any) -> np.ndarray:
    if not hasattr(values, "detach"):
        return np.asarray(values)
    host = values.detach().cpu()
    return (
        host.float() if host.is_floating_point() and host.dtype.itemsize < 4 else host
    ).numpy()  # bfloat16


def rgb_to_sh0(rgb: np.ndarray) -> np.ndarray:
    """Coefficient of the constant harmonic whose colour is `rgb` (colour = SH + 0.5)."""
    return ((rgb - 0.5) / SH_C0).astype(np.float32)


def random_quats(rows: int, seed: int) -> np.ndarray:
    """Uniformly random unit quaternions, (rows, 4) float32."""
    normal = np.random.default_rng(seed).standard_normal((rows, 4))
    return (normal / np.linalg.norm(normal, axis=1, keepdims=True).clip(1e-12)).astype(np.float32)


def neighbour_distances(xyz: np.ndarray) -> np.ndarray:
    """Mean distance of each point to its three nearest others (or as many as there are): (N,) float64, always positive.

    Coinciding points would give 0, whose logarithm no scale survives: distances are at least a thousandth of the
    median. Where no two points differ, 1 % of the distance from the origin, and at least 0.01, is used.
    """
    from scipy.spatial import cKDTree

    rows = len(xyz)
    fallback = max(0.01, 0.01 * float(np.linalg.norm(xyz, axis=1).max())) if rows else 0.01
    neighbours = min(NEIGHBOURS, rows - 1)
    if neighbours < 1:
        return np.full(rows, fallback)
    tree = cKDTree(xyz)
    mean = np.empty(rows)
    for begin in range(0, rows, _QUERY_ROWS):
        piece = xyz[begin : begin + _QUERY_ROWS]
        distance, _ = tree.query(piece, k=neighbours + 1, workers=-1)
        mean[begin : begin + len(piece)] = distance[:, 1:].mean(axis=1)
    positive = mean[mean > 0.0]
    if positive.size == 0:
        return np.full(rows, fallback)
    return np.maximum(mean, 1e-3 * float(np.median(positive)))


def thin_evenly(xyz: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of `count` points spread evenly in space: dense places lose most. One line says so.

    The cloud is sorted along a Morton curve once; equal prefixes of the code are the cells of ever finer grids. One
    point is kept per cell of the finest grid with at most `count` cells, the rest come one per cell of the next.
    """
    rows = len(xyz)
    _log.warning(
        "the seed cloud has %s points: thinned evenly to the cap of %s Gaussians", f"{rows:,}", f"{count:,}"
    )
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    code = _morton(xyz)
    order = np.argsort(code, kind="stable")
    changed = code[order][1:] ^ code[order][:-1]  # its highest bit: the level at which neighbours part
    firsts = np.empty(0, dtype=np.int64)
    for level in range(_MORTON_BITS + 1):  # cells of level l share all but the lowest 3 (bits - l) bits
        shift = np.uint64(3 * (_MORTON_BITS - level))
        finer = np.concatenate([[0], np.flatnonzero(changed >> shift) + 1])
        if len(finer) > count:
            break
        firsts = finer
    else:
        finer = np.arange(rows)
    # A cell's first point is also the first of one of its finer cells, so `firsts` is part of `finer`.
    others = np.setdiff1d(finer, firsts, assume_unique=True)
    missing = count - len(firsts)
    picked = (
        others[np.linspace(0, len(others) - 1, missing).round().astype(np.int64)] if missing else others[:0]
    )
    return np.sort(order[np.concatenate([firsts, picked])])


def _morton(xyz: np.ndarray) -> np.ndarray:
    """Morton code of each point in the cube around the cloud, uint64 of 3 x 20 bits."""
    low = xyz.min(axis=0)
    extent = float((xyz.max(axis=0) - low).max()) or 1.0
    cells = 1 << _MORTON_BITS
    grid = np.minimum((xyz - low) / extent * cells, cells - 1).astype(np.uint64)
    code = np.zeros(len(xyz), dtype=np.uint64)
    for axis in range(3):
        code |= _spread(grid[:, axis]) << np.uint64(axis)
    return code


def _spread(value: np.ndarray) -> np.ndarray:
    """Move bit i to bit 3 i (values below 2^21)."""
    for shift, mask in (
        (32, 0x1F00000000FFFF),
        (16, 0x1F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        value = (value | (value << np.uint64(shift))) & np.uint64(mask)
    return value
