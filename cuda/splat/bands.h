// SPDX-License-Identifier: Apache-2.0
// bands.h: which rows of each image a shard's loss works on: bands, as large as the parts of the images that
// it blends and as near to them as bands of rows can be, so that few pixels change shards.
#pragma once
#include <cstdint>
#include <vector>

#include "splat/frame.h"

namespace mgpu::splat {

// Pixels of the shards in each row of tiles of a view, as columns: [shards, tile rows].
std::vector<int64_t> owned_columns(const Frame& frame, const View& view);

// [views][shards]: bands that cover each image once, whole rows of tiles but for the last. No shard has more
// than a tenth over its share of all pixels, but for the rounding to rows of tiles.
std::vector<std::vector<RowRange>> bands_of_owners(const Frame& frame);

}  // namespace mgpu::splat
