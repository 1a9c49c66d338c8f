// SPDX-License-Identifier: Apache-2.0
// kernels.h: what the .cu files of the stages share: records as 16-byte loads, scans, the choice of a kernel
// by SH degree, a frame's device side.
#pragma once
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include <algorithm>
#include <cstdint>
#include <cuda/std/functional>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "math/gaussian.h"
#include "memory/buffer.h"
#include "mesh/launch.h"
#include "splat/frame.h"
#include "splat/history.h"

namespace mgpu::splat {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxShards = 32;   // ranges that a record's mask tells apart, in registers
constexpr int kDepthBins = 512;  // of one digit of a depth key

// ---- loads and stores of the 48 bytes of a record

static_assert(sizeof(Record) == 48 && sizeof(RecordGrad) == 48);

template <typename T>
__device__ __forceinline__ T load48(const T* from) {
  union {
    float4 part[3];
    T value;
  } both;
  const float4* parts = reinterpret_cast<const float4*>(from);
  for (int i = 0; i < 3; ++i) both.part[i] = parts[i];
  return both.value;
}

template <typename T>
__device__ __forceinline__ void store48(T* to, const T& value) {
  union {
    float4 part[3];
    T value;
  } both;
  both.value = value;
  float4* parts = reinterpret_cast<float4*>(to);
  for (int i = 0; i < 3; ++i) parts[i] = both.part[i];
}

// threadIdx.x % 32, read anew: what a loop derives from it is not kept in registers across the loop.
__device__ __forceinline__ int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A product that the compiler must round: it cannot be fused into a sum, here in one way and there in
// another.
__device__ __forceinline__ void round_now(float& x) { asm("" : "+f"(x)); }

// ---- sums over a grid, in an order that does not change

// part[k] = sum over the threads of a block of sum[k], k < kCount; by all of its kBlockWarps warps.
template <int kBlockWarps, int kCount>
__device__ __forceinline__ void store_block_sums(double (&sum)[kCount], double* part) {
  __shared__ double warp_sums[kBlockWarps][kCount];
  for (int k = 0; k < kCount; ++k) {
    for (int step = kWarp / 2; step > 0; step /= 2) sum[k] += __shfl_down_sync(kAllLanes, sum[k], step);
    if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp][k] = sum[k];
  }
  __syncthreads();
  if (threadIdx.x < kCount) {
    double total = 0.0;
    for (int warp = 0; warp < kBlockWarps; ++warp) total += warp_sums[warp][threadIdx.x];
    part[threadIdx.x] = total;
  }
}

// total[k] = sum over blocks of part[block, k], k < kCount. One block of threads.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const double* part, int64_t blocks, double* total) {
  __shared__ double partial[kThreads];
  for (int k = 0; k < kCount; ++k) {
    double sum = 0.0;
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads) sum += part[block * kCount + k];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int step = kThreads / 2; step > 0; step /= 2) {
      if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
      __syncthreads();
    }
    if (threadIdx.x == 0) total[k] = partial[0];
    __syncthreads();
  }
}

// ---- kernels that are compiled for each SH degree

// call(std::integral_constant<int, degree>): so that a row's coefficients stay in registers.
template <typename Call>
void with_sh_degree(int degree, const Call& call) {
  switch (degree) {
    case 0:
      return call(std::integral_constant<int, 0>{});
    case 1:
      return call(std::integral_constant<int, 1>{});
    case 2:
      return call(std::integral_constant<int, 2>{});
    default:
      return call(std::integral_constant<int, 3>{});
  }
}

// ---- kernels that need much shared memory, or fill the GPU

// Allows `kernel` its dynamic shared memory on the GPU of `shard` and returns how many of its blocks that GPU
// holds at a time. Asks the driver once a kernel and GPU.
inline int64_t prepare_kernel(const void* kernel, int threads, size_t shared_bytes, int shard) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int64_t> known;
  const int gpu = shard_device(shard);
  std::lock_guard<std::mutex> lock(mutex);
  int64_t& blocks = known[{kernel, gpu}];
  if (blocks == 0) {
    DeviceGuard guard(gpu);
    int processors = 0, on_one = 0;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)));
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, gpu));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_one, kernel, threads, shared_bytes));
    blocks = int64_t{std::max(on_one, 1)} * processors;
  }
  return blocks;
}

// ---- scans and sorts on a shard's stream

// offset[i] = sum of count[0..i), i = 0..items-1. To get the total too, scan one item more.
template <typename Counts, typename Sum>
void exclusive_sum(Counts count, Sum* offset, int64_t items, int shard) {
  if (items == 0) return;
  size_t bytes = 0;
  const auto scan = [&](void* scratch) {
    CUDA_CHECK(cub::DeviceScan::ExclusiveScan(scratch, bytes, count, offset, ::cuda::std::plus<>{}, Sum{0},
                                              items, shard_stream(shard)));
  };
  scan(nullptr);
  Buffer<char> scratch(static_cast<int64_t>(bytes), shard);
  scan(scratch.data());
}

// Stable, ascending by the low `bits` of the key. Afterwards key and value hold the result.
template <typename Key, typename Value>
void sort_pairs(Buffer<Key>& key, Buffer<Value>& value, int bits, int shard) {
  const int64_t items = key.size();
  if (items == 0) return;
  Buffer<Key> other_key(items, shard);
  Buffer<Value> other_value(items, shard);
  cub::DoubleBuffer<Key> keys(key.data(), other_key.data());
  cub::DoubleBuffer<Value> values(value.data(), other_value.data());
  size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    CUDA_CHECK(
        cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, values, items, 0, bits, shard_stream(shard)));
  };
  sort(nullptr);
  Buffer<char> scratch(static_cast<int64_t>(bytes), shard);
  sort(scratch.data());
  if (keys.Current() != key.data()) std::swap(key, other_key);
  if (values.Current() != value.data()) std::swap(value, other_value);
}

// Ascending by the low `bits`.
template <typename Key>
void sort_keys(Buffer<Key>& key, int bits, int shard) {
  const int64_t items = key.size();
  if (items == 0) return;
  Buffer<Key> other_key(items, shard);
  cub::DoubleBuffer<Key> keys(key.data(), other_key.data());
  size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    CUDA_CHECK(cub::DeviceRadixSort::SortKeys(scratch, bytes, keys, items, 0, bits, shard_stream(shard)));
  };
  sort(nullptr);
  Buffer<char> scratch(static_cast<int64_t>(bytes), shard);
  sort(scratch.data());
  if (keys.Current() != key.data()) std::swap(key, other_key);
}

// ---- a frame on the device

// Fills frame.constants. Called by stage "project", before anything else of the frame.
void upload_constants(Frame& frame);

// Bits of a depth, less those of the near plane: visible depths are positive, so they order as the keys do.
__device__ __forceinline__ uint32_t depth_key_of(float depth) {
  return __float_as_uint(depth) - __float_as_uint(math::kNearPlane);
}

// What an owner received: its own arrays, or the home's on a mesh of one shard.
inline const Record* received_records(const Frame& frame, int owner) {
  const TileOwner& self = frame.owners[static_cast<size_t>(owner)];
  return frame.homes.size() == 1 ? frame.shards[0].record.data() : self.record.data();
}
inline const int32_t* received_views(const Frame& frame, int owner) {
  const TileOwner& self = frame.owners[static_cast<size_t>(owner)];
  return frame.homes.size() == 1 ? frame.shards[0].view.data() : self.view.data();
}

}  // namespace mgpu::splat
