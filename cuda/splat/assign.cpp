// SPDX-License-Identifier: Apache-2.0
// assign.cpp: what both flavours share of stage "assign".
#include "splat/assign.h"

namespace mgpu::splat {

void order_tiles(Frame& frame) {
  const size_t shards = frame.homes.size();
  frame.owners.clear();
  frame.owners.resize(shards);
  frame.ranges = TileRanges{{frame.tile_count()}, {0}};
  frame.curves.clear();
  if (shards == 1) {
    frame.owners[0].tiles = {0, frame.tile_count()};
    return;
  }
  for (View& view : frame.views) {
    frame.curves.push_back(tile_curve(view.tiles_x, view.tiles_y));
    view.position_from_tile = frame.curves.back()->position_from_tile.data();
    view.tile_from_position = frame.curves.back()->tile_from_position.data();
  }
}

RangeCounts range_counts(const Frame& frame) {
  return {static_cast<int64_t>(frame.homes.size()), static_cast<int64_t>(frame.views.size())};
}

void give_ranges(Frame& frame, const std::vector<uint64_t>& counts) {
  const RangeCounts layout = range_counts(frame);
  const int64_t shards = layout.ranges;
  const auto count = [&](int64_t home, int64_t word) {
    return static_cast<int64_t>(counts[static_cast<size_t>(home * layout.words() + word)]);
  };
  std::vector<int64_t> kept;
  for (int64_t home = 0; home < shards; ++home) {
    for (int64_t range = 0; range < shards; ++range) {
      kept.push_back(0);
      for (int64_t v = 0; v < layout.views; ++v) kept.back() += count(home, layout.parcel(range, v));
    }
  }
  frame.ranges.owner = match_ranges(kept, static_cast<int>(shards));

  frame.parcels.clear();
  frame.parcels.resize(frame.homes.size());
  for (auto& from_home : frame.parcels) from_home.resize(frame.homes.size());
  int64_t begin = 0;
  for (int64_t range = 0; range < shards; ++range) {
    const int owner = frame.ranges.owner[static_cast<size_t>(range)];
    const int64_t end = frame.ranges.end[static_cast<size_t>(range)];
    TileOwner& of_range = frame.owners[static_cast<size_t>(owner)];
    of_range.tiles = {begin, end};
    of_range.pairs = of_range.patch_pairs = 0;
    begin = end;
    for (int64_t home = 0; home < shards; ++home) {
      of_range.pairs += count(home, layout.pairs(range));
      of_range.patch_pairs += count(home, layout.patches(range));
      Parcel& parcel = frame.parcels[static_cast<size_t>(home)][static_cast<size_t>(owner)];
      parcel.view_begin.assign(1, 0);
      for (int64_t v = 0; v < layout.views; ++v)
        parcel.view_begin.push_back(parcel.view_begin.back() + count(home, layout.parcel(range, v)));
      parcel.count = parcel.view_begin.back();
    }
    frame.shards[static_cast<size_t>(owner)].remote =
        count(owner, layout.met()) - count(owner, layout.alone(range));
  }
}

}  // namespace mgpu::splat
