// SPDX-License-Identifier: Apache-2.0
#include "foreign.h"

namespace {

constexpr int kThreads = 256;
unsigned blocks(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

__global__ void scale_kernel(const float* in, float* out, float factor, int64_t begin, int64_t end) {
  const int64_t i = begin + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < end) out[i] = in[i] * factor;
}

__global__ void slow_fill_kernel(float* out, float value, int64_t begin, int64_t end, int64_t cycles) {
  const int64_t start = clock64();
  while (clock64() - start < cycles) {
  }
  const int64_t i = begin + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < end) out[i] = value;
}

cudaMemLocation location_of(int gpu) {
  cudaMemLocation location{};
  location.type = gpu >= 0 ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost;
  location.id = gpu >= 0 ? gpu : 0;
  return location;
}

}  // namespace

extern "C" {

void foreign_scale(const float* in, float* out, float factor, int64_t begin, int64_t end,
                   cudaStream_t stream) {
  if (begin < end) scale_kernel<<<blocks(end - begin), kThreads, 0, stream>>>(in, out, factor, begin, end);
}

void foreign_slow_fill(float* out, float value, int64_t begin, int64_t end, int64_t cycles,
                       cudaStream_t stream) {
  if (begin < end)
    slow_fill_kernel<<<blocks(end - begin), kThreads, 0, stream>>>(out, value, begin, end, cycles);
}

cudaError_t foreign_prefetch(void* data, int64_t bytes, int gpu, int batched, cudaStream_t stream) {
  const cudaMemLocation location = location_of(gpu);
  if (!batched) return cudaMemPrefetchAsync(data, static_cast<size_t>(bytes), location, 0, stream);
  void* pointers[] = {data};
  size_t sizes[] = {static_cast<size_t>(bytes)}, first[] = {0};
  cudaMemLocation locations[] = {location};
  return cudaMemPrefetchBatchAsync(pointers, sizes, 1, locations, first, 1, 0, stream);
}

}  // extern "C"
