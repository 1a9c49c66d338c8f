// SPDX-License-Identifier: Apache-2.0
// pair_counts.cu: a block a tile, a warp a patch, a thread a pixel; every record of the tile's list is tried.
#include "splat/pair_counts.h"

#include <vector>

#include "math/tile.h"
#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int kPatchesAcross = kTileSize / kPatchWidth;
static_assert(kPatchWidth * kPatchHeight == kWarp && kThreads == kTilePixels);

__global__ void __launch_bounds__(kThreads)
    count_pairs_kernel(const View* views, int num_views, int64_t first_tile, const Record* records,
                       const int32_t* entries, const int64_t* tile_begin, unsigned long long* counts) {
  const int64_t tile = blockIdx.x;
  int v = num_views - 1;
  while (v > 0 && views[v].tile_begin > first_tile + tile) --v;
  const View view = views[v];
  const int64_t local = view.tile_at(first_tile + tile);
  const int patch = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t column =
      local % view.tiles_x * kTileSize + patch % kPatchesAcross * kPatchWidth + lane % kPatchWidth;
  const int64_t row =
      local / view.tiles_x * kTileSize + patch / kPatchesAcross * kPatchHeight + lane / kPatchWidth;
  const float x = static_cast<float>(column) + 0.5f, y = static_cast<float>(row) + 0.5f;

  float live = column < view.width && row < view.height ? 1.f : 0.f, kept = 1.f;
  unsigned long long lit = 0, patches = 0;
  for (int64_t i = tile_begin[tile]; i < tile_begin[tile + 1]; ++i) {
    if (!__any_sync(kAllLanes, live > 0.f)) break;
    const Record& record = records[entries[i]];
    const float alpha = math::uncapped_alpha(
        math::make_blend_row(record.mean2d, record.conic, record.opacity, y), x - record.mean2d[0]);
    bool contributes;
    math::blend_step(alpha, live, kept, contributes);
    const unsigned lanes = __ballot_sync(kAllLanes, contributes);
    lit += __popc(lanes);
    patches += lanes != 0;
  }
  if (lane != 0) return;
  atomicAdd(counts, lit);
  atomicAdd(counts + 1, patches);
}

}  // namespace

PairCounts count_pairs(const Frame& frame) {
  PairCounts all;
  for_each_shard("pair_counts", [&](const Shard& shard) {
    const TileOwner& owner = frame.owners[static_cast<size_t>(shard.index)];
    if (owner.tiles.empty() || owner.pairs == 0) return;
    Buffer<int64_t> counts(2, shard.index);
    zero(counts);
    count_pairs_kernel<<<static_cast<unsigned>(owner.tiles.size()), kThreads, 0, shard_stream(shard.index)>>>(
        frame.constants[static_cast<size_t>(shard.index)].views, static_cast<int>(frame.views.size()),
        owner.tiles.begin, received_records(frame, shard.index), owner.entry_record.data(),
        owner.tile_begin.data(), reinterpret_cast<unsigned long long*>(counts.data()));
    KERNEL_CHECK("pair_counts", shard.index, owner.pairs);
    const std::vector<int64_t> host = to_vector(counts);
    all.lit += host[0];
    all.patches += host[1];
  });
  return all;
}

}  // namespace mgpu::splat
