# SPDX-License-Identifier: Apache-2.0
"""Stands in for open3d where it is absent, so that Nerfstudio's exporter can be imported: `gaussian-splat` needs none of it.

Not a part of the package: it is found only if this folder is on Python's path (`ns_mgpu_splat.nerfstudio.exporter`).
"""


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ModuleNotFoundError(
        f"open3d.{name} was asked for, and open3d cannot be imported here. `ns-export gaussian-splat` and `cameras` work "
        "without it; for the rest: pip install open3d (on Debian and Ubuntu also apt install libusb-1.0-0)."
    )
