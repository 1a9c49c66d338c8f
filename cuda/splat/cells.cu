// SPDX-License-Identifier: Apache-2.0
// cells.cu: boxes of runs of rows, a warp a cell. Floor: 28 bytes a row, 8 more with an optimizer.
#include "splat/cells.h"

#include "splat/cell_row.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

__global__ void __launch_bounds__(kThreads)
    measure_cells_kernel(const __grid_constant__ SplatColumns columns,
                         const __grid_constant__ AdamState state, const __grid_constant__ ShardCells cells,
                         RowRange rows) {
  const int lane = threadIdx.x % kWarp;
  const int64_t c = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (c >= cells.count) return;
  math::Cell cell = math::empty_cell();
  const int64_t first = rows.begin + c * kCellRows;
#pragma unroll
  for (int i = 0; i < kCellRows / kWarp; ++i) {
    const int64_t row = first + i * kWarp + lane;
    if (row >= rows.end) continue;
    const math::CellRow stored = stored_cell_row(columns, state, row, cells.moment_ratio);
    if (stored.finite()) math::join(cell, {stored, cells.logit_drift});
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    for (int i = 0; i < 3; ++i) {
      cell.low[i] = fminf(cell.low[i], __shfl_xor_sync(kAllLanes, cell.low[i], step));
      cell.high[i] = fmaxf(cell.high[i], __shfl_xor_sync(kAllLanes, cell.high[i], step));
    }
    cell.log_scale = fmaxf(cell.log_scale, __shfl_xor_sync(kAllLanes, cell.log_scale, step));
    cell.log_reach = fmaxf(cell.log_reach, __shfl_xor_sync(kAllLanes, cell.log_reach, step));
  }
  if (lane == 0) cells.cell[c] = cell;
}

}  // namespace

void measure_cells(const SplatColumns& columns, const AdamState& state, const Cells& all) {
  JoinedOperator joined;  // whoever wrote the rows may have cut them otherwise
  for_each_shard("cells", [&](const Shard& shard) {
    const ShardCells cells = all.of_shard(static_cast<size_t>(shard.index));
    const RowRange rows = all.homes()[static_cast<size_t>(shard.index)];
    if (cells.count == 0) return;
    measure_cells_kernel<<<blocks_for(cells.count, kWarps), kThreads, 0, shard_stream(shard.index)>>>(
        columns, state, cells, rows);
    KERNEL_CHECK("cells", shard.index, rows.size());
  });
}

// 112 thousand rows are 5 us slower with cells, a million as fast, more are faster (docs/benchmarks.md).
int64_t least_rows_for_cells() { return int64_t{1} << 19; }

}  // namespace mgpu::splat
