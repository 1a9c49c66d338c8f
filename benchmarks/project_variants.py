# SPDX-License-Identifier: Apache-2.0
"""Variants of stages "project" and "bin" side by side on the garden scenes: what a GPU has not decided yet.

    python benchmarks/project_variants.py [--only base ahead_4 ...] [--scenes 0 1 2 3 4 5] [--modes seen missed]

Each variant is the tree's cuda/ with some text of one file replaced. Needs nvcc, numpy, one GPU and
$MGPU_TEST_DATA/garden; no torch. A scene takes 1 to 4 s a variant. Records, pairs and patches must be the base's.
`ncu --set full -k regex:'record_kernel|cull_kernel'` on the executable that --keep leaves says what a kernel waits for.

What is expected of them (arithmetic and SASS, not measured):

- `blocks_2`, `blocks_4`: record_kernel with 128 or 64 registers instead of 80. Before its instructions were cut, 2 was
  quicker at 9 M rows (0.73 against 0.78 ms for the stage) and slower at 112 k.
- `rows_2`: cull_kernel with two rows a thread: fewer registers, twice the blocks in the chain of sums.
- `ahead_1`, `ahead_4`, `ahead_16`: how many tiles before it a radix sort's block asks at once.
- `items_10`, `items_16`: items a thread of the large radix sorts (12).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blend_variants import NVCC, NVCC_FLAGS, ROOT, SCENES, chosen, replaced, run, write_garden

MODES = ("none", "seen", "missed", "noise")
ALL_SCENES = [*SCENES, (21, 3840, 0.5, "49M@4K")]
# name: source to compile again, file that is changed, replacements
VARIANTS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "blocks_2": ("project", "project.cu", [("kBlocks = 3;", "kBlocks = 2;")]),
    "blocks_4": ("project", "project.cu", [("kBlocks = 3;", "kBlocks = 4;")]),
    "rows_2": (
        "project",
        "project.cu",
        [
            ("kCullRows = 4;", "kCullRows = 2;"),
            ("static_assert(kCullRows * kWarps == kWarp);", ""),
            (
                "const int count = s_before[lane];",
                "const int count = lane < kCullRows * kWarps ? s_before[lane] : 0;",
            ),
        ],
    ),
    "ahead_1": ("bin", "radix.h", [("kLookAhead = 8;", "kLookAhead = 1;")]),
    "ahead_4": ("bin", "radix.h", [("kLookAhead = 8;", "kLookAhead = 4;")]),
    "ahead_16": ("bin", "radix.h", [("kLookAhead = 8;", "kLookAhead = 16;")]),
    "items_10": ("bin", "radix.h", [("kManyItems = 12;", "kManyItems = 10;")]),
    "items_16": ("bin", "radix.h", [("kManyItems = 12;", "kManyItems = 16;")]),
}


def build(folder: Path, names: list[str]) -> None:
    """One executable a variant, `project_<name>`."""
    objects = folder / "stages"
    run(["bash", "tests/cuda/build.sh", str(objects)])
    main = str(folder / "project_stage.o")
    run([*NVCC, *NVCC_FLAGS, "-c", "benchmarks/project_stage.cu", "-o", main])

    def one(name: str) -> None:
        skipped, parts = {"check_stages.cpp.o"}, [main]
        if name != "base":
            source, changed, replacements = VARIANTS[name]
            tree = folder / name
            shutil.copytree(ROOT / "cuda", tree)
            path = tree / "splat" / changed
            path.write_text(replaced(path.read_text(), *replacements, source=f"{changed} ({name})"))
            flags = [flag for flag in NVCC_FLAGS if flag != "-Icuda"]
            compiled = str(folder / f"{name}.o")
            run([*NVCC, *flags, f"-I{tree}", "-c", str(tree / "splat" / f"{source}.cu"), "-o", compiled])
            skipped.add(f"{source}.cu.o")
            parts.append(compiled)
        others = [str(path) for path in objects.glob("*.o") if path.name not in skipped]
        run([*NVCC, *others, *parts, "-o", str(folder / f"project_{name}"), "-lpthread"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, names))


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description="Variants of stages project and bin side by side.")
    parser.add_argument("--only", nargs="*", help="names of variants; the base is always there")
    parser.add_argument(
        "--scenes", nargs="*", type=int, default=list(range(len(ALL_SCENES))), help="their numbers"
    )
    parser.add_argument("--modes", nargs="*", choices=MODES, default=["seen"], help="what rows missed")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build there, and leave the executables")
    options = parser.parse_args()
    names = chosen(options.only, VARIANTS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_garden(folder)
        build(folder, names)
        print("milliseconds: project (with the read-back), bin")
        for number in options.scenes:
            grid, width, scale, scene = ALL_SCENES[number]
            for mode in options.modes:
                counts: list[str] = []
                for name in names:
                    line = run(
                        [
                            str(folder / f"project_{name}"),
                            str(folder),
                            str(grid),
                            str(width),
                            str(scale),
                            mode,
                        ]
                    ).split()
                    counts = counts or line[2:]
                    note = "" if line[2:] == counts else f"  counts differ: {line[2:]}"
                    print(
                        f"{scene:12} {mode:7} {name:10} {float(line[0]):7.3f} {float(line[1]):7.3f}{note}",
                        flush=True,
                    )
                print(f"{scene:12} {mode:7} records, pairs, patches: {', '.join(counts)}")


if __name__ == "__main__":
    main()
