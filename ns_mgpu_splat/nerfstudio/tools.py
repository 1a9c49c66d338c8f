# SPDX-License-Identifier: Apache-2.0
"""Nerfstudio's tools on a run: a `--load-config` that cannot be used ends in a sentence, a run whose folder was moved opens.

`ns-eval`, `ns-viewer`, `ns-render` and `ns-export` read the file before any code of a method runs, and leave what goes wrong
there to the interpreter. So `watch`, called where Nerfstudio discovers this plug-in in such a command, has an uncaught error
looked at before it is shown: if it came from opening the run, and the file explains it, that is said instead. Ctrl-C, the only
way to end `ns-viewer`, is no error.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig

kTools = ("ns-eval", "ns-export", "ns-render", "ns-viewer")
kModules = {  # run by python -m
    "exporter.py": "ns-export",
    "evaluate.py": "evaluate",
    "info.py": "mgpu-splat-info",
    "export_command.py": "mgpu-splat-export",
}
kFlag = "--load-config"
kOutputFlags = ("--output-path", "--output-dir", "--render-output-path")
kWhereConfigs = "ns-train says where it writes a run's config.yml."


def config_argument(arguments: Sequence[str] | None = None) -> Path | None:
    """What `--load-config` names on a command line (by default this process's), or None."""
    return _path_argument(kFlag, list(sys.argv[1:] if arguments is None else arguments))


def _path_argument(flag: str, words: Sequence[str]) -> Path | None:
    for word, after in zip(words, [*words[1:], None], strict=False):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else after
            return None if found is None else Path(found)
    return None


def watch(tool: str | None = None) -> None:
    """In one of Nerfstudio's tools (or as `tool`): put the sentence in the place of the traceback, where there is one.

    A pipe or a device in the place of a config.yml ends the tool here: the tool would read it, and wait for ever.
    """
    tool = tool or PurePath(sys.argv[0] if sys.argv else "").name
    if tool not in kTools:
        return
    from ns_mgpu_splat.nerfstudio.text_files import why_no_file

    given = config_argument()
    if given is not None and not given.is_dir() and (why := why_no_file(given)) is not None:
        print(f"{tool}: {given} cannot be read: {why}. {kWhereConfigs}", file=sys.stderr)
        raise SystemExit(1)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # a second one needs no words, whatever is being ended
            print(f"{tool}: stopped.", file=sys.stderr)
            raise SystemExit(130)
        config = config_argument()
        said = None if config is None else why_not_opened(config, error, trace)
        said = said or why_not_written(error, sys.argv[1:])
        if said is None:
            before(kind, error, trace)
        else:
            print(f"{tool}: {said}", file=sys.stderr)

    sys.excepthook = hook


def why_not_opened(config: Path, error: BaseException, trace: TracebackType | None) -> str | None:
    """A sentence on a config.yml that Nerfstudio's `eval_setup` could not make an experiment of; None: it is no fault of it."""
    import yaml

    if not _inside(trace, "eval_setup"):
        return None
    from ns_mgpu_splat.nerfstudio.saved_run import RunError, read_options
    from ns_mgpu_splat.nerfstudio.text_files import yaml_problem

    try:
        options = read_options(config)
    except RunError as found:
        return str(found)
    if isinstance(error, yaml.YAMLError):
        return (
            f"{config} cannot be opened here: {yaml_problem(error)}. It was written by another version, or by a method that "
            "is not installed."
        )
    method = options.get("method_name")
    if isinstance(error, KeyError) and error.args == (method,):
        return f"{config} is of the method {method}, which is not installed here."
    if isinstance(error, AssertionError) and not _inside(trace, "setup"):
        return f"{config} is no config.yml of a training run."
    return _wrong_value(config)


def why_not_written(error: BaseException, arguments: Sequence[str]) -> str | None:
    """A sentence on a place that the command line names for results, and that cannot be written; None: the error is another."""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    refused = Path(error.filename).absolute()
    for flag in kOutputFlags:
        given = _path_argument(flag, arguments)
        if given is None:
            continue
        asked = given.absolute()
        if asked == refused or asked in refused.parents or refused in asked.parents:
            return f"{refused} cannot be written ({error.strerror}). Choose another {flag}."
    return None


def _wrong_value(config: Path) -> str | None:
    """The sentence on an option that the config.yml of a run of ours has, and that it cannot be."""
    import yaml

    from ns_mgpu_splat.nerfstudio.presets import first_wrong_value
    from ns_mgpu_splat.nerfstudio.trainer_config import MgpuSplatTrainerConfig

    run = yaml.load(config.read_text(encoding="utf-8"), Loader=yaml.Loader)  # as the tool has done
    return first_wrong_value(run, config) if isinstance(run, MgpuSplatTrainerConfig) else None


def speaker() -> str:
    """Who says the sentence that this process ends with: the tool, under the name it was called by; elsewhere `mgpu-splat`."""
    name = PurePath(sys.argv[0] if sys.argv else "").name
    name = kModules.get(name, name)
    return name if name in (*kTools, *kModules.values()) else "mgpu-splat"


def _inside(trace: TracebackType | None, function: str) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_name == function:
            return True
        trace = trace.tb_next
    return False


def moved_folder(config: TrainerConfig) -> Path | None:
    """Where the run is that this tool was asked to open, if its checkpoints lie beside the config.yml it was given, and not where
    that file says."""
    from ns_mgpu_splat.nerfstudio import checkpoint

    given = config_argument()
    if given is None or not given.is_file():
        return None
    folder = given.absolute().parent
    there = folder / config.relative_model_dir
    if not checkpoint.checkpoints(there) or there == config.get_checkpoint_dir().absolute():
        return None
    return folder
