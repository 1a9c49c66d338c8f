// SPDX-License-Identifier: Apache-2.0
#include "splat/assign.h"

#include <algorithm>

namespace mgpu::splat {

void assign_tiles(Frame& frame) {
  const int shards = static_cast<int>(frame.homes.size());
  frame.owners.clear();
  frame.owners.resize(frame.homes.size());
  for (int owner = 0; owner < shards; ++owner) {
    frame.owners[owner].tiles = equal_chunk(frame.tile_count(), owner, shards);
  }
}

int owner_of_tile(const Frame& frame, int64_t tile) {
  const auto after = std::partition_point(frame.owners.begin(), frame.owners.end(),
                                          [tile](const TileOwner& owner) { return owner.tiles.end <= tile; });
  return static_cast<int>(after - frame.owners.begin());
}

}  // namespace mgpu::splat
