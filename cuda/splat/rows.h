// SPDX-License-Identifier: Apache-2.0
// rows.h: lists of rows that one operator of densification leaves for the next, in memory that every shard
// may touch. The host knows how many rows a list has, never which.
#pragma once
#include <cstdint>
#include <vector>

#include "math/host_device.h"
#include "memory/buffer.h"
#include "mesh/mesh.h"

namespace mgpu::splat {

// A list as kernels take it. -1 stands for no row.
struct RowListView {
  const int64_t* row;  // null: the rows first, first + 1, ...
  int64_t first, count;
  HOST_DEVICE int64_t operator[](int64_t i) const { return row ? row[i] : first + i; }
};

// Rows in ascending order; some may be there several times.
struct RowList {
  Buffer<int64_t> row;  // exchange; empty: consecutive rows
  int64_t first = 0, count = 0;
  RowListView view() const { return {row.data(), first, count}; }
};

// The rows begin, begin + 1, ..., end - 1.
RowList consecutive_rows(int64_t begin, int64_t end);

// A list with the given rows of a table of `num_rows`. Throws std::invalid_argument, with `name` in the text,
// unless they ascend and lie in the table.
RowList row_list(const std::vector<int64_t>& rows, int64_t num_rows, const char* name);

// Throws std::invalid_argument unless the lists are equally long.
void check_pairs(const RowList& source, const RowList& destination);

// For tests and messages; waits for the shards.
std::vector<int64_t> to_vector(const RowList& list);

}  // namespace mgpu::splat
