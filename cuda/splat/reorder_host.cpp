// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
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

MortonCube cube_around(const SplatColumns& columns, const std::vector<RowRange>& homes) {
  constexpr float kFar = std::numeric_limits<float>::max();
  struct Box {
    float low[3] = {kFar, kFar, kFar}, high[3] = {-kFar, -kFar, -kFar};
  };
  std::vector<Box> boxes(homes.size());
  for_each_shard("morton box", [&](const Shard& shard) {
    Box& box = boxes[static_cast<size_t>(shard.index)];
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    for (int64_t row = home.begin; row < home.end; ++row) {
      const float* mean = columns.means + 3 * row;
      if (!is_finite_mean(mean)) continue;
      for (int axis = 0; axis < 3; ++axis) {
        box.low[axis] = std::min(box.low[axis], mean[axis]);
        box.high[axis] = std::max(box.high[axis], mean[axis]);
      }
    }
  });
  Box all;
  for (const Box& box : boxes) {
    for (int axis = 0; axis < 3; ++axis) {
      all.low[axis] = std::min(all.low[axis], box.low[axis]);
      all.high[axis] = std::max(all.high[axis], box.high[axis]);
    }
  }
  return morton_cube(all.low, all.high);
}

}  // namespace

RowMap morton_order(const SplatColumns& columns) {
  const std::vector<RowRange> homes = equal_chunks(columns.num_rows);
  const MortonCube cube = cube_around(columns, homes);
  Buffer<KeyedRow> keyed(columns.num_rows, kExchange);
  for_each_shard("morton keys", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      for (int64_t row = home.begin + begin; row < home.begin + end; ++row)
        keyed[row] = {morton_key(cube, columns.means + 3 * row), row};
    });
  });
  std::sort(keyed.begin(), keyed.end());
  RowMap map;
  map.rows = columns.num_rows;
  for (size_t shard = 0; shard < homes.size(); ++shard)
    map.origin.emplace_back(homes[shard].size(), static_cast<int>(shard));
  for_each_shard("morton order", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    for (int64_t i = 0; i < homes[index].size(); ++i)
      map.origin[index][i] = row_origin(keyed[homes[index].begin + i].row);
  });
  return map;
}

}  // namespace mgpu::splat
