// SPDX-License-Identifier: Apache-2.0
// cells_host.cpp: boxes of runs of rows, cell by cell.
#include <algorithm>

#include "mesh/fork_join.h"
#include "splat/cell_row.h"
#include "splat/cells.h"

namespace mgpu::splat {

void measure_cells(const SplatColumns& columns, const AdamState& state, const Cells& all) {
  for_each_shard("cells", [&](const Shard& shard) {
    const ShardCells cells = all.of_shard(static_cast<size_t>(shard.index));
    const int64_t end_row = all.homes()[static_cast<size_t>(shard.index)].end;
    parallel_for(cells.count, 64, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        math::Cell cell = math::empty_cell();
        const int64_t first = cells.first_row + c * kCellRows;
        for (int64_t row = first; row < std::min(end_row, first + kCellRows); ++row) {
          const math::CellRow stored = stored_cell_row(columns, state, row, cells.moment_ratio);
          if (stored.finite()) math::join(cell, {stored, cells.logit_drift});
        }
        cells.cell[c] = cell;
      }
    });
  });
}

int64_t least_rows_for_cells() { return 2 * kCellRows; }

}  // namespace mgpu::splat
