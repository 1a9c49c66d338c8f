# SPDX-License-Identifier: Apache-2.0
"""The variant "strips" of forward_variants.py: what changes in cuda/splat/blend.cu around the forward kernel, which
blend_strips.cuh replaces."""

from __future__ import annotations

from variants import ROOT

BLEND = (ROOT / "cuda/splat/blend.cu").read_text()
SECTION = BLEND[BLEND.index("// What a block keeps in shared memory.") : BLEND.index("void blend_owner(")]
STRIPS: list[tuple[str, str]] = [
    (SECTION, (ROOT / "benchmarks/blend_strips.cuh").read_text()),
    (
        """\
constexpr int kBatch = kBlendThreads;  // records in shared memory at a time
""",
        """\
constexpr int kMet = 2 * kWarp;
""",
    ),
    (
        """\
constexpr int kBlendBlocks = 8;        // on a processor
constexpr int kHalves = 2;             // of a heavy tile: with one pixel a lane it takes as many blocks
""",
        """\
constexpr int kBlendWarps = 4;
constexpr int kBlendBlocks = 32 / kBlendWarps;
""",
    ),
    (
        """\
constexpr int kBlendThreads = kTilePixels / kLanePixels;
""",
        "",
    ),
    (
        """\
static_assert(kBlendThreads / kLanes == math::kTilePatches && kSides == math::kPatchesAcross &&
              kBucket == kWarp);""",
        "static_assert(kSides == math::kPatchesAcross && kBucket == kWarp);",
    ),
    (
        "kernel<<<static_cast<unsigned>(tiles + kHalves * heavy_room), kBlendThreads, 0, stream>>>(views, in, out);",
        """\
const int64_t warps = math::kTilePatches * heavy_room + math::kTilePatches / kSides * tiles;
  kernel<<<static_cast<unsigned>(warps / kBlendWarps), kBlendWarps * kWarp, 0, stream>>>(views, in, out);""",
    ),
    (
        "prepare_kernel(reinterpret_cast<const void*>(kernel), kBlendThreads, 0, self)",
        "prepare_kernel(reinterpret_cast<const void*>(kernel), kBlendWarps * kWarp, 0, self)",
    ),
    (
        "const int64_t times = tiles < 2 * resident",
        "const int64_t times = tiles * math::kTilePatches / kSides < 2 * kBlendWarps * resident",
    ),
    (
        """\
  const int32_t* bucket_count;
  const int32_t* bucket_record;
""",
        """\
  const int32_t* further_buckets;
  int32_t first_buckets;
  const int32_t* bucket_record;
""",
    ),
    (
        "const int32_t buckets = *in.bucket_count;",
        "const int32_t buckets = in.first_buckets + *in.further_buckets;",
    ),
    (
        """\
        state[p] = in.state[at + p * kLanes];
""",
        """\
        if (b >= in.first_buckets) state[p] = in.state[at + p * kLanes];
""",
    ),
    (
        """\
      const bool alive = count > 0 && state[p].x > 0.f;
""",
        """\
      if (b < in.first_buckets)
        state[p].x = column < view.width && row + p < view.height ? 1.f : -1.f;
      const bool alive = count > 0 && state[p].x > 0.f;
""",
    ),
    (
        "(view.image.depth[to] - in.state_depth[at + p * kLanes]) * g[p].w;",
        "(view.image.depth[to] - (b < in.first_buckets ? 0.f : in.state_depth[at + p * kLanes])) * g[p].w;",
    ),
    (
        """\
      owner.bucket.data(),        owner.bucket_count.data(),
      owner.bucket_record.data(), reinterpret""",
        """\
      owner.bucket.data(), owner.bucket_count.data(), first_buckets,
      owner.bucket_record.data(), reinterpret""",
    ),
    (
        "  const BackwardInput in{",
        """\
  const int32_t first_buckets = static_cast<int32_t>(owner.tiles.size()) * math::kTilePatches;
  const BackwardInput in{""",
    ),
    (
        """\
  read_back(&buckets, owner.bucket_count.data(), 1, self);
  if (buckets == 0) return;
""",
        """\
  read_back(&buckets, owner.bucket_count.data(), 1, self);
  buckets += first_buckets;
""",
    ),
]
