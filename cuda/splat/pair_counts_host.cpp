// SPDX-License-Identifier: Apache-2.0
// pair_counts_host.cpp: tile by tile, patch by patch, pixel by pixel.
#include "splat/pair_counts.h"

#include <algorithm>
#include <vector>

#include "math/tile.h"
#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

struct Pixel {
  float x, y;
  float live = 1.f, kept = 1.f;
};

PairCounts count_patch(const TileOwner& owner, int64_t tile, std::vector<Pixel>& pixels) {
  PairCounts counts;
  for (int64_t i = owner.tile_begin[tile]; i < owner.tile_begin[tile + 1]; ++i) {
    const Record& record = owner.record[owner.entry[i].record];
    const int64_t before = counts.lit;
    for (Pixel& pixel : pixels) {
      const math::BlendRow row = math::make_blend_row(record.mean2d, record.conic, record.opacity, pixel.y);
      bool contributes;
      math::blend_step(math::uncapped_alpha(row, pixel.x - record.mean2d[0]), pixel.live, pixel.kept,
                       contributes);
      counts.lit += contributes;
    }
    counts.patches += counts.lit > before;
  }
  return counts;
}

PairCounts count_owner(const Frame& frame, const TileOwner& owner) {
  PairCounts all;
  std::vector<Pixel> pixels;
  for (const View& view : frame.views) {
    const int64_t first = std::max(owner.tiles.begin, view.tile_begin);
    const int64_t end = std::min(owner.tiles.end, view.tile_begin + view.tile_count());
    for (int64_t tile = first; tile < end; ++tile) {
      const int64_t local = view.tile_at(tile);
      const int64_t left = local % view.tiles_x * kTileSize, top = local / view.tiles_x * kTileSize;
      for (int patch = 0; patch < kTilePixels / (kPatchWidth * kPatchHeight); ++patch) {
        const int64_t x0 = left + patch % (kTileSize / kPatchWidth) * kPatchWidth;
        const int64_t y0 = top + patch / (kTileSize / kPatchWidth) * kPatchHeight;
        pixels.clear();
        for (int64_t y = y0; y < std::min<int64_t>(y0 + kPatchHeight, view.height); ++y) {
          for (int64_t x = x0; x < std::min<int64_t>(x0 + kPatchWidth, view.width); ++x)
            pixels.push_back({static_cast<float>(x) + 0.5f, static_cast<float>(y) + 0.5f});
        }
        const PairCounts counts = count_patch(owner, tile - owner.tiles.begin, pixels);
        all.lit += counts.lit;
        all.patches += counts.patches;
      }
    }
  }
  return all;
}

}  // namespace

PairCounts count_pairs(const Frame& frame) {
  std::vector<PairCounts> counts(frame.owners.size());
  for_each_shard("pair_counts", [&](const Shard& shard) {
    counts[static_cast<size_t>(shard.index)] =
        count_owner(frame, frame.owners[static_cast<size_t>(shard.index)]);
  });
  PairCounts all;
  for (const PairCounts& one : counts) {
    all.lit += one.lit;
    all.patches += one.patches;
  }
  return all;
}

}  // namespace mgpu::splat
