// SPDX-License-Identifier: Apache-2.0
// exposure.cu: two kernels that stream, 24 bytes a pixel forward and 36 on the way back, and a step of a few
// numbers. Sums are taken of pieces of rows of tiles, which are the same on any mesh.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "math/exposure.h"
#include "splat/exposure.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

using math::kExposureFloats;

constexpr int kChannels = 3;
constexpr int kHigh = 16;   // rows of a tile; bands begin at multiples of it
constexpr int kPixels = 4;  // of a thread at a time, three float4
constexpr int kPack = kChannels * kPixels;
constexpr int kRounds = 8;
constexpr int kPiece = kThreads * kPixels * kRounds;  // pixels of a block, neighbours in memory
constexpr int kPatchBlocks = 256;                     // of a shard, on the way back
constexpr unsigned kMostBlocks = 2048;

struct ExposureInput {
  const float* rgb;
  const float* map;
  int64_t height, width;
  int64_t first_tile;  // row of tiles of the shard's first block
  bool packed;         // images are aligned to float4
};

// The pixels of a row of tiles that block and thread have in a round: from `at`, before `end`.
struct Place {
  int64_t at, end;
  bool packed;
};

__device__ __forceinline__ Place place_of(const ExposureInput& in, int round) {
  const int64_t tile = in.first_tile + blockIdx.y;
  Place place;
  place.end = min((tile + 1) * kHigh, in.height) * in.width;
  place.at = tile * kHigh * in.width + int64_t{blockIdx.x} * kPiece +
             kPixels * (int64_t{round} * kThreads + threadIdx.x);
  place.packed = in.packed && place.at + kPixels <= place.end;
  return place;
}

__device__ __forceinline__ void load_pixels(const float* image, const Place& place, float (&out)[kPack]) {
  const float* from = image + kChannels * place.at;
#pragma unroll
  for (int k = 0; k < kPack; k += 4) {
    if (place.packed) {
      *reinterpret_cast<float4*>(out + k) = *reinterpret_cast<const float4*>(from + k);
      continue;
    }
#pragma unroll
    for (int i = k; i < k + 4; ++i) out[i] = place.at + i / kChannels < place.end ? from[i] : 0.f;
  }
}

__device__ __forceinline__ void store_pixels(float* image, const Place& place, const float (&values)[kPack]) {
  float* to = image + kChannels * place.at;
#pragma unroll
  for (int k = 0; k < kPack; k += 4) {
    if (place.packed) {
      *reinterpret_cast<float4*>(to + k) = *reinterpret_cast<const float4*>(values + k);
      continue;
    }
#pragma unroll
    for (int i = k; i < k + 4; ++i) {
      if (place.at + i / kChannels < place.end) to[i] = values[i];
    }
  }
}

__device__ __forceinline__ void load_map(const float* from, float (&map)[kExposureFloats]) {
#pragma unroll
  for (int i = 0; i < kExposureFloats; ++i) map[i] = from[i];
}

__global__ void __launch_bounds__(kThreads)
    expose_kernel(const __grid_constant__ ExposureInput in, float* exposed) {
  float map[kExposureFloats];
  load_map(in.map, map);
#pragma unroll 2
  for (int round = 0; round < kRounds; ++round) {
    const Place place = place_of(in, round);
    if (place.at >= place.end) return;
    alignas(16) float pixels[kPack];
    alignas(16) float mapped[kPack];
    load_pixels(in.rgb, place, pixels);
#pragma unroll
    for (int i = 0; i < kPack; i += kChannels) math::expose(map, pixels + i, mapped + i);
    store_pixels(exposed, place, mapped);
  }
}

// part: [rows of tiles, blocks, 12], of the whole image.
__global__ void __launch_bounds__(kThreads)
    expose_backward_kernel(const __grid_constant__ ExposureInput in, float* gradient, double* part) {
  float map[kExposureFloats], sum[kExposureFloats] = {};
  load_map(in.map, map);
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const Place place = place_of(in, round);
    if (place.at >= place.end) break;
    alignas(16) float pixels[kPack];
    alignas(16) float both[kPack];
    load_pixels(in.rgb, place, pixels);
    load_pixels(gradient, place, both);
#pragma unroll
    for (int i = 0; i < kPack; i += kChannels)
      math::expose_backward(map, pixels + i, both + i, both + i, sum);
    store_pixels(gradient, place, both);
  }
  double wide[kExposureFloats];
#pragma unroll
  for (int i = 0; i < kExposureFloats; ++i) wide[i] = sum[i];
  const int64_t block = (in.first_tile + blockIdx.y) * gridDim.x + blockIdx.x;
  store_block_sums<kWarps, kExposureFloats>(wide, part + block * kExposureFloats);
}

// Of a shard's part of an image: pixels [begin, end), a thread a pixel.
__global__ void __launch_bounds__(kThreads)
    expose_pixels_kernel(const float* rgb, float* exposed, const float* from, int64_t begin, int64_t end) {
  float map[kExposureFloats];
  load_map(from, map);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t at = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; at < end; at += stride)
    math::expose(map, rgb + kChannels * at, exposed + kChannels * at);
}

// A block takes one tile after the other of the rectangle around a shard's own, a thread a pixel of it. part:
// [blocks, 12].
__global__ void __launch_bounds__(kThreads)
    expose_patch_backward_kernel(const __grid_constant__ LossPatch patch, int height, int width,
                                 const float* from, double* part) {
  static_assert(kThreads == kTilePixels);
  float map[kExposureFloats];
  double sum[kExposureFloats] = {};
  load_map(from, map);
  const int across = patch.patch.x1 - patch.patch.x0, tiles = across * (patch.patch.y1 - patch.patch.y0);
  const int tiles_x = (width + kTileSize - 1) / kTileSize;
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
    const int tile_x = patch.patch.x0 + i % across, tile_y = patch.patch.y0 + i / across;
    const int64_t tile = int64_t{tile_y} * tiles_x + tile_x;
    const int64_t position = patch.position_from_tile ? patch.position_from_tile[tile] : tile;
    if (position < patch.tiles.begin || position >= patch.tiles.end) continue;
    const int x = tile_x * kTileSize + static_cast<int>(threadIdx.x) % kTileSize;
    const int y = tile_y * kTileSize + static_cast<int>(threadIdx.x) / kTileSize;
    if (x >= width || y >= height) continue;
    const int64_t at = kChannels * (int64_t{y} * width + x);
    float* const both = patch.dL_drgb + at;
    math::expose_backward(map, patch.rgb + at, both, both, sum);
  }
  store_block_sums<kWarps, kExposureFloats>(sum, part + int64_t{blockIdx.x} * kExposureFloats);
}

// dL_dmap[k] = sum over blocks of part[block, k]. One block of threads, kLanes to a component.
constexpr int kLanes = 64;
constexpr int kMapThreads = kLanes * kExposureFloats;
static_assert((kLanes & (kLanes - 1)) == 0 && kMapThreads <= 1024);

// The sum over the lanes of a component, in lane 0; all threads call.
__device__ __forceinline__ double component_sum(double own) {
  __shared__ double partial[kMapThreads];
  const int lane = threadIdx.x / kExposureFloats;
  partial[threadIdx.x] = own;
  for (int step = kLanes / 2; step > 0; step /= 2) {
    __syncthreads();
    if (lane < step) partial[threadIdx.x] += partial[threadIdx.x + step * kExposureFloats];
  }
  __syncthreads();
  return partial[threadIdx.x % kExposureFloats];
}

__global__ void __launch_bounds__(kMapThreads)
    map_total_kernel(const double* part, int64_t blocks, float* dL_dmap) {
  double sum = 0.0;
  for (int64_t at = threadIdx.x; at < blocks * kExposureFloats; at += kMapThreads) sum += part[at];
  const double total = component_sum(sum);
  if (threadIdx.x < kExposureFloats) dL_dmap[threadIdx.x] = static_cast<float>(total);
}

__global__ void __launch_bounds__(kMapThreads)
    exposure_step_kernel(ExposureTable table, int64_t row, const float* gradient, math::AdamConstants adam,
                         float step_size, float inv_sqrt_bc2) {
  if (threadIdx.x < kExposureFloats) {
    const int64_t at = row * kExposureFloats + threadIdx.x;
    math::adam_step(adam, step_size, inv_sqrt_bc2, gradient[threadIdx.x], table.map[at], table.exp_avg[at],
                    table.exp_avg_sq[at]);
  }
  __syncthreads();
  double sum = 0.0;
  const int64_t floats = table.count * kExposureFloats;
  for (int64_t at = threadIdx.x; at < floats; at += kMapThreads) sum += table.map[at];
  const double mean = component_sum(sum) / static_cast<double>(table.count);
  const float off = static_cast<float>(mean - math::identity_exposure(threadIdx.x % kExposureFloats));
  for (int64_t at = threadIdx.x; at < floats; at += kMapThreads) table.map[at] -= off;
}

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % sizeof(float4) == 0; }

unsigned pieces_of(const LossImages& images) { return blocks_for(kHigh * images.width, kPiece); }

// launch(input, grid, stream) on each shard that has rows.
template <typename Launch>
void for_each_band(const char* stage, const LossImages& images, const float* map, bool packed,
                   const Launch& launch) {
  const int shards = mesh().size();
  const auto run = [&](const Shard& shard) {
    const RowRange rows = loss_band(images, shard.index, shards);
    if (rows.empty() || images.width == 0) return;
    const int64_t first = rows.begin / kHigh, tiles = (rows.end + kHigh - 1) / kHigh - first;
    const ExposureInput in{images.rgb, map, images.height, images.width, first, packed};
    launch(in, dim3(pieces_of(images), static_cast<unsigned>(tiles)), shard_stream(shard.index));
    KERNEL_CHECK(stage, shard.index, rows.size());
  };
  for_each_shard(stage, run, Access::kExchange);  // rows of an image lie anywhere
}

}  // namespace

void expose(const LossImages& images, const float* map, float* exposed) {
  for_each_band("exposure", images, map, aligned(images.rgb) && aligned(exposed),
                [&](const ExposureInput& in, dim3 grid, cudaStream_t stream) {
                  expose_kernel<<<grid, kThreads, 0, stream>>>(in, exposed);
                });
}

void expose_backward(const LossImages& images, const float* map, float* gradient, float* dL_dmap) {
  const int64_t blocks = (images.height + kHigh - 1) / kHigh * pieces_of(images);
  Buffer<double> part(blocks * kExposureFloats, kExchange);
  for_each_band("exposure backward", images, map, aligned(images.rgb) && aligned(gradient),
                [&](const ExposureInput& in, dim3 grid, cudaStream_t stream) {
                  expose_backward_kernel<<<grid, kThreads, 0, stream>>>(in, gradient, part.data());
                });
  DeviceGuard guard(shard_device(0));
  map_total_kernel<<<1, kMapThreads, 0, shard_stream(0)>>>(part.data(), blocks, dL_dmap);
  KERNEL_CHECK("exposure backward", 0, images.height);
  if (mesh().size() > 1) join_shards();  // the sums are read before they are freed
}

std::vector<Buffer<float>> expose_patches(const View& view, float ssim_weight, const float* map,
                                          std::vector<LossPatch>& patches) {
  const LossReach reach = loss_reach(view.height, view.width, ssim_weight);
  std::vector<Buffer<float>> memory(patches.size());
  const auto run = [&](const Shard& shard) {
    const auto self = static_cast<size_t>(shard.index);
    LossPatch& patch = patches[self];
    if (patch.patch.empty()) return;
    const RowRange rows = rows_held(view, patch.patch, reach);
    const int64_t begin = rows.begin * view.width, end = rows.end * view.width;
    memory[self] = Buffer<float>(kChannels * (end - begin), shard.index);
    float* const exposed = memory[self].data() - kChannels * begin;  // of the first row of all
    const unsigned blocks = std::min(blocks_for(end - begin, kThreads), kMostBlocks);
    expose_pixels_kernel<<<blocks, kThreads, 0, shard_stream(shard.index)>>>(patch.rgb, exposed, map, begin,
                                                                             end);
    KERNEL_CHECK("exposure", shard.index, rows.size());
    patch.rgb = exposed;
  };
  for_each_shard("exposure", run, Access::kExchange);  // the map lies on one GPU
  return memory;
}

void expose_patches_backward(const PatchedImage& image, const float* map, float* dL_dmap) {
  const auto shards = static_cast<int64_t>(image.patches.size());
  Buffer<double> part(shards * kPatchBlocks * kExposureFloats, kExchange);
  const auto run = [&](const Shard& shard) {  // a shard without tiles has sums of nothing
    expose_patch_backward_kernel<<<kPatchBlocks, kThreads, 0, shard_stream(shard.index)>>>(
        image.patches[static_cast<size_t>(shard.index)], static_cast<int>(image.images.height),
        static_cast<int>(image.images.width), map,
        part.data() + int64_t{shard.index} * kPatchBlocks * kExposureFloats);
    KERNEL_CHECK("exposure backward", shard.index, image.images.height);
  };
  for_each_shard("exposure backward", run, Access::kExchange);
  DeviceGuard guard(shard_device(0));
  map_total_kernel<<<1, kMapThreads, 0, shard_stream(0)>>>(part.data(), shards * kPatchBlocks, dL_dmap);
  KERNEL_CHECK("exposure backward", 0, image.images.height);
  join_shards();  // the sums are read before they are freed
}

void exposure_step(const ExposureTable& table, int64_t row, const float* gradient,
                   const math::AdamConstants& adam, float step_size, float inv_sqrt_bc2) {
  JoinedOperator joined;
  DeviceGuard guard(shard_device(0));
  exposure_step_kernel<<<1, kMapThreads, 0, shard_stream(0)>>>(table, row, gradient, adam, step_size,
                                                               inv_sqrt_bc2);
  KERNEL_CHECK("exposure step", 0, table.count);
}

}  // namespace mgpu::splat
