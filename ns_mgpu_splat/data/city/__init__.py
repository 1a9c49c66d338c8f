# SPDX-License-Identifier: Apache-2.0
"""A procedural town: plain arrays, pictures by ray casting, Gaussians by sampling. `mgpu-splat-city` is its command line."""

from __future__ import annotations

from ns_mgpu_splat.data.city.splats import SplatSampler, sample_splats, write_splats
from ns_mgpu_splat.data.city.town import METRES_PER_UNIT, Town, build_town

__all__ = ["METRES_PER_UNIT", "SplatSampler", "Town", "build_town", "sample_splats", "write_splats"]
