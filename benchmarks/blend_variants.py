# SPDX-License-Identifier: Apache-2.0
"""Variants of cuda/splat/blend.cu side by side on the garden scenes: what a GPU has not decided yet.

    python benchmarks/blend_variants.py [--only base loads ...] [--scenes 0 1 2 3 4] [--sources-only] [--json FILE]

Each variant is the source with some of its text replaced. Needs nvcc, numpy, one GPU and $MGPU_TEST_DATA/garden; no torch.
Builds in about 2 minutes on 16 cores; a scene takes 1 to 3 s a variant. Images must be the base's to the bit, and the
gradients differ from the base's only by the order of atomics. A number that changes in the source makes a replacement
fail by name: mend or drop it here.

What is expected of them (arithmetic and SASS, not measured):

- `loads`: backward; the pixels' loads without branches, so that the second row's do not wait for the first one's.
- `prefetch`: backward; the next two buckets come to the L2 while these are walked back (40 instructions of 2,700).
- `at_once_4`: both; four alphas before the first blend: 8 chains instead of 4 in flight, for tiles with long lists,
  whose four warps are alone on their schedulers at the end. `at_once_1`: fewer registers, more warps.
- `blocks_6`, `blocks_8`, `blocks_10`: forward; registers against warps.
- `sorted`: forward; the heaviest tiles from the longest list down. At 9 M rows and 1080p 317 of 9,360 tiles hold 56 % of
  all pairs, and the longest list alone (21,453 records, walked by one block) is 0.8 of what a processor has to do on average.
- `one_pixel`: forward; a pixel a lane and eight warps a tile, as before two pixels shared a record's load. It
  was quicker where few long lists decide (9 M rows at 1080p: 0.90 against 1.15 ms, 648x420: 0.095 against 0.13), and
  slower elsewhere (4K: 1.02 against 0.83). If it still is: give the tiles of `find_heavy_kernel` to it, beside the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
ARCH = os.environ.get("MGPU_CUDA_ARCHS", "90")
NVCC = [str(CUDA / "bin/nvcc"), f"-gencode=arch=compute_{ARCH},code=sm_{ARCH}"]
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--extended-lambda",
    "-lineinfo",
    "-Icuda",
    "-DMGPU_CUDA=1",
]
SCENES = [  # grid, width, scale, name
    (1, 648, 1.0, "112k@420p"),
    (1, 1920, 1.0, "112k@1080p"),
    (5, 1920, 1.0, "2.8M@1080p"),
    (9, 1920, 0.5, "9M@1080p"),
    (9, 3840, 0.5, "9M@4K"),
]

BACK_BOUNDS = ("__launch_bounds__(kBackThreads)\n", "__launch_bounds__(kBackThreads, 4)\n")
FRONT_BOUNDS = "__launch_bounds__(kBlendThreads)\n"

LOADS_BEGIN = "    float4 g[kLanePixels];\n    float behind[kLanePixels];\n"
LOADS_END = "#pragma unroll\n    for (int p = 0; p < kLanePixels; ++p) {\n      const float parts[4]"
LOADS = """\
    float4 g[kLanePixels] = {};
    float behind[kLanePixels] = {};
    math::PatchPixel pixel[kLanePixels];
    bool alive[kLanePixels];
    int64_t
        to[kLanePixels];  // where it lies in the images; 0 if it has ended, so that loads need no branches
#pragma unroll
    for (int p = 0; p < kLanePixels; ++p) {
      alive[p] = count > 0 && state[p].x > 0.f;
      pixel[p] = {state[p].x, alive[p] ? math::kAlphaMin : math::kNever};
      to[p] = alive[p] ? int64_t{row + p} * view.width + column : 0;
    }
    if (view.grad.rgb) {
      float grad[kLanePixels][3], rgb[kLanePixels][3];
#pragma unroll
      for (int p = 0; p < kLanePixels; ++p) {
#pragma unroll
        for (int c = 0; c < 3; ++c) {
          grad[p][c] = __ldg(view.grad.rgb + 3 * to[p] + c);
          rgb[p][c] = __ldg(view.image.rgb + 3 * to[p] + c);
        }
      }
#pragma unroll
      for (int p = 0; p < kLanePixels; ++p) {
        if (!alive[p]) continue;
        g[p].x = grad[p][0];
        g[p].y = grad[p][1];
        g[p].z = grad[p][2];
        behind[p] = (rgb[p][0] - state[p].y) * g[p].x + (rgb[p][1] - state[p].z) * g[p].y +
                    (rgb[p][2] - state[p].w) * g[p].z;  // with the background
      }
    }
    if constexpr (kDepth) {
      if (view.grad.depth) {
        for (int p = 0; p < kLanePixels; ++p) {
          if (!alive[p]) continue;
          g[p].w = __ldg(view.grad.depth + to[p]);
          behind[p] += (__ldg(view.image.depth + to[p]) - in.state_depth[at + p * kLanes]) * g[p].w;
        }
      }
    }
    if (view.grad.accumulation) {
      for (int p = 0; p < kLanePixels; ++p) {
        if (alive[p])
          behind[p] -= (1.f - __ldg(view.image.accumulation + to[p])) * __ldg(view.grad.accumulation + to[p]);
      }
    }
"""

PREFETCH_BEFORE = "template <bool kDepth, bool kAbs, bool kSlots>\n__global__"
PREFETCH = """\
// Brings two buckets, which the warp reads next, from memory to the L2.
__device__ __forceinline__ void prefetch_buckets(const BackwardInput& in, int32_t first) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kLine = 128;  // bytes
  constexpr int kStateLines = kSides * kBucket * sizeof(float4) / kLine,
                kListLines = kSides * kBucket * 4 / kLine;
  const char* at = nullptr;
  if (lane < kStateLines)
    at = reinterpret_cast<const char*>(in.state + int64_t{first} * kBucket) + lane * kLine;
  else if (lane < kStateLines + kListLines)
    at = reinterpret_cast<const char*>(in.bucket_record + int64_t{first} * kBucket) +
         (lane - kStateLines) * kLine;
  else if (lane == kStateLines + kListLines)
    at = reinterpret_cast<const char*>(in.bucket + first);
  if (at) asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

"""
PREFETCH_CALL_BEFORE = "    const int count = head.y & 63;\n"
PREFETCH_CALL = "    if (first + stride + 1 < buckets) prefetch_buckets(in, first + stride);\n"

SORT_BEFORE = "// Appends to a list in shared memory"
SORT = """\
// The heaviest tiles, longest list first: each counts those that go before it.
__global__ void __launch_bounds__(kThreads)
    sort_heaviest_kernel(const int64_t* tile_begin, const int32_t* heavy, const int32_t* heavy_count,
                         int32_t* sorted) {
  const int32_t i = blockIdx.x * kThreads + threadIdx.x, count = *heavy_count;
  if (i >= count) return;
  const int64_t entries = tile_begin[heavy[i] + 1] - tile_begin[heavy[i]];
  int32_t rank = 0;
  for (int32_t k = 0; k < count; ++k) {
    const int64_t other = tile_begin[heavy[k] + 1] - tile_begin[heavy[k]];
    rank += other > entries || (other == entries && k < i);
  }
  sorted[rank] = heavy[i];
}

"""
SORT_LAUNCH_BEFORE = """\
    KERNEL_CHECK("blend", self, tiles);
  }
  Buffer<ViewImages> storage;
"""
SORT_LAUNCH = """\
    sort_heaviest_kernel<<<blocks_for(heavy_room / kHeaviest + 1, kThreads), kThreads, 0, stream>>>(
        owner.tile_begin.data(), heavy.data(), owner.bucket_count.data() + 1, sorted.data());
"""


def replaced(text: str, *pairs: tuple[str, str], source: str = "blend.cu") -> str:
    """`text` with each pair's first replaced by its second; every first must be there."""
    for old, new in pairs:
        if old not in text:
            raise ValueError(f"{source} has changed; not found any more: {old!r}")
        text = text.replace(old, new)
    return text


def chosen(only: list[str] | None, known: Iterable[str]) -> list[str]:
    """The base and those of `known` that `only` names; all without it. Exits naming a variant that there is not."""
    names = ["base", *(name for name in known if name != "base")]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        sys.exit(f"no variant {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if only is None or name == "base" or name in only]


def with_loads(text: str) -> str:
    """Pixels' loads without branches."""
    begin, end = text.index(LOADS_BEGIN), text.index(LOADS_END)
    return replaced(text[:begin] + LOADS + text[end:], BACK_BOUNDS)


def with_prefetch(text: str) -> str:
    """The next buckets to the L2."""
    return replaced(
        text,
        (PREFETCH_BEFORE, PREFETCH + PREFETCH_BEFORE),
        (PREFETCH_CALL_BEFORE, PREFETCH_CALL + PREFETCH_CALL_BEFORE),
        BACK_BOUNDS,
    )


def with_sorted(text: str) -> str:
    """The heaviest tiles in order."""
    return replaced(
        text,
        (SORT_BEFORE, SORT + SORT_BEFORE),
        (SORT_LAUNCH_BEFORE, SORT_LAUNCH + SORT_LAUNCH_BEFORE),
        (
            "  Buffer<int32_t> heavy(heavy_room, self);\n",
            "  Buffer<int32_t> heavy(heavy_room, self), sorted(heavy_room, self);\n",
        ),
        (
            "    tile = in.heavy[blockIdx.x];\n",
            "    tile = (blockIdx.x < in.heavy_count[0] ? in.sorted : in.heavy)[blockIdx.x];\n",
        ),
        ("  const int32_t* heavy_count;  //", "  const int32_t* sorted;\n  const int32_t* heavy_count;  //"),
        (
            "                      heavy.data(),\n",
            "                      heavy.data(),\n                      sorted.data(),\n",
        ),
    )


def with_one_pixel(text: str) -> str:
    """A pixel a lane in the forward kernel; buckets keep their layout."""
    text = replaced(
        text,
        (
            "constexpr int kBlendThreads = kTilePixels / kLanePixels;",
            "constexpr int kBlendThreads = kTilePixels;",
        ),
        ("static_assert(kBlendThreads / kLanes == math::kTilePatches && ", "static_assert("),
    )
    begin, end = text.index("// ---- forward"), text.index("// ---- back")
    front = text[begin:end]
    for name, value in (("kLanePixels", "1"), ("kLanes", "kWarp"), ("kSides", "1")):
        front = front.replace(name, value)
    front = replaced(
        front,
        ("row = patch_y + lane_row();", "row = patch_y + lane / math::kPatchX;"),
        ("const unsigned side = side_mask();", "const unsigned side = kAllLanes;"),
        ("    static_assert(1 == 2);\n", ""),
        ("math::smaller(pixel[0].least, pixel[1].least)", "pixel[0].least"),
        ("length[0] > length[1] ? length[0] : length[1]", "length[0]"),
        ("(lane < kWarp ? length[0] : length[1])", "length[0]"),
        (
            "      out.state[at] = ",
            "      const int number = lane / 8 % 2 * 16 + lane / 16 * 8 + lane % 8;\n"
            "      out.state[at - i + number] = ",
        ),
        ("out.depth[at] = ", "out.depth[at - i + number] = "),
    )
    return text[:begin] + front + text[end:]


def variants(text: str) -> dict[str, str]:
    """Sources by name."""
    at_once = "constexpr int kAtOnce = 2;"
    out = {"base": text, "loads": with_loads(text), "prefetch": with_prefetch(text)}
    out["loads_prefetch"] = replaced(
        with_loads(text),
        (PREFETCH_BEFORE, PREFETCH + PREFETCH_BEFORE),
        (PREFETCH_CALL_BEFORE, PREFETCH_CALL + PREFETCH_CALL_BEFORE),
    )
    out["at_once_1"] = replaced(text, (at_once, at_once.replace("2", "1")))
    bounds = FRONT_BOUNDS.replace("kBlendThreads)", "kBlendThreads, 6)")  # else it spills
    out["at_once_4"] = replaced(
        text, (at_once, at_once.replace("2", "4")), (FRONT_BOUNDS, bounds), BACK_BOUNDS
    )
    for blocks in (6, 8, 10):
        bounds = FRONT_BOUNDS.replace("kBlendThreads)", f"kBlendThreads, {blocks})")
        out[f"blocks_{blocks}"] = replaced(text, (FRONT_BOUNDS, bounds))
    out["sorted"] = with_sorted(text)
    out["one_pixel"] = with_one_pixel(text)
    return out


def run(command: list[str]) -> str:
    """Standard output; an error shows what the command said."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path, sources: dict[str, str]) -> None:
    """One executable a variant, `blend_<name>`."""
    objects = folder / "stages"
    run(["bash", "tests/cuda/build.sh", str(objects)])
    others = [
        str(path) for path in objects.glob("*.o") if path.name not in ("blend.cu.o", "check_stages.cpp.o")
    ]
    main = str(folder / "blend_stage.o")
    compiler = ["g++", "-std=c++20", "-O2", "-Wno-unknown-pragmas", "-Icuda", f"-I{CUDA}/include"]
    run([*compiler, "-DMGPU_CUDA=1", "-c", "benchmarks/blend_stage.cpp", "-o", main])

    def one(name: str) -> None:
        source, compiled = folder / f"{name}.cu", folder / f"{name}.o"
        source.write_text(sources[name])
        run([*NVCC, *NVCC_FLAGS, "-c", str(source), "-o", str(compiled)])
        run([*NVCC, *others, str(compiled), main, "-o", str(folder / f"blend_{name}"), "-lpthread"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, sources))


def write_garden(folder: Path) -> None:
    """What blend_stage reads."""
    data_folder = os.environ.get("MGPU_TEST_DATA") or ROOT.parent / "shared" / "data"
    data = np.load(Path(data_folder) / "garden" / "test_garden.npz")
    means = data["means3d"].astype(np.float32)
    inside = ((means >= -2) & (means <= 2)).all(-1)
    means[inside].tofile(folder / "means.bin")
    (data["colors"][inside].astype(np.float32) / 255).tofile(folder / "colors.bin")
    size = [data["width"].item(), data["height"].item()]
    np.concatenate([data["viewmats"][0].ravel(), data["Ks"][0].ravel(), size]).astype(np.float64).tofile(
        folder / "camera.bin"
    )


def compare(base: np.ndarray, other: np.ndarray, image_floats: int) -> str:
    """The image's differing floats, and the gradient's relative L2 distance."""
    differ = np.count_nonzero(base[:image_floats] != other[:image_floats])
    base, other = base[image_floats:].astype(np.float64), other[image_floats:].astype(np.float64)
    distance = float(np.linalg.norm(other - base)) / max(float(np.linalg.norm(base)), 1e-30)
    return f"{differ} floats of the image differ, gradient {distance:.1e}"


def main() -> None:
    """Build, run, print."""
    parser = argparse.ArgumentParser(description="Variants of the blend stage side by side.")
    parser.add_argument("--only", nargs="*", help="names of variants; the base is always there")
    parser.add_argument(
        "--scenes", nargs="*", type=int, default=list(range(len(SCENES))), help="their numbers"
    )
    parser.add_argument(
        "--sources-only", type=Path, metavar="FOLDER", help="write the variants there, and end"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    sources = variants((ROOT / "cuda/splat/blend.cu").read_text())
    sources = {name: sources[name] for name in chosen(options.only or None, sources)}
    if options.sources_only:
        options.sources_only.mkdir(parents=True, exist_ok=True)
        for name, text in sources.items():
            (options.sources_only / f"{name}.cu").write_text(text)
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_garden(folder)
        build(folder, sources)
        print("milliseconds: forward, backward, forward without what the way back needs")
        for number in options.scenes:
            grid, width, scale, scene = SCENES[number]
            base: np.ndarray | None = None
            for name in sources:
                result = folder / "result.bin"
                line = run(
                    [
                        str(folder / f"blend_{name}"),
                        str(folder),
                        str(grid),
                        str(width),
                        str(scale),
                        str(result),
                    ]
                ).split()
                forward, backward, show = (float(value) for value in line[:3])
                visible, pairs, buckets, steps = (int(value) for value in line[3:])
                values = np.fromfile(result, np.float32)
                image_floats = values.size - 12 * visible
                note = "" if base is None else compare(base, values, image_floats)
                base = values if base is None else base
                print(f"{scene:12} {name:16} {forward:7.3f} {backward:7.3f} {show:7.3f}  {note}", flush=True)
                rows.append(
                    {"scene": scene, "variant": name, "forward": forward, "backward": backward, "show": show}
                    | {"visible": visible, "pairs": pairs, "buckets": buckets, "steps": steps}
                )
            print(
                f"{scene:12} {visible} records, {pairs} pairs, {buckets} buckets, {steps} (patch, record) pairs lit"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
