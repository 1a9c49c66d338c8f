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

// ShardRecords::parcel_words: the home's RangeCounts; zeros for the sums of stage "pack", of each range one
// for kSummedWarps warps of records (look_back.h); and a RangeRun a tile of all views, counted row by row.
// Behind these, once it is packed: for each warp of records, and for one behind the last, range by range how
// many records of the parcel are before it. 32 bits are enough, as owners number what they receive by 32.
constexpr int kSummedWarps = 256;

constexpr int64_t warps_of(int64_t records) { return (records + kWarp - 1) / kWarp; }

struct ParcelWords {
  RangeCounts counts;
  int64_t records, tiles;

  constexpr int64_t sums() const { return warps_of(records) / kSummedWarps + 1; }
  constexpr int64_t states() const { return counts.words(); }
  constexpr int64_t table() const { return states() + counts.ranges * sums(); }
  constexpr int64_t begins() const {
    constexpr int64_t kRuns = sizeof(SumState) / sizeof(RangeRun);
    return table() + (tiles + kRuns - 1) / kRuns;
  }
  constexpr int64_t words() const { return begins() + (counts.ranges * (warps_of(records) + 1) + 1) / 2; }
  HOST_DEVICE RangeRun* range_runs(SumState* all) const { return reinterpret_cast<RangeRun*>(all + table()); }
  const RangeRun* range_runs(const SumState* all) const {
    return reinterpret_cast<const RangeRun*>(all + table());
  }
  uint32_t* begin_of_warp(SumState* all) const { return reinterpret_cast<uint32_t*>(all + begins()); }
};
inline ParcelWords parcel_words(const Frame& frame, int home) {
  return {range_counts(frame), frame.shards[static_cast<size_t>(home)].count, frame.tile_count()};
}

}  // namespace mgpu::splat
