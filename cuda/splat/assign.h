// SPDX-License-Identifier: Apache-2.0
// assign.h: stage 3: which shard blends which tiles: ranges along a curve through the tiles of all views,
// chosen by what each home's records meet (ranges.h).
#pragma once
#include "splat/frame.h"

namespace mgpu::splat {

// Before stage "project": fills frame.owners and, on several shards, the curves of the views. On a mesh of
// one shard its range is all tiles, row by row.
void order_tiles(Frame& frame);

// Stage "assign", after "project": fills frame.ranges, frame.owners[*].tiles, and at home range_mask, remote
// and the counts of the parcels. On a mesh of one shard all that is clear; CUDA: since stage "project".
void assign_tiles(Frame& frame);

// ---- what both flavours share

// What a home's records are to each range, as words side by side.
struct RangeCounts {
  int64_t ranges, views;

  constexpr int64_t words() const { return met() + 1 + 2 * ranges; }
  constexpr int64_t parcel(int64_t range, int64_t view) const {
    return range * views + view;
  }  // records that meet it
  constexpr int64_t alone(int64_t range) const {
    return ranges * views + range;
  }  // records that meet no other
  constexpr int64_t met() const { return ranges * views + ranges; }  // records that meet any
  // CUDA, for TileOwner's counts of the same names
  constexpr int64_t pairs(int64_t range) const { return met() + 1 + range; }
  constexpr int64_t patches(int64_t range) const { return met() + 1 + ranges + range; }
};
RangeCounts range_counts(const Frame& frame);

// Gives each range to the shard that keeps most records at home by it, exactly, and fills what assign_tiles
// promises but for range_mask. counts: [shards, RangeCounts::words].
void give_ranges(Frame& frame, const std::vector<uint64_t>& counts);

}  // namespace mgpu::splat
