# SPDX-License-Identifier: Apache-2.0
"""`python -m ns_mgpu_splat.nerfstudio.exporter gaussian-splat ...`: `ns-export` without the libraries that meshes need.

Nerfstudio's exporter imports open3d (half a gigabyte, and a system library), pymeshlab and others whatever it exports. This
is the same command with stand-ins for those of them, and only those, that cannot be imported. To keep the command itself,
let Python put the stand-ins in place at its start:
PYTHONPATH=$(python -m ns_mgpu_splat.nerfstudio.exporter --path) ns-export gaussian-splat ...
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ns_mgpu_splat.quiet import hide_future_warnings

# What Nerfstudio 1.1.5 imports for `ns-export` alone, and `gaussian-splat` and `cameras` do not use
MESH_TOOLS = ("open3d", "mediapy", "xatlas", "pymeshlab", "skimage", "trimesh")


class _Missing:
    """Something of a library that is not there: says so when it is used."""

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def _complain(self) -> None:
        library = self._name.partition(".")[0]
        raise ModuleNotFoundError(
            f"{self._name} was asked for, and {library} cannot be imported here ({self._why}). `ns-export gaussian-splat` "
            f"and `cameras` do without it; for the rest install it. docs/install.md says more."
        )

    def __call__(self, *_arguments: Any, **_options: Any) -> None:
        self._complain()

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        self._complain()


class _StandIn(ModuleType):
    """Takes the place of a library that cannot be imported."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, f"Stands in for {name}, which cannot be imported: {why}.")
        self._why = why

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}", self._why)


def make_mesh_tools_optional() -> tuple[str, ...]:
    """Put stand-ins in the place of those of `MESH_TOOLS` that cannot be imported; returns which."""
    missing = []
    for name in MESH_TOOLS:
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:  # absent, or a library of its own is
            for half_imported in [m for m in sys.modules if m.partition(".")[0] == name]:
                del sys.modules[half_imported]
            sys.modules[name] = _StandIn(name, str(error))
            missing.append(name)
    return tuple(missing)


def main() -> None:
    """Nerfstudio's command line."""
    if sys.argv[1:] == ["--path"]:
        print(Path(__file__).with_name("without_mesh_tools"))
        return
    hide_future_warnings()  # the command's name does not say that it is one of Nerfstudio's
    make_mesh_tools_optional()
    from ns_mgpu_splat.nerfstudio import tools

    tools.watch("ns-export")
    from nerfstudio.scripts.exporter import entrypoint

    entrypoint()


if __name__ == "__main__":
    main()
