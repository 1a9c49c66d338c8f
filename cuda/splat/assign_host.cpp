// SPDX-License-Identifier: Apache-2.0
// assign_host.cpp: two walks over the records of each home: one counts for each tile, one says which ranges a
// record meets.
#include "splat/assign.h"

#include <atomic>
#include <bit>

#include "math/tile.h"
#include "mesh/fork_join.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kGrain = 2048;  // records a piece

// Calls visit(position) for every tile that the record meets.
template <typename Visit>
void for_each_position(const View& view, const Record& record, const Visit& visit) {
  math::TileEllipse ellipse;
  if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) return;
  for (int y = record.tile_rect[1]; y < record.tile_rect[3]; ++y) {
    const math::TileSpan span = math::tile_span_of(ellipse, view, record.tile_rect, y);
    for (int x = span.begin; x < span.end; ++x) visit(view.position_of(int64_t{y} * view.tiles_x + x));
  }
}

// count: [positions], zero before.
void count_tiles(const Frame& frame, int home, TileCount* count) {
  const ShardRecords& in = frame.shards[home];
  parallel_for(in.count, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> met;
    for (int64_t r = begin; r < end; ++r) {
      met.clear();
      for_each_position(frame.views[in.view[r]], in.record[r], [&](int64_t at) { met.push_back(at); });
      for (const int64_t at : met) {
        std::atomic_ref<TileCount>(count[at]).fetch_add(tile_count_of(static_cast<uint32_t>(met.size())),
                                                        std::memory_order_relaxed);
      }
    }
  });
}

// Fills range_mask; counts: a row of RangeCounts, zero before.
void mark_ranges(Frame& frame, int home, uint64_t* counts) {
  ShardRecords& in = frame.shards[home];
  const RangeCounts layout = range_counts(frame);
  in.range_mask = Buffer<RangeMask>(in.count, home);
  parallel_for(in.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      uint64_t mask = 0;
      for_each_position(frame.views[in.view[r]], in.record[r],
                        [&](int64_t at) { mask |= uint64_t{1} << frame.ranges.range_of(at); });
      in.range_mask[r] = mask;
    }
  });
  for (int64_t r = 0; r < in.count; ++r) {
    const uint64_t mask = in.range_mask[r];
    for (uint64_t left = mask; left; left &= left - 1)
      ++counts[layout.parcel(std::countr_zero(left), in.view[r])];
    if (std::has_single_bit(mask)) ++counts[layout.alone(std::countr_zero(mask))];
    counts[layout.met()] += mask != 0;
  }
}

}  // namespace

void assign_tiles(Frame& frame) {
  const int64_t shards = static_cast<int64_t>(frame.homes.size());
  if (shards == 1) {
    frame.parcels.clear();
    frame.parcels.resize(1);
    frame.parcels[0].resize(1);
    frame.parcels[0][0].view_begin = frame.shards[0].view_begin;
    frame.parcels[0][0].count = frame.shards[0].count;
    return;
  }
  const int64_t positions = frame.tile_count();
  std::vector<TileCount> tile_count(static_cast<size_t>(shards * positions), 0);
  for_each_shard("count_tiles", [&](const Shard& shard) {
    count_tiles(frame, shard.index, tile_count.data() + shard.index * positions);
  });
  transport().gather(tile_count.data(), positions);
  frame.ranges = choose_ranges(tile_count.data(), static_cast<int>(shards), positions);

  const int64_t words = range_counts(frame).words();
  std::vector<uint64_t> counts(static_cast<size_t>(shards * words), 0);
  for_each_shard("mark_ranges", [&](const Shard& shard) {
    mark_ranges(frame, shard.index, counts.data() + shard.index * words);
  });
  transport().gather(counts.data(), words);
  give_ranges(frame, counts);
}

}  // namespace mgpu::splat
