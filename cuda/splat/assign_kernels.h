// SPDX-License-Identifier: Apache-2.0
// assign_kernels.h: what stage "project" does on GPUs for stage "assign", on several shards: counts what its
// records meet, and brings that along with its read-back; and what stage "assign" leaves for the exchange.
#pragma once
#include <memory>

#include "memory/buffer.h"
#include "memory/transfer.h"
#include "splat/assign.h"
#include "splat/frame.h"
#include "splat/look_back.h"

namespace mgpu::splat {

// A curve in memory of a shard; cached.
std::shared_ptr<const DeviceCurve> device_curve(const View& view, const TileCurve& curve, int shard);

// Words of a home in frame.run_table.
int64_t run_table_words(const Frame& frame);

// Adds what the home's first `room` measured records meet, of which there are as many as `records` [views]
// say and `large` [1] without a mask, to a row of the table on the device.
void count_tiles(const Frame& frame, int home, const SumState* records, const SumState* large, int64_t room,
                 SumState* counts);

// Of a tile: its range, and how many tiles from it on, along its row, are of that range for certain.
struct RangeRun {
  uint8_t range, length;
};

// ShardRecords::parcel_words: the home's RangeCounts; for each range, of the blocks of kThreads records, how
// many records the parcel has up to the block's end (look_back.h), once it is packed; and a RangeRun a
// tile of all views, counted row by row.
struct ParcelWords {
  RangeCounts counts;
  int64_t blocks, tiles;

  constexpr int64_t states() const { return counts.words(); }
  constexpr int64_t table() const { return states() + counts.ranges * blocks; }
  constexpr int64_t words() const {
    constexpr int64_t kRuns = sizeof(SumState) / sizeof(RangeRun);
    return table() + (tiles + kRuns - 1) / kRuns;
  }
  HOST_DEVICE RangeRun* range_runs(SumState* all) const { return reinterpret_cast<RangeRun*>(all + table()); }
  const RangeRun* range_runs(const SumState* all) const {
    return reinterpret_cast<const RangeRun*>(all + table());
  }
};
inline ParcelWords parcel_words(const Frame& frame, int home) {
  return {range_counts(frame), blocks_for(frame.shards[static_cast<size_t>(home)].count, kThreads),
          frame.tile_count()};
}

}  // namespace mgpu::splat
