// SPDX-License-Identifier: Apache-2.0
#include "splat/row_measure.h"

#include <algorithm>
#include <vector>

#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

void measure_run(const SplatColumns& columns, const RowCube& cube, int64_t begin, int64_t end,
                 RowMeasure& out) {
  uint32_t least[3] = {~0u, ~0u, ~0u}, most[3] = {0, 0, 0};
  uint64_t before = begin > 0 ? row_key(cube, columns.means + 3 * (begin - 1)) : kNowhere;
  bool any = false;
  for (int64_t row = begin; row < end; ++row) {
    const uint64_t key = row_key(cube, columns.means + 3 * row);
    if (key != kNowhere) {
      uint32_t cell[3];
      row_cell(cube, columns.means + 3 * row, cell);
      for (int axis = 0; axis < 3; ++axis) {
        least[axis] = std::min(least[axis], cell[axis]);
        most[axis] = std::max(most[axis], cell[axis]);
      }
      any = true;
      ++out.finite_rows;
      if (before != kNowhere && before != key) {
        const int level = parting_level(before, key);
        ++out.changes[level];
        out.descents[level] += key < before;
      }
    }
    before = key;
  }
  if (!any) return;
  ++out.runs;
  for (int axis = 0; axis < 3; ++axis) out.run_cells += most[axis] - least[axis];
}

}  // namespace

RowMeasure measure_rows(const SplatColumns& columns, RowRuns runs) {
  const Buffer<RowCube> cube = row_cube(columns);
  const std::vector<RowRange> homes = homes_of(columns);
  std::vector<RowMeasure> own(homes.size(), RowMeasure{});
  const auto measure = [&](const Shard& shard) {  // a run lies with its first row
    const size_t index = static_cast<size_t>(shard.index);
    for (int64_t run = runs.from(homes[index].begin); run < runs.from(homes[index].end); ++run)
      measure_run(columns, cube[0], runs.begin(run), std::min(runs.begin(run + 1), columns.num_rows),
                  own[index]);
  };
  for_each_shard("measure rows", measure, Access::kExchange);
  RowMeasure all{};
  all.cube = cube[0];
  for (const RowMeasure& part : own) {
    all.finite_rows += part.finite_rows;
    all.runs += part.runs;
    all.run_cells += part.run_cells;
    for (int level = 0; level < kLevels; ++level) {
      all.changes[level] += part.changes[level];
      all.descents[level] += part.descents[level];
    }
  }
  return all;
}

}  // namespace mgpu::splat
