// SPDX-License-Identifier: Apache-2.0
// fates.cu: a scan of the outcomes, block by block and shard by shard.
#include "splat/fates.h"

#include <cub/block/block_scan.cuh>

#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

__device__ int outcomes_of(uint8_t fate) { return fate == kGone ? 0 : fate == kKept ? 1 : 2; }

__global__ void __launch_bounds__(kThreads)
    count_outcomes_kernel(const uint8_t* fate, int64_t rows, int32_t* count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int mine = i < rows ? outcomes_of(fate[i]) : 0;
  const int total = __syncthreads_count(mine > 0) + __syncthreads_count(mine > 1);
  if (threadIdx.x == 0) count[blockIdx.x] = total;
}

// The lists of all shards.
struct OriginLists {
  RowOrigin* origin[kMaxShards];  // of the shard's first row
  int64_t end[kMaxShards];        // of its rows
  __device__ RowOrigin& operator[](int64_t row) const {
    int home = 0;
    while (row >= end[home]) ++home;
    return origin[home][row - (home > 0 ? end[home - 1] : 0)];
  }
};

// shard_total: outcomes of each shard of the mesh. offset: outcomes of the blocks before, on this shard.
__global__ void __launch_bounds__(kThreads)
    map_rows_kernel(const uint8_t* fate, RowRange rows, const int64_t* offset, const int64_t* shard_total,
                    int shard, const __grid_constant__ OriginLists lists) {
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ typename Scan::TempStorage scratch;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint8_t mine = i < rows.size() ? fate[i] : static_cast<uint8_t>(kGone);
  int before;
  Scan(scratch).ExclusiveSum(outcomes_of(mine), before);
  if (mine == kGone) return;
  int64_t to = offset[blockIdx.x] + before;
  for (int other = 0; other < shard; ++other) to += shard_total[other];
  const int64_t row = rows.begin + i;
  lists[to] = row_origin(row, mine == kSplit ? kFirstChild : kSame);
  if (mine == kCloned) lists[to + 1] = row_origin(row, kCopy);
  if (mine == kSplit) lists[to + 1] = row_origin(row, kSecondChild);
}

// Outcomes of the blocks before each block of a shard's rows; the last value is the shard's total.
std::vector<Buffer<int64_t>> scan_outcomes(const Fates& fates) {
  std::vector<Buffer<int64_t>> offset(fates.size());
  for_each_shard("count outcomes", [&](const Shard& shard) {
    const Buffer<uint8_t>& fate = fates[static_cast<size_t>(shard.index)];
    const int64_t blocks = blocks_for(fate.size(), kThreads);
    Buffer<int32_t> count(blocks + 1, shard.index);
    zero_bytes(count.data() + blocks, sizeof(int32_t), shard.index);
    if (blocks > 0) {
      count_outcomes_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, shard_stream(shard.index)>>>(
          fate.data(), fate.size(), count.data());
      KERNEL_CHECK("count outcomes", shard.index, fate.size());
    }
    Buffer<int64_t>& before = offset[static_cast<size_t>(shard.index)];
    before = Buffer<int64_t>(blocks + 1, shard.index);
    exclusive_sum(count.data(), before.data(), blocks + 1, shard.index);
  });
  return offset;
}

}  // namespace

int64_t count_rows_after(const Fates& fates) {
  JoinedOperator joined;
  const std::vector<Buffer<int64_t>> offset = scan_outcomes(fates);
  std::vector<int64_t> total(fates.size());
  ReadBack totals;
  for (size_t shard = 0; shard < fates.size(); ++shard)
    totals.add(&total[shard], offset[shard].data() + offset[shard].size() - 1, 1, static_cast<int>(shard));
  totals.wait();
  int64_t sum = 0;
  for (const int64_t rows : total) sum += rows;
  return sum;
}

RowMap map_rows(const Fates& fates, const std::vector<RowRange>& homes_after) {
  JoinedOperator joined;
  const std::vector<RowRange> before = homes_of(fates);
  const std::vector<RowRange>& after = homes_after;
  RowMap map;
  map.rows = after.back().end;
  map.homes = after;
  OriginLists lists{};
  for (size_t shard = 0; shard < after.size(); ++shard) {
    map.origin.emplace_back(after[shard].size(), static_cast<int>(shard));
    lists.origin[shard] = map.origin[shard].data();
    lists.end[shard] = after[shard].end;
  }
  const std::vector<Buffer<int64_t>> offset = scan_outcomes(fates);
  Buffer<int64_t> shard_total(static_cast<int64_t>(fates.size()), kExchange);
  const auto collect = [&](const Shard& shard) {
    const Buffer<int64_t>& own = offset[static_cast<size_t>(shard.index)];
    CUDA_CHECK(cudaMemcpyAsync(shard_total.data() + shard.index, own.data() + own.size() - 1, sizeof(int64_t),
                               cudaMemcpyDefault, shard_stream(shard.index)));
  };
  for_each_shard("collect totals", collect, Access::kExchange);
  const auto list = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange rows = before[index];
    if (rows.empty()) return;
    map_rows_kernel<<<blocks_for(rows.size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        fates[index].data(), rows, offset[index].data(), shard_total.data(), shard.index, lists);
    KERNEL_CHECK("map rows", shard.index, rows.size());
  };
  for_each_shard("map rows", list, Access::kExchange);
  return map;
}

}  // namespace mgpu::splat
