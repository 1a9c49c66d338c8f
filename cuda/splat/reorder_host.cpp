// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "mesh/fork_join.h"
#include "splat/reorder.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kRowsPerPiece = 4096;

struct KeyedRow {
  uint64_t key;
  int64_t row;
  bool operator<(const KeyedRow& other) const { return key != other.key ? key < other.key : row < other.row; }
};

}  // namespace

RowMap hilbert_order(const SplatColumns& columns, const RowDeal* deal) {
  const std::vector<RowRange> homes = homes_of(columns);
  const Buffer<RowCube> cube = row_cube(columns);
  Buffer<KeyedRow> keyed(columns.num_rows, kExchange);
  for_each_shard("row keys", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      for (int64_t row = home.begin + begin; row < home.begin + end; ++row)
        keyed[row] = {row_key(cube[0], columns.means + 3 * row), row};
    });
  });
  std::sort(keyed.begin(), keyed.end());
  RowMap map;
  map.rows = columns.num_rows;
  map.homes = homes;
  for (size_t shard = 0; shard < homes.size(); ++shard)
    map.origin.emplace_back(homes[shard].size(), static_cast<int>(shard));
  for_each_shard("row order", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange home = homes[index];
    int64_t ahead = 0;  // of a row, its place in the sequence
    for (int64_t row = home.begin; row < home.end; ++row) {
      if (deal && (row == home.begin || row % RowDeal::kUnit == 0)) ahead = deal->rank(row) - row;
      map.origin[index][row - home.begin] = row_origin(keyed[row + ahead].row);
    }
  });
  return map;
}

}  // namespace mgpu::splat
