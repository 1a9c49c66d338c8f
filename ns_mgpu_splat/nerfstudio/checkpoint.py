# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole or absent, that `torch.load(weights_only=True)` reads, and that say what is wrong with them.

A checkpoint is written beside its folder, flushed to disk and renamed into it, so that a killed run never leaves half
of one, and Nerfstudio's tools, which take every name in the folder for a checkpoint, never see it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from nerfstudio.utils.rich_utils import CONSOLE

from ns_mgpu_splat.device import files

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig
    from nerfstudio.pipelines.base_pipeline import Pipeline

kFormat = 1
kName = re.compile(r"step-(\d+)\.ckpt")


class CheckpointError(Exception):
    """A checkpoint that cannot be used; `str()` is what the user reads."""


def to_plain(value: Any) -> Any:
    """Numpy scalars as Python ones, tensors without gradient and no larger than they look; recursively.

    Tensors stay where they are; but a view of a part of a storage, which would be saved with all of it, is copied.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value if value.untyped_storage().nbytes() == value.nbytes else value.to("cpu", copy=True)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_plain(entry) for entry in value)
    return value


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(entry) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(entry) for entry in value)
    return 0


def save(state: dict[str, Any], folder: Path, step: int, keep_others: bool) -> Path:
    """Write `step-<step>.ckpt` atomically.

    Args:
        state: of tensors and plain Python values. Tensors on `mgpu` go to the file piece by piece, as CPU tensors.
        folder: of checkpoints; made if absent. Its parent takes the unfinished file.
        keep_others: leave older checkpoints; otherwise they are removed once this one is on disk.
    Raises: CheckpointError if the disk is too small or writing fails; nothing is removed then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent)
    target = folder / f"step-{step:09d}.ckpt"
    need, free = tensor_bytes(state), shutil.disk_usage(folder).free
    if need > free:
        raise CheckpointError(
            f"{target} needs {need / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free there. Free some, or train "
            "with another --output-dir. Older checkpoints are as they were."
        )
    aside = folder.parent / f".{target.name}.{os.getpid()}"
    try:
        files.save(to_plain(state), aside, location="cpu")
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(target)
    except (OSError, RuntimeError) as error:  # torch's writer hides a full disk in a RuntimeError
        raise CheckpointError(
            f"{target} could not be written ({_first_line(error)}); is the disk full? Older checkpoints are as they were."
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    if not keep_others:
        for other in folder.glob("*.ckpt"):
            if other != target:
                other.unlink()
    return target


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished checkpoints of processes that were killed while they wrote."""
    for path in folder.glob(".step-*.ckpt.*"):
        pid = path.suffix[1:]
        if pid.isdigit() and not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints of a folder by step, newest first; other names are ignored."""
    found = [(kName.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def find(folder: Path, step: int | None = None) -> Path:
    """The checkpoint of a step, or the newest one. Raises CheckpointError."""
    there = checkpoints(folder)
    if not there:
        nested = folder / "nerfstudio_models"
        hint = f" Did you mean {nested}?" if checkpoints(nested) else " They are called step-000001999.ckpt."
        raise CheckpointError(f"{folder} has no checkpoint.{hint}")
    if step is None:
        return there[0][1]
    for at, path in there:
        if at == step:
            return path
    raise CheckpointError(
        f"{folder} has no checkpoint of step {step}, but of {', '.join(str(s) for s, _ in there)}."
    )


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint: its tensors are the file itself, mapped, and go where they are copied to without one on the host.

    Raises: CheckpointError for one that is missing, cut short, not a checkpoint or from a newer version. It names an
        older whole one where there is one.
    """
    if not path.is_file():
        raise CheckpointError(f"Checkpoint {path} does not exist.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:  # bytes that are no checkpoint make the unpickler raise anything
        reason = (
            "is cut short or damaged" if not _is_whole_zip(path) else f"cannot be read ({_first_line(error)})"
        )
        raise CheckpointError(f"Checkpoint {path} {reason}.{_older(path)}") from error
    if not isinstance(state, dict) or "pipeline" not in state or "step" not in state:
        raise CheckpointError(f"{path} is no checkpoint of a Nerfstudio model.")
    made_by = state.get("format", 0)
    if made_by > kFormat:
        raise CheckpointError(
            f"Checkpoint {path} has format {made_by}, this version of ns-mgpu-splat reads up to {kFormat}. Upgrade it."
        )
    return state


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_whole_zip(path: Path) -> bool:
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _older(path: Path) -> str:
    """A sentence on the newest whole checkpoint beside a broken one."""
    for _, other in checkpoints(path.parent):
        if other != path and _is_whole_zip(other):
            return f" A whole one is beside it: --load-checkpoint {other}."
    return " There is no other one beside it."


def random_state() -> dict[str, Any]:
    """State of the host's random generators, in values that weights_only loading allows."""
    version, words, position = random.getstate()
    _, keys, at, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - Nerfstudio seeds it
    return {
        "python": [version, list(words), position],
        "numpy": [torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(at), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo of `random_state`."""
    version, words, position = state["python"]
    random.setstate((version, tuple(words), position))
    keys, at, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), at, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch"])


def eval_load_checkpoint(config: TrainerConfig, pipeline: Pipeline) -> tuple[Path, int]:
    """Stand-in for Nerfstudio's function of this name: same result, but one sentence where it fails."""
    assert config.load_dir is not None
    try:
        path = find(Path(config.load_dir), config.load_step)
        state = read(path)
        pipeline.load_pipeline(state["pipeline"], state["step"])
    except CheckpointError as error:
        raise SystemExit(f"mgpu-splat: {error}") from None
    CONSOLE.print(f":white_check_mark: Done loading checkpoint from {path}")
    return path, state["step"]
