// SPDX-License-Identifier: Apache-2.0
// cuda_on_host.h: CUDA's words for a C++ compiler, so that kernels can be tried without a GPU. Blocks run one
// after the other; a block's threads are fibers that take turns at barriers, so a barrier that is missing
// goes unnoticed, and so does everything about memory's order. Included before all else (-include);
// test_exchange_played.py rewrites launches, kernel<<<blocks, threads, bytes, stream>>>(...), to play(...).
#pragma once
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __shared__
#undef __device__
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#undef __host__
#undef __align__
#define __shared__ static
#define __device__
#define __host__
#define __global__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) alignas(n)

namespace played {

struct Dimension {
  unsigned x, y, z;
};

// Runs `body` once for each thread of each block.
void run(unsigned blocks, unsigned threads, const std::function<void()>& body);
void wait_for_block();
void wait_for_warp();
// A block's, whatever it asked for.
alignas(16) inline char dynamic_shared[size_t{1} << 18];
// A word for each lane of the running thread's warp.
uint64_t* lanes();

template <typename T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace played

inline played::Dimension threadIdx, blockIdx, gridDim;

namespace played {

// What all lanes of the warp give, to `read`.
template <typename T, typename Read>
auto of_warp(T value, const Read& read) {
  lanes()[threadIdx.x % 32] = bits_of(value);
  wait_for_warp();
  const auto out = read(lanes());
  wait_for_warp();
  return out;
}

template <typename Kernel>
struct Launch {
  Kernel kernel;
  unsigned blocks, threads;
  template <typename... Arguments>
  void operator()(const Arguments&... arguments) const {
    run(blocks, threads, [&] { kernel(arguments...); });
  }
};
template <typename Kernel>
Launch<Kernel> play(const Kernel& kernel, unsigned blocks, unsigned threads, size_t = 0,
                    cudaStream_t = nullptr) {
  return {kernel, blocks, threads};
}

}  // namespace played

inline void __syncthreads() { played::wait_for_block(); }
inline void __syncwarp(unsigned = 0) { played::wait_for_warp(); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __ballot_sync(unsigned, bool mine) {
  return played::of_warp(mine, [](const uint64_t* all) {
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(all[lane] & 1) << lane;
    return mask;
  });
}
inline bool __any_sync(unsigned lanes, bool mine) { return __ballot_sync(lanes, mine) != 0; }
template <typename T>
T __shfl_sync(unsigned, T mine, int from) {
  return played::of_warp(mine, [=](const uint64_t* all) { return played::from_bits<T>(all[from & 31]); });
}
template <typename T>
T __shfl_up_sync(unsigned lanes, T mine, int by) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(lanes, mine, lane >= by ? lane - by : lane);
}
template <typename T>
T __shfl_down_sync(unsigned lanes, T mine, int by) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(lanes, mine, lane + by < 32 ? lane + by : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T mine, int by) {
  return __shfl_sync(lanes, mine, static_cast<int>(threadIdx.x % 32) ^ by);
}
template <typename T>
T __reduce_add_sync(unsigned, T mine) {
  return played::of_warp(mine, [](const uint64_t* all) {
    T sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += played::from_bits<T>(all[lane]);
    return sum;
  });
}
template <typename T>
T __reduce_or_sync(unsigned, T mine) {
  return played::of_warp(mine, [](const uint64_t* all) {
    T sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum |= played::from_bits<T>(all[lane]);
    return sum;
  });
}
template <typename T, typename U>
T atomicAdd(T* to, U more) {
  const T before = *to;
  *to += more;
  return before;
}
template <typename T, typename U>
T atomicMax(T* to, U other) {
  const T before = *to;
  if (other > before) *to = other;
  return before;
}
inline unsigned __float_as_uint(float x) { return played::from_bits<unsigned>(played::bits_of(x)); }
inline int whole_number(float x) {
  return x > 2e9f ? 2147483647 : x < -2e9f ? -2147483647 : static_cast<int>(x);
}
inline int __float2int_ru(float x) { return whole_number(std::ceil(x)); }
inline int __float2int_rd(float x) { return whole_number(std::floor(x)); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float2 make_float2(float x, float y) { return {x, y}; }
