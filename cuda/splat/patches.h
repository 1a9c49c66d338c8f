// SPDX-License-Identifier: Apache-2.0
// patches.h: what each shard holds of the images: the tiles that it blends, and the pixels around them that
// its loss reads. Pure functions of the host.
#pragma once
#include <cstdint>
#include <vector>

#include "math/view.h"
#include "mesh/mesh.h"

namespace mgpu::splat {

struct Frame;
class TileOwners;

// The tiles of one view that a shard blends.
struct ViewPatch {
  RowRange tiles;                      // positions in the order of the tiles of all views
  int x0 = 0, y0 = 0, x1 = 0, y1 = 0;  // in tiles: the smallest rectangle that holds them

  bool empty() const { return tiles.empty(); }
};

// How far from a tile its loss reads, in pixels, less than a tile; all 0: L1 alone.
struct LossReach {
  int side = 0, above = 0, below = 0;
};

// Pixels of one tile of `from` that the loss of `to` reads: those within its reach, as a rectangle.
struct HaloPiece {
  int from, to, view;
  int x0, y0, x1, y1;  // pixels

  int64_t pixels() const { return int64_t{x1 - x0} * (y1 - y0); }
};

// [shards][views].
std::vector<std::vector<ViewPatch>> view_patches(const Frame& frame);

// By (from, to, view, tile); owners, reach: [views].
std::vector<HaloPiece> halo_pieces(const Frame& frame, const std::vector<TileOwners>& owners,
                                   const std::vector<LossReach>& reach);

// Rows of the image in which a shard holds anything: its tiles' and those within reach, and one more below,
// which the loss may fetch but does not use.
RowRange rows_held(const View& view, const ViewPatch& patch, const LossReach& reach);

}  // namespace mgpu::splat
