// SPDX-License-Identifier: Apache-2.0
// densify.cu: decisions are a pass over 60 bytes a row; what costs is moving the rows (gather.cu).
#include "splat/densify.h"

#include <algorithm>

#include "memory/transfer.h"
#include "splat/cuts.h"
#include "splat/kernels.h"
#include "splat/row_kernels.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

// ---- decisions

struct FateCounts {
  unsigned long long gone, doubled;
};

// doubled_of_block: for the list of rows to be doubled.
__global__ void __launch_bounds__(kThreads)
    decide_kernel(const __grid_constant__ SplatColumns columns, RowStatistics statistics, DensifyRules rules,
                  RowRange rows, uint8_t* fate, int32_t* doubled_of_block, FateCounts* counts) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool inside = i < rows.size();
  const RowFate mine = inside ? fate_of(columns, statistics, rules, rows.begin + i) : kKept;
  if (inside) fate[i] = mine;
  const int gone = __syncthreads_count(mine == kGone);
  const int doubled = __syncthreads_count(mine == kCloned || mine == kSplit);
  if (threadIdx.x > 0) return;
  doubled_of_block[blockIdx.x] = doubled;
  if (gone > 0) atomicAdd(&counts->gone, static_cast<unsigned long long>(gone));
  if (doubled > 0) atomicAdd(&counts->doubled, static_cast<unsigned long long>(doubled));
}

__global__ void __launch_bounds__(kThreads)
    list_doubled_kernel(RowStatistics statistics, RowRange rows, const uint8_t* fate, const int64_t* offset,
                        uint64_t* key, uint32_t* local_row) {
  __shared__ unsigned warp_bits[kWarps];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool mine = i < rows.size() && (fate[i] == kCloned || fate[i] == kSplit);
  const unsigned bits = __ballot_sync(kAllLanes, mine);
  if (lane == 0) warp_bits[warp] = bits;
  __syncthreads();
  if (!mine) return;
  int64_t to = offset[blockIdx.x] + __popc(bits & ((1u << lane) - 1u));
  for (int w = 0; w < warp; ++w) to += __popc(warp_bits[w]);
  key[to] = doubling_key(statistics, rows.begin + i);
  local_row[to] = static_cast<uint32_t>(i);
}

// Rows of the sorted list from *cut on stay as they are.
__global__ void __launch_bounds__(kThreads)
    keep_kernel(const uint32_t* local_row, int64_t count, const int64_t* cut, uint8_t* fate) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= *cut && i < count) fate[local_row[i]] = kKept;
}

// ---- new rows

__global__ void __launch_bounds__(kThreads)
    new_rows_kernel(const __grid_constant__ Rows rows, const RowOrigin* origin, uint64_t seed, int64_t step) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = rows.home.begin + i;
  const RowOrigin from = i < rows.home.size() ? origin[i] : row_origin(0, kSame);
  if (from.tag() == kFirstChild || from.tag() == kSecondChild) {
    float quat[4], mean[3], log_scale[3];
    for (int k = 0; k < 4; ++k) quat[k] = rows.columns.quats[4 * row + k];
    for (int k = 0; k < 3; ++k) mean[k] = rows.columns.means[3 * row + k];
    for (int k = 0; k < 3; ++k) log_scale[k] = rows.columns.scales[3 * row + k];
    draw_child(seed, step, from.row(), from.tag() == kSecondChild, quat, mean, log_scale);
    for (int k = 0; k < 3; ++k) rows.columns.means[3 * row + k] = mean[k];
    for (int k = 0; k < 3; ++k) rows.columns.scales[3 * row + k] = log_scale[k];
  }
  for (unsigned left = __ballot_sync(kAllLanes, from.tag() != kSame); left != 0; left &= left - 1)
    reset_moments(rows, __shfl_sync(kAllLanes, row, __ffs(left) - 1), lane);
}

// moments: null if there is no state.
__global__ void __launch_bounds__(kThreads)
    reset_opacities_kernel(float* opacities, FloatArray exp_avg, float* exp_avg_sq, RowRange rows,
                           float most) {
  const int64_t row = rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= rows.end) return;
  opacities[row] = fminf(opacities[row], most);
  if (!exp_avg_sq) return;
  exp_avg.set(row, 0.f, 0);
  exp_avg_sq[row] = 0.f;
}

}  // namespace

DensifyPlan plan_densification(const SplatColumns& columns, const RowStatistics& statistics,
                               const DensifyRules& rules) {
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns);
  const size_t shards = homes.size();
  DensifyPlan plan;
  plan.fates.resize(shards);
  plan.rows_before = plan.rows_after = columns.num_rows;
  std::vector<Buffer<int32_t>> doubled_of_block(shards);
  std::vector<Buffer<FateCounts>> device_counts(shards);
  std::vector<FateCounts> counts(shards, FateCounts{0, 0});
  ReadBack read_back;
  for_each_shard("decide fates", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange home = homes[index];
    if (home.empty()) return;
    const int64_t blocks = blocks_for(home.size(), kThreads);
    plan.fates[index] = Buffer<uint8_t>(home.size(), shard.index);
    doubled_of_block[index] = Buffer<int32_t>(blocks + 1, shard.index);
    device_counts[index] = Buffer<FateCounts>(1, shard.index);
    zero_bytes(doubled_of_block[index].data() + blocks, sizeof(int32_t), shard.index);
    zero(device_counts[index]);
    decide_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, shard_stream(shard.index)>>>(
        columns, statistics, rules, home, plan.fates[index].data(), doubled_of_block[index].data(),
        device_counts[index].data());
    KERNEL_CHECK("decide fates", shard.index, home.size());
    read_back.add(&counts[index], device_counts[index].data(), 1, shard.index);
  });
  read_back.wait();
  for (const FateCounts& count : counts) {
    plan.pruned += static_cast<int64_t>(count.gone);
    plan.doubled += static_cast<int64_t>(count.doubled);
  }
  const int64_t room = std::max<int64_t>(0, rules.max_rows - (plan.rows_before - plan.pruned));
  const bool binds = plan.doubled > room;
  plan.doubled = std::min(plan.doubled, room);
  plan.rows_after = plan.rows_before - plan.pruned + plan.doubled;
  if (!binds) return plan;

  std::vector<Buffer<uint64_t>> key(shards);
  std::vector<Buffer<uint32_t>> local_row(shards);
  for_each_shard("rank gradients", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const int64_t listed = static_cast<int64_t>(counts[index].doubled);
    if (listed == 0) return;
    const int64_t blocks = blocks_for(homes[index].size(), kThreads);
    Buffer<int64_t> offset(blocks + 1, shard.index);
    exclusive_sum(doubled_of_block[index].data(), offset.data(), blocks + 1, shard.index);
    key[index] = Buffer<uint64_t>(listed, shard.index);
    local_row[index] = Buffer<uint32_t>(listed, shard.index);
    list_doubled_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, shard_stream(shard.index)>>>(
        statistics, homes[index], plan.fates[index].data(), offset.data(), key[index].data(),
        local_row[index].data());
    KERNEL_CHECK("rank gradients", shard.index, listed);
    sort_pairs(key[index], local_row[index], 32, shard.index);
  });
  const Buffer<int64_t> cut = cut_lists(key, {room});
  const auto keep = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const int64_t listed = key[index].size();
    if (listed == 0) return;
    keep_kernel<<<blocks_for(listed, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        local_row[index].data(), listed, cut.data() + index, plan.fates[index].data());
    KERNEL_CHECK("keep rows", shard.index, listed);
  };
  for_each_shard("keep rows", keep, Access::kExchange);  // reads the cuts of the lead's GPU
  return plan;
}

void densify(const SplatColumns& columns, const AdamState* state, const DensifyPlan& plan, uint64_t seed,
             int64_t step, int64_t now) {
  if (plan.pruned == 0 && plan.doubled == 0) return;
  JoinedOperator joined;
  const RowMap map = map_rows(plan.fates, row_homes(columns.means, plan.rows_after));
  gather_rows(all_columns(columns, state), map);
  const std::vector<RowRange>& homes = map.homes;
  const auto finish = [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    if (home.empty()) return;
    new_rows_kernel<<<blocks_for(home.size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        rows_of(columns, state, now, home), map.origin[static_cast<size_t>(shard.index)].data(), seed, step);
    KERNEL_CHECK("new rows", shard.index, home.size());
  };
  for_each_shard("new rows", finish);
}

void reset_opacities(const SplatColumns& columns, const AdamState* state, float most) {
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns);
  constexpr int kOpacities = 3;
  const float logit = std::log(most / (1.0f - most));
  for_each_shard("reset opacities", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    if (home.empty()) return;
    reset_opacities_kernel<<<blocks_for(home.size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        columns.opacities, state ? state->exp_avg[kOpacities] : FloatArray(),
        state ? state->exp_avg_sq[kOpacities] : nullptr, home, logit);
    KERNEL_CHECK("reset opacities", shard.index, home.size());
  });
}

}  // namespace mgpu::splat
