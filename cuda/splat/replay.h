// SPDX-License-Identifier: Apache-2.0
// replay.h: read a row of the table as it is after the optimizer's latest step, in registers.
// First version: plain loads (no missed steps).
#pragma once
#include "math/vec.h"
#include "splat/columns.h"

namespace mgpu::splat {

HOST_DEVICE inline void replay_geometry(const SplatColumns& columns, const AdamState* /*state*/,
                                        const AdamHistory* /*history*/, int64_t row, float mean[3], float quat[4],
                                        float log_scale[3], float& opacity_logit) {
  for (int i = 0; i < 3; ++i) mean[i] = columns.means[3 * row + i];
  for (int i = 0; i < 4; ++i) quat[i] = columns.quats[4 * row + i];
  for (int i = 0; i < 3; ++i) log_scale[i] = columns.scales[3 * row + i];
  opacity_logit = columns.opacities[row];
}

// The first `sh_count` coefficients of the row, [sh_count, 3], the constant one first; sh_count <= 1 + sh_rest.
HOST_DEVICE inline void replay_sh(const SplatColumns& columns, const AdamState* /*state*/,
                                  const AdamHistory* /*history*/, int64_t row, int sh_count, float* sh0_and_rest) {
  for (int i = 0; i < 3; ++i) sh0_and_rest[i] = columns.sh0[3 * row + i];
  const float* rest = columns.shN + row * columns.sh_rest * 3;
  for (int i = 3; i < 3 * sh_count; ++i) sh0_and_rest[i] = rest[i - 3];
}

}  // namespace mgpu::splat
