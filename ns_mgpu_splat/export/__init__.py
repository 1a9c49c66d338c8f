# SPDX-License-Identifier: Apache-2.0
"""Finished Gaussians to files that other programs read: `.ply`, `.splat`, `.spz`, in one piece or in tiles."""

from ns_mgpu_splat.export.frame import Frame, world_frame
from ns_mgpu_splat.export.rows import RowSource, TensorRows
from ns_mgpu_splat.export.write import FORMATS, Exported, ExportError, ExportSettings, export, target_of

__all__ = [
    "FORMATS",
    "ExportError",
    "ExportSettings",
    "Exported",
    "Frame",
    "RowSource",
    "TensorRows",
    "export",
    "target_of",
    "world_frame",
]
