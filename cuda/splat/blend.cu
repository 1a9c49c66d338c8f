// SPDX-License-Identifier: Apache-2.0
// blend.cu: forward, one block a tile and one thread a pixel; back, one warp a bucket of 32 records and one
// lane a record, past which the pixels march (as Taming 3DGS, Mallick et al. 2024, and Faster-GS). Formulas:
// math/tile.h, math/blend_front.h.
#include "splat/blend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "math/blend_front.h"
#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int kBucket = 32;              // records a warp walks back together
constexpr int kPatchX = 8, kPatchY = 4;  // pixels of one warp of the forward kernel
constexpr float kCullMargin = 0.01f;     // px; more than the roundings of the box test
static_assert(kThreads == kTilePixels && kBucket == kWarp && kPatchX * kPatchY == kWarp);

// Where a tile lies in its view. Pixel `i` of the tile is (x + i % 16, y + i / 16).
struct TilePlace {
  int view, x, y, columns, rows;
};

__device__ __forceinline__ TilePlace place_of(const View* views, int num_views, int64_t tile) {
  int v = num_views - 1;
  while (v > 0 && views[v].tile_begin > tile) --v;
  const View& view = views[v];
  const int64_t local = tile - view.tile_begin;
  TilePlace place;
  place.view = v;
  place.x = static_cast<int>(local % view.tiles_x) * kTileSize;
  place.y = static_cast<int>(local / view.tiles_x) * kTileSize;
  place.columns = view.width - place.x < kTileSize ? view.width - place.x : kTileSize;
  place.rows = view.height - place.y < kTileSize ? view.height - place.y : kTileSize;
  return place;
}

// Everything the kernels read of one owner; Entry is int32_t or TileEntry.
template <typename Entry>
struct BlendInput {
  const View* views;
  int num_views;
  int64_t first_tile;
  const Record* record;
  const float2* half_extent;
  const Entry* entry;
  const int64_t* tile_begin;
};

__device__ __forceinline__ int32_t record_of(int32_t entry) { return entry; }
__device__ __forceinline__ int32_t record_of(TileEntry entry) { return entry.record; }

// Index into bucket_state of a tile's bucket, from its second one on: tiles cannot collide, because
// floor(begin / 32) + floor((length - 1) / 32) <= floor((begin + length) / 32).
__device__ __forceinline__ int64_t state_of(int64_t tile_begin, int64_t bucket) {
  return tile_begin / kBucket + bucket - 1;
}

// sigma's terms of a record in the row of pixels at `dy`, rounded in one way only, so that forward and
// backward agree.
__device__ __forceinline__ math::BlendRow blend_row(float x, const float conic[3], float opacity, float y,
                                                    float y_centre) {
  const float mean2d[2] = {x, y};
  math::BlendRow row = math::make_blend_row(mean2d, conic, opacity, y_centre);
  round_now(row.b_dy);
  round_now(row.half_c_dy2);
  return row;
}

// ---- forward

struct BlendTarget {
  float* transmittance;   // [tiles, 256]
  int32_t* contributors;  // [tiles, 256]
  float* pixels;          // [tiles, 4, 256]
  float4* state;          // [buckets, 256]; null: no way back
  float* state_depth;     // [buckets, 256]
  TileBucket* active;
  int32_t* active_count;
};

template <bool kDepth, typename Entry>
__global__ void __launch_bounds__(kThreads)
    blend_kernel(const __grid_constant__ BlendInput<Entry> in, const __grid_constant__ BlendTarget out) {
  __shared__ float4 s_shape[kThreads];   // x, y, conic xx, conic xy
  __shared__ float4 s_colour[kThreads];  // red, green, blue, depth
  __shared__ float4 s_rest[kThreads];    // conic yy, opacity, half extents
  __shared__ int32_t s_deepest;
  __shared__ int32_t s_active;

  const int64_t tile = blockIdx.x;
  const TilePlace place = place_of(in.views, in.num_views, in.first_tile + tile);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int patch_x = warp % 2 * kPatchX, patch_y = warp / 2 * kPatchY;
  const int column = patch_x + lane % kPatchX, row = patch_y + lane / kPatchX;
  const int pixel = row * kTileSize + column;
  const float x = static_cast<float>(place.x + column) + 0.5f, y = static_cast<float>(place.y + row) + 0.5f;
  const float middle_x = static_cast<float>(place.x + patch_x) + 0.5f * kPatchX;
  const float middle_y = static_cast<float>(place.y + patch_y) + 0.5f * kPatchY;
  constexpr float kReachX = 0.5f * (kPatchX - 1) + kCullMargin, kReachY = 0.5f * (kPatchY - 1) + kCullMargin;

  float live = column < place.columns && row < place.rows ? 1.f : 0.f;
  float kept = 1.f;
  float red = 0.f, green = 0.f, blue = 0.f, depth = 0.f;
  int32_t contributors = 0;
  if (threadIdx.x == 0) s_deepest = 0;

  const int64_t begin = in.tile_begin[tile], count = in.tile_begin[tile + 1] - begin;
  for (int64_t batch = 0; batch < count; batch += kThreads) {
    if (__syncthreads_count(live > 0.f) == 0) break;
    if (batch + threadIdx.x < count) {
      const int32_t r = record_of(in.entry[begin + batch + threadIdx.x]);
      const Record record = load48(in.record + r);
      const float2 half = in.half_extent[r];
      s_shape[threadIdx.x] =
          make_float4(record.mean2d[0], record.mean2d[1], record.conic[0], record.conic[1]);
      s_colour[threadIdx.x] = make_float4(record.rgb[0], record.rgb[1], record.rgb[2], record.depth);
      s_rest[threadIdx.x] = make_float4(record.conic[2], record.opacity, half.x, half.y);
    }
    __syncthreads();
    const int held = count - batch < kThreads ? static_cast<int>(count - batch) : kThreads;
    for (int first = 0; first < held; first += kBucket) {
      if (!__any_sync(kAllLanes, live > 0.f)) break;
      if (out.state && live > 0.f && batch + first > 0) {
        const int64_t at = state_of(begin, (batch + first) / kBucket) * kTilePixels + pixel;
        out.state[at] = make_float4(kept, red, green, blue);
        if constexpr (kDepth) out.state_depth[at] = depth;
      }
      bool meets = false;
      if (first + lane < held) {
        const float4 shape = s_shape[first + lane], rest = s_rest[first + lane];
        meets = fabsf(shape.x - middle_x) <= rest.z * 1.000001f + kReachX &&
                fabsf(shape.y - middle_y) <= rest.w * 1.000001f + kReachY;
      }
      for (unsigned left = __ballot_sync(kAllLanes, meets); left; left &= left - 1) {
        const int i = first + __ffs(left) - 1;
        const float4 shape = s_shape[i], rest = s_rest[i];
        const float conic[3] = {shape.z, shape.w, rest.x};
        const math::BlendRow g = blend_row(shape.x, conic, rest.y, shape.y, y);
        float raw_alpha = math::uncapped_alpha(g, x - g.x);
        round_now(raw_alpha);
        bool contributes;
        const float weight = math::blend_step(raw_alpha, live, kept, contributes);
        if (contributes) {
          const float4 colour = s_colour[i];
          red = weight * colour.x + red;
          green = weight * colour.y + green;
          blue = weight * colour.z + blue;
          if constexpr (kDepth) depth = weight * colour.w + depth;
          contributors = static_cast<int32_t>(batch + i + 1);
        }
      }
    }
  }

  const int64_t at = tile * kTilePixels + pixel;
  out.transmittance[at] = kept;
  out.contributors[at] = contributors;
  float* planes = out.pixels + tile * 4 * kTilePixels + pixel;
  planes[0] = red;
  planes[kTilePixels] = green;
  planes[2 * kTilePixels] = blue;
  planes[3 * kTilePixels] = depth;

  if (!out.active) return;
  __syncthreads();
  const int deepest = __reduce_max_sync(kAllLanes, contributors);
  if (lane == 0) atomicMax(&s_deepest, deepest);
  __syncthreads();
  const int buckets = (s_deepest + kBucket - 1) / kBucket;
  if (threadIdx.x == 0 && buckets > 0) s_active = atomicAdd(out.active_count, buckets);
  __syncthreads();
  for (int bucket = threadIdx.x; bucket < buckets; bucket += kThreads) {
    out.active[s_active + bucket] = {static_cast<int32_t>(tile), bucket};
  }
}

template <typename Entry>
BlendInput<Entry> blend_input(const Frame& frame, int self, const Buffer<Entry>& entry) {
  const TileOwner& owner = frame.owners[static_cast<size_t>(self)];
  return {frame.constants[static_cast<size_t>(self)].views.data(),
          static_cast<int>(frame.views.size()),
          owner.tiles.begin,
          received_records(frame, self),
          reinterpret_cast<const float2*>(owner.half_extent.data()),
          entry.data(),
          owner.tile_begin.data()};
}

template <typename Entry>
void blend_owner(const Frame& frame, int self, TileOwner& owner, const Buffer<Entry>& entry) {
  const int64_t tiles = owner.tiles.size();
  const bool backward = frame.settings.wanted_backward, depth = frame.settings.wanted_depth;
  const int64_t states = backward ? owner.pairs / kBucket + 1 : 0;
  owner.transmittance = Buffer<float>(tiles * kTilePixels, self);
  owner.contributors = Buffer<int32_t>(tiles * kTilePixels, self);
  owner.pixels = Buffer<float>(tiles * 4 * kTilePixels, self);
  owner.bucket_state = Buffer<float>(states * kTilePixels * 4, self);
  owner.bucket_depth = Buffer<float>(depth ? states * kTilePixels : 0, self);
  owner.active_bucket = Buffer<TileBucket>(backward ? owner.pairs / kBucket + tiles : 0, self);
  owner.active_count = Buffer<int32_t>(1, self);
  zero(owner.active_count);
  if (tiles == 0) return;
  const BlendTarget target{owner.transmittance.data(), owner.contributors.data(),
                           owner.pixels.data(),        reinterpret_cast<float4*>(owner.bucket_state.data()),
                           owner.bucket_depth.data(),  owner.active_bucket.data(),
                           owner.active_count.data()};
  const unsigned blocks = static_cast<unsigned>(tiles);
  if (depth)
    blend_kernel<true><<<blocks, kThreads, 0, shard_stream(self)>>>(blend_input(frame, self, entry), target);
  else
    blend_kernel<false><<<blocks, kThreads, 0, shard_stream(self)>>>(blend_input(frame, self, entry), target);
  KERNEL_CHECK("blend", self, tiles);
}

// ---- tiles to images

__global__ void __launch_bounds__(kThreads)
    assemble_kernel(const View* views, int num_views, int64_t first_tile, const float* transmittance,
                    const float* pixels, const ImagePointers* images, float background_red,
                    float background_green, float background_blue) {
  const int64_t tile = blockIdx.x;
  const TilePlace place = place_of(views, num_views, first_tile + tile);
  const int column = threadIdx.x % kTileSize, row = threadIdx.x / kTileSize;
  if (column >= place.columns || row >= place.rows) return;
  const ImagePointers image = images[place.view];
  const int64_t to = int64_t{place.y + row} * views[place.view].width + place.x + column;
  const float passing = transmittance[tile * kTilePixels + threadIdx.x];
  const float* planes = pixels + tile * 4 * kTilePixels + threadIdx.x;
  image.rgb[3 * to] = math::mul_add(passing, background_red, planes[0]);
  image.rgb[3 * to + 1] = math::mul_add(passing, background_green, planes[kTilePixels]);
  image.rgb[3 * to + 2] = math::mul_add(passing, background_blue, planes[2 * kTilePixels]);
  image.accumulation[to] = 1.f - passing;
  if (image.depth) image.depth[to] = planes[3 * kTilePixels];
}

// ---- gradients of images to tiles

// grad: [tiles, 256] red, green, blue, depth. behind: [tiles, 256] dL of all the light that enters the pixel:
// of the colours that it meets, of the background and of the accumulation.
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const View* views, int num_views, int64_t first_tile, const float* transmittance,
                   const float* pixels, const ImageGradPointers* grads, float background_red,
                   float background_green, float background_blue, float4* grad, float* behind) {
  const int64_t tile = blockIdx.x;
  const TilePlace place = place_of(views, num_views, first_tile + tile);
  const int column = threadIdx.x % kTileSize, row = threadIdx.x / kTileSize;
  const int64_t at = tile * kTilePixels + threadIdx.x;
  float4 g = make_float4(0.f, 0.f, 0.f, 0.f);
  float accumulation = 0.f;
  if (column < place.columns && row < place.rows) {
    const ImageGradPointers from = grads[place.view];
    const int64_t i = int64_t{place.y + row} * views[place.view].width + place.x + column;
    if (from.rgb) {
      g.x = from.rgb[3 * i];
      g.y = from.rgb[3 * i + 1];
      g.z = from.rgb[3 * i + 2];
    }
    if (from.depth) g.w = from.depth[i];
    if (from.accumulation) accumulation = from.accumulation[i];
  }
  const float* planes = pixels + tile * 4 * kTilePixels + threadIdx.x;
  const float lit = planes[0] * g.x + planes[kTilePixels] * g.y + planes[2 * kTilePixels] * g.z +
                    planes[3 * kTilePixels] * g.w;
  const float dL_dtransmittance =
      background_red * g.x + background_green * g.y + background_blue * g.z - accumulation;
  grad[at] = g;
  behind[at] = lit + transmittance[at] * dL_dtransmittance;
}

// ---- back

struct BackwardInput {
  const float4* state;
  const float* state_depth;
  const int32_t* contributors;
  const float4* grad;   // [tiles, 256]
  const float* behind;  // [tiles, 256]
  const TileBucket* active;
  const int32_t* active_count;
};

struct BackwardTarget {
  RecordGrad* record_grad;  // summed by atomics, or
  RecordGrad* slot_grad;    // one for each pair
  const int64_t* slot_begin;
};

// The pixels of a tile that a bucket can have lit, packed together.
struct PixelStream {
  float4 grad[kTilePixels];     // red, green, blue, depth
  float2 light[kTilePixels];    // T and what lies behind, before the bucket
  uint16_t place[kTilePixels];  // pixel of the tile, and 256 * how many of the bucket's records may
                                // contribute (1..32)
};
constexpr size_t kBackwardSharedBytes = sizeof(PixelStream) * kWarps;

// Loads the pixels of the bucket that are not ended before it; returns how many.
template <bool kDepth>
__device__ __forceinline__ int load_pixels(const BackwardInput& in, TileBucket which, int64_t state,
                                           PixelStream& stream) {
  const int lane = threadIdx.x % kWarp;
  int count = 0;
  for (int first = 0; first < kTilePixels; first += kWarp) {
    const int pixel = first + lane;
    const int64_t at = int64_t{which.tile} * kTilePixels + pixel;
    const int32_t reach = in.contributors[at] - which.bucket * kBucket;
    const unsigned lanes = __ballot_sync(kAllLanes, reach > 0);
    if (reach > 0) {
      const float4 g = in.grad[at];
      float light = 1.f, behind = in.behind[at];
      if (which.bucket > 0) {
        const float4 seen = in.state[state * kTilePixels + pixel];
        light = seen.x;
        behind -= seen.y * g.x + seen.z * g.y + seen.w * g.z;
        if constexpr (kDepth) behind -= in.state_depth[state * kTilePixels + pixel] * g.w;
      }
      const int to = count + __popc(lanes & ((1u << lane) - 1u));
      stream.grad[to] = g;
      stream.light[to] = make_float2(light, behind);
      stream.place[to] = static_cast<uint16_t>(pixel + kTilePixels * (reach < kBucket ? reach : kBucket));
    }
    count += __popc(lanes);
  }
  __syncwarp();
  return count;
}

__device__ __forceinline__ void add_four(float* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
  atomicAdd(to + 2, c);
  atomicAdd(to + 3, d);
#endif
}

template <bool kDepth, typename Entry>
__global__ void __launch_bounds__(kThreads)
    blend_backward_kernel(const __grid_constant__ BlendInput<Entry> in,
                          const __grid_constant__ BackwardInput back,
                          const __grid_constant__ BackwardTarget out) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  PixelStream& stream = reinterpret_cast<PixelStream*>(shared)[warp];
  const int64_t buckets = *back.active_count;
  for (int64_t b = int64_t{blockIdx.x} * kWarps + warp; b < buckets; b += int64_t{gridDim.x} * kWarps) {
    const TileBucket which = back.active[b];
    const TilePlace place = place_of(in.views, in.num_views, in.first_tile + which.tile);
    const int64_t begin = in.tile_begin[which.tile], end = in.tile_begin[which.tile + 1];
    const int64_t at = begin + int64_t{which.bucket} * kBucket + lane;
    Entry entry{};
    Record record{};
    if (at < end) {
      entry = in.entry[at];
      record = load48(in.record + record_of(entry));
    }
    const int count = load_pixels<kDepth>(back, which, state_of(begin, which.bucket), stream);

    math::SigmaMoments moment{};
    float red = 0.f, green = 0.f, blue = 0.f, depth = 0.f, abs_x = 0.f, abs_y = 0.f;
    float light = 0.f, behind = 0.f;
    for (int step = 0; step < count + kBucket - 1; ++step) {  // pixel `step - lane` is at this lane's record
      light = __shfl_up_sync(kAllLanes, light, 1);
      behind = __shfl_up_sync(kAllLanes, behind, 1);
      const int i = step - lane;
      if (i < 0 || i >= count) continue;
      if (lane == 0) {
        light = stream.light[i].x;
        behind = stream.light[i].y;
      }
      const int packed = stream.place[i];
      if (lane >= packed / kTilePixels) continue;
      const float4 g = stream.grad[i];
      const int pixel = packed % kTilePixels;
      const float x = static_cast<float>(place.x + pixel % kTileSize) + 0.5f;
      const float y = static_cast<float>(place.y + pixel / kTileSize) + 0.5f;
      const math::BlendRow row =
          blend_row(record.mean2d[0], record.conic, record.opacity, record.mean2d[1], y);
      const float dx = x - row.x, dy = y - record.mean2d[1];
      float colour_dot = g.x * record.rgb[0] + (g.y * record.rgb[1] + g.z * record.rgb[2]);
      if constexpr (kDepth) colour_dot += g.w * record.depth;
      float raw_alpha = math::uncapped_alpha(row, dx), weight;
      round_now(raw_alpha);
      const float dL_dsigma =
          math::blend_step_backward_from_front(raw_alpha, colour_dot, true, light, behind, weight);
      if (weight == 0.f) continue;
      const float moment_x = dL_dsigma * dx, moment_y = dL_dsigma * dy;
      moment.one += dL_dsigma;
      moment.x += moment_x;
      moment.y += moment_y;
      moment.xx += moment_x * dx;
      moment.xy += moment_x * dy;
      moment.yy += moment_y * dy;
      red += weight * g.x;
      green += weight * g.y;
      blue += weight * g.z;
      if constexpr (kDepth) depth += weight * g.w;
      abs_x += fabsf(dL_dsigma * (dx * record.conic[0] + row.b_dy));
      abs_y += fabsf(dL_dsigma * (dx * record.conic[1] + record.conic[2] * dy));
    }
    __syncwarp();  // the stream is free for the next bucket
    if (at >= end) continue;

    RecordGrad grad;
    math::moments_to_gradient(moment, record.conic, record.opacity, grad.mean2d, grad.conic, grad.opacity);
    grad.rgb[0] = red;
    grad.rgb[1] = green;
    grad.rgb[2] = blue;
    grad.depth = depth;
    grad.abs_mean2d[0] = abs_x;
    grad.abs_mean2d[1] = abs_y;
    if constexpr (sizeof(Entry) == sizeof(TileEntry)) {
      store48(out.slot_grad + out.slot_begin[entry.record] + entry.ordinal, grad);
    } else {
      const float* values = reinterpret_cast<const float*>(&grad);
      float* to = reinterpret_cast<float*>(out.record_grad + entry);
      for (int k = 0; k < 3; ++k)
        add_four(to + 4 * k, values[4 * k], values[4 * k + 1], values[4 * k + 2], values[4 * k + 3]);
    }
  }
}

template <bool kDepth, typename Entry>
void launch_backward(const BlendInput<Entry>& in, const BackwardInput& back, const BackwardTarget& out,
                     int64_t most_buckets, int self) {
  const auto kernel = blend_backward_kernel<kDepth, Entry>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(kBackwardSharedBytes)));
  int processors = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, shard_device(self)));
  constexpr int64_t kBlocksAProcessor = 4 * 4;  // four fit at a time; four rounds even out the last one
  const int64_t blocks = std::min((most_buckets + kWarps - 1) / kWarps, kBlocksAProcessor * processors);
  kernel<<<static_cast<unsigned>(blocks), kThreads, kBackwardSharedBytes, shard_stream(self)>>>(in, back,
                                                                                                out);
  KERNEL_CHECK("blend_backward", self, most_buckets);
}

template <typename Entry>
void backward_owner(const Frame& frame, int self, TileOwner& owner, const Buffer<Entry>& entry,
                    const Buffer<float4>& grad, const Buffer<float>& behind, bool depth) {
  constexpr bool kSlots = sizeof(Entry) == sizeof(TileEntry);
  if constexpr (kSlots) {
    owner.slot_grad = Buffer<RecordGrad>(owner.pairs, self);
    zero(owner.slot_grad);
  } else {
    owner.record_grad = Buffer<RecordGrad>(owner.received(), self);
    zero(owner.record_grad);
  }
  if (owner.pairs == 0) return;
  const BackwardInput back{reinterpret_cast<const float4*>(owner.bucket_state.data()),
                           owner.bucket_depth.data(),
                           owner.contributors.data(),
                           grad.data(),
                           behind.data(),
                           owner.active_bucket.data(),
                           owner.active_count.data()};
  const BackwardTarget target{owner.record_grad.data(), owner.slot_grad.data(), owner.slot_begin.data()};
  const int64_t most = owner.active_bucket.size();
  if (depth)
    launch_backward<true>(blend_input(frame, self, entry), back, target, most, self);
  else
    launch_backward<false>(blend_input(frame, self, entry), back, target, most, self);
}

void assemble_images(Frame& frame) {
  const auto assemble = [&](const Shard& shard) {
    TileOwner& owner = frame.owners[static_cast<size_t>(shard.index)];
    if (owner.tiles.empty()) return;
    const Buffer<ImagePointers> pointers = to_buffer(frame.images, shard.index);
    const float* background = frame.settings.background;
    assemble_kernel<<<static_cast<unsigned>(owner.tiles.size()), kThreads, 0, shard_stream(shard.index)>>>(
        frame.constants[static_cast<size_t>(shard.index)].views.data(), static_cast<int>(frame.views.size()),
        owner.tiles.begin, owner.transmittance.data(), owner.pixels.data(), pointers.data(), background[0],
        background[1], background[2]);
    KERNEL_CHECK("assemble", shard.index, owner.tiles.size());
    if (!frame.settings.wanted_backward) owner.pixels = Buffer<float>();
  };
  for_each_shard("assemble", assemble, Access::kExchange);
}

}  // namespace

void blend(Frame& frame) {
  for_each_shard("blend", [&](const Shard& shard) {
    TileOwner& owner = frame.owners[static_cast<size_t>(shard.index)];
    if (owner.entry.data())
      blend_owner(frame, shard.index, owner, owner.entry);
    else
      blend_owner(frame, shard.index, owner, owner.entry_record);
  });
  assemble_images(frame);
}

void blend_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  std::vector<Buffer<float4>> grad(frame.owners.size());
  std::vector<Buffer<float>> behind(frame.owners.size());
  const bool depth =
      std::any_of(grads.begin(), grads.end(), [](const ImageGradPointers& g) { return g.depth; });
  const auto scatter = [&](const Shard& shard) {
    const size_t self = static_cast<size_t>(shard.index);
    const TileOwner& owner = frame.owners[self];
    const int64_t tiles = owner.tiles.size();
    grad[self] = Buffer<float4>(tiles * kTilePixels, shard.index);
    behind[self] = Buffer<float>(tiles * kTilePixels, shard.index);
    if (tiles == 0) return;
    const Buffer<ImageGradPointers> pointers = to_buffer(grads, shard.index);
    const float* background = frame.settings.background;
    scatter_kernel<<<static_cast<unsigned>(tiles), kThreads, 0, shard_stream(shard.index)>>>(
        frame.constants[self].views.data(), static_cast<int>(frame.views.size()), owner.tiles.begin,
        owner.transmittance.data(), owner.pixels.data(), pointers.data(), background[0], background[1],
        background[2], grad[self].data(), behind[self].data());
    KERNEL_CHECK("scatter", shard.index, tiles);
  };
  for_each_shard("scatter", scatter, Access::kExchange);
  for_each_shard("blend_backward", [&](const Shard& shard) {
    const size_t self = static_cast<size_t>(shard.index);
    TileOwner& owner = frame.owners[self];
    if (frame.settings.deterministic)
      backward_owner(frame, shard.index, owner, owner.entry, grad[self], behind[self], depth);
    else
      backward_owner(frame, shard.index, owner, owner.entry_record, grad[self], behind[self], depth);
  });
}

}  // namespace mgpu::splat
