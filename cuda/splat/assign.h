// SPDX-License-Identifier: Apache-2.0
// assign.h: stage 3: which shard blends which tiles. Ranges of tiles, counted over all views, row by row.
#pragma once
#include "splat/frame.h"

namespace mgpu::splat {

// Fills frame.owners[*].tiles: equal ranges in this version, whatever the tiles hold.
void assign_tiles(Frame& frame);

// What blending `tiles` tiles with `pairs` pairs of (tile, record) costs, in pairs.
constexpr int64_t kTileCost = 8;
constexpr int64_t blending_cost(int64_t pairs, int64_t tiles) { return pairs + kTileCost * tiles; }

// The owner of a tile, for the ranges made by assign_tiles.
int owner_of_tile(const Frame& frame, int64_t tile);

}  // namespace mgpu::splat
