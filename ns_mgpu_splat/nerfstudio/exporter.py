# SPDX-License-Identifier: Apache-2.0
"""`python -m ns_mgpu_splat.nerfstudio.exporter gaussian-splat ...`: `ns-export` where open3d cannot be imported.

Nerfstudio's exporter imports open3d (half a gigabyte, and a system library) whatever it exports. This is the same command
with a stand-in for it, if and only if it cannot be imported. To keep the command itself, put the stand-in on Python's
path: PYTHONPATH=$(python -m ns_mgpu_splat.nerfstudio.exporter --path) ns-export gaussian-splat ...
"""

from __future__ import annotations

import sys
from pathlib import Path

STAND_IN = Path(__file__).with_name("without_open3d")


def make_open3d_optional() -> bool:
    """Put the stand-in in place if open3d cannot be imported; returns whether it was."""
    try:
        import open3d  # noqa: F401
    except (ImportError, OSError):  # absent, or a system library of it is
        sys.modules.pop("open3d", None)
        sys.path.insert(0, str(STAND_IN))
        return True
    return False


def main() -> None:
    """Nerfstudio's command line."""
    if sys.argv[1:] == ["--path"]:
        print(STAND_IN)
        return
    make_open3d_optional()
    from nerfstudio.scripts.exporter import entrypoint

    entrypoint()


if __name__ == "__main__":
    main()
