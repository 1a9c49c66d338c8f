// SPDX-License-Identifier: Apache-2.0
// ranges.h: which shard blends which tiles, from counts: ranges along the order of tiles, a shard each. Pure
// functions of the host.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mgpu::splat {

// What blending `tiles` tiles with `pairs` pairs of (tile, record) costs, in pairs. The constant is what an
// empty tile takes: it writes and reads its pixels (docs/architecture.md, "Tile ownership").
constexpr int64_t kTileCost = 4;
constexpr int64_t blending_cost(int64_t pairs, int64_t tiles) { return pairs + kTileCost * tiles; }

// Of one home at one place in the order of tiles, in one word: pairs (the records that meet the tile) in the
// upper half, and in the lower one the records that it stands for: each spreads `share` evenly over the
// tiles that it meets. A sum of shares over a range is then the number of its records, but for those that
// its borders cut.
using TileCount = uint64_t;
constexpr uint32_t kRecordShare = 256;
constexpr TileCount tile_count_of(uint32_t tiles_met, uint32_t share = kRecordShare) {
  return TileCount{1} << 32 | (tiles_met < share ? (share + tiles_met / 2) / tiles_met : 1u);
}
constexpr int64_t pairs_of(TileCount count) { return static_cast<int64_t>(count >> 32); }
constexpr int64_t share_of(TileCount count) { return static_cast<int64_t>(count & 0xffffffffu); }

struct TileRanges {
  std::vector<int64_t> end;  // [ranges] ascending; a range begins where the one before ends
  std::vector<int> owner;    // [ranges]; each shard once

  int range_of(int64_t position) const;
  int owner_of(int64_t position) const { return owner[static_cast<size_t>(range_of(position))]; }
};

// A range a shard, some perhaps empty, such that few records travel, subject to
//   the largest cost of a range <= max(1.1 * mean cost, the least that any cut into ranges can have),
// which is at most the mean and the dearest tile: a tile cannot be cut.
//
// In turn, until nothing is gained: cuts, exact for the owners in their order, among up to 33 places each;
// and owners, exact for the cuts. Starts from even cuts. counts: [shards, places], each place a run of `run`
// of the tiles, the last one perhaps of fewer; then it is runs that cannot be cut.
TileRanges choose_ranges(const TileCount* counts, int shards, int64_t tiles, int64_t run = 1);

// Tiles of a run such that there are at most kMostRuns of them (or a run a tile): a range is then a hundred
// runs and more, and a shard's counts are a few kilobytes.
constexpr int64_t kMostRuns = 2048;
constexpr int64_t tiles_of_run(int64_t tiles) {
  int64_t run = 1;
  while (tiles > kMostRuns * run) run *= 2;
  return run;
}

// Owner of each range such that the sum of kept[owner, range] is largest. kept: [shards, shards]. Exact
// (Hungarian method), O(shards^3).
std::vector<int> match_ranges(const std::vector<int64_t>& kept, int shards);

}  // namespace mgpu::splat
