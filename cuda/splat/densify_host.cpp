// SPDX-License-Identifier: Apache-2.0
#include "splat/densify.h"

#include <algorithm>
#include <array>
#include <vector>

#include "mesh/fork_join.h"
#include "splat/rows.h"

namespace mgpu::splat {

DensifyPlan plan_densification(const SplatColumns& columns, const RowStatistics& statistics,
                               const DensifyRules& rules) {
  struct Candidate {
    uint32_t key;
    int64_t row;
    bool operator<(const Candidate& other) const {
      return key != other.key ? key < other.key : row < other.row;
    }
  };
  const std::vector<RowRange> homes = homes_of(columns);
  DensifyPlan plan;
  plan.rows_before = columns.num_rows;
  for (size_t shard = 0; shard < homes.size(); ++shard)
    plan.fates.emplace_back(homes[shard].size(), static_cast<int>(shard));
  std::vector<int64_t> gone(homes.size(), 0);
  std::vector<std::vector<Candidate>> doubled(homes.size());
  for_each_shard("decide fates", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    for (int64_t row = homes[index].begin; row < homes[index].end; ++row) {
      const RowFate fate = fate_of(columns, statistics, rules, row);
      plan.fates[index][row - homes[index].begin] = fate;
      gone[index] += fate == kGone;
      if (fate == kCloned || fate == kSplit) doubled[index].push_back({doubling_key(statistics, row), row});
    }
  });
  std::vector<Candidate> all;
  for (size_t shard = 0; shard < homes.size(); ++shard) {
    plan.pruned += gone[shard];
    all.insert(all.end(), doubled[shard].begin(), doubled[shard].end());
  }
  const int64_t room = std::max<int64_t>(0, rules.max_rows - (plan.rows_before - plan.pruned));
  plan.doubled = std::min(static_cast<int64_t>(all.size()), room);
  plan.rows_after = plan.rows_before - plan.pruned + plan.doubled;
  std::sort(all.begin(), all.end());
  std::vector<int64_t> kept;
  for (size_t i = static_cast<size_t>(plan.doubled); i < all.size(); ++i) kept.push_back(all[i].row);
  for_each_shard("rank gradients", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    for (const int64_t row : kept) {
      if (row >= homes[index].begin && row < homes[index].end)
        plan.fates[index][row - homes[index].begin] = kKept;
    }
  });
  return plan;
}

void densify(const SplatColumns& columns, const AdamState* state, const DensifyPlan& plan, uint64_t seed,
             int64_t step, int64_t now) {
  if (plan.pruned == 0 && plan.doubled == 0) return;
  const RowMap map = map_rows(plan.fates, row_homes(columns.means, plan.rows_after));
  gather_rows(all_columns(columns, state), map);
  const std::vector<RowRange>& homes = map.homes;
  const std::array<int, kColumns> floats = {3, 4, 3, 1, 3, 3 * columns.sh_rest};
  const auto finish = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    for (int64_t i = 0; i < homes[index].size(); ++i) {
      const RowOrigin from = map.origin[index][i];
      const int64_t row = homes[index].begin + i;
      if (from.tag() == kSame) continue;
      if (from.tag() != kCopy) {
        draw_child(seed, step, from.row(), from.tag() == kSecondChild, columns.quats + 4 * row,
                   columns.means + 3 * row, columns.scales + 3 * row);
      }
      if (!state) continue;
      for (size_t column = 0; column < kColumns; ++column) {
        for (int i = 0; i < floats[column]; ++i)
          state->exp_avg[column].set(row * floats[column] + i, 0.0f, 0);
        std::fill_n(state->exp_avg_sq[column] + row * floats[column], floats[column], 0.0f);
      }
      state->last_step[row] = static_cast<int32_t>(now);
    }
  };
  // Until the table has been shrunk, its rows are split over the shards as before.
  for_each_shard("new rows", finish, Access::kExchange);
}

void reset_opacities(const SplatColumns& columns, const AdamState* state, float most) {
  const std::vector<RowRange> homes = homes_of(columns);
  constexpr size_t kOpacities = 3;
  const float logit = std::log(most / (1.0f - most));
  for_each_shard("reset opacities", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    for (int64_t row = home.begin; row < home.end; ++row) {
      columns.opacities[row] = std::min(columns.opacities[row], logit);
      if (!state) continue;
      state->exp_avg[kOpacities].set(row, 0.0f, 0);
      state->exp_avg_sq[kOpacities][row] = 0.0f;
    }
  });
}

}  // namespace mgpu::splat
