# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole or absent, that `torch.load(weights_only=True)` reads, and that say what is wrong with them.

A checkpoint is written beside its folder, flushed to disk and renamed into it, so that a killed run never leaves half
of one, and Nerfstudio's tools, which take every name in the folder for a checkpoint, never see it. It is one file for any
number of shards: whatever mesh reads it gets all rows, and `device/files.py` writes it as fast as the disk takes it.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.markup import escape

from ns_mgpu_splat.data.checks import printable
from ns_mgpu_splat.data.memory import available_memory
from ns_mgpu_splat.device import files
from ns_mgpu_splat.nerfstudio.names import kModels
from ns_mgpu_splat.nerfstudio.say import say
from ns_mgpu_splat.nerfstudio.text_files import why_no_file
from ns_mgpu_splat.words import shown_bytes

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig
    from nerfstudio.pipelines.base_pipeline import Pipeline

kFormat = 1
kName = re.compile(r"step-(\d+)\.ckpt")
kDeepestRun = 3  # folders between an --output-dir and a run's checkpoints: experiment, method, time


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
    target = folder / f"step-{step:09d}.ckpt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        need, free = tensor_bytes(state), shutil.disk_usage(folder).free
        if need > free:
            raise CheckpointError(
                f"{target} needs {shown_bytes(need)}, but {shown_bytes(free)} are free there. Free some, or train with another "
                "--output-dir. Older checkpoints are as they were."
            )
        with _aside(target) as aside:
            files.save(to_plain(state), aside, location="cpu")
            _sync(aside)
            aside.replace(target)
        _sync(folder)  # the new name is on disk before any old one goes
        _sync(folder.parent)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:  # torch's writer hides a full disk in a RuntimeError
        raise CheckpointError(
            f"{target} could not be written ({_first_line(error)}); is the disk full? Older checkpoints are as they were."
        ) from error
    if not keep_others:
        for other in folder.glob("*.ckpt"):
            if other != target:
                with suppress(OSError):  # one that cannot be removed is no reason to stop
                    other.unlink()
    return target


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A file to write into, beside the folder of `target`; locked while this process lives, and removed at the end."""
    path = target.parent.parent / f".{target.name}.{os.getpid()}"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # some network file systems know no locks; then nobody removes it either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half written beside a folder of checkpoints; what is being written stays."""
    for path in folder.parent.glob(".step-*.ckpt.*"):
        with suppress(OSError):  # locked by its living writer, or gone meanwhile
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


# ---- before training


def check_folder(folder: Path) -> None:
    """Make the folder of checkpoints and write to it, as a save would. Raises CheckpointError if that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        with _aside(folder / "step-test.ckpt") as aside:
            aside.write_bytes(b"room?")
            _sync(aside)
        probe = folder / f".{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written ({_first_line(error)}), so nothing could be saved. Train with another --output-dir."
        ) from None


def check_room(folder: Path, bytes_now: int, bytes_at_cap: int, saves: int, keep_others: bool) -> str | None:
    """Compare the free space with the checkpoints that a run will write.

    Args:
        bytes_now: of one with today's Gaussians; bytes_at_cap: of one with as many as there may be.
        saves: that the run makes. keep_others: older ones stay.
    Returns: a warning if the room is enough now, but not for what the run may become.
    Raises: CheckpointError if not even today's would fit: two, while the newer is written beside the older.
    """
    free = shutil.disk_usage(folder).free
    need = min(saves, 2) * bytes_now
    if need > free:
        both = "a checkpoint, and the next beside it," if saves > 1 else "a checkpoint"
        raise CheckpointError(
            f"{folder}: {both} of the present Gaussians needs {shown_bytes(need)}, but {shown_bytes(free)} are free there. "
            "Free some, or train with another --output-dir."
        )
    most = (saves if keep_others else min(saves, 2)) * bytes_at_cap
    if most <= free:
        return None
    several = f"{saves} checkpoints" if keep_others else "two checkpoints, one beside the other,"
    return (
        f"{folder}: {several if saves > 1 else 'a checkpoint'} of the most Gaussians that there may be will take "
        f"{shown_bytes(most)}, and {shown_bytes(free)} are free there. Free some before the run has grown, lower "
        "--pipeline.model.max-gaussians, or train with another --output-dir."
    )


def resume_command(folder: Path, arguments: Sequence[str], environment: dict[str, str], fallback: str) -> str:
    """The command line that goes on from the newest checkpoint of a folder.

    Args:
        arguments: the present command line, program first. Its --load-dir and the like are replaced.
        environment: of the process; what chooses the device is repeated.
        fallback: what to take for the command line if the present one is none of ns-train.
    """
    words = list(arguments) if Path(arguments[0]).name == "ns-train" and len(arguments) > 1 else []
    words = ["ns-train", *words[1:]] if words else shlex.split(fallback)
    rest: list[str] = []
    skip = False
    for word in words[2:]:
        if skip:
            skip = False
            continue
        name = word.split("=", 1)[0].replace("_", "-")
        if name in ("--load-dir", "--load-step", "--load-checkpoint"):
            skip = "=" not in word
            continue
        rest.append(word)
    chosen = [
        f"{name}={environment[name]}" for name in ("MGPU_DEVICES", "MGPU_MEMORY") if environment.get(name)
    ]
    return shlex.join([*chosen, *words[:2], "--load-dir", str(folder), *rest])


# ---- reading


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints of a folder by step, newest first; other names are ignored."""
    found = [(kName.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def find(folder: Path, step: int | None = None) -> Path:
    """The checkpoint of a step, or the newest one. Raises CheckpointError."""
    there = checkpoints(folder)
    if not folder.exists():
        raise CheckpointError(f"{folder} has no checkpoint: it does not exist.")
    if not there:
        runs = _runs_below(folder)
        hint = f"Did you mean {runs[-1]}?" if runs else "They are called step-000001999.ckpt."
        several = f" That is the newest of {len(runs)} runs in there." if len(runs) > 1 else ""
        raise CheckpointError(f"{folder} has no checkpoint. {hint}{several}")
    if step is None:
        return there[0][1]
    for at, path in there:
        if at == step:
            return path
    raise CheckpointError(
        f"{folder} has no step-{step:09d}.ckpt, but {', '.join(path.name for _, path in there)}. --load-step takes the number "
        "in the name, which is one less than the steps that it has had."
    )


def _runs_below(folder: Path) -> list[Path]:
    """Folders of checkpoints of runs in a folder, as deep as an --output-dir has them; that of the run saved last is the last."""
    saved = []
    with suppress(OSError):  # what goes away meanwhile is none
        for depth in range(kDeepestRun + 1):
            for models in folder.glob("*/" * depth + kModels):
                if there := checkpoints(models):
                    saved.append((there[0][1].stat().st_mtime, models))
    return [models for _, models in sorted(saved)]


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint: its tensors are the file itself, mapped, and go where they are copied to without one on the host.

    Raises: CheckpointError for one that is missing, cut short, with other bytes than were written, not a checkpoint or from
        a newer version. It names an older whole one where there is one.
    """
    if not path.is_file():
        why = why_no_file(path)
        raise CheckpointError(
            f"Checkpoint {path} {'does not exist' if why is None else f'cannot be read: {why}'}."
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:  # bytes that are no checkpoint make the unpickler raise anything
        reason = (
            "is cut short or damaged" if not _is_whole_zip(path) else f"cannot be read ({_first_line(error)})"
        )
        raise CheckpointError(f"Checkpoint {path} {reason}.{_older(path)}") from error
    if (
        not isinstance(state, dict)
        or not isinstance(state.get("pipeline"), dict)
        or not isinstance(state.get("step"), int)
    ):
        raise CheckpointError(f"{path} is no checkpoint of a Nerfstudio model.")
    if not _is_as_written(path):
        raise CheckpointError(f"Checkpoint {path} is cut short or damaged.{_older(path)}")
    made_by = state.get("format", 0)
    if made_by > kFormat:
        raise CheckpointError(
            f"Checkpoint {path} has format {made_by}, this version of ns-mgpu-splat reads up to {kFormat}. Upgrade it."
        )
    return state


def rows_of(state: dict[str, Any]) -> int:
    """Gaussians in a checkpoint; 0 where it does not say, and has no means of ours or of splatfacto."""
    pipeline = state["pipeline"]
    means = pipeline.get("_model.gauss_params.means", pipeline.get("_model.means"))
    return int(state.get("gaussians", 0 if means is None else len(means)))


def strategy_of(state: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The strategy's state in a checkpoint that was read from `path`; None where it has none, as those of other methods.

    Raises: CheckpointError for one that this version does not know.
    """
    strategy = state.get("strategy")
    if strategy is None or (isinstance(strategy, dict) and strategy.get("version", 1) == 1):
        return strategy
    if isinstance(strategy, dict):
        named = f"a strategy of version {strategy['version']}"
    else:
        named = f'the strategy "{strategy}"'
    raise CheckpointError(
        f"Checkpoint {path} has {printable(named)}, which this version of ns-mgpu-splat does not know: it reads version 1. "
        "Upgrade ns-mgpu-splat, or use the version that wrote it."
    )


def _is_as_written(path: Path) -> bool:
    """Compare the checksums of a checkpoint. One that takes more than half of the memory that is free is trusted.

    It costs next to nothing where it is done: the file is in the page cache afterwards, read by several threads, and page
    faults of a mapped file alone read in small steps: 2 to 7 s, not 1.3, for 1.3 GiB (benchmarks/checkpoint.py).
    """
    return path.stat().st_size > available_memory() // 2 or files.damaged_record(path) is None


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
            return f" A whole one is beside it: --load-checkpoint {shlex.quote(str(other))}."
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
    """Stand-in for Nerfstudio's function of this name: same result, but one sentence where it fails.

    A run whose folder was moved is read where its config.yml is now.
    """
    from ns_mgpu_splat.nerfstudio.tools import moved_folder, speaker

    assert config.load_dir is not None
    moved = moved_folder(config)
    if moved is not None:
        config.get_base_dir = lambda: moved  # type: ignore[method-assign]  # the viewer's log goes there, too
        config.load_dir = config.get_checkpoint_dir()
    try:
        path = find(Path(config.load_dir), config.load_step)
        state = read(path)
        pipeline.load_pipeline(state["pipeline"], state["step"])
    except CheckpointError as error:
        raise SystemExit(f"{speaker()}: {error}") from None
    say(f":white_check_mark: Done loading checkpoint from {escape(str(path))}", soft_wrap=True)
    return path, state["step"]
