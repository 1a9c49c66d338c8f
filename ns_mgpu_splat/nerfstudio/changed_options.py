# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from a checkpoint with other options than the run that saved it: which ones."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ns_mgpu_splat.data.checks import printable
from ns_mgpu_splat.nerfstudio.presets import option_may_be
from ns_mgpu_splat.nerfstudio.saved_run import RunError, read_options

if TYPE_CHECKING:
    from ns_mgpu_splat.nerfstudio.trainer_config import MgpuSplatTrainerConfig

kNamed = 6  # options that are named; the rest is counted

Change = tuple[str, Any, Any]  # option as on the command line, value of the earlier run, value now


def other_options_note(config: MgpuSplatTrainerConfig) -> str | None:
    """One line about options of data, model and optimizers that differ from those of the run that `config` goes on from.

    Returns: None where nothing differs, no checkpoint is asked for, or no config.yml that can be read lies beside its folder.
    """
    if config.load_dir is not None:
        models, asked = Path(config.load_dir), ("--load-dir", str(config.load_dir))
    elif config.load_checkpoint is not None:
        models = Path(config.load_checkpoint).parent
        asked = ("--load-checkpoint", str(config.load_checkpoint))
    else:
        return None
    file = models.resolve().parent / "config.yml"
    try:
        saved = read_options(file)
    except RunError:
        return None
    changes = changed_options(config, saved)
    if not changes:
        return None
    named = ", ".join(
        f"--{option} {_shown(now)} (was {_shown(before)})" for option, before, now in changes[:kNamed]
    )
    more = f" and {len(changes) - kNamed:,} more" if len(changes) > kNamed else ""
    return printable(
        f"This run has other options than the one it goes on from: {named}{more}. To go on with all of that run's: "
        f"{shlex.join(['--load-config', str(models.parent / 'config.yml'), *asked])}"
    )


def changed_options(config: MgpuSplatTrainerConfig, saved: dict[str, Any]) -> list[Change]:
    """Options of data, model and optimizers that differ from those of a config.yml.

    Args:
        config: of this run. saved: of the earlier one, as `read_options` returns it. What it lacks, because the option is
            newer, has its default there. What only it has is no option any more.
    """
    old = saved.get("pipeline")
    old = old if isinstance(old, dict) else {}
    pipeline = config.pipeline
    found = [
        *_changes(pipeline.datamanager, old.get("datamanager"), "pipeline.datamanager."),
        *_changes(pipeline.model, old.get("model"), "pipeline.model."),
        *_changes(config.optimizers, saved.get("optimizers"), "optimizers."),
    ]
    # the capture may be named in either of two places
    data = [change for change in found if change[0] in _kDataOptions]
    found = [change for change in found if change[0] not in _kDataOptions]
    manager = old.get("datamanager")
    parser = manager.get("dataparser") if isinstance(manager, dict) else None
    if data and isinstance(manager, dict) and isinstance(parser, dict):
        before = _as_path(manager.get("data")) or _as_path(parser.get("data"))
        now = pipeline.datamanager.data or pipeline.datamanager.dataparser.data
        if before is not None and not _same(before, now):
            found.insert(0, ("data", before, now))
    return found


_kDataOptions = ("pipeline.datamanager.data", "pipeline.datamanager.dataparser.data")


def _changes(holder: Any, saved: Any, prefix: str) -> Iterator[Change]:
    """Differences of a dataclass or mapping of options to plain data of the same form, options in their order."""
    if not isinstance(saved, dict):
        return
    names = list(holder) if isinstance(holder, dict) else [field.name for field in dataclasses.fields(holder)]
    for name in names:
        now = holder[name] if isinstance(holder, dict) else getattr(holder, name)
        option = f"{prefix}{name}".replace("_", "-")
        if str(name).startswith("_"):
            continue
        if name not in saved:
            if not isinstance(holder, dict) and not _same(before := _default(holder, name), now):
                yield option, before, now
            continue
        before = saved[name]
        if dataclasses.is_dataclass(now) or isinstance(now, dict):
            yield from _changes(now, before, f"{prefix}{name}.")
            continue
        if not isinstance(now, (bool, int, float, str, PurePath, list, tuple, type(None))) or isinstance(
            before, dict
        ):
            continue  # nothing that a command line says
        if not isinstance(now, (list, tuple)) and option_may_be(holder, name, Path()):
            before = _as_path(before)
        if not _same(before, now):
            yield option, before, now


def _default(holder: Any, name: str) -> Any:
    field = next(each for each in dataclasses.fields(holder) if each.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _as_path(value: Any) -> Any:
    """A path as YAML holds it, a list of its parts, as a path; other values as they are."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return Path(*value)
    return value


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, PurePath) and isinstance(now, PurePath):
        return before == now or _place(before) == _place(now)
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(_same, before, now))
    return bool(before == now)


def _place(path: PurePath) -> PurePath:
    """The folder that a path means, however it is written; the path itself where it can mean none."""
    try:
        place = Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, nobody's home, a zero byte
        return path
    return place.parent if place.name == "transforms.json" else place


def _shown(value: Any) -> str:
    """As it is typed on a command line."""
    return shlex.join(map(str, value if isinstance(value, (list, tuple)) else [value]))
