# SPDX-License-Identifier: Apache-2.0
"""Variants of stage "step" side by side on made-up rows: what a GPU has not decided yet.

    python benchmarks/step_variants.py [--only base ...] [--rows 9000000] [--seen 1870000] [--half]

Each variant is cuda/splat/step.cu with some of its text replaced. Needs nvcc and one GPU; no torch. About 2 s a variant.
Seen rows one by one at random, in runs of 64, and 70 per cent of runs of 112,000 (the garden scene, replicated).
`ncu --set full -k regex:step_kernel` on the executable that --keep leaves says what the kernel waits for.

Those tried so far lost (docs/benchmarks.md, "On the step"); add the next ones to VARIANTS.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from variants import Variant, build, chosen, run

VARIANTS: dict[str, Variant] = {}


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description="Variants of stage step side by side.")
    parser.add_argument("--only", nargs="*", help="names of variants; the base is always there")
    parser.add_argument("--rows", type=int, default=9_000_000, help="rows of the table")
    parser.add_argument("--seen", type=int, default=1_870_000, help="about how many of them are seen")
    parser.add_argument("--slow", type=float, default=0.0, help="share of rows whose moments are near eps")
    parser.add_argument("--half", action="store_true", help="a half table")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build there, and leave the executables")
    options = parser.parse_args()
    names = chosen(options.only, VARIANTS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        build(folder, "step", {name: VARIANTS.get(name, Variant()) for name in names})
        for name in names:
            numbers = [options.rows, options.seen, options.slow, 7, int(options.half)]
            command = [str(folder / f"step_{name}"), *map(str, numbers), "1:100", "64:100", "112000:70"]
            print(name, run(command), sep="\n", flush=True)


if __name__ == "__main__":
    main()
