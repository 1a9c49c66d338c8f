// SPDX-License-Identifier: Apache-2.0
#include "splat/fates.h"

#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "splat/rows.h"

namespace mgpu::splat {

Fates fates_from_mask(const uint8_t* keep, int64_t rows) {
  const std::vector<RowRange> homes = equal_chunks(rows);
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
