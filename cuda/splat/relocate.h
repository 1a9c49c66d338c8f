// SPDX-License-Identifier: Apache-2.0
// relocate.h: densification of 3DGS-MCMC (Kheradmand et al. 2024): rows that died are moved onto living ones,
// and the table grows by copies of living ones; a living row is drawn with probability proportional to its
// opacity.
//
// All rows must be flushed before (step.h). Results do not depend on the mesh. Lists of rows stay on the
// shards: of a refinement the host reads how many rows are dead, and nothing else.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/gaussian.h"
#include "splat/columns.h"
#include "splat/rows.h"

namespace mgpu::splat {

// Rows whose opacity is at most `min_opacity`, or whose geometry is not finite; the others live. The host
// waits for their number. Stage "dead rows".
RowList dead_rows(const SplatColumns& columns, float min_opacity);

// `count` independent draws of living rows, keyed by (seed, step); -1 if no row lives. Opacities are weighed
// as integers (24 bits after the point) and summed in 64 bits, so the sums are exact in any order.
RowList sample_rows(const SplatColumns& columns, float min_opacity, int64_t count, uint64_t seed,
                    int64_t step);

// Make row destination[i] a copy of row source[i]; no row is in both lists. A source that occurs n - 1 times
// and its copies share its place: all get the opacity and scales of math/relocation.h for n. Moments of
// sources and copies become zero, last_step becomes `now`. Opacities are kept a little above `min_opacity`,
// so that the rows live, and below 1. `state` may be null. Throws std::invalid_argument if the lists differ
// in length.
void relocate(const SplatColumns& columns, const AdamState* state, const RowList& source,
              const RowList& destination, float min_opacity, int64_t now);

// Set the moments of `rows` to zero and their last_step to `now`.
void reset_rows(const SplatColumns& columns, const AdamState& state, const RowList& rows, int64_t now);

// ---- one row

constexpr int64_t kRowsPerPiece = 4096;  // of the sums that sampling searches

HOST_DEVICE inline bool is_alive(const SplatColumns& columns, int64_t row, float min_opacity) {
  bool finite = true;
  for (int i = 0; i < 3; ++i) finite &= std::isfinite(columns.means[3 * row + i]);
  for (int i = 0; i < 4; ++i) finite &= std::isfinite(columns.quats[4 * row + i]);
  for (int i = 0; i < 3; ++i) finite &= std::isfinite(columns.scales[3 * row + i]);
  return finite && math::sigmoid(columns.opacities[row]) > min_opacity;
}

// Of a row in the draws: at least 1 if it lives, else 0.
HOST_DEVICE inline uint64_t sample_weight(const SplatColumns& columns, int64_t row, float min_opacity) {
  constexpr float kScale = 16777216.0f;  // 2^24
  if (!is_alive(columns, row, min_opacity)) return 0;
  const uint64_t weight = static_cast<uint64_t>(math::sigmoid(columns.opacities[row]) * kScale);
  return weight > 0 ? weight : 1;
}

}  // namespace mgpu::splat
