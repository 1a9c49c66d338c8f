# SPDX-License-Identifier: Apache-2.0
"""Replace what does not scale or does not work in Nerfstudio 1.1.5, when a model of ours is built and not before.

Each patch leaves other methods' behaviour as it is:
- the viewer no longer sends all Gaussians to the browser as a hidden point cloud (viewer.py:282);
- the legacy viewer, which cannot show splats of ours, is refused in a sentence;
- `ns-viewer` ends its start with the address to open, not with "disabled local writer" (run_viewer.py:117);
- `ns-export gaussian-splat` writes its file with numpy instead of a Python loop over numbers (exporter.py:583);
- the tools open checkpoints with our reader, which says in a sentence what is wrong with one (eval_utils.py:24);
- tensorboard takes the checksums of its files with NumPy (record_writer.py:42), instead of holding training up after a picture.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ns_mgpu_splat.nerfstudio.names import kNoLegacyViewer
from ns_mgpu_splat.nerfstudio.tools import speaker
from ns_mgpu_splat.splats.targets import check_room, whole_file, writable_target

kRowsAtOnce = 1 << 15


def apply() -> None:
    """Apply all patches; again is harmless."""
    _patch_viewer()
    _patch_legacy_viewer()
    _patch_viewer_start()
    _patch_exporter()
    _patch_loader()
    _patch_checksums()


class _SendsPoints(type):
    """Makes `isinstance(model, SplatfactoModel)` false for our models, in the viewer's start-up only."""

    def __instancecheck__(cls, instance: Any) -> bool:
        from nerfstudio.models.splatfacto import SplatfactoModel

        from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel

        return isinstance(instance, SplatfactoModel) and not isinstance(instance, MgpuSplatModel)


class SplatfactoModelWithPoints(metaclass=_SendsPoints):
    """A splat model whose means the viewer may send to the browser."""


def _patch_viewer() -> None:
    viewer = sys.modules.get("nerfstudio.viewer.viewer")
    if viewer is None:
        import nerfstudio.viewer.viewer as viewer  # type: ignore[no-redef]
    viewer.SplatfactoModel = SplatfactoModelWithPoints  # type: ignore[union-attr]


def _patch_legacy_viewer() -> None:
    from nerfstudio.viewer_legacy.server.viewer_state import ViewerLegacyState

    original = ViewerLegacyState.__init__
    if hasattr(original, "refuses"):
        return

    @wraps(original)
    def refuse(self: ViewerLegacyState, *arguments: Any, **options: Any) -> None:
        from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel

        pipeline = options.get("pipeline", next(iter(arguments[3:]), None))
        if isinstance(getattr(pipeline, "model", None), MgpuSplatModel):
            raise SystemExit(f"{speaker()}: {kNoLegacyViewer}")
        original(self, *arguments, **options)

    refuse.refuses = True  # type: ignore[attr-defined]
    ViewerLegacyState.__init__ = refuse  # type: ignore[method-assign]


def _patch_viewer_start() -> None:
    for name in ("nerfstudio.scripts.viewer.run_viewer", "__main__"):
        command = sys.modules.get(name)
        original = getattr(command, "_start_viewer", None)
        if original is None or hasattr(original, "says_where"):
            continue

        def start(config: Any, pipeline: Any, step: int, original: Any = original) -> None:
            from ns_mgpu_splat.nerfstudio.model import MgpuSplatModel
            from ns_mgpu_splat.nerfstudio.viewer_start import start_viewer

            ours = config.vis == "viewer" and isinstance(pipeline.model, MgpuSplatModel)
            (start_viewer if ours else original)(config, pipeline, step)

        start.says_where = True  # type: ignore[attr-defined]
        command._start_viewer = start  # type: ignore[union-attr]


def _patch_exporter() -> None:
    for name in ("nerfstudio.scripts.exporter", "__main__"):
        exporter = getattr(sys.modules.get(name), "ExportGaussianSplat", None)
        if exporter is not None:
            exporter.write_ply = staticmethod(write_ply)


def _patch_loader() -> None:
    import nerfstudio.utils.eval_utils as eval_utils

    from ns_mgpu_splat.nerfstudio.checkpoint import eval_load_checkpoint

    eval_utils.eval_load_checkpoint = eval_load_checkpoint


def _patch_checksums() -> None:
    from tensorboard.summary.writer import record_writer

    from ns_mgpu_splat.nerfstudio.event_bytes import masked_crc32c

    record_writer.masked_crc32c = masked_crc32c


def write_ply(filename: str, count: int, map_to_tensors: Mapping[str, np.ndarray]) -> None:
    """Write a PLY file as `ExportGaussianSplat.write_ply` does, in chunks, beside the target and then renamed.

    Args:
        filename: target. count: rows. map_to_tensors: property name to (count,) or (count, 1) float or uint8.
    Raises: SystemExit, in a sentence, if there is no row to write, or if it cannot be written.
    """
    if count == 0:
        raise SystemExit(f"{speaker()}: no Gaussian is left to export, {filename} was not written.")
    columns = {}
    for name, column in map_to_tensors.items():
        if column.size != count:
            raise ValueError(f"{name} has {column.size} values, expected {count}: one for each Gaussian.")
        columns[name] = column.reshape(-1)
    row = np.dtype([(name, "<f4" if c.dtype.kind == "f" else "u1") for name, c in columns.items()])
    header = [
        "ply",
        "format binary_little_endian 1.0",
        f"comment Generated by Nerfstudio {version('nerfstudio')}",
    ]
    header += ["comment Generated by ns-mgpu-splat", "comment Vertical Axis: z", f"element vertex {count}"]
    header += [f"property {'float' if row[name].kind == 'f' else 'uchar'} {name}" for name in columns]
    head = ("\n".join([*header, "end_header"]) + "\n").encode()
    try:
        _write(Path(filename), head, row, columns, count)
    except OSError as error:
        said = str(error) if error.errno is None else f"{filename} cannot be written ({error.strerror})."
        raise SystemExit(f"{speaker()}: {said}") from None


def _write(path: Path, head: bytes, row: np.dtype, columns: Mapping[str, np.ndarray], count: int) -> None:
    target = writable_target(path)
    check_room(target, len(head) + count * row.itemsize)
    with whole_file(target) as file:
        file.write(head)
        for begin in range(0, count, kRowsAtOnce):
            chunk = np.empty(min(kRowsAtOnce, count - begin), dtype=row)
            for name, column in columns.items():
                chunk[name] = column[begin : begin + len(chunk)]
            file.write(chunk.data)
