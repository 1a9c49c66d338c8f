// SPDX-License-Identifier: Apache-2.0
// cell_row.h: a row of the table as its cell wants to know it.
#pragma once
#include "splat/cells.h"

namespace mgpu::splat {

HOST_DEVICE inline math::CellRow stored_cell_row(const SplatColumns& columns, const AdamState& state,
                                                 int64_t row, float moment_ratio) {
  math::CellRow out{};
  for (int i = 0; i < 3; ++i) out.mean[i] = columns.means[3 * row + i];
  for (int i = 0; i < 3; ++i) out.log_scale[i] = columns.scales[3 * row + i];
  out.logit = columns.opacities[row];
  if (state.exp_avg_sq[3])
    out.drift_ratio = math::drift_ratio_of(state.exp_avg[3][row], state.exp_avg_sq[3][row], moment_ratio);
  return out;
}

}  // namespace mgpu::splat
