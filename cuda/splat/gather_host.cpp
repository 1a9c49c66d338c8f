// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "mesh/fork_join.h"
#include "splat/gather.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kRowsPerPiece = 4096;

}  // namespace

void gather_rows(const std::vector<RowBytes>& columns, const RowMap& map, int64_t scratch_bytes) {
  const std::vector<RowRange>& homes = map.homes;
  const int64_t most = most_rows(homes);
  for (const RowBytes& column : columns) {
    const RowSlices slices = slices_of(column.row_bytes, most, scratch_bytes);
    char* const data = static_cast<char*>(column.data);
    for (int64_t first = 0; first < slices.row_units; first += slices.most_units) {
      const int64_t bytes = std::min(slices.most_units, slices.row_units - first) * slices.unit;
      const int64_t offset = first * slices.unit;
      std::vector<Buffer<char>> scratch;
      for (size_t shard = 0; shard < homes.size(); ++shard)
        scratch.emplace_back(homes[shard].size() * bytes, static_cast<int>(shard));
      const auto gather = [&](const Shard& shard) {
        const size_t index = static_cast<size_t>(shard.index);
        const Buffer<RowOrigin>& origin = map.origin[index];
        parallel_for(homes[index].size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i)
            std::memcpy(scratch[index].data() + i * bytes, data + origin[i].row() * column.row_bytes + offset,
                        static_cast<size_t>(bytes));
        });
      };
      for_each_shard("gather rows", gather, Access::kExchange);
      // Rows may come to lie where, by the table's row split, other shards' rows lay.
      const auto put = [&](const Shard& shard) {
        const size_t index = static_cast<size_t>(shard.index);
        parallel_for(homes[index].size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i)
            std::memcpy(data + (homes[index].begin + i) * column.row_bytes + offset,
                        scratch[index].data() + i * bytes, static_cast<size_t>(bytes));
        });
      };
      for_each_shard("put rows", put, Access::kExchange);
    }
  }
}

}  // namespace mgpu::splat
