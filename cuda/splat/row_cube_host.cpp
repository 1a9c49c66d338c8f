// SPDX-License-Identifier: Apache-2.0
#include "splat/row_cube.h"

#include <algorithm>
#include <vector>

#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

void summarise(const float* means, RowRange rows, MeansSummary& summary) {
  std::fill(std::begin(summary.least), std::end(summary.least), ~0u);
  std::fill_n(&summary.rows[0][0], 3 * kCoordinateBins, 0u);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const float* mean = means + 3 * row;
    if (!is_finite_mean(mean)) continue;
    for (int axis = 0; axis < 3; ++axis) {
      const uint32_t bits = ordered_bits(mean[axis]);
      summary.least[axis] = std::min(summary.least[axis], bits);
      summary.least[axis + 3] = std::min(summary.least[axis + 3], ~bits);
      ++summary.rows[axis][bits >> kBinShift];
    }
  }
}

// The first bin with more than `skip` rows up to it, from either end.
int bin_after(const std::vector<int64_t>& rows, int64_t skip, bool from_above) {
  int64_t passed = 0;
  for (int i = 0; i < kCoordinateBins; ++i) {
    const int bin = from_above ? kCoordinateBins - 1 - i : i;
    passed += rows[static_cast<size_t>(bin)];
    if (passed > skip) return bin;
  }
  return 0;
}

}  // namespace

Buffer<RowCube> row_cube(const SplatColumns& columns) {
  const std::vector<RowRange> homes = homes_of(columns);
  std::vector<MeansSummary> summaries(homes.size());
  for_each_shard("row cube", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    summarise(columns.means, homes[index], summaries[index]);
  });
  float low[3], high[3], inner_low[3], inner_high[3];
  for (int axis = 0; axis < 3; ++axis) {
    uint32_t least = ~0u, most = ~0u;
    std::vector<int64_t> rows(kCoordinateBins);
    int64_t count = 0;
    for (const MeansSummary& summary : summaries) {
      least = std::min(least, summary.least[axis]);
      most = std::min(most, summary.least[axis + 3]);
      for (int bin = 0; bin < kCoordinateBins; ++bin) {
        rows[static_cast<size_t>(bin)] += summary.rows[axis][bin];
        count += summary.rows[axis][bin];
      }
    }
    low[axis] = count > 0 ? from_ordered_bits(least) : 1.f;
    high[axis] = count > 0 ? from_ordered_bits(~most) : 0.f;
    inner_low[axis] = std::max(low[axis], bin_low(bin_after(rows, count / kFarRows, false)));
    inner_high[axis] = std::min(high[axis], bin_high(bin_after(rows, count / kFarRows, true)));
  }
  Buffer<RowCube> cube(1, kExchange);
  cube[0] = cube_around(low, high, inner_low, inner_high);
  return cube;
}

}  // namespace mgpu::splat
