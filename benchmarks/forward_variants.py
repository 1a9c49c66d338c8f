# SPDX-License-Identifier: Apache-2.0
"""Variants of stages "project", "bin" and "blend" side by side on the garden scenes of fast_step.py.

    python benchmarks/forward_variants.py [--only base ahead_4 ...] [--scenes 0 1 2 3 4 5] [--mode seen] [--keep FOLDER]

Needs nvcc, numpy, one GPU and $MGPU_TEST_DATA/garden; no torch. All six scenes take about 2 s a variant. Records and
images must be the base's to the bit; gradients differ by the order of atomics.
What is expected of the variants:

- `finish_N`, `record_N`: blocks of a kernel on a processor, so registers against warps.
- `look_1`: how many words of the running sum a lane asks for at a time.
- `heavy_N`: tiles with N times the mean length are blended in halves (4).
- `no_state`: a patch's first bucket keeps no state, which is that of an empty pixel: about half of the buckets at 4K, so 512
  of 656 bytes of each are neither written nor read; but the way back must know the bucket before it asks for its state.

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


VARIANTS: dict[str, Variant] = {
    "finish_4": of_project(("kFinishBlocks = 6;", "kFinishBlocks = 4;")),
    "finish_5": of_project(("kFinishBlocks = 6;", "kFinishBlocks = 5;")),
    "finish_8": of_project(("kFinishBlocks = 6;", "kFinishBlocks = 8;")),
    "record_3": of_project(("kRecordBlocks = 4;", "kRecordBlocks = 3;")),
    "record_5": of_project(("kRecordBlocks = 4;", "kRecordBlocks = 5;")),
    "look_1": of_project(("sum_of_blocks_before<4>", "sum_of_blocks_before<1>")),
    "heavy_8": of_blend(("kHeavyOfMany = 4,", "kHeavyOfMany = 8,")),
    "heavy_16": of_blend(("kHeavyOfMany = 4,", "kHeavyOfMany = 16,")),
    "no_state": of_blend(
        ("view * 64 + lit", "view * 128 + (first_bucket ? 64 : 0) + lit"),
        (
            "        out.state[at] = shared",
            "        if (first_bucket) continue;\n        out.state[at] = shared",
        ),
        ("      open_bucket();\n    }\n", "      first_bucket = false;\n      open_bucket();\n    }\n"),
        ("  int numbered = 0;\n", "  int numbered = 0;\n  bool first_bucket = true;\n"),
        ("        state[p] = in.state[at + p * kLanes];\n", ""),
        ("views[head.y >> 6]", "views[head.y >> 7]"),
        (
            "    float4 g[kLanePixels];\n    float behind",
            """    for (int p = 0; p < kLanePixels; ++p) {
      const bool inside = column < view.width && row + p < view.height;
      state[p] = make_float4(inside ? 1.f : -1.f, 0.f, 0.f, 0.f);
      if (b < buckets && !(head.y & 64)) state[p] = in.state[at + p * kLanes];
    }
    float4 g[kLanePixels];
    float behind""",
        ),
        (
            "(view.image.depth[to] - in.state_depth[at + p * kLanes])",
            "(view.image.depth[to] - (head.y & 64 ? 0.f : in.state_depth[at + p * kLanes]))",
        ),
    ),
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
        lines = {}
        for name in names:
            command = [str(folder / f"forward_{name}"), str(folder), options.mode, *arguments]
            lines[name] = [line.split() for line in run(command).splitlines()]
        print(
            "milliseconds: project (with the read-back), bin, blend, blend without a way back, blend backward"
        )
        for number, scene in enumerate(scenes):
            base = lines["base"][number]
            print(f"{scene[3]}: records, pairs, patches, buckets: {', '.join(base[5:9])}")
            for name in names:
                values = lines[name][number]
                times = " ".join(f"{float(value):7.3f}" for value in values[:5])
                same = values[5:8] + values[9:11] == base[5:8] + base[9:11]
                print(
                    f"  {name:12} {times}  gradient {values[11]}{'' if same else '  differs from the base'}"
                )


if __name__ == "__main__":
    main()
