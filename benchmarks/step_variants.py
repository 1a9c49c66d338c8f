# SPDX-License-Identifier: Apache-2.0
"""Variants of stage "step" side by side on made-up rows: what a GPU has not decided yet.

    python benchmarks/step_variants.py [--only base ...] [--rows 9000000] [--seen 1870000] [--half]

Each variant is cuda/splat/step.cu with some of its text replaced. Needs nvcc and one GPU; no torch. About 2 s a variant.
Seen rows one by one at random, in runs of 64, and 70 per cent of runs of 112,000 (the garden scene, replicated).
`ncu --set full -k regex:step_kernel` on the executable that --keep leaves says what the kernel waits for.

What is expected of them (arithmetic and SASS; the first version of the kernel, whose windows did not start at sectors, was
bound by the L2: 87 per cent busy where the device's memory was 63, and 95 sectors a row against 48 needed):

- `together_1`, `together_4`: rows a lane loads at once. With 4, the first version lost its lines in the L1 to others.
- `blocks_6`: twelve warps a processor instead of sixteen, with 168 registers and more L1.
- `past_l1`: loads of the higher SH do not allocate lines in the L1; every sector is asked for once.
- `evict_first`: they are the first to leave the L2 (which then may fetch a sector again for a partial write).
- `prefetch`: each lane asks the L2 for its row's higher SH before it works on the rest of the row.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from variants import Variant, build, chosen, run

LOADS = [
    "return table.columns.shN.float32()[at];",
    "return table.state.exp_avg[kShColumn].float32()[at];",
    "has ? table.state.exp_avg_sq[kShColumn][at + w * kLanes] : 0.f",
]


def loads_by(function: str) -> list[tuple[str, str]]:
    """Replacements that load the higher SH and their moments with `function`."""
    return [
        (LOADS[0], f"return {function}(table.columns.shN.float32() + at);"),
        (LOADS[1], f"return {function}(table.state.exp_avg[kShColumn].float32() + at);"),
        (LOADS[2], f"has ? {function}(table.state.exp_avg_sq[kShColumn] + at + w * kLanes) : 0.f"),
    ]


PAST_L1 = """__device__ __forceinline__ float load_past_l1(const float* from) {
  float value;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

// Numbers of shN and of its first moment."""
PREFETCH = """  __pipeline_commit();
  if (row >= 0 && table.columns.shN.is_float32()) {
    const int64_t floats = 3 * table.columns.sh_rest;
    const float* const columns[] = {table.columns.shN.float32(), table.state.exp_avg[kShColumn].float32(),
                                    table.state.exp_avg_sq[kShColumn]};
    for (const float* column : columns) {
      const uint64_t begin = reinterpret_cast<uint64_t>(column + row * floats) & ~uint64_t{15};
      const uint64_t end = reinterpret_cast<uint64_t>(column + (row + 1) * floats) & ~uint64_t{15};
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin),
                   "r"(static_cast<unsigned>(end - begin)));
    }
  }
"""
VARIANTS: dict[str, Variant] = {
    name: Variant("step.cu", ("step",), replacements)
    for name, replacements in {
        "together_1": [("kTogether = 2;", "kTogether = 1;")],
        "together_4": [("kTogether = 2;", "kTogether = 4;")],
        "blocks_6": [("kStepBlocks = 8;", "kStepBlocks = 6;")],
        "past_l1": [("// Numbers of shN and of its first moment.", PAST_L1), *loads_by("load_past_l1")],
        "evict_first": loads_by("__ldcs"),
        "prefetch": [("  __pipeline_commit();\n", PREFETCH)],
    }.items()
}


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
