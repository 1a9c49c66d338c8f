// SPDX-License-Identifier: Apache-2.0
#include "splat/gather.h"

#include <algorithm>

namespace mgpu::splat {

std::vector<RowBytes> all_columns(const SplatColumns& columns, const AdamState* state) {
  const FloatArray data[kColumns] = {columns.means,     columns.quats, columns.scales,
                                     columns.opacities, columns.sh0,   columns.shN};
  const int64_t floats[kColumns] = {3, 4, 3, 1, 3, int64_t{3} * columns.sh_rest};
  std::vector<RowBytes> out;
  for (int i = 0; i < kColumns; ++i) {
    if (floats[i] == 0) continue;
    out.push_back({data[i].data(), floats[i] * data[i].bytes()});
    if (!state) continue;
    out.push_back({state->exp_avg[i].data(), floats[i] * state->exp_avg[i].bytes()});
    out.push_back({state->exp_avg_sq[i], floats[i] * static_cast<int64_t>(sizeof(float))});
  }
  if (state) out.push_back({state->last_step, sizeof(int32_t)});
  return out;
}

int64_t most_rows(const std::vector<RowRange>& homes) {
  int64_t most = 0;
  for (const RowRange& home : homes) most = std::max(most, home.size());
  return most;
}

RowSlices slices_of(int64_t row_bytes, int64_t rows, int64_t scratch_bytes) {
  RowSlices slices{};
  slices.unit = row_bytes % 16 == 0 ? 16 : row_bytes % 4 == 0 ? 4 : 2;
  slices.row_units = row_bytes / slices.unit;
  const int64_t count = std::max<int64_t>(1, (row_bytes * rows + scratch_bytes - 1) / scratch_bytes);
  slices.most_units = (slices.row_units + count - 1) / count;
  if (slices.most_units < 1) slices.most_units = 1;
  return slices;
}

}  // namespace mgpu::splat
