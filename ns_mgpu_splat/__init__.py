# SPDX-License-Identifier: Apache-2.0
"""Gaussian splatting on one aggregate PyTorch device, `mgpu`, made of all GPUs of a host.

Importing this package builds and loads nothing; `init()` does, or the first thing that needs the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Camera", "SplatAdam", "SplatTable", "__version__", "init", "render", "train_step"]

if TYPE_CHECKING:
    from ns_mgpu_splat.device import init
    from ns_mgpu_splat.splats.camera import Camera
    from ns_mgpu_splat.splats.optimizer import SplatAdam
    from ns_mgpu_splat.splats.render import render
    from ns_mgpu_splat.splats.table import SplatTable
    from ns_mgpu_splat.splats.train import train_step

_HOME = {
    "init": "ns_mgpu_splat.device",
    "Camera": "ns_mgpu_splat.splats.camera",
    "SplatTable": "ns_mgpu_splat.splats.table",
    "render": "ns_mgpu_splat.splats.render",
    "SplatAdam": "ns_mgpu_splat.splats.optimizer",
    "train_step": "ns_mgpu_splat.splats.train",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import ns_mgpu_splat` costs nothing."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ns_mgpu_splat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
