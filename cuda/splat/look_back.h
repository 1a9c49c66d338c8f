// SPDX-License-Identifier: Apache-2.0
// look_back.h: running sums over the blocks of one launch, in one pass (decoupled look-back, Merrill and
// Garland 2016). The blocks before a block must have started.
#pragma once
#include <cstdint>

#include "splat/kernels.h"

namespace mgpu::splat {

// One word a block (or a block and a bin), zero before the launch: what it holds, and a 62-bit count.
using SumState = unsigned long long;
constexpr SumState kOwnSum = SumState{1} << 62;      // the count of the block
constexpr SumState kRunningSum = SumState{2} << 62;  // of it and all before
constexpr SumState kCountMask = kOwnSum - 1;

// The count travels in the word that says that it is there, so no fence is needed.
__device__ __forceinline__ SumState load_state(const SumState* state) {
  SumState value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(state) : "memory");
  return value;
}
__device__ __forceinline__ void store_state(SumState* state, SumState value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(state), "l"(value) : "memory");
}

__device__ __forceinline__ int64_t warp_sum(int64_t value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// By one whole warp of block `index`: the sum of the counts of the blocks before it. A lane asks for kAtOnce
// words at a time.
template <int kAtOnce = 1>
__device__ __forceinline__ int64_t sum_of_blocks_before(SumState* state, int64_t index, int64_t count) {
  const int lane = threadIdx.x % kWarp;
  if (lane == 0)
    store_state(state + index, (index == 0 ? kRunningSum : kOwnSum) | static_cast<SumState>(count));
  if (index == 0) return 0;
  int64_t before = 0;
  for (int64_t nearest = index - 1;; nearest -= kAtOnce * kWarp) {
    SumState word[kAtOnce];  // of the blocks nearest - lane, nearest - 32 - lane, ...
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t at = nearest - k * kWarp - lane;
      word[k] = at >= 0 ? load_state(state + at) : kRunningSum;
    }
    bool done = false;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (done) break;
      while (word[k] == 0) word[k] = load_state(state + (nearest - k * kWarp - lane));
      const unsigned complete = __ballot_sync(kAllLanes, word[k] >= kRunningSum);
      const int last = complete ? __ffs(complete) - 1 : kWarp - 1;
      before += warp_sum(lane <= last ? static_cast<int64_t>(word[k] & kCountMask) : 0);
      done = complete != 0;
    }
    if (done) break;
  }
  if (lane == 0) store_state(state + index, kRunningSum | static_cast<SumState>(before + count));
  return before;
}

}  // namespace mgpu::splat
