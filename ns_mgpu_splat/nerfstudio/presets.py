# SPDX-License-Identifier: Apache-2.0
"""Ready run configurations: a YAML file of plain options for `ns-train mgpu-splat --load-config FILE --data DIR`.

Nerfstudio's own `config.yml` files are dumps of Python objects that replace the whole command line, the data folder
included. A preset names a few options as on the command line and leaves the rest alone; what is given on the command
line wins over it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml


def is_preset(path: Path) -> bool:
    """Whether a YAML file holds plain options. Exits with one sentence if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"mgpu-splat: --load-config {path} cannot be read: {error.strerror}.") from None
    return "!!python/" not in text


def apply_preset(config: Any, defaults: Any, path: Path) -> None:
    """Set the options of a preset in `config`, except those that differ from `defaults` already.

    Args:
        config: a dataclass, changed in place. defaults: one of the same class, as it is without a command line.
        path: the YAML file: nested mappings of option names, with underscores or dashes.
    Raises: SystemExit naming file and option if an option does not exist.
    """
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SystemExit(f"mgpu-splat: {path} is no valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(options, dict):
        raise SystemExit(f"mgpu-splat: {path} holds no options. It must be a mapping, as configs/small.yml.")
    _apply(config, defaults, options, path, "")


def _apply(config: Any, defaults: Any, options: dict[str, Any], path: Path, prefix: str) -> None:
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
            _apply(current, default, value, path, f"{where}.")
        elif current == default:
            _set(config, name, Path(value) if isinstance(current, Path) else value)
    check = getattr(config, "check", None)
    if check is not None:
        check()


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
