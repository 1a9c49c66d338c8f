// SPDX-License-Identifier: Apache-2.0
#include "splat/tile_owners.h"

namespace mgpu::splat {

static_assert(kMaxShards < TileOwners::kNobody);

TileOwners::TileOwners(const View& view, size_t v, const std::vector<std::vector<ViewPatch>>& patches)
    : across_(view.tiles_x),
      down_(view.tiles_y),
      owner_(static_cast<size_t>(view.tile_count()) + 2 * static_cast<size_t>(across_), kNobody) {
  uint8_t* const owner = owner_.data() + across_;
  for (size_t shard = 0; shard < patches.size(); ++shard) {
    const RowRange tiles = patches[shard][v].tiles;
    for (int64_t position = tiles.begin; position < tiles.end; ++position)
      owner[view.tile_at(position)] = static_cast<uint8_t>(shard);
  }
}

}  // namespace mgpu::splat
