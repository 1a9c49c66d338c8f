// SPDX-License-Identifier: Apache-2.0
// blend.cu: tiles of 16x16 pixels are culled by patches of 8x4, one warp each. Forward: one block a tile.
// Back: one warp a bucket of up to 32 records that light a patch, as they were met. Formulas: math/patch.h.
//
// Back, a lane is a pixel and walks the records front to back; the sums over pixels, which are linear, are
// matrix products on the tensor cores: dL_dsigma [records, pixels] times the monomials of the pixel's place
// in the patch, and weight [records, pixels] times dL_drgbd [pixels, 4]. Operands are split into two parts of
// 11 bits, so that what is lost is in the 22nd. Floor: docs/benchmarks.md. Needs sm_80.
#include "splat/blend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "math/patch.h"
#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int kBucket = 32;      // records a warp walks back together
constexpr int kTogether = 4;     // records whose alphas are taken before the first of them is blended
constexpr int kFewViews = 8;     // views whose images are named in a kernel's arguments
constexpr int kHeavyTile = 256;  // records; tiles with more than this and twice the mean start first
static_assert(kThreads == kTilePixels && kWarps == math::kTilePatches && kBucket == kWarp);
static_assert(math::kPatchX * math::kPatchY == kWarp);

// ---- images

struct ViewImages {
  ImagePointers image;
  ImageGradPointers grad;  // on the way back
  int width, height, tiles_x;
  int64_t tile_begin;
};

// Of all views, as a kernel's argument.
struct ViewList {
  ViewImages few[kFewViews];
  const ViewImages* many;  // null: all are in `few`
  int count;

  __device__ __forceinline__ ViewImages operator[](int v) const { return many ? many[v] : few[v]; }
};

ViewList view_list(const Frame& frame, const std::vector<ImageGradPointers>* grads, int self,
                   Buffer<ViewImages>& storage) {
  std::vector<ViewImages> all;
  for (size_t v = 0; v < frame.views.size(); ++v) {
    const View& view = frame.views[v];
    all.push_back({frame.images[v], grads ? (*grads)[v] : ImageGradPointers{}, view.width, view.height,
                   view.tiles_x, view.tile_begin});
  }
  ViewList list{};
  list.count = static_cast<int>(all.size());
  if (list.count <= kFewViews) {
    std::copy(all.begin(), all.end(), list.few);
  } else {
    storage = to_buffer(all, self);
    list.many = storage.data();
  }
  return list;
}

// Where a tile lies.
struct TilePlace {
  int view, x, y;  // first pixel
};

__device__ __forceinline__ TilePlace place_of(const ViewList& views, int64_t tile) {
  int v = views.count - 1;
  while (v > 0 && views[v].tile_begin > tile) --v;
  const uint32_t local = static_cast<uint32_t>(tile - views[v].tile_begin);
  const uint32_t across = static_cast<uint32_t>(views[v].tiles_x), row = local / across;
  return {v, static_cast<int>(local - row * across) * kTileSize, static_cast<int>(row) * kTileSize};
}

// ---- forward

// What of a record a pixel reads, in shared memory.
struct StagedRecord {
  float4 shape;   // x, y, falloff a, b
  float4 rest;    // falloff c, opacity, cap; the record's number
  float4 colour;  // red, green, blue, depth
};

__device__ __forceinline__ StagedRecord staged(const Record& record, int32_t id) {
  const math::Falloff g = math::make_falloff(record.mean2d, record.conic, record.opacity);
  return {make_float4(g.x, g.y, g.a, g.b), make_float4(g.c, g.opacity, g.cap, __int_as_float(id)),
          make_float4(record.rgb[0], record.rgb[1], record.rgb[2], record.depth)};
}

__device__ __forceinline__ float alpha_at(const float4& shape, const float4& rest, float x, float y) {
  const math::Falloff g{shape.x, shape.y, shape.z, shape.w, rest.x, rest.y, rest.z};
  return math::alpha_at(g, x - g.x, y - g.y);
}

__device__ __forceinline__ uint32_t shared_address(const void* in_shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(in_shared));
}

struct BlendInput {
  int64_t first_tile, tiles;
  const Record* record;
  const float2* half_extent;
  const int32_t* entry;
  const int64_t* tile_begin;
  const int32_t* heavy;        // tiles to start first
  const int32_t* heavy_count;  // how many; at most `heavy_room`
  int64_t heavy_room;
  int64_t heavy_length;  // tiles with more entries are in `heavy`
  float background[3];
};

struct BucketTarget {  // all null: no way back
  PatchBucket* bucket;
  int32_t* count;
  int32_t* record;
  float4* state;
  float* depth;
  int32_t room;
};

__global__ void __launch_bounds__(kThreads)
    find_heavy_kernel(const int64_t* tile_begin, int64_t tiles, int64_t length, int32_t* heavy,
                      int32_t* heavy_count) {
  const int64_t tile = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (tile < tiles && tile_begin[tile + 1] - tile_begin[tile] > length)
    heavy[atomicAdd(heavy_count, 1)] = static_cast<int32_t>(tile);
}

__device__ __forceinline__ void copy_16(void* to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy_8(void* to_shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to_shared)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Records on their way into shared memory; a thread reads only what it asked for itself.
struct Incoming {
  Record record[kThreads];
  float2 half_extent[kThreads];

  __device__ __forceinline__ void ask(const BlendInput& in, int32_t id) {
    float4* to = reinterpret_cast<float4*>(record + threadIdx.x);
    const float4* from = reinterpret_cast<const float4*>(in.record + id);
    for (int i = 0; i < 3; ++i) copy_16(to + i, from + i);
    copy_8(half_extent + threadIdx.x, in.half_extent + id);
  }
};

// The float4 at an address in shared memory.
__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

// Appends to a list in shared memory, whose end is `to`, if a lane says so. Spelled out, because the compiler
// makes a branch of it and computes the address anew. Who reads the list calls __syncwarp() first.
__device__ __forceinline__ void append_if_any(bool wanted, uint32_t value, uint32_t& to) {
  asm volatile(
      "{\n"
      ".reg .pred any;\n"
      "setp.ne.u32 any, %2, 0;\n"
      "vote.sync.any.pred any, any, 0xffffffff;\n"
      "@any st.shared.b32 [%0], %1;\n"
      "@any add.u32 %0, %0, 4;\n"
      "}"
      : "+r"(to)
      : "r"(value), "r"(static_cast<uint32_t>(wanted)));
}

template <bool kDepth, bool kBackward>
__global__ void __launch_bounds__(kThreads, 4)
    blend_kernel(const __grid_constant__ ViewList views, const __grid_constant__ BlendInput in,
                 const __grid_constant__ BucketTarget out) {
  __shared__ Incoming s_incoming;
  __shared__ StagedRecord s_batch[kThreads + 1];  // the last one nobody sees
  // addresses in s_batch, below 64 KB as all of this: the records that a patch meets
  __shared__ alignas(8) uint16_t s_list[kWarps][kThreads + kTogether];
  // the bucket that a patch is filling: records, and addresses in s_batch of those of this batch
  __shared__ uint32_t s_lit[kWarps][kBucket];
  __shared__ uint8_t s_met[kThreads];  // patches, a bit each
  __shared__ int32_t s_first_slot, s_slots;

  int64_t tile = int64_t{blockIdx.x} - in.heavy_room, begin, count;
  if (tile < 0) {
    if (blockIdx.x >= *in.heavy_count) return;
    tile = in.heavy[blockIdx.x];
    begin = in.tile_begin[tile];
    count = in.tile_begin[tile + 1] - begin;
  } else {
    begin = in.tile_begin[tile];
    count = in.tile_begin[tile + 1] - begin;
    if (count > in.heavy_length) return;
  }
  const TilePlace place = place_of(views, in.first_tile + tile);
  const ViewImages view = views[place.view];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int patch_x = place.x + warp % math::kPatchesAcross * math::kPatchX;
  const int patch_y = place.y + warp / math::kPatchesAcross * math::kPatchY;
  const int column = patch_x + lane % math::kPatchX, row = patch_y + lane / math::kPatchX;
  const bool inside = column < view.width && row < view.height;
  const float x = static_cast<float>(column) + 0.5f, y = static_cast<float>(row) + 0.5f;

  math::PatchPixel pixel{1.f, inside ? math::kAlphaMin : math::kNever};
  const auto alive = [&] { return pixel.least < math::kNever; };
  float red = 0.f, green = 0.f, blue = 0.f, depth = 0.f;

  // the bucket: the pixel before it, where its list ends, how many of it are known by number, where it will
  // go
  float4 start = make_float4(inside ? 1.f : -1.f, 0.f, 0.f, 0.f);
  float start_depth = 0.f;
  const uint32_t lit_begin = shared_address(s_lit[warp]);
  uint32_t lit_end = lit_begin;
  int numbered = 0;
  int32_t slot = -1;  // lane 0 knows
  const auto record_of_lane = [&] {
    const uint32_t lit = s_lit[warp][lane];
    return lane < numbered ? lit : __float_as_uint(load_shared(lit + sizeof(float4)).w);
  };
  const auto close_bucket = [&] {
    const int32_t to = __shfl_sync(kAllLanes, slot, 0);
    if (to >= out.room) __trap();  // cannot be: there is room for all that can be met
    const int lit = static_cast<int>(lit_end - lit_begin) / 4;
    __syncwarp();
    const int64_t at = int64_t{to} * kBucket + lane;
    if (lane < lit) out.record[at] = static_cast<int32_t>(record_of_lane());
    out.state[at] = start;
    if constexpr (kDepth) out.depth[at] = start_depth;
    if (lane == 0) {
      out.bucket[to] = {static_cast<int32_t>(tile) * math::kTilePatches + warp, place.view * 64 + lit,
                        patch_x, patch_y};
    }
    __syncwarp();
    start = make_float4(alive() ? pixel.transmittance : -1.f, red, green, blue);
    start_depth = depth;
    lit_end = lit_begin;
    numbered = 0;
    slot = -1;
  };

  if (threadIdx.x == 0) {
    s_batch[kThreads] = StagedRecord{};
    s_slots = 0;
    if (kBackward && count > 0) s_first_slot = atomicAdd(out.count, kWarps);
  }
  // the entry of a batch is known a batch before its records are asked for, and these a batch before their
  // use
  int32_t id = 0, next_id = 0;
  if (threadIdx.x < count) {
    id = in.entry[begin + threadIdx.x];
    s_incoming.ask(in, id);
  }
  if (kThreads + threadIdx.x < count) next_id = in.entry[begin + kThreads + threadIdx.x];
  for (int64_t batch = 0; batch < count; batch += kThreads) {
    StagedRecord mine{};
    uint32_t met = 0;
    copies_done();
    if (batch + threadIdx.x < count) {
      const Record& record = s_incoming.record[threadIdx.x];
      const float2 half = s_incoming.half_extent[threadIdx.x];
      const float half_extent[2] = {half.x, half.y};
      met = math::patches_met(record.mean2d, record.conic, half_extent, static_cast<float>(place.x),
                              static_cast<float>(place.y));
      mine = staged(record, id);
    }
    if (kBackward && lit_end != lit_begin) {  // the batch before goes
      const int lit = static_cast<int>(lit_end - lit_begin) / 4;
      __syncwarp();
      if (numbered <= lane && lane < lit) s_lit[warp][lane] = record_of_lane();
      numbered = lit;
    }
    if (!__syncthreads_or(alive())) break;  // and nobody reads the batch before
    s_batch[threadIdx.x] = mine;
    s_met[threadIdx.x] = static_cast<uint8_t>(met);
    if (batch + kThreads + threadIdx.x < count) {
      id = next_id;
      s_incoming.ask(in, id);
      if (batch + 2 * kThreads + threadIdx.x < count)
        next_id = in.entry[begin + batch + 2 * kThreads + threadIdx.x];
    }
    __syncthreads();
    if (!__any_sync(kAllLanes, alive())) continue;

    const int held = count - batch < kThreads ? static_cast<int>(count - batch) : kThreads;
    uint16_t* list = s_list[warp];
    int length = 0;
    for (int first = 0; first < held; first += kWarp) {
      const bool meets = s_met[first + lane] >> warp & 1;
      const unsigned lanes = __ballot_sync(kAllLanes, meets);
      if (meets)
        list[length + __popc(lanes & ((1u << lane) - 1u))] =
            static_cast<uint16_t>(shared_address(s_batch + first + lane));
      length += __popc(lanes);
    }
    if (lane < kTogether) list[length + lane] = static_cast<uint16_t>(shared_address(s_batch + kThreads));
    __syncwarp();

    for (int at = 0; at < length; at += kTogether) {
      const uint2 packed = *reinterpret_cast<const uint2*>(list + at);
      const uint32_t address[kTogether] = {packed.x & 0xffffu, packed.x >> 16, packed.y & 0xffffu,
                                           packed.y >> 16};
      float alpha[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        alpha[i] = alpha_at(load_shared(address[i]), load_shared(address[i] + sizeof(float4)), x, y);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const math::PatchStep step = math::patch_step(alpha[i], pixel);
        const float weight = step.weight;
        const float4 colour = load_shared(address[i] + 2 * sizeof(float4));
        red = math::mul_add(weight, colour.x, red);
        green = math::mul_add(weight, colour.y, green);
        blue = math::mul_add(weight, colour.z, blue);
        if constexpr (kDepth) depth = math::mul_add(weight, colour.w, depth);
        if constexpr (kBackward) append_if_any(step.contributes, address[i], lit_end);
      }
      if constexpr (kBackward) {
        if (lit_end != lit_begin && slot < 0) {  // asked for early: it is used when the bucket is full
          slot = 0;
          if (lane == 0) {
            const int32_t own = atomicAdd(&s_slots, 1);
            slot = own < kWarps ? s_first_slot + own : atomicAdd(out.count, 1);
          }
        }
        if (lit_end > lit_begin + 4 * (kBucket - kTogether)) close_bucket();
      }
      if (!__any_sync(kAllLanes, alive())) break;
    }
  }
  if constexpr (kBackward) {
    if (lit_end != lit_begin) close_bucket();
    if (count > 0) {
      __syncthreads();
      if (threadIdx.x < kWarps && threadIdx.x >= s_slots)  // not needed
        out.bucket[s_first_slot + threadIdx.x] = PatchBucket{};
    }
  }
  copies_done();
  if (!inside) return;
  const int64_t to = int64_t{row} * view.width + column;
  float* rgb = view.image.rgb + 3 * to;
  rgb[0] = math::mul_add(pixel.transmittance, in.background[0], red);
  rgb[1] = math::mul_add(pixel.transmittance, in.background[1], green);
  rgb[2] = math::mul_add(pixel.transmittance, in.background[2], blue);
  view.image.accumulation[to] = 1.f - pixel.transmittance;
  if constexpr (kDepth) {
    if (view.image.depth) view.image.depth[to] = depth;
  }
}

void blend_owner(const Frame& frame, int self, TileOwner& owner) {
  const int64_t tiles = owner.tiles.size();
  const bool backward = frame.settings.wanted_backward, depth = frame.settings.wanted_depth;
  // a bucket is closed with 29 records at least, but for a patch's last one
  const int64_t patch_pairs = owner.patch_pairs > 0 ? owner.patch_pairs : math::kTilePatches * owner.pairs;
  const int64_t room =
      backward && owner.pairs > 0 ? patch_pairs / (kBucket - kTogether + 1) + math::kTilePatches * tiles : 0;
  const int64_t heavy_length = std::max<int64_t>(kHeavyTile, 2 * owner.pairs / std::max<int64_t>(tiles, 1));
  const int64_t heavy_room = owner.pairs / heavy_length;
  Buffer<int32_t> heavy(heavy_room, self);
  owner.bucket = Buffer<PatchBucket>(room, self);
  owner.bucket_record = Buffer<int32_t>(room * kBucket, self);
  owner.bucket_state = Buffer<float>(room * kBucket * 4, self);
  owner.bucket_depth = Buffer<float>(depth ? room * kBucket : 0, self);
  owner.bucket_count = Buffer<int32_t>(2, self);  // buckets, heavy tiles
  zero(owner.bucket_count);
  if (tiles == 0) return;
  const cudaStream_t stream = shard_stream(self);
  if (heavy_room > 0) {
    find_heavy_kernel<<<blocks_for(tiles, kThreads), kThreads, 0, stream>>>(
        owner.tile_begin.data(), tiles, heavy_length, heavy.data(), owner.bucket_count.data() + 1);
    KERNEL_CHECK("blend", self, tiles);
  }
  Buffer<ViewImages> storage;
  const ViewList views = view_list(frame, nullptr, self, storage);
  const float* background = frame.settings.background;
  const BlendInput in{owner.tiles.begin,
                      tiles,
                      received_records(frame, self),
                      reinterpret_cast<const float2*>(owner.half_extent.data()),
                      owner.entry_record.data(),
                      owner.tile_begin.data(),
                      heavy.data(),
                      owner.bucket_count.data() + 1,
                      heavy_room,
                      heavy_length,
                      {background[0], background[1], background[2]}};
  const BucketTarget out{owner.bucket.data(),        owner.bucket_count.data(),
                         owner.bucket_record.data(), reinterpret_cast<float4*>(owner.bucket_state.data()),
                         owner.bucket_depth.data(),  static_cast<int32_t>(room)};
  const auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(tiles + heavy_room), kThreads, 0, stream>>>(views, in, out);
  };
  if (depth)
    backward ? launch(blend_kernel<true, true>) : launch(blend_kernel<true, false>);
  else
    backward ? launch(blend_kernel<false, true>) : launch(blend_kernel<false, false>);
  KERNEL_CHECK("blend", self, tiles);
}

// ---- back

struct BackwardInput {
  const PatchBucket* bucket;
  const int32_t* bucket_count;
  const int32_t* bucket_record;
  const float4* state;
  const float* state_depth;
  const Record* record;
};

struct BackwardTarget {
  RecordGrad* record_grad;  // summed by atomics, or
  RecordGrad* slot_grad;    // [buckets, 32]: one for each pair of (patch, record)
  uint64_t* slot_key;       // [buckets, 32]: record, patch; all ones where there is no pair
};

constexpr int kBackThreads = 128;
constexpr int kBackWarps = kBackThreads / kWarp;
constexpr int kRows = 16;       // records of one matrix product
constexpr int kStride = 36;     // floats from row to row: rows of a fragment lie in different banks
constexpr int kSumStride = 20;  // the same for the sums

// Records times pixels.
struct PixelMatrix {
  float at[kRows][kStride];
};

template <bool kAbs>
struct BackWorkspace {  // of one warp
  StagedRecord record[kBucket];
  union {
    PixelMatrix matrix[kAbs ? 4 : 2];  // dL_dsigma, weight, and what absgrad sums
    float pixel_grad[kWarp][12];       // dL_drgbd in two parts
    float sum[kBucket][kSumStride];
  };
};

// A value's upper 11 bits, which the tensor cores read; what is left is exact.
__device__ __forceinline__ uint32_t upper_part(float x) { return __float_as_uint(x) & 0xffffe000u; }
__device__ __forceinline__ uint32_t lower_part(float x) {
  return __float_as_uint(x - __uint_as_float(upper_part(x)));
}

// sum [16, 8] += a [16, 8] b [8, 8]
__device__ __forceinline__ void multiply(float sum[4], const uint32_t a[4], const uint32_t b[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// sum [16 records, 8] += matrix [16 records, 32 pixels] factor [32 pixels, 8]
__device__ __forceinline__ void multiply_pixels(float sum[4], const PixelMatrix& matrix,
                                                const uint32_t factor[4][2]) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t from = shared_address(&matrix.at[lane % kRows][lane / kRows * 4]);
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    uint32_t value[4], upper[4], lower[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                 : "r"(from + chunk * 32)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      upper[i] = upper_part(__uint_as_float(value[i]));
      lower[i] = lower_part(__uint_as_float(value[i]));
    }
    multiply(sum, upper, factor[chunk]);
    multiply(sum, lower, factor[chunk]);
  }
}

// Column `column` of the matrix that takes dL_dsigma to its moments about the patch's middle: 1, x, y, xx,
// xy, yy, 0, 0.
__device__ __forceinline__ float monomial(int column, float x, float y) {
  const float of_x = column == 1 || column == 4 ? x : column == 3 ? x * x : 1.f;
  const float of_y = column == 2 || column == 4 ? y : column == 5 ? y * y : 1.f;
  return column < 6 ? of_x * of_y : 0.f;
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

// Moments of dL_dsigma about the record's mean from those about a point that lies (x, y) off the mean.
__device__ __forceinline__ math::SigmaMoments about_mean(const math::SigmaMoments& m, float x, float y) {
  math::SigmaMoments out;
  out.one = m.one;
  out.x = m.x + x * m.one;
  out.y = m.y + y * m.one;
  out.xx = m.xx + x * (m.x + out.x);
  out.xy = m.xy + x * m.y + y * out.x;
  out.yy = m.yy + y * (m.y + out.y);
  return out;
}

template <bool kDepth, bool kAbs, bool kSlots>
__global__ void __launch_bounds__(kBackThreads)
    blend_backward_kernel(const __grid_constant__ ViewList views, const __grid_constant__ BackwardInput in,
                          const __grid_constant__ BackwardTarget out) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  BackWorkspace<kAbs>& work = reinterpret_cast<BackWorkspace<kAbs>*>(shared)[warp];
  uint32_t basis[4][2];  // fragments: pixel 8 chunk + lane % 4 (+ 4), column lane / 4
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    for (int i = 0; i < 2; ++i) {
      basis[chunk][i] = __float_as_uint(
          monomial(lane / 4, static_cast<float>(lane % 4 + 4 * i) - 3.5f, static_cast<float>(chunk) - 1.5f));
    }
  }

  const int32_t buckets = *in.bucket_count;
  for (int32_t b = blockIdx.x * kBackWarps + warp; b < buckets; b += gridDim.x * kBackWarps) {
    const int64_t at = int64_t{b} * kBucket + lane;
    const int4 packed = reinterpret_cast<const int4*>(in.bucket)[b];
    const int32_t listed = in.bucket_record[at];
    const float4 state = in.state[at];
    const PatchBucket bucket{packed.x, packed.y, packed.z, packed.w};
    const int count = bucket.view_and_count & 63;
    if (count == 0) continue;
    const ViewImages view = views[bucket.view_and_count >> 6];
    const int32_t id = lane < count ? listed : -1;
    const int column = bucket.x + lane % math::kPatchX, row = bucket.y + lane / math::kPatchX;
    const float x = static_cast<float>(column) + 0.5f, y = static_cast<float>(row) + 0.5f;

    // the pixel: dL_dimage, and dL of all the light that it still has
    float4 g = make_float4(0.f, 0.f, 0.f, 0.f);
    float behind = 0.f;
    math::PatchPixel pixel{state.x, state.x > 0.f ? math::kAlphaMin : math::kNever};
    if (state.x > 0.f) {
      const int64_t to = int64_t{row} * view.width + column;
      if (view.grad.rgb) {
        const float *grad = view.grad.rgb + 3 * to, *rgb = view.image.rgb + 3 * to;
        g.x = grad[0];
        g.y = grad[1];
        g.z = grad[2];
        behind =
            (rgb[0] - state.y) * g.x + (rgb[1] - state.z) * g.y + (rgb[2] - state.w) * g.z;  // and background
      }
      if constexpr (kDepth) {
        if (view.grad.depth) {
          g.w = view.grad.depth[to];
          behind += (view.image.depth[to] - in.state_depth[at]) * g.w;
        }
      }
      if (view.grad.accumulation) behind -= (1.f - view.image.accumulation[to]) * view.grad.accumulation[to];
    }

    StagedRecord mine{};
    if (id >= 0) mine = staged(load48(in.record + id), id);
    work.record[lane] = mine;
    const float parts[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      work.pixel_grad[lane][i] = __uint_as_float(upper_part(parts[i]));
      work.pixel_grad[lane][4 + i] = __uint_as_float(lower_part(parts[i]));
    }
    __syncwarp();
    uint32_t pixel_grad[4][2];
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      for (int i = 0; i < 2; ++i)
        pixel_grad[chunk][i] = __float_as_uint(work.pixel_grad[8 * chunk + lane % 4 + 4 * i][lane / 4]);
    }
    __syncwarp();

    float moments[2][4] = {}, colours[2][4] = {}, absolute[2][2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int held = count - half * kRows;
      if (held <= 0) break;
      for (int first = 0; first < kRows && first < held; first += kTogether) {
        float alpha[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const StagedRecord& r = work.record[half * kRows + first + i];
          alpha[i] = alpha_at(r.shape, r.rest, x, y);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const StagedRecord& r = work.record[half * kRows + first + i];
          const float4 colour = r.colour;
          const float weight = math::patch_step(alpha[i], pixel).weight;
          float colour_dot = math::mul_add(g.x, colour.x, math::mul_add(g.y, colour.y, g.z * colour.z));
          if constexpr (kDepth) colour_dot = math::mul_add(g.w, colour.w, colour_dot);
          const float dL_dsigma =
              math::patch_step_backward(alpha[i], weight, pixel.transmittance, colour_dot, behind);
          work.matrix[0].at[first + i][lane] = dL_dsigma;
          work.matrix[1].at[first + i][lane] = weight;
          if constexpr (kAbs) {  // 2 ln 2 / 2 times |dL_dmean2d|
            const float dx = x - r.shape.x, dy = y - r.shape.y;
            work.matrix[2].at[first + i][lane] = fabsf(dL_dsigma * (2.f * r.shape.z * dx + r.shape.w * dy));
            work.matrix[3].at[first + i][lane] = fabsf(dL_dsigma * (r.shape.w * dx + 2.f * r.rest.x * dy));
          }
        }
      }
      __syncwarp();
      multiply_pixels(moments[half], work.matrix[0], basis);
      multiply_pixels(colours[half], work.matrix[1], pixel_grad);
      if constexpr (kAbs) {
        multiply_pixels(absolute[half][0], work.matrix[2], basis);
        multiply_pixels(absolute[half][1], work.matrix[3], basis);
      }
      __syncwarp();
    }

    // one lane a record: columns 0..5 moments, 6, 7 absgrad, 8..15 rgbd in two parts
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float* to = work.sum[half * kRows + upper * 8 + lane / 4] + lane % 4 * 2;
        float2 pair = make_float2(moments[half][2 * upper], moments[half][2 * upper + 1]);
        if constexpr (kAbs) {
          // column 0 of the products with the basis lies in the lanes that hold columns 0 and 1
          const float abs_x = __shfl_sync(kAllLanes, absolute[half][0][2 * upper], lane & ~3);
          const float abs_y = __shfl_sync(kAllLanes, absolute[half][1][2 * upper], lane & ~3);
          if (lane % 4 == 3) pair = make_float2(abs_x, abs_y);
        }
        *reinterpret_cast<float2*>(to) = pair;
        *reinterpret_cast<float2*>(to + 8) =
            make_float2(colours[half][2 * upper], colours[half][2 * upper + 1]);
      }
    }
    __syncwarp();
    if (lane < count) {
      const float* sum = work.sum[lane];
      const float4 low = *reinterpret_cast<const float4*>(sum);
      const float4 high = *reinterpret_cast<const float4*>(sum + 4);
      const float4 upper = *reinterpret_cast<const float4*>(sum + 8);
      const float4 lower = *reinterpret_cast<const float4*>(sum + 12);
      const float4 shape = work.record[lane].shape, rest = work.record[lane].rest;
      const math::SigmaMoments m = about_mean({low.x, low.y, low.z, low.w, high.x, high.y},
                                              static_cast<float>(bucket.x) + 0.5f * math::kPatchX - shape.x,
                                              static_cast<float>(bucket.y) + 0.5f * math::kPatchY - shape.y);
      constexpr float kLn2 = 0.693147180559945309f;
      const float conic[3] = {-2.f * kLn2 * shape.z, -kLn2 * shape.w, -2.f * kLn2 * rest.x};
      RecordGrad grad;
      math::moments_to_gradient(m, conic, rest.y, grad.mean2d, grad.conic, grad.opacity);
      grad.rgb[0] = upper.x + lower.x;
      grad.rgb[1] = upper.y + lower.y;
      grad.rgb[2] = upper.z + lower.z;
      grad.depth = kDepth ? upper.w + lower.w : 0.f;
      grad.abs_mean2d[0] = kAbs ? kLn2 * high.z : 0.f;
      grad.abs_mean2d[1] = kAbs ? kLn2 * high.w : 0.f;
      if constexpr (kSlots) {
        store48(out.slot_grad + at, grad);
        out.slot_key[at] = static_cast<uint64_t>(id) << 32 | static_cast<uint32_t>(bucket.patch);
      } else {
        float* to = reinterpret_cast<float*>(out.record_grad + id);
        add_four(to, grad.mean2d[0], grad.mean2d[1], grad.conic[0], grad.conic[1]);
        add_four(to + 4, grad.conic[2], grad.opacity, grad.rgb[0], grad.rgb[1]);
        if constexpr (kDepth || kAbs)
          add_four(to + 8, grad.rgb[2], grad.depth, grad.abs_mean2d[0], grad.abs_mean2d[1]);
        else
          atomicAdd(to + 8, grad.rgb[2]);
      }
    }
    __syncwarp();  // the workspace is free for the next bucket
  }
}

// Fixed order: a record's slots by patch. One thread for each first slot of a record.
__global__ void __launch_bounds__(kThreads)
    sum_slots_kernel(const uint64_t* key, const int32_t* slot, int64_t slots, const RecordGrad* slot_grad,
                     RecordGrad* record_grad) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (first >= slots || key[first] == ~uint64_t{0}) return;
  const uint64_t record = key[first] >> 32;
  if (first > 0 && key[first - 1] >> 32 == record) return;
  float sum[12] = {};
  for (int64_t i = first; i < slots && key[i] >> 32 == record; ++i) {
    const RecordGrad part = load48(slot_grad + slot[i]);
    const float* values = reinterpret_cast<const float*>(&part);
    for (int k = 0; k < 12; ++k) sum[k] += values[k];
  }
  RecordGrad grad;
  float* values = reinterpret_cast<float*>(&grad);
  for (int k = 0; k < 12; ++k) values[k] = sum[k];
  store48(record_grad + record, grad);
}

__global__ void __launch_bounds__(kThreads) count_up_kernel(int32_t* to, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) to[i] = static_cast<int32_t>(i);
}

template <bool kSlots>
void launch_backward(const ViewList& views, const BackwardInput& in, const BackwardTarget& out, bool depth,
                     bool absgrad, int64_t most_buckets, int self) {
  const auto launch = [&](auto kernel, size_t bytes) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    int processors = 0, resident = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, shard_device(self)));
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kBackThreads, bytes));
    const int64_t blocks =
        std::min((most_buckets + kBackWarps - 1) / kBackWarps, int64_t{processors} * resident);
    kernel<<<static_cast<unsigned>(blocks), kBackThreads, bytes, shard_stream(self)>>>(views, in, out);
  };
  constexpr size_t kPlain = sizeof(BackWorkspace<false>) * kBackWarps;
  constexpr size_t kWithAbs = sizeof(BackWorkspace<true>) * kBackWarps;
  if (depth)
    absgrad ? launch(blend_backward_kernel<true, true, kSlots>, kWithAbs)
            : launch(blend_backward_kernel<true, false, kSlots>, kPlain);
  else
    absgrad ? launch(blend_backward_kernel<false, true, kSlots>, kWithAbs)
            : launch(blend_backward_kernel<false, false, kSlots>, kPlain);
  KERNEL_CHECK("blend_backward", self, most_buckets);
}

void backward_owner(const Frame& frame, int self, TileOwner& owner,
                    const std::vector<ImageGradPointers>& grads) {
  owner.record_grad = Buffer<RecordGrad>(owner.received(), self);
  zero(owner.record_grad);
  if (owner.pairs == 0) return;
  const bool depth =
      std::any_of(grads.begin(), grads.end(), [](const ImageGradPointers& g) { return g.depth; });
  const bool absgrad = frame.settings.wanted_absgrad;
  Buffer<ViewImages> storage;
  const ViewList views = view_list(frame, &grads, self, storage);
  const BackwardInput in{
      owner.bucket.data(),        owner.bucket_count.data(),
      owner.bucket_record.data(), reinterpret_cast<const float4*>(owner.bucket_state.data()),
      owner.bucket_depth.data(),  received_records(frame, self)};
  BackwardTarget out{owner.record_grad.data(), nullptr, nullptr};
  if (!frame.settings.deterministic) {
    launch_backward<false>(views, in, out, depth, absgrad, owner.bucket.size(), self);
    return;
  }
  int32_t buckets = 0;
  read_back(&buckets, owner.bucket_count.data(), 1, self);
  if (buckets == 0) return;
  const int64_t slots = int64_t{buckets} * kBucket;
  Buffer<RecordGrad> slot_grad(slots, self);
  Buffer<uint64_t> key(slots, self);
  Buffer<int32_t> slot(slots, self);
  out.slot_grad = slot_grad.data();
  out.slot_key = key.data();
  const cudaStream_t stream = shard_stream(self);
  CUDA_CHECK(cudaMemsetAsync(key.data(), 0xff, static_cast<size_t>(slots) * sizeof(uint64_t), stream));
  launch_backward<true>(views, in, out, depth, absgrad, buckets, self);
  count_up_kernel<<<blocks_for(slots, kThreads), kThreads, 0, stream>>>(slot.data(), slots);
  KERNEL_CHECK("blend_backward", self, slots);
  sort_pairs(key, slot, 64, self);
  sum_slots_kernel<<<blocks_for(slots, kThreads), kThreads, 0, stream>>>(
      key.data(), slot.data(), slots, slot_grad.data(), owner.record_grad.data());
  KERNEL_CHECK("blend_backward", self, slots);
}

}  // namespace

void blend(Frame& frame) {
  const auto work = [&](const Shard& shard) {
    blend_owner(frame, shard.index, frame.owners[static_cast<size_t>(shard.index)]);
  };
  for_each_shard("blend", work, Access::kExchange);  // images may lie with other shards
}

void blend_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  const auto work = [&](const Shard& shard) {
    backward_owner(frame, shard.index, frame.owners[static_cast<size_t>(shard.index)], grads);
  };
  for_each_shard("blend_backward", work, Access::kExchange);
}

}  // namespace mgpu::splat
