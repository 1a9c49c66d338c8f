// SPDX-License-Identifier: Apache-2.0
// row_measure.cu: a warp a run. Reads 12 bytes a row; the curve's arithmetic takes about as long.
#include "splat/row_measure.h"

#include <vector>

#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

using Counter = unsigned long long;

// What a shard counts.
struct Counts {
  Counter finite_rows, runs, run_cells;
  Counter changes[kLevels], descents[kLevels];
};
constexpr int kCounters = sizeof(Counts) / sizeof(Counter);

// runs: which of the cut's, by number.
__global__ void __launch_bounds__(kThreads)
    measure_kernel(const float* means, int64_t num_rows, RowRuns cut, RowRange runs,
                   const RowCube* cube_of_all, Counts* counts) {
  __shared__ Counts block;
  __shared__ RowCube cube;
  for (int i = threadIdx.x; i < kCounters; i += kThreads) reinterpret_cast<Counter*>(&block)[i] = 0;
  if (threadIdx.x == 0) cube = *cube_of_all;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  const int64_t run = runs.begin + int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (run < runs.end) {
    const int64_t begin = cut.begin(run), end = min(cut.begin(run + 1), num_rows);
    uint32_t least[3] = {~0u, ~0u, ~0u}, most[3] = {0, 0, 0};
    // by lane 0: the key before the lanes' rows
    uint64_t before = lane == 0 && begin > 0 ? row_key(cube, means + 3 * (begin - 1)) : kNowhere;
    int finite = 0;
    for (int64_t first = begin; first < end; first += kWarp) {
      const int64_t row = first + lane;
      uint64_t key = kNowhere;
      if (row < end && is_finite_mean(means + 3 * row)) {
        uint32_t cell[3];
        row_cell(cube, means + 3 * row, cell);
        for (int axis = 0; axis < 3; ++axis) {
          least[axis] = min(least[axis], cell[axis]);
          most[axis] = max(most[axis], cell[axis]);
        }
        key = math::hilbert_code(cell);
        ++finite;
      }
      const uint64_t left = __shfl_up_sync(kAllLanes, key, 1);
      const uint64_t previous = lane == 0 ? before : left;
      before = __shfl_sync(kAllLanes, key, kWarp - 1);
      if (key != kNowhere && previous != kNowhere && key != previous) {
        const int level = parting_level(previous, key);
        atomicAdd(&block.changes[level], Counter{1});
        if (key < previous) atomicAdd(&block.descents[level], Counter{1});
      }
    }
    const unsigned rows = __reduce_add_sync(kAllLanes, static_cast<unsigned>(finite));
    Counter sides = 0;
    for (int axis = 0; axis < 3; ++axis) {
      const uint32_t low = __reduce_min_sync(kAllLanes, least[axis]);
      const uint32_t high = __reduce_max_sync(kAllLanes, most[axis]);
      if (rows > 0) sides += high - low;
    }
    if (lane == 0 && rows > 0) {
      atomicAdd(&block.finite_rows, Counter{rows});
      atomicAdd(&block.runs, Counter{1});
      atomicAdd(&block.run_cells, sides);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kCounters; i += kThreads) {
    const Counter count = reinterpret_cast<Counter*>(&block)[i];
    if (count > 0) atomicAdd(reinterpret_cast<Counter*>(counts) + i, count);
  }
}

}  // namespace

RowMeasure measure_rows(const SplatColumns& columns, RowRuns cut) {
  JoinedOperator joined;
  const Buffer<RowCube> cube = row_cube(columns);
  const std::vector<RowRange> homes = homes_of(columns);
  std::vector<Buffer<Counts>> own;
  for (int shard = 0; shard < static_cast<int>(homes.size()); ++shard) own.emplace_back(1, shard);
  const auto measure = [&](const Shard& shard) {  // a run lies with its first row
    const size_t index = static_cast<size_t>(shard.index);
    zero(own[index]);
    const RowRange runs{cut.from(homes[index].begin), cut.from(homes[index].end)};
    if (runs.empty()) return;
    measure_kernel<<<blocks_for(runs.size(), kWarps), kThreads, 0, shard_stream(shard.index)>>>(
        columns.means, columns.num_rows, cut, runs, cube.data(), own[index].data());
    KERNEL_CHECK("measure rows", shard.index, homes[index].size());
  };
  for_each_shard("measure rows", measure, Access::kExchange);
  std::vector<Counts> counts(homes.size());
  RowMeasure all{};
  ReadBack back;
  for (size_t shard = 0; shard < homes.size(); ++shard)
    back.add(&counts[shard], own[shard].data(), 1, static_cast<int>(shard));
  back.add(&all.cube, cube.data(), 1, 0);
  back.wait();
  for (const Counts& part : counts) {
    all.finite_rows += static_cast<int64_t>(part.finite_rows);
    all.runs += static_cast<int64_t>(part.runs);
    all.run_cells += static_cast<int64_t>(part.run_cells);
    for (int level = 0; level < kLevels; ++level) {
      all.changes[level] += static_cast<int64_t>(part.changes[level]);
      all.descents[level] += static_cast<int64_t>(part.descents[level]);
    }
  }
  return all;
}

}  // namespace mgpu::splat
