// SPDX-License-Identifier: Apache-2.0
// bin.h: stage 5: each owner orders the records it received by depth and lists, tile by tile, those that can
// be seen.
#pragma once
#include "splat/frame.h"

namespace mgpu::splat {

// Stage "bin": fills frame.owners[*].{half_extent, slot_begin, entry, tile_begin}. A tile's list is front to
// back, ties by row. Exact: no tile with a pixel centre of alpha >= 1/255 is left out (math/tile.h).
void bin_records(Frame& frame);

// Pairs of (tile, record) over all owners.
int64_t intersection_count(const Frame& frame);

}  // namespace mgpu::splat
