// SPDX-License-Identifier: Apache-2.0
// loss.cu: value and gradient in one kernel, a block a tile of 32 x 16 pixels and all windows in shared
// memory: the pixels with a halo of 10, SSIM at the centres with a halo of 5. Floor: 60 bytes a pixel. Bands
// are whole rows of tiles, so that the sums are the same bits on any mesh.
#include "splat/loss.h"

#include <algorithm>
#include <vector>

#include "math/ssim.h"
#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

using math::kSsimRadius;
using math::kSsimShift;
using math::kSsimWindow;

constexpr int kChannels = 3;
constexpr int kWide = 32, kHigh = 16;  // pixels of a tile
constexpr int kCentresWide = kWide + 2 * kSsimRadius, kCentresHigh = kHigh + 2 * kSsimRadius;
constexpr int kPixelsWide = kWide + 4 * kSsimRadius, kPixelsHigh = kHigh + 4 * kSsimRadius;
// Rows in shared memory are an odd number of floats apart, so that neighbours below each other are in
// different banks.
constexpr int kPixelStride = kPixelsWide | 1, kCentreStride = kCentresWide | 1, kSpreadStride = kWide | 1;
constexpr int kPixels = kPixelStride * kPixelsHigh;  // of one channel, with halo
constexpr int kAlong = kCentreStride * kPixelsHigh;  // after the windows along the rows
constexpr int kCentres = kCentreStride * kCentresHigh;
constexpr int kSpread = kSpreadStride * kCentresHigh;
static_assert(3 * kSpread <= 4 * kAlong);

// A thread makes several windows that overlap, and reads their values once.
constexpr int kAcross = 4;  // along a row
constexpr int kDown = 5;    // down a column of centres
constexpr int kRows = 2;    // pixel rows of a thread at the end
static_assert(kRows * kThreads == kWide * kHigh && kWide % kAcross == 0);

template <bool kMasked>
constexpr size_t shared_bytes() {
  return sizeof(float) * ((2 + kMasked) * kPixels + (4 + kMasked) * kAlong + 3 * kCentres);
}

struct LossCounts {
  int64_t pixels, centres;  // that count, times channels
};

struct LossInput {
  LossImages images;
  float ssim_weight;
  float share;  // of this loss in what is differentiated
  LossCounts counts;
  const LossCounts* device_counts;  // with a mask; else null
  int first_tile_row;
  float* dL_drgb;
  double* sums;  // [tile rows, tiles across, 2] of |x - y| and SSIM
};

__device__ __forceinline__ float weight_at(int distance) {  // |distance| <= 5
  constexpr float w0 = math::kSsimWeight[0], w1 = math::kSsimWeight[1], w2 = math::kSsimWeight[2];
  constexpr float w3 = math::kSsimWeight[3], w4 = math::kSsimWeight[4], w5 = math::kSsimWeight[5];
  switch (distance < 0 ? -distance : distance) {
    case 0:
      return w5;
    case 1:
      return w4;
    case 2:
      return w3;
    case 3:
      return w2;
    case 4:
      return w1;
    default:
      return w0;
  }
}

// sum[j] = window of values[j .. j + 10].
template <int kCount>
__device__ __forceinline__ void windows(const float (&values)[kCount + 2 * kSsimRadius],
                                        float (&sum)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    sum[j] = 0.f;
#pragma unroll
    for (int k = 0; k < kSsimWindow; ++k) sum[j] += weight_at(k - kSsimRadius) * values[j + k];
  }
}

// The windows of `kCount` neighbours, `stride` apart; only the first `held` values exist, the others are 0.
template <int kCount>
__device__ __forceinline__ void windows_of(const float* from, int stride, int held, float (&sum)[kCount]) {
  float values[kCount + 2 * kSsimRadius];
#pragma unroll
  for (int k = 0; k < kCount + 2 * kSsimRadius; ++k) values[k] = k < held ? from[k * stride] : 0.f;
  windows(values, sum);
}

__device__ __forceinline__ float target_at(const LossImages& images, int64_t i) {
  return images.target_bytes ? static_cast<float>(images.target_bytes[i]) / 255.0f : images.target[i];
}

__device__ __forceinline__ double block_sum(double value, double* warp_sums) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_down_sync(kAllLanes, value, step);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp];
  return sum;
}

// Windows along the rows of x, y, x^2 + y^2, x y and, with a mask, of what is kept. Neighbouring threads take
// rows below each other.
template <bool kMasked>
__device__ __forceinline__ void windows_along_rows(const float* x, const float* y, const float* keep,
                                                   float* along) {
  constexpr int kGroups = (kCentresWide + kAcross - 1) / kAcross, kHeld = kAcross + 2 * kSsimRadius;
  for (int i = threadIdx.x; i < kPixelsHigh * kGroups; i += kThreads) {
    const int r = i % kPixelsHigh, c = i / kPixelsHigh * kAcross;
    float a[kHeld], b[kHeld], sum[4 + kMasked][kAcross];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const bool held = c + k < kPixelsWide;
      a[k] = held ? x[r * kPixelStride + c + k] : 0.f;
      b[k] = held ? y[r * kPixelStride + c + k] : 0.f;
    }
    windows(a, sum[0]);
    windows(b, sum[1]);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const float product = a[k] * b[k];
      a[k] = a[k] * a[k] + b[k] * b[k];
      b[k] = product;
    }
    windows(a, sum[2]);
    windows(b, sum[3]);
    if constexpr (kMasked) windows_of(keep + r * kPixelStride + c, 1, kPixelsWide - c, sum[4]);
#pragma unroll
    for (int map = 0; map < 4 + kMasked; ++map) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        if (c + j < kCentresWide) along[map * kAlong + r * kCentreStride + c + j] = sum[map][j];
      }
    }
  }
}

// SSIM's derivatives at the centres; returns the sum of the thread's SSIM values in the tile itself.
template <bool kMasked>
__device__ __forceinline__ float centres(const LossImages& images, int64_t top, int64_t left,
                                         const float* keep, const float* along, float* derivative) {
  constexpr int kGroups = (kCentresHigh + kDown - 1) / kDown;
  static_assert(kGroups * kCentresWide <= kThreads);
  if (threadIdx.x >= kGroups * kCentresWide) return 0.f;
  const int c = threadIdx.x % kCentresWide, first = threadIdx.x / kCentresWide * kDown;
  float mean[4 + kMasked][kDown];
#pragma unroll
  for (int map = 0; map < 4 + kMasked; ++map) {
    windows_of(along + map * kAlong + first * kCentreStride + c, kCentreStride, kPixelsHigh - first,
               mean[map]);
  }
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kDown; ++j) {
    const int r = first + j;
    if (r >= kCentresHigh) continue;
    const int64_t row = top + r - kSsimRadius, column = left + c - kSsimRadius;
    bool valid = row >= kSsimRadius && row < images.height - kSsimRadius && column >= kSsimRadius &&
                 column < images.width - kSsimRadius;
    if constexpr (kMasked) valid = valid && keep[(r + kSsimRadius) * kPixelStride + c + kSsimRadius] != 0.f;
    math::SsimDerivative d{0.f, 0.f, 0.f};
    if (valid) {
      float scale = 1.f;
      if constexpr (kMasked) scale = 1.f / mean[4][j];
      const float value =
          math::ssim(mean[0][j] * scale, mean[1][j] * scale, mean[2][j] * scale, mean[3][j] * scale, d);
      d = {d.by_mean * scale, d.by_square * scale, d.by_product * scale};
      const bool own =
          r >= kSsimRadius && r < kSsimRadius + kHigh && c >= kSsimRadius && c < kSsimRadius + kWide;
      if (own) sum += value;
    }
    derivative[r * kCentreStride + c] = d.by_mean;
    derivative[kCentres + r * kCentreStride + c] = d.by_square;
    derivative[2 * kCentres + r * kCentreStride + c] = d.by_product;
  }
  return sum;
}

template <bool kMasked>
__global__ void __launch_bounds__(kThreads) loss_kernel(const __grid_constant__ LossInput in) {
  extern __shared__ float shared[];
  __shared__ double warp_sums[kWarps];
  float* const x = shared;  // [36, 52] shifted values
  float* const y = x + kPixels;
  float* const keep = y + kPixels;  // 1 where the pixel counts; with a mask
  float* const along =
      keep + kMasked * kPixels;  // [36, 42] each: windows along the rows of x, y, squares, product, keep
  float* const derivative = along + (4 + kMasked) * kAlong;  // [26, 42] each, of mean, square, product
  float* const spread = along;  // [26, 32] each: windows along the rows of the derivatives

  const LossImages& images = in.images;
  const int64_t width = images.width, height = images.height;
  const int64_t left = int64_t{blockIdx.x} * kWide, top = (int64_t{blockIdx.y} + in.first_tile_row) * kHigh;
  const LossCounts counts = in.device_counts ? *in.device_counts : in.counts;
  const bool with_ssim = counts.centres > 0;
  const float l1_scale =
      counts.pixels > 0
          ? in.share * static_cast<float>((with_ssim ? 1.0 - static_cast<double>(in.ssim_weight) : 1.0) /
                                          static_cast<double>(counts.pixels))
          : 0.f;
  const float ssim_scale = with_ssim ? in.share * static_cast<float>(-static_cast<double>(in.ssim_weight) /
                                                                     static_cast<double>(counts.centres))
                                     : 0.f;
  double l1_sum = 0.0, ssim_sum = 0.0;

  for (int channel = 0; channel < kChannels; ++channel) {
    __syncthreads();  // of the channel before
    if (with_ssim) {
      for (int i = threadIdx.x; i < kPixelsWide * kPixelsHigh; i += kThreads) {
        const int r = i / kPixelsWide, c = i % kPixelsWide, to = r * kPixelStride + c;
        const int64_t row = top + r - 2 * kSsimRadius, column = left + c - 2 * kSsimRadius;
        const bool inside = row >= 0 && row < height && column >= 0 && column < width;
        const int64_t pixel = row * width + column;
        const bool counts_here = inside && (!kMasked || images.mask[pixel]);
        x[to] = counts_here ? images.rgb[kChannels * pixel + channel] - kSsimShift : 0.f;
        y[to] = counts_here ? target_at(images, kChannels * pixel + channel) - kSsimShift : 0.f;
        if constexpr (kMasked) keep[to] = counts_here ? 1.f : 0.f;
      }
      __syncthreads();
      windows_along_rows<kMasked>(x, y, keep, along);
      __syncthreads();
      ssim_sum += centres<kMasked>(images, top, left, keep, along, derivative);
      __syncthreads();
      if (in.dL_drgb) {
        for (int i = threadIdx.x; i < kCentresHigh * (kWide / kAcross); i += kThreads) {
          const int r = i % kCentresHigh, c = i / kCentresHigh * kAcross;
          for (int map = 0; map < 3; ++map) {
            float sum[kAcross];
            windows_of(derivative + map * kCentres + r * kCentreStride + c, 1, kAcross + 2 * kSsimRadius,
                       sum);
            for (int j = 0; j < kAcross; ++j) spread[map * kSpread + r * kSpreadStride + c + j] = sum[j];
          }
        }
        __syncthreads();
      }
    }
    const int c = threadIdx.x % kWide, r = threadIdx.x / kWide * kRows;
    float by_mean[kRows] = {}, by_square[kRows] = {}, by_product[kRows] = {};
    if (with_ssim && in.dL_drgb) {
      const float* from = spread + r * kSpreadStride + c;
      windows_of(from, kSpreadStride, kRows + 2 * kSsimRadius, by_mean);
      windows_of(from + kSpread, kSpreadStride, kRows + 2 * kSsimRadius, by_square);
      windows_of(from + 2 * kSpread, kSpreadStride, kRows + 2 * kSsimRadius, by_product);
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int64_t row = top + r + j, column = left + c;
      if (row >= height || column >= width) continue;
      const int64_t pixel = row * width + column, at = kChannels * pixel + channel;
      if (kMasked && !images.mask[pixel]) {
        if (in.dL_drgb) in.dL_drgb[at] = 0.f;
        continue;
      }
      const float value = images.rgb[at], target = target_at(images, at);
      l1_sum += fabsf(value - target);
      if (!in.dL_drgb) continue;
      const float sign = static_cast<float>(value > target) - static_cast<float>(value < target);
      in.dL_drgb[at] =
          l1_scale * sign + ssim_scale * (by_mean[j] + 2.0f * (value - kSsimShift) * by_square[j] +
                                          (target - kSsimShift) * by_product[j]);
    }
  }
  const double l1 = block_sum(l1_sum, warp_sums), similarity = block_sum(ssim_sum, warp_sums);
  if (threadIdx.x == 0) {
    double* sums = in.sums + 2 * (int64_t{blockIdx.y} * gridDim.x + blockIdx.x);
    sums[0] = l1;
    sums[1] = similarity;
  }
}

// Pixels and centres that a mask leaves; every shard counts the whole mask, which is less than asking the
// others.
__global__ void __launch_bounds__(kThreads) count_kernel(const uint8_t* mask, int64_t height, int64_t width,
                                                         bool any_centre, unsigned long long* counts) {
  int64_t pixels = 0, centres = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < height * width;
       i += int64_t{gridDim.x} * kThreads) {
    if (!mask[i]) continue;
    const int64_t row = i / width, column = i % width;
    ++pixels;
    centres += any_centre && row >= kSsimRadius && row < height - kSsimRadius && column >= kSsimRadius &&
               column < width - kSsimRadius;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    pixels += __shfl_down_sync(kAllLanes, pixels, step);
    centres += __shfl_down_sync(kAllLanes, centres, step);
  }
  if (threadIdx.x % kWarp == 0) {
    atomicAdd(counts, static_cast<unsigned long long>(pixels * kChannels));
    atomicAdd(counts + 1, static_cast<unsigned long long>(centres * kChannels));
  }
}

// The tiles' sums in their order to loss, L1 and SSIM. One block of threads.
__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* sums, int64_t tiles, LossCounts counts, const LossCounts* device_counts,
                 float ssim_weight, double* value, float* value_float) {
  __shared__ double partial[kThreads];
  double total[2];
  for (int k = 0; k < 2; ++k) {
    double sum = 0.0;
    for (int64_t tile = threadIdx.x; tile < tiles; tile += kThreads) sum += sums[2 * tile + k];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int step = kThreads / 2; step > 0; step /= 2) {
      if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
      __syncthreads();
    }
    total[k] = partial[0];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (device_counts) counts = *device_counts;
  const double weight = ssim_weight;
  const double l1 = counts.pixels > 0 ? total[0] / static_cast<double>(counts.pixels) : 0.0;
  const double similarity = counts.centres > 0 ? total[1] / static_cast<double>(counts.centres) : 1.0;
  const double loss = counts.centres > 0 ? (1.0 - weight) * l1 + weight * (1.0 - similarity) : l1;
  const double all[3] = {loss, l1, similarity};
  for (int k = 0; k < 3; ++k) {
    if (value) value[k] = all[k];
    if (value_float) value_float[k] = static_cast<float>(all[k]);
  }
}

// Value as doubles, as floats, or both, on the lead shard's GPU.
void launch_loss(const LossImages& images, float ssim_weight, float share, float* dL_drgb, double* value,
                 float* value_float) {
  const int64_t height = images.height, width = images.width;
  const int shards = mesh().size();
  const bool any_centre = height >= kSsimWindow && width >= kSsimWindow && ssim_weight != 0.f;
  const LossCounts counts{
      height * width * kChannels,
      any_centre ? (height - 2 * kSsimRadius) * (width - 2 * kSsimRadius) * kChannels : 0};
  const int64_t tile_rows = (height + kHigh - 1) / kHigh, tiles_across = (width + kWide - 1) / kWide;
  std::vector<Buffer<double>> sums(static_cast<size_t>(shards));
  std::vector<Buffer<LossCounts>> masked(static_cast<size_t>(shards));
  const auto run = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange band = equal_chunk(tile_rows, shard.index, shards);
    const cudaStream_t stream = shard_stream(shard.index);
    if (images.mask && (shard.index == 0 || !band.empty())) {
      masked[index] = Buffer<LossCounts>(1, shard.index);
      zero(masked[index]);
      const unsigned blocks = std::min(blocks_for(height * width, kThreads), 512u);
      count_kernel<<<blocks, kThreads, 0, stream>>>(
          images.mask, height, width, any_centre,
          reinterpret_cast<unsigned long long*>(masked[index].data()));
      KERNEL_CHECK("loss", shard.index, height);
    }
    if (band.empty()) return;
    sums[index] = Buffer<double>(2 * band.size() * tiles_across, shard.index);
    const LossInput in{images,  ssim_weight,          share,
                       counts,  masked[index].data(), static_cast<int>(band.begin),
                       dL_drgb, sums[index].data()};
    const dim3 grid(static_cast<unsigned>(tiles_across), static_cast<unsigned>(band.size()));
    const auto kernel = images.mask ? loss_kernel<true> : loss_kernel<false>;
    const size_t bytes = images.mask ? shared_bytes<true>() : shared_bytes<false>();
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    kernel<<<grid, kThreads, bytes, stream>>>(in);
    KERNEL_CHECK("loss", shard.index, band.size() * kHigh);
  };
  for_each_shard("loss", run, Access::kExchange);  // bands read their neighbours' rows

  DeviceGuard guard(shard_device(0));
  Buffer<double> all;
  if (shards > 1) {
    all = Buffer<double>(2 * tile_rows * tiles_across, 0);
    for (int shard = 0; shard < shards; ++shard) {
      const RowRange band = equal_chunk(tile_rows, shard, shards);
      const Buffer<double>& part = sums[static_cast<size_t>(shard)];
      copy_between(all.data() + 2 * band.begin * tiles_across, 0, part.data(), shard,
                   part.size() * static_cast<int64_t>(sizeof(double)));
    }
  }
  total_kernel<<<1, kThreads, 0, shard_stream(0)>>>(shards > 1 ? all.data() : sums[0].data(),
                                                    tile_rows * tiles_across, counts, masked[0].data(),
                                                    ssim_weight, value, value_float);
  KERNEL_CHECK("loss", 0, height);
  if (shards > 1) join_shards();  // the copies are made before the parts are freed
}

}  // namespace

RowRange loss_band(int64_t height, int shard, int shards) {
  const RowRange rows = equal_chunk((height + kHigh - 1) / kHigh, shard, shards);
  return {std::min(height, rows.begin * kHigh), std::min(height, rows.end * kHigh)};
}

LossValue l1_ssim(const LossImages& images, float ssim_weight, float* dL_drgb, float share) {
  if (images.height == 0 || images.width == 0) return {};
  Buffer<double> value(3, 0);
  launch_loss(images, ssim_weight, share, dL_drgb, value.data(), nullptr);
  double host[3];
  read_back(host, value.data(), 3, 0);
  return {host[0], host[1], host[2]};
}

void l1_ssim_into(const LossImages& images, float ssim_weight, float* dL_drgb, float* value, float share) {
  if (images.height == 0 || images.width == 0) {
    const float nothing[3] = {0.f, 0.f, 1.f};
    upload(value, nothing, 3, 0);
    return;
  }
  launch_loss(images, ssim_weight, share, dL_drgb, nullptr, value);
}

}  // namespace mgpu::splat
