// SPDX-License-Identifier: Apache-2.0
#include "mesh/fork_join.h"
#include "splat/fates.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

int64_t outcomes_of(uint8_t fate) { return fate == kGone ? 0 : fate == kKept ? 1 : 2; }

// Of each shard.
std::vector<int64_t> count_outcomes(const Fates& fates) {
  std::vector<int64_t> count(fates.size(), 0);
  for_each_shard("count outcomes", [&](const Shard& shard) {
    int64_t sum = 0;
    for (const uint8_t fate : fates[static_cast<size_t>(shard.index)]) sum += outcomes_of(fate);
    count[static_cast<size_t>(shard.index)] = sum;
  });
  return count;
}

}  // namespace

int64_t count_rows_after(const Fates& fates) {
  int64_t sum = 0;
  for (const int64_t count : count_outcomes(fates)) sum += count;
  return sum;
}

RowMap map_rows(const Fates& fates, const std::vector<RowRange>& homes_after) {
  const std::vector<int64_t> count = count_outcomes(fates);
  const std::vector<RowRange> before = homes_of(fates);
  const std::vector<RowRange>& after = homes_after;
  RowMap map;
  map.rows = after.back().end;
  map.homes = after;
  for (size_t shard = 0; shard < after.size(); ++shard)
    map.origin.emplace_back(after[shard].size(), static_cast<int>(shard));
  const auto list = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    int64_t next = 0;  // row afterwards
    for (size_t other = 0; other < index; ++other) next += count[other];
    size_t home = 0;  // of `next`
    const auto add = [&](RowOrigin origin) {
      while (next >= after[home].end) ++home;
      map.origin[home][next++ - after[home].begin] = origin;
    };
    for (int64_t i = 0; i < fates[index].size(); ++i) {
      const int64_t row = before[index].begin + i;
      const uint8_t fate = fates[index][i];
      if (fate == kGone) continue;
      add(row_origin(row, fate == kSplit ? kFirstChild : kSame));
      if (fate == kCloned) add(row_origin(row, kCopy));
      if (fate == kSplit) add(row_origin(row, kSecondChild));
    }
  };
  for_each_shard("map rows", list, Access::kExchange);
  return map;
}

}  // namespace mgpu::splat
