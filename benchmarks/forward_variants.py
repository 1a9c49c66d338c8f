# SPDX-License-Identifier: Apache-2.0
"""Variants of stages "project", "bin" and "blend" side by side on the garden scenes of fast_step.py.

    python benchmarks/forward_variants.py [--only base ahead_4 ...] [--scenes 0 1 2 3 4 5] [--mode seen] [--keep FOLDER]

Needs nvcc, numpy, one GPU and $MGPU_TEST_DATA/garden; no torch. All six scenes take about 2 s a variant. Records and
images must be the base's to the bit; gradients differ by the order of atomics.
What is expected of the variants:

- `finish_N`: blocks of the colours' kernel on a processor, so registers against warps.
- `look_1`, `cull_4`, `emit_4`: how many words of the running sum a lane asks for at a time, in the kernel of the records (4),
  of the candidates (1) and of the tiles' lists (1), where a quarter of the samples stands at the barrier behind it.
- `match`: four instructions a bit of a digit, not seven, to find the lanes with the same: 2,296 of 2,728 instructions in a sort.
- `three_lanes`: a record that blend fetches by three lanes, as on its way back. Alphas taken ahead and records announced to
  the second-level cache both made heavy tiles slower (docs/benchmarks.md), so it is not latency that they wait for; a fetch of
  32 records looks up 128 lines, this one some 72.
- `heavy_8`: tiles with eight times the mean length are blended in halves (4).

`ncu --set full -k regex:'record_kernel|blend_kernel'` on the executable that --keep leaves says what a kernel waits for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
from variants import ROOT, Variant, build, chosen, run

MODES = ("none", "seen", "missed", "noise")
SCENES = [  # grid, width, scale, name
    (1, 648, 1.0, "112k@420p"),
    (1, 1920, 1.0, "112k@1080p"),
    (5, 1920, 1.0, "2.8M@1080p"),
    (9, 1920, 0.5, "9M@1080p"),
    (9, 3840, 0.5, "9M@4K"),
    (21, 3840, 0.5, "49M@4K"),
]


def of_project(*replacements: tuple[str, str]) -> Variant:
    """A variant of project.cu."""
    return Variant("project.cu", ("project",), list(replacements))


def of_blend(*replacements: tuple[str, str]) -> Variant:
    """A variant of blend.cu."""
    return Variant("blend.cu", ("blend",), list(replacements))


def of_radix(*replacements: tuple[str, str]) -> Variant:
    """A variant of the radix sort."""
    return Variant("radix.h", ("bin",), list(replacements))


MATCH = (
    """    const bool set = digit & bit;
    const unsigned with = __ballot_sync(kAllLanes, set);
    same &= set ? with : ~with;
""",
    """    unsigned with;
    asm volatile(
        "{\\n.reg .pred set;\\n.reg .b32 masked;\\n"
        "and.b32 masked, %1, %2;\\nsetp.ne.u32 set, masked, 0;\\n"
        "vote.sync.ballot.b32 %0, set, 0xffffffff;\\n@!set not.b32 %0, %0;\\n}"
        : "=r"(with)
        : "r"(digit), "r"(bit));
    same &= with;
""",
)

# A record's 48 bytes by three lanes side by side: a line of the cache is looked up once for them, not three times.
THREE_LANES = [
    (
        """    if (id < 0) return;
    const uint32_t to = shared_address(&shared.record[buffer][threadIdx.x]);
    const char* from = reinterpret_cast<const char*>(in.record + id);
    for (int i = 0; i < 3; ++i) copy_16(to + 16 * i, from + 16 * i);
    copy_8(shared_address(&shared.half_extent[buffer][threadIdx.x]), in.half_extent + id);
""",
        """#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const int of = (k * kWarp + lane) / 3, piece = 16 * ((k * kWarp + lane) % 3);
      const int32_t which = __shfl_sync(kAllLanes, id, of);
      if (which < 0) continue;
      copy_16(shared_address(&shared.record[buffer][warp * kWarp + of]) + piece,
              reinterpret_cast<const char*>(in.record + which) + piece);
    }
    if (id < 0) return;
    copy_8(shared_address(&shared.half_extent[buffer][threadIdx.x]), in.half_extent + id);
""",
    ),
    (
        """    copies_done();
    uint32_t met = 0;
""",
        """    copies_done();
    __syncwarp();
    uint32_t met = 0;
""",
    ),
]

VARIANTS: dict[str, Variant] = {
    "three_lanes": of_blend(*THREE_LANES),
    "finish_5": of_project(("kFinishBlocks = 6;", "kFinishBlocks = 5;")),
    "finish_8": of_project(("kFinishBlocks = 6;", "kFinishBlocks = 8;")),
    "look_1": of_project(("sum_of_blocks_before<4>", "sum_of_blocks_before<1>")),
    "cull_4": of_project(("sum_of_blocks_before(state +", "sum_of_blocks_before<4>(state +")),
    "emit_4": Variant(
        "bin.cu", ("bin",), [("sum_of_blocks_before(out.state", "sum_of_blocks_before<4>(out.state")]
    ),
    "match": of_radix(MATCH),
    "heavy_8": of_blend(("kHeavyOfMany = 4,", "kHeavyOfMany = 8,")),
}


def write_garden(folder: Path) -> None:
    """What forward_stage reads."""
    data_folder = os.environ.get("MGPU_TEST_DATA") or ROOT.parent / "shared" / "data"
    data = np.load(Path(data_folder) / "garden" / "test_garden.npz")
    means = data["means3d"].astype(np.float32)
    inside = ((means >= -2) & (means <= 2)).all(-1)
    means[inside].tofile(folder / "means.bin")
    (data["colors"][inside].astype(np.float32) / 255).tofile(folder / "colors.bin")
    size = [data["width"].item(), data["height"].item()]
    camera = np.concatenate([data["viewmats"][0].ravel(), data["Ks"][0].ravel(), size])
    camera.astype(np.float64).tofile(folder / "camera.bin")


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description="Variants of the stages of a forward pass side by side.")
    parser.add_argument("--only", nargs="*", help="names of variants; the base is always there")
    parser.add_argument(
        "--scenes", nargs="*", type=int, default=list(range(len(SCENES))), help="their numbers"
    )
    parser.add_argument("--mode", choices=MODES, default="seen", help="which rows missed steps")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="build there, and leave the executables")
    parser.add_argument("--build-only", action="store_true", help="run nothing")
    parser.add_argument("--no-build", action="store_true", help="run what --keep left there")
    options = parser.parse_args()
    names = chosen(options.only, VARIANTS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not options.no_build:
            write_garden(folder)
            build(folder, "forward", {name: VARIANTS.get(name, Variant()) for name in names})
        if options.build_only:
            return
        scenes = [SCENES[number] for number in options.scenes]
        arguments = [str(value) for scene in scenes for value in scene[:3]]
        lines: dict[str, list[list[str]]] = {}
        for name in names:
            command = [str(folder / f"forward_{name}"), str(folder), options.mode, *arguments]
            try:
                lines[name] = [line.split() for line in run(command, seconds=20).splitlines()]
            except RuntimeError as error:
                if name == "base":
                    raise
                print(f"{name} failed: {error}", flush=True)
        print(
            "milliseconds: project (with the read-back), bin, blend, blend without a way back, blend backward"
        )
        for number, scene in enumerate(scenes):
            base = lines["base"][number]
            print(f"{scene[3]}: records, pairs, patches, buckets: {', '.join(base[5:9])}")
            for name in lines:
                values = lines[name][number]
                times = " ".join(f"{float(value):7.3f}" for value in values[:5])
                same = values[5:8] + values[9:11] == base[5:8] + base[9:11]
                print(
                    f"  {name:12} {times}  gradient {values[11]}{'' if same else '  differs from the base'}"
                )


if __name__ == "__main__":
    main()
