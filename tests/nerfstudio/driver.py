# SPDX-License-Identifier: Apache-2.0
"""Run several `ns-train` command lines one after the other in one process: importing Nerfstudio takes ten seconds.

Usage: driver.py '[["mgpu-splat", "--data", ...], ...]'. The last line of output is a JSON list of {"code", "text"}.
"""

from __future__ import annotations

import json
import sys
import traceback

import tyro
from nerfstudio.configs.method_configs import AnnotatedBaseConfigUnion
from nerfstudio.scripts.train import main
from nerfstudio.utils import writer


def run(arguments: list[str]) -> dict[str, object]:
    """One command line; the exit code is what the interpreter would make of what was raised."""
    writer.EVENT_WRITERS.clear()
    writer.EVENT_STORAGE.clear()
    try:
        main(tyro.cli(AnnotatedBaseConfigUnion, args=arguments))
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        return {"code": code, "text": str(end.code)}
    except Exception:
        return {"code": 1, "text": traceback.format_exc()}
    return {"code": 0, "text": ""}


if __name__ == "__main__":
    results = [run(arguments) for arguments in json.loads(sys.argv[1])]
    print(f"\n{json.dumps(results)}")
