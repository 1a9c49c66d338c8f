// SPDX-License-Identifier: Apache-2.0
// reorder.cu: each shard sorts its rows; on several shards each then takes its part of the union and sorts
// again. 64-bit keys in eight passes: 1.9 GB for ten million rows, which the moves (gather.cu) exceed
// tenfold. Dealing then looks up 8 bytes a row, most of them on other shards.
#include "splat/reorder.h"

#include <utility>
#include <vector>

#include "memory/transfer.h"
#include "splat/cuts.h"
#include "splat/kernels.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

constexpr int kKeyBits = 64;

__global__ void __launch_bounds__(kThreads)
    key_kernel(const float* means, RowRange rows, const RowCube* cube_of_all, uint64_t* key,
               uint32_t* local_row) {
  __shared__ RowCube cube;
  if (threadIdx.x == 0) cube = *cube_of_all;
  __syncthreads();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows.size()) return;
  key[i] = row_key(cube, means + 3 * (rows.begin + i));
  local_row[i] = static_cast<uint32_t>(i);
}

__global__ void __launch_bounds__(kThreads)
    origin_kernel(const uint32_t* local_row, RowRange rows, RowOrigin* origin) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < rows.size()) origin[i] = row_origin(rows.begin + local_row[i]);
}

// The sorted lists of all shards.
struct SortedLists {
  const uint64_t* key[kMaxShards];
  const uint32_t* local_row[kMaxShards];
  int64_t first_row[kMaxShards];
  int lists;
};

// A shard's part of the union: from each list what lies between two cuts, list by list.
__global__ void __launch_bounds__(kThreads)
    take_kernel(const __grid_constant__ SortedLists lists, const int64_t* begin, const int64_t* end,
                int64_t count, uint64_t* key, RowOrigin* origin) {
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t to = i;
  int list = 0;
  while (list + 1 < lists.lists && i >= end[list] - begin[list]) {
    i -= end[list] - begin[list];
    ++list;
  }
  const int64_t from = begin[list] + i;
  key[to] = lists.key[list][from];
  origin[to] = row_origin(lists.first_row[list] + lists.local_row[list][from]);
}

// A sequence of rows, shard by shard.
struct Sequence {
  const RowOrigin* origin[kMaxShards];
  RowRange home[kMaxShards];
};

// A block a unit of the deal, whose rows are consecutive in the sequence; `first_unit` has the first row of
// `home`.
__global__ void __launch_bounds__(kThreads)
    deal_kernel(const __grid_constant__ RowDeal deal, const __grid_constant__ Sequence sequence,
                RowRange home, int64_t first_unit, RowOrigin* dealt) {
  static_assert(kThreads == RowDeal::kUnit);
  __shared__ int64_t ahead;  // of a row, its place in the sequence
  const int64_t row = (first_unit + blockIdx.x) * RowDeal::kUnit + threadIdx.x;
  const int64_t first = max(home.begin, row - threadIdx.x);
  if (threadIdx.x == 0) ahead = deal.rank(first) - first;
  __syncthreads();
  if (row < home.begin || row >= home.end) return;
  const int64_t place = row + ahead;
  int shard = 0;
  while (place >= sequence.home[shard].end) ++shard;
  dealt[row - home.begin] = sequence.origin[shard][place - sequence.home[shard].begin];
}

// Rows in order, shard by shard.
RowMap sorted_rows(const SplatColumns& columns) {
  const std::vector<RowRange> homes = homes_of(columns);
  const size_t shards = homes.size();
  RowMap map;
  map.rows = columns.num_rows;
  map.homes = homes;
  map.origin.resize(shards);
  if (columns.num_rows == 0) return map;
  const Buffer<RowCube> cube = row_cube(columns);
  std::vector<Buffer<uint64_t>> key(shards);
  std::vector<Buffer<uint32_t>> local_row(shards);
  const auto sort = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange home = homes[index];
    if (home.empty()) return;
    key[index] = Buffer<uint64_t>(home.size(), shard.index);
    local_row[index] = Buffer<uint32_t>(home.size(), shard.index);
    key_kernel<<<blocks_for(home.size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        columns.means, home, cube.data(), key[index].data(), local_row[index].data());
    KERNEL_CHECK("row keys", shard.index, home.size());
    sort_pairs(key[index], local_row[index], kKeyBits, shard.index);
  };
  for_each_shard("row keys", sort);
  for (size_t shard = 0; shard < shards; ++shard)
    map.origin[shard] = Buffer<RowOrigin>(homes[shard].size(), static_cast<int>(shard));
  if (shards == 1) {
    for_each_shard("row order", [&](const Shard& shard) {
      origin_kernel<<<blocks_for(map.rows, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
          local_row[0].data(), homes[0], map.origin[0].data());
      KERNEL_CHECK("row order", shard.index, map.rows);
    });
    return map;
  }

  std::vector<int64_t> ranks;
  for (const RowRange& home : homes) ranks.push_back(home.begin);
  ranks.push_back(columns.num_rows);
  const Buffer<int64_t> cut = cut_lists(key, ranks);
  SortedLists lists{};
  lists.lists = static_cast<int>(shards);
  for (size_t shard = 0; shard < shards; ++shard) {
    lists.key[shard] = key[shard].data();
    lists.local_row[shard] = local_row[shard].data();
    lists.first_row[shard] = homes[shard].begin;
  }
  std::vector<Buffer<uint64_t>> taken(shards);
  const auto take = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const int64_t rows = homes[index].size();
    if (rows == 0) return;
    taken[index] = Buffer<uint64_t>(rows, shard.index);
    take_kernel<<<blocks_for(rows, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        lists, cut.data() + index * shards, cut.data() + (index + 1) * shards, rows, taken[index].data(),
        map.origin[index].data());
    KERNEL_CHECK("row exchange", shard.index, rows);
  };
  for_each_shard("row exchange", take, Access::kExchange);
  for_each_shard("row order", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    sort_pairs(taken[index], map.origin[index], kKeyBits, shard.index);
  });
  return map;
}

}  // namespace

RowMap hilbert_order(const SplatColumns& columns, const RowDeal* deal) {
  JoinedOperator joined;
  RowMap map = sorted_rows(columns);
  if (!deal || map.rows == 0) return map;
  Sequence sequence{};
  for (size_t shard = 0; shard < map.homes.size(); ++shard) {
    sequence.origin[shard] = map.origin[shard].data();
    sequence.home[shard] = map.homes[shard];
  }
  std::vector<Buffer<RowOrigin>> dealt(map.homes.size());
  const auto look_up = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange home = map.homes[index];
    dealt[index] = Buffer<RowOrigin>(home.size(), shard.index);
    if (home.empty()) return;
    const int64_t first_unit = home.begin / RowDeal::kUnit;
    const int64_t units = (home.end + RowDeal::kUnit - 1) / RowDeal::kUnit - first_unit;
    deal_kernel<<<static_cast<unsigned>(units), kThreads, 0, shard_stream(shard.index)>>>(
        *deal, sequence, home, first_unit, dealt[index].data());
    KERNEL_CHECK("row deal", shard.index, home.size());
  };
  for_each_shard("row deal", look_up, Access::kExchange);
  for (size_t shard = 0; shard < map.homes.size(); ++shard) map.origin[shard] = std::move(dealt[shard]);
  return map;
}

}  // namespace mgpu::splat
