# SPDX-License-Identifier: Apache-2.0
"""Ready run configurations: a YAML file of plain options for `ns-train mgpu-splat --load-config FILE --data DIR`.

A preset names a few options as on the command line and leaves the rest alone. The `config.yml` of an earlier run is a dump
of Python objects with all options, the data folder and the run's own folder included. What is given on the command line
wins over either; Nerfstudio alone would let a `config.yml` replace all of it, `--load-dir` included.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path, PurePath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from ns_mgpu_splat.nerfstudio.text_files import read_text, yaml_problem


def existing(path: Path) -> Path:
    """The file that a path means: itself, or where there is none its name with the other ending of YAML files."""
    other = {".yml": ".yaml", ".yaml": ".yml"}.get(path.suffix)
    if other is not None and not path.exists() and path.with_suffix(other).is_file():
        return path.with_suffix(other)
    return path


def is_preset(path: Path) -> bool:
    """Whether a YAML file holds plain options. Exits with one sentence if it cannot be read."""
    try:
        text = read_text(path)
    except OSError as error:
        raise SystemExit(f"mgpu-splat: --load-config {path} cannot be read: {error.strerror}.") from None
    return "!!python/" not in text


def typed_options() -> frozenset[str]:
    """The options on this process's command line, as `pipeline.model.max-gaussians`: one may be typed with its default."""
    words = [word for word in sys.argv[1:] if word.startswith("--")]
    return frozenset(word.split("=")[0].lstrip("-").replace("_", "-") for word in words)


def apply_preset(config: Any, defaults: Any, path: Path) -> None:
    """Set the options of a preset in `config`, except those that were typed or differ from `defaults` already.

    Args:
        config: a dataclass, changed in place. defaults: one of the same class, as it is without a command line.
        path: the YAML file: nested mappings of option names, with underscores or dashes.
    Raises: SystemExit naming file and option if an option does not exist.
    """
    try:
        options = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise SystemExit(f"mgpu-splat: {path} is no valid YAML: {yaml_problem(error)}.") from None
    if not isinstance(options, dict):
        raise SystemExit(f"mgpu-splat: {path} holds no options. It must be a mapping, as configs/small.yml.")
    _apply(config, defaults, options, path, "", typed_options())


def apply_run(config: Any, defaults: Any, path: Path) -> None:
    """Set all options of an earlier run's `config.yml` in `config`, except those that were typed or differ from `defaults`
    already.

    Args: as of `apply_preset`.
    Raises: SystemExit naming the file if it is of another method or cannot be understood.
    """
    try:
        run = yaml.load(read_text(path), Loader=yaml.Loader)
    except Exception as error:  # names of classes that are not there any more, or bad YAML
        raise SystemExit(
            f"mgpu-splat: --load-config {path} cannot be understood: {yaml_problem(error)}."
        ) from None
    if type(run) is not type(config):
        raise SystemExit(
            f"mgpu-splat: --load-config {path} is of the method {getattr(run, 'method_name', 'unknown')}. Give the "
            "config.yml of a run of mgpu-splat."
        )
    if config.load_dir is not None or config.load_checkpoint is not None:
        run.load_dir = run.load_step = run.load_checkpoint = None  # where that run itself began
    wrong = first_wrong_value(run, path)
    if wrong is not None:
        raise SystemExit(f"mgpu-splat: {wrong}")
    _take(config, defaults, run, "", typed_options())
    _check(config)


def _check(config: Any) -> None:
    """What the parts of a configuration say of values that are possible, but not together or not in this range."""
    for part in (config.pipeline.datamanager.dataparser, config.pipeline.datamanager, config.pipeline.model):
        check = getattr(part, "check", None)
        if check is not None:
            check()
    config.check()


def _take(config: Any, defaults: Any, run: Any, prefix: str, typed: frozenset[str]) -> None:
    names = list(run) if isinstance(run, dict) else [field.name for field in dataclasses.fields(run)]
    for name in names:
        if isinstance(config, dict) and name not in config:
            config[name] = run[name]
            continue
        if not isinstance(run, dict) and not hasattr(run, name):
            continue  # an option that is newer than the run
        current, default, value = (_get(holder, name) for holder in (config, defaults, run))
        if type(current) is type(default) is type(value) and (
            dataclasses.is_dataclass(current) or isinstance(current, dict)
        ):
            _take(current, default, value, f"{prefix}{name}.", typed)
        elif current == default and f"{prefix}{name}".replace("_", "-") not in typed:
            _set(config, name, value)


def _apply(
    config: Any, defaults: Any, options: dict[str, Any], path: Path, prefix: str, typed: frozenset[str]
) -> None:
    for key, value in options.items():
        name, where = str(key).replace("-", "_"), f"{prefix}{key}"
        known = (
            name in config if isinstance(config, dict) else hasattr(config, name) and not name.startswith("_")
        )
        if not known:
            raise SystemExit(
                f"mgpu-splat: {path} sets {where}, which is no option. See ns-train mgpu-splat --help."
            )
        current, default = _get(config, name), _get(defaults, name)
        if isinstance(value, dict) and (dataclasses.is_dataclass(current) or isinstance(current, dict)):
            _apply(current, default, value, path, f"{where}.", typed)
        elif not fits(value, _kind(config, name)):
            raise SystemExit(f"mgpu-splat: {wrong_value(path, where, value, _kind(config, name))}")
        elif current == default and where.replace("_", "-") not in typed:
            wants_path = isinstance(value, str) and fits(Path(), _kind(config, name))
            _set(config, name, Path(value) if wants_path else value)
    check = getattr(config, "check", None)
    if check is not None:
        check()


def option_may_be(holder: Any, name: str, value: Any) -> bool:
    """Whether an option of a dataclass is declared so that it may have a value."""
    return not isinstance(holder, dict) and fits(value, _kind(holder, name))


# ---- whether a value may be an option's


def wrong_value(path: Path | str, option: str, value: Any, kind: Any) -> str:
    """The sentence on an option that a file sets to what it cannot be; nothing ("null") is said as other values are."""
    shown = "null" if value is None else repr(value)
    wanted = _words(kind)
    takes = f"It takes {wanted}" if wanted else "See ns-train mgpu-splat --help"
    return f"{path} sets {option} to {shown}, which it cannot be. {takes}."


def first_wrong_value(config: Any, path: Path | str, prefix: str = "") -> str | None:
    """The sentence on the first option of a loaded configuration that is what it cannot be, since loading asks nothing.

    Args:
        config: a dataclass of options, with others in it. path: the file it came from. prefix: of the options' names.
    """
    names = list(config) if isinstance(config, dict) else [field.name for field in dataclasses.fields(config)]
    for name in names:
        if not isinstance(config, dict) and not hasattr(config, name):
            continue  # it is newer than the run
        value, where = _get(config, name), f"{prefix}{name}"
        if dataclasses.is_dataclass(value) or (
            isinstance(value, dict) and where.partition(".")[0] == "optimizers"
        ):
            found = first_wrong_value(value, path, f"{where}.")
            if found is not None:
                return found
        elif not fits(value, kind := _kind(config, name)):
            return wrong_value(path, where, value, kind)
    return None


def _kind(holder: Any, name: str) -> Any:
    """The type that an option is declared with. Optimizers are in a mapping, which declares none: only schedulers may lack."""
    if isinstance(holder, dict):
        return Any if name == "scheduler" else object
    return get_type_hints(type(holder)).get(name, Any)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of a YAML file may be one of a declared type."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inside)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inside)
    if origin in (tuple, list) or kind in (tuple, list):
        return isinstance(value, (tuple, list))
    if origin is dict or kind is dict:
        return isinstance(value, dict) and all(fits(each, inside[1]) for each in value.values() if inside)
    if kind is object:
        return value is not None
    if origin is type or kind is type:
        return isinstance(value, type)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return isinstance(value, (str, PurePath))
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind in (None, type(None)):
        return value is None
    return not dataclasses.is_dataclass(kind)


def _words(kind: Any) -> str:
    """What a declared type takes, as a user would say it; nothing where that is not said in a few words."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _or([str(each) for each in inside])
    if origin in (Union, UnionType):
        parts = [_words(each) for each in inside]
        return _or(parts) if all(parts) else ""
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return "a path"
    simple: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    simple |= {type(None): "null"}
    return simple.get(kind, "a list" if origin in (tuple, list) else "")


def _or(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
