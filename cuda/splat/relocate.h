// SPDX-License-Identifier: Apache-2.0
// relocate.h: densification of 3DGS-MCMC (Kheradmand et al. 2024): rows that died are moved onto living ones,
// and the table grows by copies of living ones; a living row is drawn with probability proportional to its
// opacity.
//
// All rows must be flushed before (step.h). Results do not depend on the mesh.
#pragma once
#include <cstdint>
#include <vector>

#include "splat/columns.h"

namespace mgpu::splat {

// Rows, ascending, whose opacity is at most `min_opacity`, or whose geometry is not finite. Stage "dead
// rows".
std::vector<int64_t> dead_rows(const SplatColumns& columns, float min_opacity);

// `count` independent draws of living rows, ascending; keyed by (seed, step). Empty if no row lives.
// Opacities are weighed as integers (24 bits after the point) and summed in 64 bits, so the sums are exact in
// any order.
std::vector<int64_t> sample_rows(const SplatColumns& columns, float min_opacity, int64_t count, uint64_t seed,
                                 int64_t step);

// Make row destination[i] a copy of row source[i]; both ascending, and no row is in both. A source that
// occurs n - 1 times and its copies share its place: all get the opacity and scales of math/relocation.h for
// n. Moments of sources and copies become zero, last_step becomes `now`. Opacities are kept in [min_opacity,
// 1 - 2^-23]. `state` may be null. Throws std::invalid_argument on lists that break these rules.
void relocate(const SplatColumns& columns, const AdamState* state, const std::vector<int64_t>& source,
              const std::vector<int64_t>& destination, float min_opacity, int64_t now);

// Set the moments of `rows` (ascending) to zero and their last_step to `now`.
void reset_rows(const SplatColumns& columns, const AdamState& state, const std::vector<int64_t>& rows,
                int64_t now);

}  // namespace mgpu::splat
