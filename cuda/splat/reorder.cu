// SPDX-License-Identifier: Apache-2.0
// reorder.cu: each shard sorts its rows; on several shards each then takes its part of the union and sorts
// again. 64-bit keys in eight passes: 1.9 GB for ten million rows, which the moves (gather.cu) exceed
// tenfold.
#include "splat/reorder.h"

#include <vector>

#include "memory/transfer.h"
#include "splat/cuts.h"
#include "splat/kernels.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

constexpr int kKeyBits = 64;
constexpr int kBoxValues = 6;  // low and high of three axes

// Floats as integers in the same order.
__device__ uint32_t ordered_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ float from_ordered_bits(uint32_t bits) {
  return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

// box: low (all ones before) and ~high (all ones before) in ordered bits, so that all are minima.
__global__ void __launch_bounds__(kThreads) box_kernel(const float* means, RowRange rows, uint32_t* box) {
  uint32_t least[kBoxValues];
  for (uint32_t& value : least) value = ~0u;
  for (int64_t row = rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows.end;
       row += int64_t{gridDim.x} * kThreads) {
    const float* mean = means + 3 * row;
    if (!is_finite_mean(mean)) continue;
    for (int axis = 0; axis < 3; ++axis) {
      const uint32_t bits = ordered_bits(mean[axis]);
      least[axis] = min(least[axis], bits);
      least[axis + 3] = min(least[axis + 3], ~bits);
    }
  }
  for (int i = 0; i < kBoxValues; ++i) {
    const uint32_t warp = __reduce_min_sync(kAllLanes, least[i]);
    if (threadIdx.x % kWarp == 0 && warp != ~0u) atomicMin(box + i, warp);
  }
}

// boxes: of all shards.
__device__ MortonCube cube_of(const uint32_t* boxes, int shards) {
  uint32_t least[kBoxValues];
  for (uint32_t& value : least) value = ~0u;
  for (int i = 0; i < shards * kBoxValues; ++i) least[i % kBoxValues] = min(least[i % kBoxValues], boxes[i]);
  float low[3], high[3];
  for (int axis = 0; axis < 3; ++axis) {
    low[axis] = from_ordered_bits(least[axis]);
    high[axis] = from_ordered_bits(~least[axis + 3]);
  }
  return morton_cube(low, high);
}

__global__ void __launch_bounds__(kThreads)
    key_kernel(const float* means, RowRange rows, const uint32_t* boxes, int shards, uint64_t* key,
               uint32_t* local_row) {
  __shared__ MortonCube cube;
  if (threadIdx.x == 0) cube = cube_of(boxes, shards);
  __syncthreads();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows.size()) return;
  key[i] = morton_key(cube, means + 3 * (rows.begin + i));
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

// Boxes of the means, by shard, in the exchange.
Buffer<uint32_t> find_boxes(const float* means, const std::vector<RowRange>& homes) {
  const int64_t shards = static_cast<int64_t>(homes.size());
  std::vector<Buffer<uint32_t>> own;
  for (int shard = 0; shard < static_cast<int>(shards); ++shard) own.emplace_back(kBoxValues, shard);
  for_each_shard("morton box", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    uint32_t* const box = own[static_cast<size_t>(shard.index)].data();
    CUDA_CHECK(cudaMemsetAsync(box, 0xff, kBoxValues * sizeof(uint32_t), shard_stream(shard.index)));
    if (home.empty()) return;
    const unsigned blocks = std::min(blocks_for(home.size(), kThreads), 132u * 8);
    box_kernel<<<blocks, kThreads, 0, shard_stream(shard.index)>>>(means, home, box);
    KERNEL_CHECK("morton box", shard.index, home.size());
  });
  Buffer<uint32_t> boxes(shards * kBoxValues, kExchange);
  const auto collect = [&](const Shard& shard) {
    CUDA_CHECK(cudaMemcpyAsync(boxes.data() + shard.index * kBoxValues,
                               own[static_cast<size_t>(shard.index)].data(), kBoxValues * sizeof(uint32_t),
                               cudaMemcpyDefault, shard_stream(shard.index)));
  };
  for_each_shard("morton boxes", collect, Access::kExchange);
  return boxes;
}

}  // namespace

RowMap morton_order(const SplatColumns& columns) {
  JoinedOperator joined;
  const std::vector<RowRange> homes = equal_chunks(columns.num_rows);
  const size_t shards = homes.size();
  RowMap map;
  map.rows = columns.num_rows;
  map.origin.resize(shards);
  if (columns.num_rows == 0) return map;
  const Buffer<uint32_t> boxes = find_boxes(columns.means, homes);
  std::vector<Buffer<uint64_t>> key(shards);
  std::vector<Buffer<uint32_t>> local_row(shards);
  const auto sort = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange home = homes[index];
    if (home.empty()) return;
    key[index] = Buffer<uint64_t>(home.size(), shard.index);
    local_row[index] = Buffer<uint32_t>(home.size(), shard.index);
    key_kernel<<<blocks_for(home.size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        columns.means, home, boxes.data(), static_cast<int>(shards), key[index].data(),
        local_row[index].data());
    KERNEL_CHECK("morton keys", shard.index, home.size());
    sort_pairs(key[index], local_row[index], kKeyBits, shard.index);
  };
  for_each_shard("morton keys", sort);
  for (size_t shard = 0; shard < shards; ++shard)
    map.origin[shard] = Buffer<RowOrigin>(homes[shard].size(), static_cast<int>(shard));
  if (shards == 1) {
    for_each_shard("morton order", [&](const Shard& shard) {
      origin_kernel<<<blocks_for(map.rows, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
          local_row[0].data(), homes[0], map.origin[0].data());
      KERNEL_CHECK("morton order", shard.index, map.rows);
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
    KERNEL_CHECK("morton exchange", shard.index, rows);
  };
  for_each_shard("morton exchange", take, Access::kExchange);
  for_each_shard("morton order", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    sort_pairs(taken[index], map.origin[index], kKeyBits, shard.index);
  });
  return map;
}

}  // namespace mgpu::splat
