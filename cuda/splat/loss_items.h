// SPDX-License-Identifier: Apache-2.0
// loss_items.h: which rows of which strips of an image a shard walks down for the loss of its tiles, and how
// that is dealt to the blocks of a GPU (loss.cu). Pure functions of the host.
#pragma once
#include <cstdint>
#include <vector>

#include "splat/tile_owners.h"

namespace mgpu::splat {

// How an image is walked: down strips of its columns, from the left, a row of pixels a step.
struct StripWalk {
  int wide;     // columns of a strip
  int warm_up;  // steps before the first row
};

// Rows of tiles of a strip.
struct StripRun {
  int strip, begin, end;
};

// What a block walks: the same, and where its sums begin among those of all rows of all items.
struct LossItem {
  uint16_t strip, begin, end;
  int32_t sum_row;
};

// [shards]: the rows of each strip in which a shard has a tile. Gaps that take no longer than a warm-up are
// not left out. `width`: pixels.
std::vector<std::vector<StripRun>> strip_runs(const TileOwners& owners, int shards, int width,
                                              const StripWalk& walk);

// The runs in pieces, so that the GPU is done soonest: a multiprocessor has one block at a time. The longest
// come first where there are more pieces than processors. Sums lie in the order of the runs, however these
// are cut.
std::vector<LossItem> loss_items(const std::vector<StripRun>& runs, int processors, const StripWalk& walk);

}  // namespace mgpu::splat
