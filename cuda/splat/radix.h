// SPDX-License-Identifier: Apache-2.0
// radix.h: one stable pass of a least-significant-digit radix sort of (key, int32) pairs ("onesweep", Adinets
// and Merrill 2022): a launch a digit, each item read and written once. Whoever makes the keys counts their
// lowest digit; each pass counts the next one. Counts are 64 bits wide.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "splat/look_back.h"

namespace mgpu::splat {

constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kFewItems = 4, kSomeItems = 8,
              kManyItems = 12;  // a thread; the fewer the items, the more blocks
constexpr int kLookAhead = 8;   // blocks before that are asked at once

// One pass. Pointers are the device's.
template <typename Key>
struct SortPass {
  const Key* key;
  const int32_t* value;  // null: the places themselves
  Key* key_out;          // null: not wanted
  int32_t* value_out;
  int64_t items;
  int shift;                  // of the digit
  const SumState* histogram;  // [bins] of this digit
  int next_shift;
  SumState* next_histogram;  // [bins], zero before; null for the last pass
  SumState* state;           // [tiles, bins], zero before
};

template <int kBins>
__device__ __forceinline__ unsigned lanes_with_digit(unsigned digit) {
  unsigned same = kAllLanes;
#pragma unroll
  for (int bit = 1; bit < kBins; bit *= 2) {
    const bool set = digit & bit;
    const unsigned with = __ballot_sync(kAllLanes, set);
    same &= set ? with : ~with;
  }
  return same;
}

// Exclusive sum over the block's threads; all of them call.
template <typename T>
__device__ __forceinline__ T sum_of_threads_before(T value, T* warp_sums) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  T inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == kWarp - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  T before = 0;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  __syncthreads();
  return before + inclusive - value;
}

// By a thread a bin: the sum of the counts of the tiles before, in state[tile * bins + bin].
__device__ __forceinline__ int64_t sum_of_tiles_before(const SumState* state, int64_t tile, int bins,
                                                       int bin) {
  int64_t before = 0;
  for (int64_t nearest = tile - 1; nearest >= 0;) {
    SumState word[kLookAhead];
#pragma unroll
    for (int k = 0; k < kLookAhead; ++k)
      word[k] = nearest >= k ? load_state(state + (nearest - k) * bins + bin) : kRunningSum;
#pragma unroll
    for (int k = 0; k < kLookAhead; ++k) {
      if (word[k] == 0) break;  // not there yet: ask again, from here
      before += static_cast<int64_t>(word[k] & kCountMask);
      --nearest;
      if (word[k] >= kRunningSum) return before;
    }
  }
  return before;
}

template <typename Key, int kBins, int kItems>
struct SortShared {
  static constexpr int kTile = kSortThreads * kItems;
  int64_t to[kBins];  // where the digit's first item goes, less its place in the tile
  int64_t warp_sums[kSortWarps];
  int32_t value[kTile];
  union {  // one after the other
    uint16_t warp_count[kSortWarps][kBins];
    Key key[kTile];
  };
  uint32_t next[kBins];
};

// A block a tile of kSortThreads * kItems items. Blocks start in the order of their indices, as cub's scans
// rely on too: the tiles that a block waits for are running.
template <typename Key, int kBins, int kItems>
__global__ void __launch_bounds__(kSortThreads, 2)
    sort_pass_kernel(const __grid_constant__ SortPass<Key> in) {
  static_assert(kBins <= kSortThreads && kBins >= kWarp);
  using Shared = SortShared<Key, kBins, kItems>;
  extern __shared__ __align__(16) char shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  constexpr int kTile = Shared::kTile;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t tile = blockIdx.x;
  const int64_t begin = tile * kTile;
  const int held = in.items - begin < kTile ? static_cast<int>(in.items - begin) : kTile;
  const auto digit_of = [](Key key, int shift) { return static_cast<unsigned>(key >> shift) & (kBins - 1); };

  // A warp has neighbours, read 32 at a time: order within the tile is (warp, item, lane).
  Key key[kItems];
  const int first = warp * kWarp * kItems + lane;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = first + i * kWarp;
    key[i] = at < held ? in.key[begin + at] : Key{};
  }
  for (int i = threadIdx.x; i < kSortWarps * kBins; i += kSortThreads) (&shared.warp_count[0][0])[i] = 0;
  if (threadIdx.x < kBins) shared.next[threadIdx.x] = 0;
  __syncthreads();

  // Place among the warp's items with the same digit.
  uint16_t place[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool valid = first + i * kWarp < held;
    const unsigned digit = digit_of(key[i], in.shift);
    const unsigned same = lanes_with_digit<kBins>(digit) & __ballot_sync(kAllLanes, valid);
    uint16_t& count = shared.warp_count[warp][digit];
    const unsigned before = same & ((1u << lane) - 1u);
    if (valid) place[i] = static_cast<uint16_t>(count + __popc(before));
    __syncwarp();
    if (valid && before == 0) count = static_cast<uint16_t>(count + __popc(same));
    __syncwarp();
    if (valid && in.next_histogram) atomicAdd(&shared.next[digit_of(key[i], in.next_shift)], 1u);
  }
  __syncthreads();

  // A thread a digit: its items in the warps before and in the tile, which other blocks may now read.
  const int bin = threadIdx.x;
  int32_t count = 0;
  int64_t smaller = 0;  // items of smaller digits, in all
  if (bin < kBins) {
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) {
      const int32_t here = shared.warp_count[w][bin];
      shared.warp_count[w][bin] = static_cast<uint16_t>(count);
      count += here;
    }
    store_state(in.state + tile * kBins + bin,
                (tile == 0 ? kRunningSum : kOwnSum) | static_cast<SumState>(count));
    smaller = static_cast<int64_t>(in.histogram[bin]);
  }
  smaller = sum_of_threads_before(smaller, shared.warp_sums);
  const int32_t bin_begin = static_cast<int32_t>(sum_of_threads_before(int64_t{count}, shared.warp_sums));
  if (bin < kBins) {
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w)
      shared.warp_count[w][bin] = static_cast<uint16_t>(shared.warp_count[w][bin] + bin_begin);
    if (in.next_histogram && shared.next[bin])
      atomicAdd(in.next_histogram + bin, static_cast<unsigned long long>(shared.next[bin]));
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first + i * kWarp < held)
      place[i] = static_cast<uint16_t>(place[i] + shared.warp_count[warp][digit_of(key[i], in.shift)]);
  }
  __syncthreads();

  // Into sorted order in shared memory, so that neighbours are stored together.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = first + i * kWarp;
    if (at >= held) continue;
    shared.key[place[i]] = key[i];
    shared.value[place[i]] = in.value ? in.value[begin + at] : static_cast<int32_t>(begin + at);
  }
  if (bin < kBins) {
    const int64_t before = sum_of_tiles_before(in.state, tile, kBins, bin);
    if (tile > 0)
      store_state(in.state + tile * kBins + bin, kRunningSum | static_cast<SumState>(before + count));
    shared.to[bin] = smaller + before - bin_begin;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int at = i * kSortThreads + threadIdx.x;
    if (at >= held) continue;
    const Key mine = shared.key[at];
    const int64_t to = shared.to[digit_of(mine, in.shift)] + at;
    if (in.key_out) in.key_out[to] = mine;
    in.value_out[to] = shared.value[at];
  }
}

// How a sort is cut into tiles and digits.
struct SortPlan {
  int items_a_thread;
  int64_t tiles;
  int passes;

  // Words of zeros that the passes need: their states, and the histograms behind the first.
  int64_t words(int bins) const { return passes * tiles * bins + (passes - 1) * bins; }
};

inline SortPlan sort_plan(int64_t items, int key_bits, int bins) {
  const int digit_bits = std::bit_width(static_cast<unsigned>(bins) - 1);
  constexpr int64_t kEnough = 2 * 132;  // tiles that keep a large GPU busy
  int a_thread = kFewItems;
  for (const int more : {kSomeItems, kManyItems}) {
    if (items >= kEnough * kSortThreads * more) a_thread = more;
  }
  const int64_t tile = int64_t{kSortThreads} * a_thread;
  return {a_thread, (items + tile - 1) / tile, std::max(1, (key_bits + digit_bits - 1) / digit_bits)};
}

template <typename Key, int kBins, int kItems>
void launch_sort_pass(const SortPass<Key>& pass, int64_t tiles, int shard) {
  const auto kernel = sort_pass_kernel<Key, kBins, kItems>;
  constexpr size_t kBytes = sizeof(SortShared<Key, kBins, kItems>);
  prepare_kernel(reinterpret_cast<const void*>(kernel), kSortThreads, kBytes, shard);
  kernel<<<static_cast<unsigned>(tiles), kSortThreads, kBytes, shard_stream(shard)>>>(pass);
  KERNEL_CHECK("bin", shard, pass.items);
}

// Sorts by the digits of `plan`, lowest first: key[0] and `value` (null: the places 0, 1, ...) to key[r] and
// value_buffer[r], r being what is returned; sorted keys are written only if they are wanted. Both buffers of
// each are used; value may be value_buffer[0]. `histogram` is that of the lowest digit; `words` are
// plan.words(kBins) zeros.
template <int kBins, typename Key>
int sort_by_digits(const SortPlan& plan, Key* const key[2], const int32_t* value,
                   int32_t* const value_buffer[2], int64_t items, const SumState* histogram, SumState* words,
                   bool keys_wanted, int shard) {
  constexpr int kDigitBits = std::bit_width(unsigned{kBins} - 1);
  SumState* const histograms = words + plan.passes * plan.tiles * kBins;
  for (int p = 0; p < plan.passes; ++p) {
    const bool last = p + 1 == plan.passes;
    SortPass<Key> pass{};
    pass.key = key[p % 2];
    pass.value = p == 0 ? value : value_buffer[p % 2];
    pass.key_out = last && !keys_wanted ? nullptr : key[(p + 1) % 2];
    pass.value_out = value_buffer[(p + 1) % 2];
    pass.items = items;
    pass.shift = p * kDigitBits;
    pass.histogram = p == 0 ? histogram : histograms + (p - 1) * kBins;
    pass.next_shift = (p + 1) * kDigitBits;
    pass.next_histogram = last ? nullptr : histograms + p * kBins;
    pass.state = words + p * plan.tiles * kBins;
    switch (plan.items_a_thread) {
      case kFewItems:
        launch_sort_pass<Key, kBins, kFewItems>(pass, plan.tiles, shard);
        break;
      case kSomeItems:
        launch_sort_pass<Key, kBins, kSomeItems>(pass, plan.tiles, shard);
        break;
      default:
        launch_sort_pass<Key, kBins, kManyItems>(pass, plan.tiles, shard);
        break;
    }
  }
  return plan.passes % 2;
}

}  // namespace mgpu::splat
