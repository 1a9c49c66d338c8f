// SPDX-License-Identifier: Apache-2.0
// cover.h: the tiles that a record meets, by a warp: walked once in double precision (math/tile.h), kept as
// 16 bytes from which stage "bin" lists them again. Also the patches of its tiles that blend's cull can meet.
#pragma once
#include "math/patch.h"
#include "splat/assign_kernels.h"
#include "splat/kernels.h"

namespace mgpu::splat {

constexpr int kTallRows = 8;  // rows of tiles; a taller record is spread over its warp

// This warp's number among those of the launch, which go round the blocks, and how many there are. Large
// records are neighbours: warps that take them in turn have as many each.
__device__ __forceinline__ int64_t warp_of_launch() {
  return int64_t{threadIdx.x / kWarp} * gridDim.x + blockIdx.x;
}
__device__ __forceinline__ int64_t warps_of_launch() { return int64_t{gridDim.x} * kWarps; }

// Places in the mask of a small rectangle of tiles, row by row.
struct MaskPlaces {
  float inverse;

  __device__ __forceinline__ explicit MaskPlaces(int columns) : inverse(1.f / static_cast<float>(columns)) {}
  // Exact: there are at most kSmallTiles places, so the quotient is 1/64 off a whole number at least.
  __device__ __forceinline__ int row_of(int bit) const {
    return static_cast<int>((static_cast<float>(bit) + 0.5f) * inverse);
  }
};
static_assert(kSmallTiles <= 32);

// Patches of the image that come within the record's half extents, as frame.h defines it; ends exclusive.
struct PatchBox {
  int x0, x1, y0, y1;

  __device__ __forceinline__ int32_t in_span(int tile_y, int first_tile, int end_tile) const {
    constexpr int kAcross = math::kPatchesAcross, kDown = math::kPatchesDown;
    const int across = min(kAcross * end_tile, x1) - max(kAcross * first_tile, x0);
    const int down = min(kDown * (tile_y + 1), y1) - max(kDown * tile_y, y0);
    return max(across, 0) * max(down, 0);
  }
};

__device__ __forceinline__ PatchBox patch_box(const float mean2d[2], float2 half_extent) {
  const auto first = [](float centre, float half, float patch) {
    const float reach = half * 1.000002f + 0.5f * (patch - 1.f) + 0.03f + 1e-6f * fabsf(centre);
    return max(__float2int_ru((centre - 0.5f * patch - reach) / patch), 0);
  };
  const auto end = [](float centre, float half, float patch) {
    const float reach = half * 1.000002f + 0.5f * (patch - 1.f) + 0.03f + 1e-6f * fabsf(centre);
    return min(__float2int_rd((centre - 0.5f * patch + reach) / patch), 1 << 29) + 1;
  };
  return {first(mean2d[0], half_extent.x, math::kPatchX), end(mean2d[0], half_extent.x, math::kPatchX),
          first(mean2d[1], half_extent.y, math::kPatchY), end(mean2d[1], half_extent.y, math::kPatchY)};
}

// Half extents of the bounding box of an ellipse, rounded outwards.
__device__ __forceinline__ float2 half_extent_of(const math::TileEllipse& ellipse) {
  return make_float2(static_cast<float>(ellipse.half_width * (1.0 + 1e-6)),
                     static_cast<float>(ellipse.half_height * (1.0 + 1e-6)));
}

// What the walk over rows of tiles reads, of the lane's own record or of another lane's.
struct TileWalk {
  math::TileEllipse ellipse;
  uint16_t rect[4];
  PatchBox box;

  __device__ __forceinline__ int rows() const { return rect[3] - rect[1]; }
  __device__ __forceinline__ int columns() const { return rect[2] - rect[0]; }
  __device__ __forceinline__ bool is_small() const { return rows() * columns() <= kSmallTiles; }
};

// By all lanes of a warp: what the tiles of each lane's record come to. A low record is walked by its own
// lane, a tall one by all. A Part starts out as `empty`; it has add(walk, view, y, span) for a row of tiles
// that meets the ellipse, and over_warp(), the total of all lanes' parts. `v` is the view of the lane's
// record; `shared` is the warp's own.
template <typename Part>
__device__ __forceinline__ Part walk_tiles(const TileWalk& mine, bool wanted, const View* views, int v,
                                           const Part& empty, TileWalk& shared) {
  const int lane = threadIdx.x % kWarp;
  const bool tall = wanted && mine.rows() > kTallRows;
  Part own = empty;
  if (wanted && !tall) {
    const View& view = views[v];
    for (int y = mine.rect[1]; y < mine.rect[3]; ++y) {
      const math::TileSpan span = math::tile_span_of(mine.ellipse, view, mine.rect, y);
      if (span.begin < span.end) own.add(mine, view, y, span);
    }
  }
  for (unsigned left = __ballot_sync(kAllLanes, tall); left; left &= left - 1) {
    const int source = __ffs(left) - 1;
    __syncwarp();
    if (lane == source) shared = mine;
    __syncwarp();
    const View& view = views[__shfl_sync(kAllLanes, v, source)];
    Part part = empty;
    for (int y = shared.rect[1] + lane; y < shared.rect[3]; y += kWarp) {
      const math::TileSpan span = math::tile_span_of(shared.ellipse, view, shared.rect, y);
      if (span.begin < span.end) part.add(shared, view, y, span);
    }
    part = part.over_warp();
    if (lane == source) own = part;
  }
  return own;
}

// On several shards, whose tiles an owner looks for.
struct OwnTiles {
  const RangeRun* runs;  // of the tiles of all views
  int range;             // the owner's

  // From tile x of a row on, the row's runs beginning at `row`: the first stretch of own tiles that begins
  // before `end`, and ends there at the latest. Empty: there is none.
  __device__ __forceinline__ math::TileSpan next(const RangeRun* row, int x, int end) const {
    while (x < end) {
      const RangeRun run = row[x];
      const int behind = min(x + run.length, end);
      if (run.range == range) return {x, behind};
      x = behind;
    }
    return {end, end};
  }
};

// The tiles of one owner; those of other owners, anywhere in a row of tiles, are left out if kSeveral.
template <bool kSeveral>
struct CoverPart {
  OwnTiles own;
  int32_t count, patches;
  uint32_t mask;

  __device__ __forceinline__ void add(const TileWalk& walk, const View& view, int y, math::TileSpan span) {
    if constexpr (kSeveral) {
      const RangeRun* const row = own.runs + view.tile_begin + int64_t{y} * view.tiles_x;
      for (int x = span.begin;;) {
        const math::TileSpan mine = own.next(row, x, span.end);
        if (mine.begin == mine.end) break;
        add_run(walk, y, mine);
        x = mine.end;
      }
    } else {
      add_run(walk, y, span);
    }
  }
  __device__ __forceinline__ void add_run(const TileWalk& walk, int y, math::TileSpan span) {
    const int width = span.end - span.begin;
    count += width;
    patches += walk.box.in_span(y, span.begin, span.end);
    if (width > 0 && walk.is_small()) {
      const uint32_t bits = width < 32 ? (1u << width) - 1u : ~0u;
      mask |= bits << ((y - walk.rect[1]) * walk.columns() + span.begin - walk.rect[0]);
    }
  }
  __device__ __forceinline__ CoverPart over_warp() const {
    return {own, __reduce_add_sync(kAllLanes, count), __reduce_add_sync(kAllLanes, patches),
            __reduce_or_sync(kAllLanes, mask)};
  }
};

template <bool kSeveral>
__device__ __forceinline__ TileCover cover_of(const uint16_t rect[4], const CoverPart<kSeveral>& part) {
  union {
    TileCover cover;
    uint4 words;  // one store
  } out;
  for (int i = 0; i < 4; ++i) out.cover.tile_rect[i] = rect[i];
  out.cover.mask = part.mask;
  out.cover.count = part.count;
  return out.cover;
}

}  // namespace mgpu::splat
