// SPDX-License-Identifier: Apache-2.0
// loss.cu: value and gradient in one kernel that walks down a strip of the image, a row a step. A thread has
// two pixels of a channel; windows along a row are read from shared memory, windows down the columns are sums
// in registers that move up by one row a step. So a pixel is read once and a window's taps are 11
// multiply-adds, 154 for all seven maps of a channel. Floor: 60 bytes and 560 lane instructions a pixel, all
// channels; this takes 820 and, for the columns and rows that strips share, a third more. L1 alone is a
// kernel that streams. Sums are taken of tiles of 16 rows, so that the value is the same bits on any mesh,
// whatever the heights of strips. Of a shard's own tiles a block has a piece of a strip in which there are
// some (loss_items.h); strips lie where they lie in the image.
#include "splat/loss.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "math/ssim.h"
#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/loss_items.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

using math::kSsimRadius;
using math::kSsimShift;
using math::kSsimWindow;

constexpr int kChannels = 3;
constexpr int kHigh = 16;  // rows of a tile; shards' bands and strips are whole tiles high
static_assert(kHigh == kTileSize);

// Columns of a block. Thread 3 s + c has channel c of the slot s of two pixels; threads beside each other
// read values beside each other. Each of the two windows along a row takes five slots from the width of the
// strip.
constexpr int kAcross = 2;                                    // pixels of a slot
constexpr int kSpan = (kSsimWindow + kAcross - 1) / kAcross;  // slots that a slot's windows touch
constexpr int kSlots = kThreads / kChannels;
constexpr int kWide = kAcross * (kSlots - 2 * (kSpan - 1));  // pixels of a strip that come out
constexpr int kRowSlots =
    kThreads + kChannels * (kSpan - 1) + 1;  // in shared memory; threads at the end read beyond
static_assert(kSpan * kAcross == kSsimWindow + kAcross - 1);

// Rows. In step i row i enters, the centres five rows above get their SSIM, and the row seven rows above
// those is done: derivatives are read two steps later, before the step's only barrier.
constexpr int kSlopeLag =
    2;  // also the rows of derivatives kept: the barrier parts their readers from writers
constexpr int kCentreLag = kSsimRadius, kOutputLag = 2 * kSsimRadius + kSlopeLag;
constexpr int kWarmUp = 2 * kSsimRadius + kOutputLag;  // steps before the strip's first row is done
constexpr int kRing = 16;                              // rows kept in shared memory
static_assert(kRing > kOutputLag + 1);                 // a warp may be a row ahead
constexpr StripWalk kWalk{.wide = kWide, .warm_up = kWarmUp};

// What a value of the loss is divided by.
struct LossCounts {
  int64_t pixels, centres;  // that count, times channels
};

// Factors of the gradient.
struct LossScales {
  float l1, ssim;
};

HOST_DEVICE inline LossScales scales_of(const LossCounts& counts, double ssim_weight, float share) {
  const double l1_weight = counts.centres > 0 ? 1.0 - ssim_weight : 1.0;
  return {
      counts.pixels > 0 ? share * static_cast<float>(l1_weight / static_cast<double>(counts.pixels)) : 0.f,
      counts.centres > 0 ? share * static_cast<float>(-ssim_weight / static_cast<double>(counts.centres))
                         : 0.f};
}

// Of |x - y| and of SSIM.
struct Sums {
  double l1, ssim;
};

struct LossInput {
  LossImages images;
  float ssim_weight;
  float share;  // of this loss in what is differentiated
  LossScales scales;
  const LossCounts* device_counts;  // with a mask, then instead of scales; else null
  RowRange tiles;                   // rows of tiles of the shard
  int64_t strip_tiles = 0;          // rows of tiles of a strip
  float* dL_drgb = nullptr;
  Sums* sums = nullptr;  // [tile rows, strips, warps], or [tile rows, blocks] for L1 alone

  // Of a patch: only the shard's own tiles count and come out.
  RowRange positions;
  const int32_t* position_from_tile = nullptr;
  int tiles_x = 0;

  __device__ __forceinline__ bool owns(int tile_row, int tile_column) const {
    if (tile_column < 0 || tile_column >= tiles_x) return false;
    const int64_t tile = int64_t{tile_row} * tiles_x + tile_column;
    const int64_t position = position_from_tile ? position_from_tile[tile] : tile;
    return position >= positions.begin && position < positions.end;
  }
};

// Of a patch: a block an item, which then stands for `tiles` and `strip_tiles`; sums are [rows of tiles of
// all items, warps].
constexpr int kMostItems = 300;
struct PatchInput : LossInput {
  LossItem items[kMostItems];
};
static_assert(sizeof(PatchInput) <= 4096);  // of a kernel's arguments

template <bool kPatch>
using StripsInput = std::conditional_t<kPatch, PatchInput, LossInput>;

__device__ __forceinline__ float weight_at(int tap) {  // 0..10, known to the compiler
  constexpr float w0 = math::kSsimWeight[0], w1 = math::kSsimWeight[1], w2 = math::kSsimWeight[2];
  constexpr float w3 = math::kSsimWeight[3], w4 = math::kSsimWeight[4], w5 = math::kSsimWeight[5];
  switch (tap < kSsimRadius ? tap : 2 * kSsimRadius - tap) {
    case 0:
      return w0;
    case 1:
      return w1;
    case 2:
      return w2;
    case 3:
      return w3;
    case 4:
      return w4;
    default:
      return w5;
  }
}

// One more row into the window down a column; returns the window of the eleven latest. sums[k] is that of the
// row k further on, as far as it is known.
__device__ __forceinline__ float slide(float (&sums)[kSsimWindow - 1], float value) {
  const float full = fmaf(weight_at(0), value, sums[0]);
#pragma unroll
  for (int k = 1; k < kSsimWindow - 1; ++k) sums[k - 1] = fmaf(weight_at(k), value, sums[k]);
  sums[kSsimWindow - 2] = weight_at(kSsimWindow - 1) * value;
  return full;
}

// Adds the value at `tap`, counted from the first of the slot's windows, to the window of each pixel of the
// slot.
__device__ __forceinline__ void add_tap(float (&sums)[kAcross], int tap, float value) {
#pragma unroll
  for (int j = 0; j < kAcross; ++j) {
    if (tap >= j && tap - j < kSsimWindow) sums[j] = fmaf(weight_at(tap - j), value, sums[j]);
  }
}

// byte / 255, rounded as a division is: one step of Newton's after the product.
__device__ __forceinline__ float byte_value(unsigned byte) {
  constexpr float kInverse = 1.0f / 255.0f;
  const float x = static_cast<float>(byte), guess = x * kInverse;
  return fmaf(fmaf(-255.0f, guess, x), kInverse, guess);
}

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_down_sync(kAllLanes, value, step);
  return value;
}

// ---- L1 and SSIM

template <bool kMasked>
struct SharedRows {
  float4 values[kRing][kRowSlots];        // x, y of the slot's two pixels, shifted; 0 where nothing counts
  float4 slopes[kSlopeLag][kRowSlots];    // derivatives by mean and square of the slot's two centres
  float2 products[kSlopeLag][kRowSlots];  // by product
  float2 keep[kMasked ? kRing : 1][kRowSlots];  // 1 where a pixel counts
};

// A row's pixels of a thread as they are in memory.
template <typename Target>
struct Fetched {
  float x[kAcross];
  Target y[kAcross];
  bool counts[kAcross];
};

template <typename Target>
__device__ __forceinline__ const Target* targets_of(const LossImages& images) {
  if constexpr (sizeof(Target) == 1) {
    return images.target_bytes;
  } else {
    return images.target;
  }
}

// Nothing in a step depends on how far the walk is, but what is put out: sums that lack their first rows come
// before the strip's first row. Of a patch, strips lie where they lie in the image, and a thread's two pixels
// are of one tile, so its sums over a row of tiles are those that it has on one shard, or nothing: its
// centres count where the last one is that the strip counts.
template <typename Target, bool kMasked, bool kPatch>
__global__ void __launch_bounds__(kThreads, 1) ssim_kernel(const __grid_constant__ StripsInput<kPatch> in) {
  extern __shared__ float4 shared_memory[];
  SharedRows<kMasked>& shared = *reinterpret_cast<SharedRows<kMasked>*>(shared_memory);

  const LossImages& images = in.images;
  const int width = static_cast<int>(images.width), height = static_cast<int>(images.height);
  int64_t first_tile, end_tile;
  int strip;
  if constexpr (kPatch) {
    const LossItem& item = in.items[blockIdx.x];
    first_tile = item.begin, end_tile = item.end, strip = item.strip;
  } else {
    first_tile = in.tiles.begin + int64_t{blockIdx.y} * in.strip_tiles;
    end_tile = min(first_tile + in.strip_tiles, in.tiles.end), strip = static_cast<int>(blockIdx.x);
  }
  const int top = static_cast<int>(first_tile) * kHigh;
  const int bottom = static_cast<int>(min(end_tile * kHigh, images.height));
  const int left = strip * kWide;
  const int right = min(left + kWide, width);
  const int channel = threadIdx.x % kChannels;
  // Columns of the thread's first pixel: as it enters, as a centre, as it comes out.
  const int column = left - 2 * kSsimRadius + kAcross * static_cast<int>(threadIdx.x / kChannels);
  const int centre_column = column + kSsimRadius, output_column = centre_column + kSsimRadius;
  // How many rows a pixel counts in: from the image's first, from the first centre's, from the strip's first.
  unsigned enters[kAcross], centres[kAcross], outputs[kAcross];
  bool own_centre[kAcross];
#pragma unroll
  for (int j = 0; j < kAcross; ++j) {
    const bool spare = threadIdx.x >= kSlots * kChannels;
    const int centre = centre_column + j;
    enters[j] = !spare && column + j >= 0 && column + j < width ? height : 0;
    centres[j] = centre >= kSsimRadius && centre < width - kSsimRadius ? height - 2 * kSsimRadius : 0;
    own_centre[j] = centre >= left && centre < right;
    outputs[j] = output_column + j < right ? bottom - top : 0;
  }
  LossScales scales = in.scales;
  if constexpr (kMasked) scales = scales_of(*in.device_counts, in.ssim_weight, in.share);

  // Of the first pixel in the row that is fetched next; it may lie outside the image.
  const int64_t first_pixel = int64_t{top - 2 * kSsimRadius} * width + column;
  const float* x_at = images.rgb + kChannels * first_pixel + channel;
  const Target* y_at = targets_of<Target>(images) + kChannels * first_pixel + channel;
  const uint8_t* mask_at = images.mask + first_pixel;
  const auto fetch = [&](int row) {
    Fetched<Target> next;
#pragma unroll
    for (int j = 0; j < kAcross; ++j) {
      next.counts[j] = static_cast<unsigned>(row) < enters[j];
      if constexpr (kMasked) next.counts[j] = next.counts[j] && mask_at[j];
      next.x[j] = next.counts[j] ? x_at[kChannels * j] : 0.f;
      next.y[j] = next.counts[j] ? y_at[kChannels * j] : Target{0};
    }
    x_at += kChannels * width;
    y_at += kChannels * width;
    if constexpr (kMasked) mask_at += width;
    return next;
  };

  float down_x[kAcross][kSsimWindow - 1] = {}, down_y[kAcross][kSsimWindow - 1] = {};
  float down_squares[kAcross][kSsimWindow - 1] = {}, down_product[kAcross][kSsimWindow - 1] = {};
  float down_keep[kMasked ? kAcross : 1][kSsimWindow - 1] = {};
  float down_by_mean[kAcross][kSsimWindow - 1] = {}, down_by_square[kAcross][kSsimWindow - 1] = {};
  float down_by_product[kAcross][kSsimWindow - 1] = {};
  float l1_sum = 0.f, ssim_sum = 0.f;

  float* dL_drgb = in.dL_drgb;
  if (dL_drgb) {
    dL_drgb += kChannels * ((int64_t{top} - kWarmUp) * width + output_column) + channel;
  }
  // Sums of SSIM belong to the row that comes out when the centre gets its value: the first strip has one row
  // more.
  const int first_centre = top == 0 ? 0 : top + kOutputLag - kCentreLag;
  int64_t sum_row;
  if constexpr (kPatch) {
    sum_row = in.items[blockIdx.x].sum_row;
  } else {
    sum_row = int64_t{blockIdx.y} * in.strip_tiles * gridDim.x + blockIdx.x;
  }
  Sums* sums = in.sums + (sum_row * kWarps + threadIdx.x / kWarp);
  const auto put_sums = [&] {  // the lanes of the warps have those of a tile
    const Sums sum{warp_sum(l1_sum), warp_sum(ssim_sum)};
    if (threadIdx.x % kWarp == 0) *sums = sum;
    sums += kPatch ? kWarps : int64_t{gridDim.x} * kWarps;
    l1_sum = ssim_sum = 0.f;
  };

  int tile_row = static_cast<int>(first_tile);  // that comes out
  bool own_pixels = true, own_centres = true;
  const auto look_up_owner = [&] {
    own_pixels = in.owns(tile_row, output_column / kTileSize);
    // the second one, but at the strip's end, where that is the next strip's
    own_centres = in.owns(tile_row, (centre_column + (own_centre[1] ? 1 : 0)) / kTileSize);
  };
  if constexpr (kPatch) look_up_owner();

  int row = top - 2 * kSsimRadius;  // of the image, that enters
  Fetched<Target> next = fetch(row);
  for (unsigned step = 0; row < bottom + kOutputLag; ++step, ++row) {
    if (step > kWarmUp && (step - kWarmUp) % kHigh == 0) {
      put_sums();
      if constexpr (kPatch) {
        ++tile_row;
        look_up_owner();
      }
    }
    {
      float value[kAcross][2], keep[kAcross];
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        float y;
        if constexpr (sizeof(Target) == 1) {
          y = byte_value(next.y[j]);
        } else {
          y = next.y[j];
        }
        value[j][0] = next.counts[j] ? next.x[j] - kSsimShift : 0.f;
        value[j][1] = next.counts[j] ? y - kSsimShift : 0.f;
        keep[j] = next.counts[j] ? 1.f : 0.f;
      }
      shared.values[step % kRing][threadIdx.x] = {value[0][0], value[0][1], value[1][0], value[1][1]};
      if constexpr (kMasked) shared.keep[step % kRing][threadIdx.x] = {keep[0], keep[1]};
    }
    next = fetch(row + 1);

    // Derivatives of an earlier step along the row: work for warps that are early at the barrier.
    float by_mean[kAcross] = {}, by_square[kAcross] = {}, by_product[kAcross] = {};
    if (step >= 2 * kSsimRadius + kSlopeLag) {
#pragma unroll
      for (int k = 0; k < kSpan; ++k) {
        const float4 slope = shared.slopes[step % kSlopeLag][threadIdx.x + kChannels * k];
        const float2 part = shared.products[step % kSlopeLag][threadIdx.x + kChannels * k];
        add_tap(by_mean, kAcross * k, slope.x);
        add_tap(by_square, kAcross * k, slope.y);
        add_tap(by_product, kAcross * k, part.x);
        add_tap(by_mean, kAcross * k + 1, slope.z);
        add_tap(by_square, kAcross * k + 1, slope.w);
        add_tap(by_product, kAcross * k + 1, part.y);
      }
    }
    __syncthreads();

    {  // the row that those derivatives complete
      const int slot = threadIdx.x + kChannels * (2 * kSsimRadius / kAcross);
      const float4 value = shared.values[(step - kOutputLag) % kRing][slot];
      const float a[kAcross] = {value.x, value.z}, b[kAcross] = {value.y, value.w};
      bool kept[kAcross] = {true, true};
      if constexpr (kMasked) {
        const float2 keep = shared.keep[(step - kOutputLag) % kRing][slot];
        kept[0] = keep.x != 0.f;
        kept[1] = keep.y != 0.f;
      }
      const int output_row = row - kOutputLag;
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        by_mean[j] = slide(down_by_mean[j], by_mean[j]);
        by_square[j] = slide(down_by_square[j], by_square[j]);
        by_product[j] = slide(down_by_product[j], by_product[j]);
        const float difference = a[j] - b[j];  // 0 where nothing counts
        const float by_l1 = difference > 0.f ? scales.l1 : difference < 0.f ? -scales.l1 : 0.f;
        const float by_ssim = fmaf(b[j], by_product[j], fmaf(2.f * a[j], by_square[j], by_mean[j]));
        const float gradient = kept[j] ? fmaf(scales.ssim, by_ssim, by_l1) : 0.f;
        bool comes_out = static_cast<unsigned>(output_row - top) < outputs[j];
        if constexpr (kPatch) comes_out = comes_out && own_pixels;
        l1_sum += comes_out ? fabsf(difference) : 0.f;
        if (comes_out && in.dL_drgb) dL_drgb[kChannels * j] = gradient;
      }
      dL_drgb += kChannels * width;
    }

    {  // the row that entered, and the centres it completes
      float x[kAcross] = {}, y[kAcross] = {}, squares[kAcross] = {}, product[kAcross] = {},
            held[kAcross] = {};
#pragma unroll
      for (int k = 0; k < kSpan; ++k) {
        const float4 value = shared.values[step % kRing][threadIdx.x + kChannels * k];
        const float a[kAcross] = {value.x, value.z}, b[kAcross] = {value.y, value.w};
#pragma unroll
        for (int i = 0; i < kAcross; ++i) {
          add_tap(x, kAcross * k + i, a[i]);
          add_tap(y, kAcross * k + i, b[i]);
          add_tap(squares, kAcross * k + i, fmaf(a[i], a[i], b[i] * b[i]));
          add_tap(product, kAcross * k + i, a[i] * b[i]);
        }
        if constexpr (kMasked) {
          const float2 keep = shared.keep[step % kRing][threadIdx.x + kChannels * k];
          add_tap(held, kAcross * k, keep.x);
          add_tap(held, kAcross * k + 1, keep.y);
        }
      }
      bool kept[kAcross] = {true, true};
      if constexpr (kMasked) {
        // Centres are five pixels, two slots and a half, from the pixels of their slot.
        const float2* const keep = shared.keep[(step - kCentreLag) % kRing];
        kept[0] = keep[threadIdx.x + kChannels * (kSsimRadius / kAcross)].y != 0.f;
        kept[1] = keep[threadIdx.x + kChannels * (kSsimRadius / kAcross + 1)].x != 0.f;
      }
      const int centre_row = row - kCentreLag;
      math::SsimDerivative derivative[kAcross];
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        float scale = 1.f;
        if constexpr (kMasked) scale = math::quick_inverse(slide(down_keep[j], held[j]));
        const float mean_x = scale * slide(down_x[j], x[j]), mean_y = scale * slide(down_y[j], y[j]);
        const float mean_squares = scale * slide(down_squares[j], squares[j]);
        const float mean_product = scale * slide(down_product[j], product[j]);
        const float value = math::ssim(mean_x, mean_y, mean_squares, mean_product, derivative[j]);
        const bool counts = kept[j] && static_cast<unsigned>(centre_row - kSsimRadius) < centres[j];
        if (counts && own_centre[j] && centre_row >= first_centre && (!kPatch || own_centres))
          ssim_sum += value;
        derivative[j].by_mean = counts ? derivative[j].by_mean * scale : 0.f;
        derivative[j].by_square = counts ? derivative[j].by_square * scale : 0.f;
        derivative[j].by_product = counts ? derivative[j].by_product * scale : 0.f;
      }
      shared.slopes[step % kSlopeLag][threadIdx.x] = {derivative[0].by_mean, derivative[0].by_square,
                                                      derivative[1].by_mean, derivative[1].by_square};
      shared.products[step % kSlopeLag][threadIdx.x] = {derivative[0].by_product, derivative[1].by_product};
    }
  }
  put_sums();
}

// ---- L1 alone

constexpr int kPack = 4;   // values that are read at once, where they are aligned
constexpr int kPacks = 4;  // of a thread
constexpr int kPiece = kThreads * kPacks * kPack;

// A block takes kPiece values of a row of tiles, which are neighbours in memory. `packed`: images are aligned
// to packs, and of a patch rows are, so that a pack is one tile's.
template <bool kMasked, bool kPatch>
__global__ void __launch_bounds__(kThreads) l1_kernel(const __grid_constant__ LossInput in, bool packed) {
  __shared__ double warp_sums[kWarps];
  const LossImages& images = in.images;
  const int64_t row_values = images.width * kChannels;
  const int64_t tile = in.tiles.begin + blockIdx.y;
  const int64_t end = min((tile + 1) * kHigh, images.height) * row_values;
  const int64_t first = tile * kHigh * row_values + int64_t{blockIdx.x} * kPiece + kPack * threadIdx.x;
  float scale = in.scales.l1;
  if constexpr (kMasked) scale = scales_of(*in.device_counts, in.ssim_weight, in.share).l1;

  // Of a patch, whether the value is the shard's own.
  const auto owned = [&](int64_t at) {
    const int64_t column = at % row_values / (kChannels * kTileSize);
    return !kPatch || in.owns(static_cast<int>(tile), static_cast<int>(column));
  };
  float x[kPacks][kPack], y[kPacks][kPack];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t at = first + int64_t{p} * kThreads * kPack;
    if (packed && at + kPack <= end) {
      if (kPatch && !owned(at)) continue;
      *reinterpret_cast<float4*>(x[p]) = *reinterpret_cast<const float4*>(images.rgb + at);
      if (images.target_bytes) {
        const uchar4 bytes = *reinterpret_cast<const uchar4*>(images.target_bytes + at);
        y[p][0] = byte_value(bytes.x), y[p][1] = byte_value(bytes.y);
        y[p][2] = byte_value(bytes.z), y[p][3] = byte_value(bytes.w);
      } else {
        *reinterpret_cast<float4*>(y[p]) = *reinterpret_cast<const float4*>(images.target + at);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const bool inside = at + k < end && owned(at + k);
        x[p][k] = inside ? images.rgb[at + k] : 0.f;
        y[p][k] = !inside               ? 0.f
                  : images.target_bytes ? byte_value(images.target_bytes[at + k])
                                        : images.target[at + k];
      }
    }
  }
  // Of a patch in double: a thread's values are of several tiles.
  std::conditional_t<kPatch, double, float> sum = 0;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t at = first + int64_t{p} * kThreads * kPack;
    if (kPatch && packed && at + kPack <= end && !owned(at)) continue;
    float gradient[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      float difference = x[p][k] - y[p][k];
      if constexpr (kMasked) {
        if (at + k < end && !images.mask[(at + k) / kChannels]) difference = 0.f;
      }
      sum += fabsf(difference);
      gradient[k] = difference > 0.f ? scale : difference < 0.f ? -scale : 0.f;
    }
    if (!in.dL_drgb) continue;
    if (packed && at + kPack <= end) {
      *reinterpret_cast<float4*>(in.dL_drgb + at) = *reinterpret_cast<const float4*>(gradient);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (at + k < end && owned(at + k)) in.dL_drgb[at + k] = gradient[k];
      }
    }
  }
  const double warp = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double block = 0.0;
  for (int w = 0; w < kWarps; ++w) block += warp_sums[w];
  in.sums[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = {block, 0.0};
}

// Pixels and centres that a mask leaves; every shard counts the whole mask, which is less than asking the
// others.
__global__ void __launch_bounds__(kThreads) count_kernel(const uint8_t* mask, int64_t height, int64_t width,
                                                         bool any_centre, unsigned long long* counts) {
  int64_t pixels = 0, centres = 0;
  for (int64_t row = blockIdx.x; row < height; row += gridDim.x) {
    const bool any = any_centre && row >= kSsimRadius && row < height - kSsimRadius;
    for (int64_t column = threadIdx.x; column < width; column += kThreads) {
      if (!mask[row * width + column]) continue;
      ++pixels;
      centres += any && column >= kSsimRadius && column < width - kSsimRadius;
    }
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

// The sum of all, in a fixed order, by one block of threads; thread 0 has it.
constexpr int kTotalThreads = 1024;
__device__ __forceinline__ Sums sum_of_all(const Sums* sums, int64_t count) {
  __shared__ Sums partial[kTotalThreads];
  Sums total{0.0, 0.0};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kTotalThreads) {
    total.l1 += sums[i].l1;
    total.ssim += sums[i].ssim;
  }
  partial[threadIdx.x] = total;
  for (int step = kTotalThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) {
      partial[threadIdx.x].l1 += partial[threadIdx.x + step].l1;
      partial[threadIdx.x].ssim += partial[threadIdx.x + step].ssim;
    }
  }
  return partial[0];
}

__device__ __forceinline__ void put_value(const Sums& total, const LossCounts& counts, float ssim_weight,
                                          double* value, float* value_float) {
  const double weight = ssim_weight;
  const double l1 = counts.pixels > 0 ? total.l1 / static_cast<double>(counts.pixels) : 0.0;
  const double similarity = counts.centres > 0 ? total.ssim / static_cast<double>(counts.centres) : 1.0;
  const double loss = counts.centres > 0 ? (1.0 - weight) * l1 + weight * (1.0 - similarity) : l1;
  const double all[3] = {loss, l1, similarity};
  for (int k = 0; k < 3; ++k) {
    if (value) value[k] = all[k];
    if (value_float) value_float[k] = static_cast<float>(all[k]);
  }
}

// All sums in their order to loss, L1 and SSIM. One block of threads.
__global__ void __launch_bounds__(kTotalThreads)
    total_kernel(const Sums* sums, int64_t count, LossCounts counts, const LossCounts* device_counts,
                 float ssim_weight, double* value, float* value_float) {
  const Sums total = sum_of_all(sums, count);
  if (threadIdx.x != 0) return;
  put_value(total, device_counts ? *device_counts : counts, ssim_weight, value, value_float);
}

// The images of one launch of the kernels below, as their argument.
constexpr int kMostImages = 64;

struct SumsOfImages {
  const Sums* sums[kMostImages];
  int64_t count[kMostImages];
};

// What a shard has of each image. A block an image.
__global__ void __launch_bounds__(kTotalThreads)
    shard_total_kernel(const __grid_constant__ SumsOfImages in, Sums* total) {
  const Sums sum = sum_of_all(in.sums[blockIdx.x], in.count[blockIdx.x]);
  if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

struct CountsOfImages {
  LossCounts counts[kMostImages];
  const LossCounts* masked[kMostImages];  // instead, if it is not null
};

// From what the shards have ([shards, stride], from this launch's first image on) to values [images, 3]. A
// thread an image.
__global__ void __launch_bounds__(kMostImages)
    patch_total_kernel(const __grid_constant__ CountsOfImages counts, const Sums* part, int shards,
                       int64_t stride, int images, float ssim_weight, float* values) {
  const int v = static_cast<int>(threadIdx.x);
  if (v >= images) return;
  Sums total{0.0, 0.0};
  for (int shard = 0; shard < shards; ++shard) {
    total.l1 += part[shard * stride + v].l1;
    total.ssim += part[shard * stride + v].ssim;
  }
  put_value(total, counts.masked[v] ? *counts.masked[v] : counts.counts[v], ssim_weight, nullptr,
            values + 3 * v);
}

// ---- launches

bool aligned(const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

int processors_of(int shard) {
  int processors = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, shard_device(shard)));
  return processors;
}

// Rows of tiles of a strip, so that the GPU is done soonest: a multiprocessor has one block at a time, and a
// strip costs a step a row and those before its first.
int64_t strip_tiles_of(int64_t tiles, int64_t strips, int processors) {
  int64_t best = tiles, least = std::numeric_limits<int64_t>::max();
  for (int64_t bands = 1; bands <= std::min<int64_t>(tiles, 4 * processors); ++bands) {
    const int64_t high = (tiles + bands - 1) / bands, blocks = strips * ((tiles + high - 1) / high);
    const int64_t steps = (blocks + processors - 1) / processors * (high * kHigh + kWarmUp);
    if (steps < least) least = steps, best = high;
  }
  return best;
}

// Launches on a shard, in its current stream.
template <bool kPatch>
void launch_strips(const StripsInput<kPatch>& in, dim3 grid, int shard) {
  const LossImages& images = in.images;
  const auto kernel =
      images.target_bytes
          ? (images.mask ? ssim_kernel<uint8_t, true, kPatch> : ssim_kernel<uint8_t, false, kPatch>)
          : (images.mask ? ssim_kernel<float, true, kPatch> : ssim_kernel<float, false, kPatch>);
  const size_t bytes = images.mask ? sizeof(SharedRows<true>) : sizeof(SharedRows<false>);
  CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  kernel<<<grid, kThreads, bytes, shard_stream(shard)>>>(in);
  KERNEL_CHECK("loss", shard, images.height);
}

// L1 and SSIM of a band; all its sums, as with the functions below.
Buffer<Sums> launch_band(const LossInput& in, int shard) {
  const int64_t strips = (in.images.width + kWide - 1) / kWide;
  Buffer<Sums> sums(in.tiles.size() * strips * kWarps, shard);
  LossInput band = in;
  band.strip_tiles = strip_tiles_of(in.tiles.size(), strips, processors_of(shard));
  band.sums = sums.data();
  launch_strips<false>(
      band,
      dim3(static_cast<unsigned>(strips),
           static_cast<unsigned>((in.tiles.size() + band.strip_tiles - 1) / band.strip_tiles)),
      shard);
  return sums;
}

// L1 and SSIM of a patch whose tiles are in `runs`.
Buffer<Sums> launch_items(const LossInput& in, const std::vector<StripRun>& runs, int shard) {
  const int processors = processors_of(shard);
  const std::vector<LossItem> items = loss_items(runs, processors, kWalk);
  int64_t rows = 0;
  for (const StripRun& run : runs) rows += run.end - run.begin;
  Buffer<Sums> sums(rows * kWarps, shard);
  PatchInput piece{in, {}};
  piece.sums = sums.data();
  // Of very many, as many at once as keep all multiprocessors busy.
  const size_t most =
      static_cast<size_t>(processors < kMostItems ? kMostItems / processors * processors : kMostItems);
  for (size_t first = 0; first < items.size(); first += most) {
    const size_t some = std::min(most, items.size() - first);
    std::copy_n(items.begin() + static_cast<std::ptrdiff_t>(first), some, piece.items);
    launch_strips<true>(piece, dim3(static_cast<unsigned>(some)), shard);
  }
  return sums;
}

// L1 alone.
template <bool kPatch>
Buffer<Sums> launch_l1(const LossInput& in, int shard) {
  const LossImages& images = in.images;
  const unsigned tile_rows = static_cast<unsigned>(in.tiles.size());
  const unsigned pieces = blocks_for(kHigh * images.width * kChannels, kPiece);
  Buffer<Sums> sums(int64_t{tile_rows} * pieces, shard);
  LossInput band = in;
  band.sums = sums.data();
  const bool packed = aligned(images.rgb, sizeof(float4)) && aligned(in.dL_drgb, sizeof(float4)) &&
                      aligned(images.target, sizeof(float4)) &&
                      aligned(images.target_bytes, sizeof(uchar4)) &&
                      (!kPatch || images.width * kChannels % kPack == 0);
  const auto kernel = images.mask ? l1_kernel<true, kPatch> : l1_kernel<false, kPatch>;
  kernel<<<dim3(pieces, tile_rows), kThreads, 0, shard_stream(shard)>>>(band, packed);
  KERNEL_CHECK("loss", shard, in.tiles.size() * kHigh);
  return sums;
}

bool has_centres(const LossImages& images, float ssim_weight) {
  return images.height >= kSsimWindow && images.width >= kSsimWindow && ssim_weight != 0.f;
}

// Without a mask.
LossCounts counts_of(const LossImages& images, float ssim_weight) {
  return {images.height * images.width * kChannels,
          has_centres(images, ssim_weight)
              ? (images.height - 2 * kSsimRadius) * (images.width - 2 * kSsimRadius) * kChannels
              : 0};
}

// Adds to `counts`, memory of the shard.
void count_mask(const LossImages& images, bool with_ssim, LossCounts* counts, int shard) {
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(images.height, 1024));
  count_kernel<<<blocks, kThreads, 0, shard_stream(shard)>>>(
      images.mask, images.height, images.width, with_ssim, reinterpret_cast<unsigned long long*>(counts));
  KERNEL_CHECK("loss", shard, images.height);
}

// Value as doubles, as floats, or both, on the lead shard's GPU.
void launch_loss(const LossImages& images, float ssim_weight, float share, float* dL_drgb, double* value,
                 float* value_float) {
  const int64_t height = images.height;
  const int shards = mesh().size();
  const bool with_ssim = has_centres(images, ssim_weight);
  const LossCounts counts = counts_of(images, ssim_weight);
  std::vector<Buffer<Sums>> sums(static_cast<size_t>(shards));
  std::vector<Buffer<LossCounts>> masked(static_cast<size_t>(shards));
  const auto run = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange rows = loss_band(images, shard.index, shards);
    const RowRange band =
        rows.empty() ? RowRange{} : RowRange{rows.begin / kHigh, (rows.end + kHigh - 1) / kHigh};
    if (images.mask && (shard.index == 0 || !band.empty())) {
      masked[index] = Buffer<LossCounts>(1, shard.index);
      zero(masked[index]);
      count_mask(images, with_ssim, masked[index].data(), shard.index);
    }
    if (band.empty()) return;
    const LossInput in{.images = images,
                       .ssim_weight = ssim_weight,
                       .share = share,
                       .scales = scales_of(counts, ssim_weight, share),
                       .device_counts = masked[index].data(),
                       .tiles = band,
                       .dL_drgb = dL_drgb};
    sums[index] = with_ssim ? launch_band(in, shard.index) : launch_l1<false>(in, shard.index);
  };
  for_each_shard("loss", run, Access::kExchange);  // bands read their neighbours' rows

  DeviceGuard guard(shard_device(0));
  Buffer<Sums> all;
  if (shards > 1) {
    int64_t count = 0;
    for (const Buffer<Sums>& part : sums) count += part.size();
    all = Buffer<Sums>(count, 0);
    int64_t begin = 0;
    for (int shard = 0; shard < shards; ++shard) {
      const Buffer<Sums>& part = sums[static_cast<size_t>(shard)];
      copy_between(all.data() + begin, 0, part.data(), shard,
                   part.size() * static_cast<int64_t>(sizeof(Sums)));
      begin += part.size();
    }
  }
  const Buffer<Sums>& whole = shards > 1 ? all : sums[0];
  total_kernel<<<1, kTotalThreads, 0, shard_stream(0)>>>(whole.data(), whole.size(), counts, masked[0].data(),
                                                         ssim_weight, value, value_float);
  KERNEL_CHECK("loss", 0, height);
  if (shards > 1) join_shards();  // the copies are made before the parts are freed
}

}  // namespace

RowRange loss_band(const LossImages& images, int shard, int shards) {
  const RowRange rows = equal_chunk((images.height + kHigh - 1) / kHigh, shard, shards);
  return {std::min(images.height, rows.begin * kHigh), std::min(images.height, rows.end * kHigh)};
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

LossReach loss_reach(int64_t height, int64_t width, float ssim_weight) {
  if (height < kSsimWindow || width < kSsimWindow || ssim_weight == 0.f) return {};
  // The centres that a row of tiles counts lie up to kOutputLag - kCentreLag rows below it.
  return {2 * kSsimRadius, 2 * kSsimRadius, kOutputLag};
}

void patch_losses_into(const std::vector<PatchedImage>& images, float ssim_weight, float* values,
                       float share) {
  const int shards = mesh().size();
  const auto count = static_cast<int64_t>(images.size());
  // What the shards have: [shards, images] on the lead's, into which those write that reach it.
  Buffer<Sums> gathered(shards * count, 0);
  std::vector<Buffer<Sums>> part(static_cast<size_t>(shards));          // [images], of the others
  std::vector<Buffer<LossCounts>> masked(static_cast<size_t>(shards));  // [images]
  const bool any_mask = std::any_of(images.begin(), images.end(),
                                    [](const PatchedImage& image) { return image.images.mask != nullptr; });
  std::vector<std::vector<std::vector<StripRun>>> runs(images.size());  // [images][shards]
  for (size_t v = 0; v < images.size(); ++v) {
    const LossImages& image = images[v].images;
    if (!has_centres(image, ssim_weight)) continue;
    if (!images[v].owners) throw std::invalid_argument("the loss of patches needs the owners of the tiles");
    runs[v] = strip_runs(*images[v].owners, shards, static_cast<int>(image.width), kWalk);
  }
  const auto take = [&](const Shard& shard) {
    const auto self = static_cast<size_t>(shard.index);
    if (!transport().reaches(shard.index, 0)) part[self] = Buffer<Sums>(count, shard.index);
    Sums* const total = part[self].size() > 0 ? part[self].data() : gathered.data() + shard.index * count;
    if (any_mask) {
      masked[self] = Buffer<LossCounts>(count, shard.index);
      zero(masked[self]);
    }
    for (int64_t first = 0; first < count; first += kMostImages) {
      const int64_t some = std::min<int64_t>(kMostImages, count - first);
      std::vector<Buffer<Sums>> sums(static_cast<size_t>(some));
      SumsOfImages all{};
      for (int64_t i = 0; i < some; ++i) {
        const int64_t v = first + i;
        LossImages image = images[static_cast<size_t>(v)].images;
        const LossPatch& patch = images[static_cast<size_t>(v)].patches[self];
        const bool with_ssim = has_centres(image, ssim_weight);
        LossCounts* const counted = image.mask ? masked[self].data() + v : nullptr;
        if (image.mask && (shard.index == 0 || !patch.patch.empty()))
          count_mask(image, with_ssim, counted, shard.index);
        if (patch.patch.empty()) continue;
        image.rgb = patch.rgb;
        const LossInput in{.images = image,
                           .ssim_weight = ssim_weight,
                           .share = share,
                           .scales = scales_of(counts_of(image, ssim_weight), ssim_weight, share),
                           .device_counts = counted,
                           .tiles = {patch.patch.y0, patch.patch.y1},
                           .dL_drgb = patch.dL_drgb,
                           .positions = patch.tiles,
                           .position_from_tile = patch.position_from_tile,
                           .tiles_x = static_cast<int>((image.width + kTileSize - 1) / kTileSize)};
        Buffer<Sums>& of_image = sums[static_cast<size_t>(i)];
        of_image = with_ssim ? launch_items(in, runs[static_cast<size_t>(v)][self], shard.index)
                             : launch_l1<true>(in, shard.index);
        all.sums[i] = of_image.data();
        all.count[i] = of_image.size();
      }
      shard_total_kernel<<<static_cast<unsigned>(some), kTotalThreads, 0, shard_stream(shard.index)>>>(
          all, total + first);
      KERNEL_CHECK("loss", shard.index, some);
    }
  };
  for_each_shard("loss", take, Access::kExchange, Launch::kSideBySide);

  std::vector<Shipment> shipments;
  for (int shard = 1; shard < shards; ++shard) {
    const Buffer<Sums>& own = part[static_cast<size_t>(shard)];
    if (own.size() > 0) {
      shipments.push_back({shard, 0, own.data(), gathered.data() + shard * count,
                           own.size() * static_cast<int64_t>(sizeof(Sums))});
    }
  }
  transport().ship("loss values", shipments);
  DeviceGuard guard(shard_device(0));
  for (int64_t first = 0; first < count; first += kMostImages) {
    const int64_t some = std::min<int64_t>(kMostImages, count - first);
    CountsOfImages counts{};
    for (int64_t i = 0; i < some; ++i) {
      const LossImages& image = images[static_cast<size_t>(first + i)].images;
      counts.counts[i] = counts_of(image, ssim_weight);
      if (image.mask) counts.masked[i] = masked[0].data() + first + i;
    }
    patch_total_kernel<<<1, kMostImages, 0, shard_stream(0)>>>(counts, gathered.data() + first, shards, count,
                                                               static_cast<int>(some), ssim_weight,
                                                               values + 3 * first);
    KERNEL_CHECK("loss", 0, some);
  }
}

}  // namespace mgpu::splat
