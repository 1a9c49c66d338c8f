// SPDX-License-Identifier: Apache-2.0
#include "splat/fates.h"

#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "splat/rows.h"

namespace mgpu::splat {

std::vector<RowRange> homes_of(const Fates& fates) {
  std::vector<RowRange> homes;
  for (const Buffer<uint8_t>& fate : fates) {
    const int64_t begin = homes.empty() ? 0 : homes.back().end;
    homes.push_back({begin, begin + fate.size()});
  }
  return homes;
}

Fates fates_from_mask(const uint8_t* keep, const std::vector<RowRange>& homes) {
  Fates fates;
  for (size_t shard = 0; shard < homes.size(); ++shard)
    fates.emplace_back(homes[shard].size(), static_cast<int>(shard));
  const auto copy = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    copy_between(fates[index].data(), shard.index, keep + homes[index].begin, shard.index,
                 homes[index].size());
  };
  for_each_shard("keep rows", copy, Access::kExchange);
  return fates;
}

}  // namespace mgpu::splat
