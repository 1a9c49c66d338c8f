// SPDX-License-Identifier: Apache-2.0
// cuts.cu: the key at a rank, found bit by bit; a warp a rank, a lane a list. About a millisecond, and only
// on meshes of several shards.
#include "splat/cuts.h"

#include "math/search.h"
#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

struct Lists {
  const uint64_t* key[kMaxShards];
  int64_t count[kMaxShards];
  int lists;
};

__device__ int64_t warp_sum(int64_t value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__global__ void __launch_bounds__(kWarp)
    cut_kernel(const __grid_constant__ Lists lists, const int64_t* ranks, int64_t* cut) {
  const int lane = threadIdx.x;
  const bool mine = lane < lists.lists;
  const uint64_t* key = lists.key[mine ? lane : 0];
  const int64_t count = mine ? lists.count[lane] : 0, rank = ranks[blockIdx.x];
  uint64_t bound = 0;  // the largest that no more than `rank` keys are below of
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t higher = bound | uint64_t{1} << bit;
    if (warp_sum(math::first_at_least(key, count, higher)) <= rank) bound = higher;
  }
  const int64_t below = math::first_at_least(key, count, bound);
  const int64_t equal = (bound + 1 == 0 ? count : math::first_at_least(key, count, bound + 1)) - below;
  int64_t before = 0;  // keys equal to the bound in the lists before
  for (int other = 0; other < kMaxShards; ++other) {
    const int64_t theirs = __shfl_sync(kAllLanes, equal, other);
    if (other < lane) before += theirs;
  }
  const int64_t left = rank - warp_sum(below) - before;
  if (mine)
    cut[int64_t{blockIdx.x} * lists.lists + lane] = below + (left < 0 ? 0 : left < equal ? left : equal);
}

}  // namespace

Buffer<int64_t> cut_lists(const std::vector<Buffer<uint64_t>>& lists, const std::vector<int64_t>& ranks) {
  Lists all{};
  all.lists = static_cast<int>(lists.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    all.key[i] = lists[i].data();
    all.count[i] = lists[i].size();
  }
  const int64_t count = static_cast<int64_t>(ranks.size());
  Buffer<int64_t> cut(count * all.lists, kExchange);
  const auto find = [&](const Shard& shard) {
    if (shard.index != 0 || count == 0) return;
    const Buffer<int64_t> wanted = to_buffer(ranks, 0);
    cut_kernel<<<static_cast<unsigned>(count), kWarp, 0, shard_stream(0)>>>(all, wanted.data(), cut.data());
    KERNEL_CHECK("cut lists", 0, count);
  };
  for_each_shard("cut lists", find, Access::kExchange);
  return cut;
}

}  // namespace mgpu::splat
