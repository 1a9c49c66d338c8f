// SPDX-License-Identifier: Apache-2.0
// gather.h: give every row of a table the contents of another row, in place: for a new order of the rows, and
// for taking rows out and doubling rows. Column by column, through scratch of at most one column.
#pragma once
#include <cstdint>
#include <vector>

#include "math/host_device.h"
#include "memory/buffer.h"
#include "splat/columns.h"

namespace mgpu::splat {

// A row of the table before, and what a stage wants to know of the row made of it.
struct RowOrigin {
  int64_t packed;
  static constexpr int kRowBits = 60;
  HOST_DEVICE int64_t row() const { return packed & ((int64_t{1} << kRowBits) - 1); }
  HOST_DEVICE int tag() const { return static_cast<int>(packed >> kRowBits); }
};
HOST_DEVICE inline RowOrigin row_origin(int64_t row, int tag = 0) {
  return {row | static_cast<int64_t>(tag) << RowOrigin::kRowBits};
}

// Where the rows of a table come from.
struct RowMap {
  int64_t rows = 0;                       // of the table afterwards
  std::vector<RowRange> homes;            // [shards] of these
  std::vector<Buffer<RowOrigin>> origin;  // [shards] home; of the rows homes[shard]
};

// Anything with a value a row.
struct RowBytes {
  void* data;
  int64_t row_bytes;  // even
};

// The columns, and with a state its moments and last_step.
std::vector<RowBytes> all_columns(const SplatColumns& columns, const AdamState* state);

constexpr int64_t kGatherScratch = int64_t{1} << 31;

// Row r of each column becomes what row origin[r] was, for all r < map.rows. The columns have at least
// map.rows rows and all that are named. A column that does not fit `scratch_bytes` on a shard goes in slices
// of its rows. Stages "gather rows" and "put rows".
void gather_rows(const std::vector<RowBytes>& columns, const RowMap& map,
                 int64_t scratch_bytes = kGatherScratch);

// Of the shard that has most of them.
int64_t most_rows(const std::vector<RowRange>& homes);

// How the rows of a column are cut into slices.
struct RowSlices {
  int unit;            // bytes that move at once: 16, 4 or 2
  int64_t row_units;   // units in a row
  int64_t most_units;  // in a slice
};
RowSlices slices_of(int64_t row_bytes, int64_t rows, int64_t scratch_bytes);

}  // namespace mgpu::splat
