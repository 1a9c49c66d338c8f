# SPDX-License-Identifier: Apache-2.0
"""CUDA's headers, for tests that compile parts of the CUDA flavour without a GPU."""

from __future__ import annotations

from pathlib import Path

from ns_mgpu_splat.device import build


def headers() -> list[str]:
    """Folders in which cuda.h is: of a toolkit, or of the wheels that torch comes with."""
    places = [Path("/usr/local/cuda/include")]
    for find in (build.cuda_home, build._nvidia_wheels):
        try:
            places.append(find() / "include")
        except build.BuildError:
            continue
    return [
        str(place)
        for place in places
        if (place / "cuda_runtime_api.h").is_file() and (place / "cuda.h").is_file()
    ]
