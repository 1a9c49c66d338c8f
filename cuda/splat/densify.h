// SPDX-License-Identifier: Apache-2.0
// densify.h: the densification of 3D Gaussian Splatting (Kerbl et al. 2023, section 5.2), with gsplat's
// thresholds: rows that many pixels pull at are cloned if small and split if large, rows that are nearly
// transparent or too large go. Rows keep their order, and what comes of a row lies side by side.
//
// All rows must be flushed before (step.h). Results do not depend on the mesh.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "math/gaussian.h"
#include "math/random.h"
#include "splat/columns.h"
#include "splat/fates.h"
#include "splat/statistics.h"

namespace mgpu::splat {

// Infinite: the rule is off.
struct DensifyRules {
  float grow_gradient;              // mean gradient of a view above which a row is doubled
  float split_scale, split_radius;  // above: split, at most: cloned; above the radius: split anyway
  float prune_opacity, prune_scale, prune_radius;  // below or above: gone
  int64_t max_rows;                                // of the table
};

struct DensifyPlan {
  Fates fates;
  int64_t rows_before = 0, rows_after = 0;
  int64_t pruned = 0, doubled = 0;
};

// Decides on every row. If not all that should be doubled fit, those with the highest gradients are, rows in
// ascending order where they are equal; the others stay as they are. The host waits once, for the counts.
DensifyPlan plan_densification(const SplatColumns& columns, const RowStatistics& statistics,
                               const DensifyRules& rules);

// Carries it out. The table has max(rows_before, rows_after) rows and is to be shrunk to rows_after. Rows
// that are new have zero moments, and last_step `now`; children are drawn from their parent by (seed, step,
// row), with scales divided by 1.6. `state` may be null.
void densify(const SplatColumns& columns, const AdamState* state, const DensifyPlan& plan, uint64_t seed,
             int64_t step, int64_t now);

// Lowers all opacities to at most `most`, and sets their moments to zero. Stage "reset opacities".
void reset_opacities(const SplatColumns& columns, const AdamState* state, float most);

// ---- one row

constexpr float kSplitShrink = 1.6f;

HOST_DEVICE inline RowFate fate_of(const SplatColumns& columns, const RowStatistics& statistics,
                                   const DensifyRules& rules, int64_t row) {
  bool finite = true;
  for (int i = 0; i < 3; ++i) finite &= std::isfinite(columns.means[3 * row + i]);
  for (int i = 0; i < 4; ++i) finite &= std::isfinite(columns.quats[4 * row + i]);
  for (int i = 0; i < 3; ++i) finite &= std::isfinite(columns.scales[3 * row + i]);
  if (!finite || !(math::sigmoid(columns.opacities[row]) >= rules.prune_opacity)) return kGone;
  const float* log_scale = columns.scales + 3 * row;
  float largest = log_scale[0] > log_scale[1] ? log_scale[0] : log_scale[1];
  largest = std::exp(largest > log_scale[2] ? largest : log_scale[2]);
  const float radius = statistics.radius ? statistics.radius[row] : 0.0f;
  const bool pulled = mean_gradient(statistics, row) > rules.grow_gradient;
  const bool split = (pulled && largest > rules.split_scale) || radius > rules.split_radius;
  const float scale_after = split ? largest / kSplitShrink : largest;
  if (scale_after > rules.prune_scale || radius > rules.prune_radius) return kGone;
  return split ? kSplit : pulled ? kCloned : kKept;
}

// Ascending: the highest gradient first.
HOST_DEVICE inline uint32_t doubling_key(const RowStatistics& statistics, int64_t row) {
  const float gradient = mean_gradient(statistics, row);
  union {
    float value;
    uint32_t bits;
  } both;
  both.value = gradient > 0.0f ? gradient : 0.0f;  // positive floats are in the order of their bits
  return ~both.bits;
}

// Moves the mean of a child away from its parent's, and shrinks it. child: 0 or 1.
HOST_DEVICE inline void draw_child(uint64_t seed, int64_t step, int64_t parent, int child,
                                   const float quat[4], float mean[3], float log_scale[3]) {
  const float norm = std::sqrt(quat[0] * quat[0] + quat[1] * quat[1] + quat[2] * quat[2] + quat[3] * quat[3]);
  const float inverse = norm > 0.0f ? 1.0f / norm : 0.0f;
  const float unit[4] = {quat[0] * inverse, quat[1] * inverse, quat[2] * inverse, quat[3] * inverse};
  float rotation[9], normal[3], offset[3];
  math::rotation_from_unit_quat(unit, rotation);
  math::normal3(math::draw(seed, math::Stream::kSplit, step, 2 * parent + child), normal);
  for (int axis = 0; axis < 3; ++axis) normal[axis] *= std::exp(log_scale[axis]);
  math::mat3_mul(rotation, normal, offset);
  for (int axis = 0; axis < 3; ++axis) {
    mean[axis] += offset[axis];
    log_scale[axis] -= std::log(kSplitShrink);
  }
}

}  // namespace mgpu::splat
