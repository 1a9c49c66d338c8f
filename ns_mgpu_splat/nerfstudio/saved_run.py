# SPDX-License-Identifier: Apache-2.0
"""A trained run on disk, opened without its model, its images or a device: rows of the newest checkpoint, frame, options.

Nerfstudio's config.yml names Python objects; it is read here as plain data, which runs no code and needs no class of it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from torch import Tensor

from ns_mgpu_splat.export import Frame, RowSource, TensorRows, world_frame
from ns_mgpu_splat.nerfstudio import checkpoint
from ns_mgpu_splat.nerfstudio.names import kColumnOf, kModels
from ns_mgpu_splat.nerfstudio.presets import fits, wrong_value
from ns_mgpu_splat.nerfstudio.text_files import read_text, yaml_problem

kTransforms = "dataparser_transforms.json"


class RunError(Exception):
    """A run that cannot be opened; `str()` is what the user reads."""


@dataclass(frozen=True)
class SavedRun:
    """What a run's folder holds.

    Attributes:
        config: its config.yml. options: what that says, as plain data. checkpoint: the file the rows come from.
    """

    config: Path
    options: dict[str, Any]
    checkpoint: Path
    rows: RowSource

    @property
    def antialiased(self) -> bool:
        """Whether it was trained with opacities dimmed for small Gaussians."""
        return bool(
            self.model_option("rasterize_mode", Literal["classic", "antialiased"], "classic") == "antialiased"
        )

    def model_option(self, name: str, kind: Any, default: Any) -> Any:
        """An option of the model; its default where the run is older than it. Raises RunError if it is none of `kind`, a type."""
        model = _dig(self.options, "pipeline", "model")
        value = model.get(name, default) if isinstance(model, dict) else default
        if not fits(value, kind):
            raise RunError(wrong_value(self.config, f"pipeline.model.{name}", value, kind))
        return value

    def world(self) -> Frame:
        """The capture's own world. Raises RunError if the run does not say where that is."""
        path = self.config.parent / kTransforms
        try:
            saved = json.loads(read_text(path))
            return world_frame(np.array(saved["transform"], dtype=np.float64), float(saved["scale"]))
        except OSError as error:
            raise RunError(
                f"{path} cannot be read ({error.strerror}); it says where the capture's world is. Export with --frame "
                "nerfstudio, or put it back: training writes it beside config.yml."
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} is damaged ({error}); it says where the capture's world is. Export with --frame nerfstudio."
            ) from None


def open_run(config: Path) -> SavedRun:
    """Open the run of a config.yml. Its folder may have been moved. Raises RunError, CheckpointError."""
    options = read_options(config)
    models = _dig(options, "relative_model_dir")
    folder = config.parent / (Path(*models) if isinstance(models, list) and models else kModels)
    path = checkpoint.find(folder)
    try:
        rows = TensorRows([_columns(checkpoint.read(path)["pipeline"])])
    except ValueError as error:
        raise RunError(f"Checkpoint {path} cannot be exported: {error}") from None
    return SavedRun(config, options, path, rows)


def _columns(pipeline: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The table's columns among a pipeline's tensors, splatfacto's of any version included. Raises ValueError."""
    found = {}
    for name, column in kColumnOf.items():
        tensor = pipeline.get(f"_model.gauss_params.{name}", pipeline.get(f"_model.{name}"))
        if tensor is None:
            raise ValueError(f"it has no {name}, so it is of another method.")
        found[column] = tensor
    return found


def read_options(config: Path) -> dict[str, Any]:
    """A config.yml as plain data. Raises RunError if it is none of a run."""
    if config.is_dir():
        inside = config / "config.yml"
        hint = (
            f"Give --load-config {shlex.quote(str(inside))}."
            if inside.is_file()
            else "Give the config.yml of a run in it."
        )
        raise RunError(f"{config} is a folder. {hint}")
    try:
        text = read_text(config)
    except OSError as error:
        raise RunError(
            f"{config} cannot be read: {error.strerror}. ns-train says where it writes a run's config.yml."
        ) from None
    try:
        options = yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # the last four: from PyYAML, of values that are not of their own tag, and of very deep ones
        raise RunError(f"{config} is no valid YAML: {yaml_problem(error)}.") from None
    if (
        not isinstance(options, dict) or not {"pipeline", "_target"} <= options.keys()
    ):  # a preset has no class
        raise RunError(f"{config} is no config.yml of a training run.")
    return options


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML with Python objects in it as mappings, lists and words."""


def _plain(loader: yaml.SafeLoader, _suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(node) if isinstance(node, yaml.ScalarNode) else None


_PlainLoader.add_multi_constructor("tag:yaml.org,2002:python/", _plain)


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
