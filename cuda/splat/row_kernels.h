// SPDX-License-Identifier: Apache-2.0
// row_kernels.h: what the .cu files of densification share: a warp that works on a row of table and state.
#pragma once
#include <cstdint>

#include "splat/columns.h"
#include "splat/kernels.h"

namespace mgpu::splat {

// A row's floats in all columns (or moments), one after the other.
struct RowFloats {
  FloatArray column[kColumns];
  int end[kColumns];  // of the columns' floats in a row
};

template <typename Data>
RowFloats row_floats(const SplatColumns& columns, const Data (&data)[kColumns]) {
  const int size[kColumns] = {3, 4, 3, 1, 3, 3 * columns.sh_rest};
  RowFloats out{};
  for (int i = 0, end = 0; i < kColumns; ++i) {
    out.column[i] = data[i];
    out.end[i] = end += size[i];
  }
  return out;
}

// What a kernel that changes rows needs of table and state.
struct Rows {
  SplatColumns columns;
  RowFloats values, exp_avg, exp_avg_sq;
  int32_t* last_step;  // null: no state
  int32_t now;
  RowRange home;  // only these are changed
};

inline Rows rows_of(const SplatColumns& columns, const AdamState* state, int64_t now, RowRange home) {
  const FloatArray data[kColumns] = {columns.means,     columns.quats, columns.scales,
                                     columns.opacities, columns.sh0,   columns.shN};
  Rows rows{};
  rows.columns = columns;
  rows.values = row_floats(columns, data);
  if (state) {
    rows.exp_avg = row_floats(columns, state->exp_avg);
    rows.exp_avg_sq = row_floats(columns, state->exp_avg_sq);
    rows.last_step = state->last_step;
  }
  rows.now = static_cast<int32_t>(now);
  rows.home = home;
  return rows;
}

// Calls visit(column, float of the row, floats of the row) for the lane's share of a row.
template <typename Visit>
__device__ __forceinline__ void for_each_float(const RowFloats& floats, int lane, const Visit& visit) {
  for (int k = lane; k < floats.end[kColumns - 1]; k += kWarp) {
    int column = 0, begin = 0;
#pragma unroll
    for (int c = 0; c + 1 < kColumns; ++c) {
      if (k >= floats.end[c]) column = c + 1, begin = floats.end[c];
    }
    visit(column, k - begin, floats.end[column] - begin);
  }
}

__device__ __forceinline__ void reset_moments(const Rows& rows, int64_t row, int lane) {
  if (!rows.last_step) return;
  for_each_float(rows.exp_avg, lane, [&](int column, int i, int size) {
    rows.exp_avg.column[column].set(row * size + i, 0.f, 0);
    rows.exp_avg_sq.column[column].set(row * size + i, 0.f, 0);
  });
  if (lane == 0) rows.last_step[row] = rows.now;
}

// Blocks for a warp an item.
inline unsigned warps_for(int64_t count) { return blocks_for(count * kWarp, kThreads); }

}  // namespace mgpu::splat
