# SPDX-License-Identifier: Apache-2.0
"""Run several `ns-train` command lines one after the other in one process.

`drive([["mgpu-splat", "--data", ...], ...])`: the last line of output is a JSON list of {"code", "text", "losses"}: exit
code, message, the loss of each step.
"""

from __future__ import annotations

import json
import traceback

import tyro
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.scripts.train import main
from nerfstudio.utils import writer

from ns_mgpu_splat.nerfstudio.trainer import MgpuSplatTrainer

LOSSES: list[float] = []
train_iteration = MgpuSplatTrainer.train_iteration


def recorded(self: MgpuSplatTrainer, step: int):
    """The trainer's iteration; its loss is kept."""
    result = train_iteration(self, step)
    LOSSES.append(result.loss)
    return result


MgpuSplatTrainer.train_iteration = recorded  # type: ignore[method-assign]


def parse(arguments: list[str]) -> TrainerConfig:
    """The configuration that `ns-train` makes of a command line."""
    return tyro.cli(AnnotatedBaseConfigUnion, args=arguments)


def run(arguments: list[str]) -> dict[str, object]:
    """One command line; the exit code is what the interpreter would make of what was raised."""
    writer.EVENT_WRITERS.clear()
    writer.EVENT_STORAGE.clear()
    LOSSES.clear()
    try:
        main(parse(arguments))
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        return {"code": code, "text": str(end.code), "losses": list(LOSSES)}
    except Exception:
        return {"code": 1, "text": traceback.format_exc(), "losses": list(LOSSES)}
    return {"code": 0, "text": "", "losses": list(LOSSES)}


def drive(lines: list[list[str]]) -> None:
    """Run them and print the results."""
    results = []
    for arguments in lines:
        print("\n@@ run", flush=True)  # train_many cuts the output here
        results.append(run(arguments))
    print("\n@@ run")
    print(f"\n{json.dumps(results)}")
