// SPDX-License-Identifier: Apache-2.0
// fates.h: what becomes of each row in a refinement or a compaction, and the map of rows that follows.
#pragma once
#include <cstdint>
#include <vector>

#include "memory/buffer.h"
#include "splat/gather.h"

namespace mgpu::splat {

enum RowFate : uint8_t {
  kGone = 0,
  kKept = 1,    // so a mask of rows to keep is a list of fates
  kCloned = 2,  // the row and a copy of it
  kSplit = 3,   // two children in its place
};

// RowOrigin::tag of the rows that come of it.
enum RowTag : int { kSame = 0, kCopy = 1, kFirstChild = 2, kSecondChild = 3 };

// By shard, of the rows at home there; home.
using Fates = std::vector<Buffer<uint8_t>>;

// The fates of a mask, a byte for each row of `homes` in the memory of a tensor: 0 is gone, anything else
// kept.
Fates fates_from_mask(const uint8_t* keep, const std::vector<RowRange>& homes);

// The homes that they are of.
std::vector<RowRange> homes_of(const Fates& fates);

// Rows that come of it; waits for the shards.
int64_t count_rows_after(const Fates& fates);

// Where the rows afterwards come from: in the order of the rows before, a row's own two side by side.
// homes_after: of as many rows as count_rows_after says. Stages "count outcomes" and "map rows".
RowMap map_rows(const Fates& fates, const std::vector<RowRange>& homes_after);

}  // namespace mgpu::splat
