// SPDX-License-Identifier: Apache-2.0
// blend.cu: tiles of 16x16 pixels are culled by patches of 8x4, of which a warp takes two: a lane has two
// pixels of a patch, one below the other, so that what it reads of a record from shared memory, the
// bottleneck, serves both. Forward: one block a tile; for tiles with long lists two, a lane a pixel. Back:
// two buckets a warp, each of up to 32 records that light one patch, as they were met. Formulas:
// math/patch.h.
//
// Back, a lane walks the records front to back; the sums over pixels, which are linear, are matrix products
// on the tensor cores: dL_dsigma [records, pixels] times the monomials of the pixel's place in the patch, and
// weight [records, pixels] times dL_drgbd [pixels, 4]. Operands are split into two parts of 11 bits, so that
// what is lost is in the 22nd. Floor: docs/benchmarks.md. Needs sm_80.
#include "splat/blend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "math/patch.h"
#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int kBucket = 32;             // records that are walked back together
constexpr int kLanes = 16;              // of a patch
constexpr int kLanePixels = 2;          // a column of them
constexpr int kSides = kWarp / kLanes;  // patches of a warp, and buckets on the way back
constexpr int kBlendThreads = kTilePixels / kLanePixels;
constexpr int kBlendBlocks = 8;        // on a processor
constexpr int kHalves = 2;             // of a heavy tile: with one pixel a lane it takes as many blocks
constexpr int kBatch = kBlendThreads;  // records in shared memory at a time
constexpr int kTogether = 4;           // records between looks at what has ended or is full
constexpr int kAtOnce = 2;             // records whose alphas are taken before the first of them is blended
constexpr int kFewViews = 8;           // views whose images are named in a kernel's arguments
// Tiles with more records than this, and than so many times the mean (which depends on whether there are more
// tiles than fill the GPU twice), are heavy: they start first, in halves, and first of all those that have so
// many times more.
constexpr int kHeavyTile = 256;
constexpr int kHeavyOfMany = 4, kHeavyOfFew = 2, kHeaviest = 4;
static_assert(kBlendThreads / kLanes == math::kTilePatches && kSides == math::kPatchesAcross &&
              kBucket == kWarp);
static_assert(math::kPatchX * math::kPatchY == kLanes * kLanePixels && kLanes % math::kPatchX == 0);

// A lane's place in its patch: its upper pixel. Pixels are numbered 16 (row % 2) + lane where a lane is
// wanted for each, and 2 lane + row % 2 where a lane writes both.
__device__ __forceinline__ int lane_column() { return threadIdx.x % math::kPatchX; }
__device__ __forceinline__ int lane_row() { return threadIdx.x % kLanes / math::kPatchX * kLanePixels; }
__device__ __forceinline__ unsigned side_mask() { return 0xffffu << (threadIdx.x & kLanes); }

// ---- images

struct ViewImages {
  ImagePointers image;
  ImageGradPointers grad;  // on the way back
  int width, height, tiles_x;
  int64_t tile_begin;
  const int32_t* tile_from_position;  // null: row by row
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
    const auto& curves = frame.constants[static_cast<size_t>(self)].curves;
    all.push_back({frame.of_shard(frame.images, self, v),
                   grads ? frame.of_shard(*grads, self, v) : ImageGradPointers{}, view.width, view.height,
                   view.tiles_x, view.tile_begin,
                   curves.empty() ? nullptr : curves[v]->tile_from_position.data()});
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

__device__ __forceinline__ TilePlace place_of(const ViewList& views, int64_t position) {
  int v = views.count - 1;
  while (v > 0 && views[v].tile_begin > position) --v;
  uint32_t local = static_cast<uint32_t>(position - views[v].tile_begin);
  if (views[v].tile_from_position) local = static_cast<uint32_t>(views[v].tile_from_position[local]);
  const uint32_t across = static_cast<uint32_t>(views[v].tiles_x), row = local / across;
  return {v, static_cast<int>(local - row * across) * kTileSize, static_cast<int>(row) * kTileSize};
}

// ---- forward

// A record in shared memory, where its conic becomes a falloff. The copy engine brings it as it is.
struct StagedRecord {
  float4 shape;    // x, y, falloff a, b
  float4 rest;     // falloff c, opacity, red, green
  float4 further;  // blue, depth, the record's number, unused
};
static_assert(sizeof(StagedRecord) == sizeof(Record) && offsetof(Record, conic) == 8 &&
              offsetof(Record, opacity) == 20 && offsetof(Record, rgb) == 24 &&
              offsetof(Record, depth) == 36);

__device__ __forceinline__ uint32_t shared_address(const void* in_shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(in_shared));
}
__device__ __forceinline__ void copy_16(uint32_t to_shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_8(uint32_t to_shared, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to_shared), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float4 load_shared4(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}
__device__ __forceinline__ float2 load_shared2(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}
__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

// A record as a lane has it: alpha's part, and colours.
struct LaneRecord {
  math::AlphaColumn column;
  float red, green, blue, depth;
};

template <bool kDepth>
__device__ __forceinline__ LaneRecord load_record(uint32_t staged, float x) {
  const float4 shape = load_shared4(staged), rest = load_shared4(staged + 16);
  LaneRecord r;
  r.column = math::alpha_column({shape.z, shape.w, rest.x}, shape.x, shape.y, rest.y, x);
  r.red = rest.z;
  r.green = rest.w;
  if constexpr (kDepth) {
    const float2 further = load_shared2(staged + 32);
    r.blue = further.x;
    r.depth = further.y;
  } else {
    r.blue = load_shared(staged + 32);
    r.depth = 0.f;
  }
  return r;
}

struct BlendInput {
  int64_t first_tile, tiles;
  const Record* record;
  const float2* half_extent;
  const int32_t* entry;
  const int64_t* tile_begin;
  const int32_t*
      heavy;  // [heavy_room]: tiles to start first, the heaviest from the front, others from the back
  const int32_t* heavy_count;  // [2]: how many of either
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
    find_heavy_kernel(const int64_t* tile_begin, int64_t tiles, int64_t length, int64_t room, int32_t* heavy,
                      int32_t* heavy_count) {
  const int64_t tile = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (tile >= tiles) return;
  const int64_t entries = tile_begin[tile + 1] - tile_begin[tile];
  if (entries <= length) return;
  if (entries > kHeaviest * length)
    heavy[atomicAdd(heavy_count, 1)] = static_cast<int32_t>(tile);
  else
    heavy[room - 1 - atomicAdd(heavy_count + 1, 1)] = static_cast<int32_t>(tile);
}

// Appends to a list in shared memory, whose end is `to`, if a lane of the side says so. Spelled out, because
// the compiler makes branches of it. Who reads the list calls __syncwarp() first.
__device__ __forceinline__ void append_if_any(bool wanted, unsigned side, uint32_t value, uint32_t& to) {
  asm volatile(
      "{\n"
      ".reg .pred any;\n"
      ".reg .b32 lanes;\n"
      "setp.ne.u32 any, %2, 0;\n"
      "vote.sync.ballot.b32 lanes, any, 0xffffffff;\n"
      "and.b32 lanes, lanes, %3;\n"
      "setp.ne.u32 any, lanes, 0;\n"
      "@any st.shared.b32 [%0], %1;\n"
      "@any add.u32 %0, %0, 4;\n"
      "}"
      : "+r"(to)
      : "r"(value), "r"(static_cast<uint32_t>(wanted)), "r"(side));
}

// What a block keeps in shared memory.
template <bool kKeepsDepth>
struct BlendShared {
  // two batches: one is read while the other one comes
  StagedRecord record[2][kBatch];
  float2 half_extent[2][kBatch];
  uint8_t met[2][kBatch];  // patches of the block, a bit each
  StagedRecord nobody;     // lights nothing
  // of each patch: addresses in `record`, below 64 KB as all of this, of what it meets in the batch
  alignas(8) uint16_t list[math::kTilePatches][kBatch + kTogether];
  // the bucket that a patch is filling: records, and addresses of those that are of this batch
  uint32_t lit[math::kTilePatches][kBucket];
  float4 start[kLanePixels][kBlendThreads];  // T (-1: ended), red, green, blue before the bucket
  float start_depth[kLanePixels][kKeepsDepth ? kBlendThreads : 1];
  int32_t first_slot, slots;
};

// The number of a lane's pixel in its patch, in buckets' order: that of two pixels a lane.
template <int kPixels>
__device__ __forceinline__ int pixel_number(int patch_lane, int p) {
  if (kPixels == kLanePixels) return p * kLanes + patch_lane;
  const int row = patch_lane / math::kPatchX;
  return row % kLanePixels * kLanes + row / kLanePixels * math::kPatchX + patch_lane % math::kPatchX;
}

// By a block: `kPixels` of two parts of a tile, its records [begin, begin + count) of the lists. With one
// pixel a lane a patch has a warp to itself.
template <bool kDepth, bool kBackward, int kPixels>
__device__ __forceinline__ void blend_tile(const ViewList& views, const BlendInput& in,
                                           const BucketTarget& out, BlendShared<kDepth && kBackward>& shared,
                                           int64_t tile, int part, int64_t begin, int64_t count) {
  constexpr int kLanes = math::kPatchX * math::kPatchY / kPixels, kSides = kWarp / kLanes;
  constexpr int kPatches = kBlendThreads / kLanes;  // of the block
  constexpr int kRows = kPatches / math::kPatchesAcross;
  constexpr int kAtOnce = kPixels == 1 ? 4 : 2;  // records whose alphas are taken before one is blended
  static_assert(kTogether % kAtOnce == 0);
  const TilePlace place = place_of(views, in.first_tile + tile);
  const ViewImages view = views[place.view];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, patch_lane = threadIdx.x % kLanes;
  const int own = threadIdx.x / kLanes, patch = part * kPatches + own;  // in the block, in the tile
  const int patch_x = place.x + patch % math::kPatchesAcross * math::kPatchX;
  const int patch_y = place.y + patch / math::kPatchesAcross * math::kPatchY;
  const int column = patch_x + patch_lane % math::kPatchX,
            row = patch_y + patch_lane / math::kPatchX * kPixels;
  const unsigned side = kSides == 1 ? kAllLanes : side_mask();
  const float x = static_cast<float>(column) + 0.5f;

  bool inside[kPixels];
  math::PatchPixel pixel[kPixels];
  float red[kPixels] = {}, green[kPixels] = {}, blue[kPixels] = {}, depth[kPixels] = {};
  for (int p = 0; p < kPixels; ++p) {
    inside[p] = column < view.width && row + p < view.height;
    pixel[p] = {1.f, inside[p] ? math::kAlphaMin : math::kNever};
  }
  const auto alive = [&] {
    static_assert(kPixels <= 2);
    return math::smaller(pixel[0].least, pixel[kPixels - 1].least) < math::kNever;
  };

  // the bucket: where its list ends, how many of it are known by number, where it will go
  const uint32_t lit_begin = shared_address(shared.lit[own]);
  uint32_t lit_end = lit_begin;
  int numbered = 0;
  int32_t slot = patch_lane == 0 ? -1 : 0;  // the first lane knows
  const auto open_bucket = [&] {
    for (int p = 0; p < kPixels; ++p) {
      const float before = pixel[p].least < math::kNever ? pixel[p].transmittance : -1.f;
      shared.start[p][threadIdx.x] = make_float4(before, red[p], green[p], blue[p]);
      if constexpr (kDepth) shared.start_depth[p][threadIdx.x] = depth[p];
    }
  };
  const auto record_at = [&](int i) {
    const uint32_t lit = shared.lit[own][i];
    return i < numbered ? lit : __float_as_uint(load_shared(lit + offsetof(StagedRecord, further) + 8));
  };
  const auto close_bucket = [&](bool mine) {  // all of the warp comes here
    const int32_t to = __shfl_sync(kAllLanes, slot, 0, kLanes);
    const int lit = static_cast<int>(lit_end - lit_begin) / 4;
    __syncwarp();
    if (mine) {
      if (to >= out.room) __trap();  // cannot be: there is room for all that can be met
      for (int p = 0; p < kPixels; ++p) {
        const int i = p * kLanes + patch_lane;
        const int64_t first = int64_t{to} * kBucket, at = first + pixel_number<kPixels>(patch_lane, p);
        if (i < lit) out.record[first + i] = static_cast<int32_t>(record_at(i));
        out.state[at] = shared.start[p][threadIdx.x];
        if constexpr (kDepth) out.depth[at] = shared.start_depth[p][threadIdx.x];
      }
      if (patch_lane == 0) {
        const int4 head = make_int4(static_cast<int32_t>(tile) * math::kTilePatches + patch,
                                    place.view * 64 + lit, patch_x, patch_y);
        reinterpret_cast<int4*>(out.bucket)[to] = head;
        slot = -1;
      }
      lit_end = lit_begin;
      numbered = 0;
      open_bucket();
    }
    __syncwarp();
  };
  if constexpr (kBackward) open_bucket();

  // A batch's entries are known a batch before its records are asked for, and these a batch before their use.
  const auto entry_of = [&](int64_t batch) {
    return batch + threadIdx.x < count ? in.entry[begin + batch + threadIdx.x] : -1;
  };
  const auto ask = [&](int32_t id, int buffer) {
    if (id < 0) return;
    const uint32_t to = shared_address(&shared.record[buffer][threadIdx.x]);
    const char* from = reinterpret_cast<const char*>(in.record + id);
    for (int i = 0; i < 3; ++i) copy_16(to + 16 * i, from + 16 * i);
    copy_8(shared_address(&shared.half_extent[buffer][threadIdx.x]), in.half_extent + id);
  };
  if (threadIdx.x == 0) {
    shared.nobody = StagedRecord{};
    shared.slots = 0;
    if (kBackward && count > 0) shared.first_slot = atomicAdd(out.count, kPatches);
  }
  int32_t id = entry_of(0), next_id = entry_of(kBatch);
  ask(id, 0);
  int buffer = 0;
  for (int64_t batch = 0; batch < count; batch += kBatch, buffer ^= 1) {
    copies_done();
    uint32_t met = 0;
    if (id >= 0) {  // this thread's own record
      StagedRecord& mine = shared.record[buffer][threadIdx.x];
      const float2 half = shared.half_extent[buffer][threadIdx.x];
      const float mean2d[2] = {mine.shape.x, mine.shape.y}, half_extent[2] = {half.x, half.y};
      const float conic[3] = {mine.shape.z, mine.shape.w, mine.rest.x};
      met = math::patches_met<kRows>(mean2d, conic, half_extent, static_cast<float>(place.x),
                                     static_cast<float>(place.y + part * kRows * math::kPatchY));
      const math::Falloff falloff = math::make_falloff(conic);
      mine.shape.z = falloff.a;
      mine.shape.w = falloff.b;
      mine.rest.x = falloff.c;
      mine.further.z = __int_as_float(id);
    }
    shared.met[buffer][threadIdx.x] = static_cast<uint8_t>(met);
    if constexpr (kBackward) {  // the batch before goes
      const int lit = static_cast<int>(lit_end - lit_begin) / 4;
      __syncwarp();
      for (int i = patch_lane; i < lit; i += kLanes) shared.lit[own][i] = record_at(i);
      numbered = lit;
    }
    if (!__syncthreads_or(alive())) break;  // and nobody reads the batch before
    id = next_id;
    ask(id, buffer ^ 1);
    next_id = entry_of(batch + 2 * kBatch);
    if (!__any_sync(kAllLanes, alive())) continue;

    int length[kSides] = {};
    for (int first = 0; first < kBatch && batch + first < count; first += kWarp) {
      const uint32_t bits = shared.met[buffer][first + lane] >> (warp * kSides);
      const uint32_t address = shared_address(&shared.record[buffer][first + lane]);
#pragma unroll
      for (int i = 0; i < kSides; ++i) {
        const unsigned lanes = __ballot_sync(kAllLanes, bits >> i & 1);
        if (bits >> i & 1)
          shared.list[warp * kSides + i][length[i] + __popc(lanes & ((1u << lane) - 1u))] =
              static_cast<uint16_t>(address);
        length[i] += __popc(lanes);
      }
    }
    const int longest = max(length[0], length[kSides - 1]);
    uint16_t* list = shared.list[own];
    for (int i = (lane < kLanes ? length[0] : length[kSides - 1]) + patch_lane; i < longest + kTogether - 1;
         i += kLanes)
      list[i] = static_cast<uint16_t>(shared_address(&shared.nobody));
    __syncwarp();

    for (int at = 0; at < longest; at += kTogether) {
      static_assert(kTogether == 4);
      const uint2 packed = *reinterpret_cast<const uint2*>(list + at);
      const uint32_t address[kTogether] = {packed.x & 0xffffu, packed.x >> 16, packed.y & 0xffffu,
                                           packed.y >> 16};
#pragma unroll
      for (int i0 = 0; i0 < kTogether; i0 += kAtOnce) {
        LaneRecord record[kAtOnce];
        float alpha[kAtOnce][kPixels];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          record[i] = load_record<kDepth>(address[i0 + i], x);
          for (int p = 0; p < kPixels; ++p)
            alpha[i][p] = math::alpha_at(record[i].column, static_cast<float>(row + p) + 0.5f);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          bool contributes = false;
          for (int p = 0; p < kPixels; ++p) {
            const math::PatchStep step = math::patch_step(alpha[i][p], pixel[p]);
            red[p] = math::mul_add(step.weight, record[i].red, red[p]);
            green[p] = math::mul_add(step.weight, record[i].green, green[p]);
            blue[p] = math::mul_add(step.weight, record[i].blue, blue[p]);
            if constexpr (kDepth) depth[p] = math::mul_add(step.weight, record[i].depth, depth[p]);
            contributes |= step.contributes;
          }
          if constexpr (kBackward) append_if_any(contributes, side, address[i0 + i], lit_end);
        }
      }
      if constexpr (kBackward) {
        if (slot < 0 && lit_end != lit_begin) {  // asked for early: it is used when the bucket is full
          const int32_t taken = atomicAdd(&shared.slots, 1);
          slot = taken < kPatches ? shared.first_slot + taken : atomicAdd(out.count, 1);
        }
        const bool full = lit_end > lit_begin + 4 * (kBucket - kTogether);
        if (__any_sync(kAllLanes, full)) close_bucket(full);
      }
      if (!__any_sync(kAllLanes, alive())) break;
    }
  }
  if constexpr (kBackward) {
    close_bucket(lit_end != lit_begin);
    if (count > 0) {
      __syncthreads();
      if (threadIdx.x < kPatches && threadIdx.x >= shared.slots)  // not needed
        out.bucket[shared.first_slot + threadIdx.x] = PatchBucket{};
    }
  }
  copies_done();
  for (int p = 0; p < kPixels; ++p) {
    if (!inside[p]) continue;
    const int64_t to = int64_t{row + p} * view.width + column;
    float* rgb = view.image.rgb + 3 * to;
    rgb[0] = math::mul_add(pixel[p].transmittance, in.background[0], red[p]);
    rgb[1] = math::mul_add(pixel[p].transmittance, in.background[1], green[p]);
    rgb[2] = math::mul_add(pixel[p].transmittance, in.background[2], blue[p]);
    view.image.accumulation[to] = 1.f - pixel[p].transmittance;
    if constexpr (kDepth) {
      if (view.image.depth) view.image.depth[to] = depth[p];
    }
  }
}

// First the heavy tiles, by a block each half; then the others.
template <bool kDepth, bool kBackward>
__global__ void __launch_bounds__(kBlendThreads, kBlendBlocks)
    blend_kernel(const __grid_constant__ ViewList views, const __grid_constant__ BlendInput in,
                 const __grid_constant__ BucketTarget out) {
  __shared__ BlendShared<kDepth && kBackward> shared;
  const int64_t other = int64_t{blockIdx.x} - kHalves * in.heavy_room;
  if (other < 0) {
    const int64_t place = blockIdx.x / kHalves;
    if (place >= in.heavy_count[0] && place < in.heavy_room - in.heavy_count[1]) return;
    const int64_t tile = in.heavy[place], begin = in.tile_begin[tile];
    blend_tile<kDepth, kBackward, 1>(views, in, out, shared, tile, static_cast<int>(blockIdx.x) % kHalves,
                                     begin, in.tile_begin[tile + 1] - begin);
  } else {
    const int64_t begin = in.tile_begin[other], count = in.tile_begin[other + 1] - begin;
    if (count > in.heavy_length) return;
    blend_tile<kDepth, kBackward, kLanePixels>(views, in, out, shared, other, 0, begin, count);
  }
}

void blend_owner(const Frame& frame, int self, TileOwner& owner) {
  const int64_t tiles = owner.tiles.size();
  const bool backward = frame.settings.wanted_backward, depth = frame.settings.wanted_depth;
  // a bucket is closed with 29 records at least, but for a patch's last one
  const int64_t patch_pairs = owner.patch_pairs > 0 ? owner.patch_pairs : math::kTilePatches * owner.pairs;
  const int64_t room =
      backward && owner.pairs > 0 ? patch_pairs / (kBucket - kTogether + 1) + math::kTilePatches * tiles : 0;
  const auto kernel = depth      ? backward ? blend_kernel<true, true> : blend_kernel<true, false>
                      : backward ? blend_kernel<false, true>
                                 : blend_kernel<false, false>;
  const int64_t resident = prepare_kernel(reinterpret_cast<const void*>(kernel), kBlendThreads, 0, self);
  const int64_t times = tiles < 2 * resident ? kHeavyOfFew : kHeavyOfMany;
  const int64_t heavy_length =
      std::max<int64_t>(kHeavyTile, times * owner.pairs / std::max<int64_t>(tiles, 1));
  const int64_t heavy_room = owner.pairs / heavy_length;
  Buffer<int32_t> heavy(heavy_room, self);
  owner.bucket = Buffer<PatchBucket>(room, self);
  owner.bucket_record = Buffer<int32_t>(room * kBucket, self);
  owner.bucket_state = Buffer<float>(room * kBucket * 4, self);
  owner.bucket_depth = Buffer<float>(depth ? room * kBucket : 0, self);
  owner.bucket_count = Buffer<int32_t>(3, self);  // buckets; heavy tiles of both kinds
  zero(owner.bucket_count);
  if (tiles == 0) return;
  const cudaStream_t stream = shard_stream(self);
  if (heavy_room > 0) {
    find_heavy_kernel<<<blocks_for(tiles, kThreads), kThreads, 0, stream>>>(
        owner.tile_begin.data(), tiles, heavy_length, heavy_room, heavy.data(),
        owner.bucket_count.data() + 1);
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
  kernel<<<static_cast<unsigned>(tiles + kHalves * heavy_room), kBlendThreads, 0, stream>>>(views, in, out);
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
static_assert(kRows == kLanes && kBucket == 2 * kRows);

// Records times pixels.
struct PixelMatrix {
  float at[kRows][kStride];
};

// The records of a bucket. Those of a warp's two are read together, and lie 16 banks apart.
struct BucketRecords {
  StagedRecord at[kBucket];
  float4 apart[4];
};

template <bool kAbs>
struct BackWorkspace {  // of one warp
  BucketRecords record[kSides];
  union {
    PixelMatrix matrix[kSides][kAbs ? 4 : 2];           // dL_dsigma, weight, and what absgrad sums
    float pixel_grad[kSides][kLanePixels][kLanes][12];  // dL_drgbd in two parts of 4
    float sum[kSides][kRows][kSumStride];
    float4 record_grad[kSides][kRows][3];
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

// As copy_16; zeros if there is nothing to copy.
__device__ __forceinline__ void copy_16_or_zero(uint32_t to_shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

template <bool kDepth, bool kAbs, bool kSlots>
__global__ void __launch_bounds__(kBackThreads)
    blend_backward_kernel(const __grid_constant__ ViewList views, const __grid_constant__ BackwardInput in,
                          const __grid_constant__ BackwardTarget out) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int side = lane / kLanes, patch_lane = lane % kLanes;
  BackWorkspace<kAbs>& work = reinterpret_cast<BackWorkspace<kAbs>*>(shared)[warp];
  uint32_t basis[4]
                [2];  // fragments: pixel 8 chunk + lane % 4 (+ 4) = 2 patch_lane + row % 2, monomial lane / 4
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    for (int i = 0; i < 2; ++i) {
      const int of_pixel = 4 * chunk + lane % 4 / 2 + 2 * i;  // its patch_lane
      const int column = of_pixel % math::kPatchX;
      const int row = of_pixel / math::kPatchX * kLanePixels + lane % 2;
      basis[chunk][i] =
          __float_as_uint(monomial(lane / 4, static_cast<float>(column) - 0.5f * (math::kPatchX - 1),
                                   static_cast<float>(row) - 0.5f * (math::kPatchY - 1)));
    }
  }

  const int32_t buckets = *in.bucket_count;
  const int32_t stride = gridDim.x * kBackWarps * kSides;
  for (int32_t first = (blockIdx.x * kBackWarps + warp) * kSides; first < buckets; first += stride) {
    const int32_t b = first + side;
    const int64_t at = int64_t{b} * kBucket + patch_lane;
    int4 head = make_int4(0, 0, 0, 0);
    int32_t id[kLanePixels] = {-1, -1};  // of the bucket's records patch_lane and patch_lane + 16
    float4 state[kLanePixels] = {};
    if (b < buckets) {
      head = reinterpret_cast<const int4*>(in.bucket)[b];
      for (int p = 0; p < kLanePixels; ++p) {
        id[p] = in.bucket_record[at + p * kLanes];
        state[p] = in.state[at + p * kLanes];
      }
    }
    const int count = head.y & 63;
    const int most = __reduce_max_sync(kAllLanes, count);
    if (most == 0) continue;
    for (int p = 0; p < kLanePixels; ++p) {
      if (p * kLanes + patch_lane >= count) id[p] = -1;
    }

    // records, three lanes each
#pragma unroll
    for (int p = 0; p < kLanePixels; ++p) {
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        const int of = (k * kWarp + lane) / 3, part = (k * kWarp + lane) % 3;
        const int32_t which = __shfl_sync(kAllLanes, id[p], of);
        const Record* from = in.record + (which < 0 ? 0 : which);
        copy_16_or_zero(shared_address(&work.record[of / kLanes].at[p * kLanes + of % kLanes]) + 16 * part,
                        reinterpret_cast<const char*>(from) + 16 * part, which >= 0);
      }
    }

    // pixels: dL_dimage, and dL of all the light that they still have
    const ViewImages view = views[head.y >> 6];
    const int column = head.z + lane_column(), row = head.w + lane_row();
    const float x = static_cast<float>(column) + 0.5f;
    float4 g[kLanePixels];
    float behind[kLanePixels];
    math::PatchPixel pixel[kLanePixels];
#pragma unroll
    for (int p = 0; p < kLanePixels; ++p) {
      g[p] = make_float4(0.f, 0.f, 0.f, 0.f);
      behind[p] = 0.f;
      const bool alive = count > 0 && state[p].x > 0.f;
      pixel[p] = {state[p].x, alive ? math::kAlphaMin : math::kNever};
      if (!alive) continue;
      const int64_t to = int64_t{row + p} * view.width + column;
      if (view.grad.rgb) {
        const float *grad = view.grad.rgb + 3 * to, *rgb = view.image.rgb + 3 * to;
        g[p].x = grad[0];
        g[p].y = grad[1];
        g[p].z = grad[2];
        behind[p] = (rgb[0] - state[p].y) * g[p].x + (rgb[1] - state[p].z) * g[p].y +
                    (rgb[2] - state[p].w) * g[p].z;  // with the background
      }
      if constexpr (kDepth) {
        if (view.grad.depth) {
          g[p].w = view.grad.depth[to];
          behind[p] += (view.image.depth[to] - in.state_depth[at + p * kLanes]) * g[p].w;
        }
      }
      if (view.grad.accumulation)
        behind[p] -= (1.f - view.image.accumulation[to]) * view.grad.accumulation[to];
    }
#pragma unroll
    for (int p = 0; p < kLanePixels; ++p) {
      const float parts[4] = {g[p].x, g[p].y, g[p].z, g[p].w};
      float* to = work.pixel_grad[side][p][patch_lane];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i] = __uint_as_float(upper_part(parts[i]));
        to[4 + i] = __uint_as_float(lower_part(parts[i]));
      }
    }
    copies_done();
    __syncwarp();
    uint32_t pixel_grad[kSides][4][2];
#pragma unroll
    for (int k = 0; k < kSides; ++k) {
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        for (int i = 0; i < 2; ++i) {  // pixels as in `basis`
          pixel_grad[k][chunk][i] =
              __float_as_uint(work.pixel_grad[k][lane % 2][4 * chunk + lane % 4 / 2 + 2 * i][lane / 4]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kLanePixels; ++p) {
      StagedRecord& r = work.record[side].at[p * kLanes + patch_lane];
      const float conic[3] = {r.shape.z, r.shape.w, r.rest.x};
      const math::Falloff falloff = math::make_falloff(conic);
      r.shape.z = falloff.a;
      r.shape.w = falloff.b;
      r.rest.x = falloff.c;
    }
    __syncwarp();

#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 16 records of each bucket
      const int held = most - part * kRows;
      if (held <= 0) break;
      const uint32_t records = shared_address(work.record[side].at + part * kRows);
#pragma unroll 1
      for (int i0 = 0; i0 < kRows && i0 < held; i0 += kAtOnce) {
        LaneRecord record[kAtOnce];
        float alpha[kAtOnce][kLanePixels];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          record[i] = load_record<kDepth>(records + (i0 + i) * sizeof(StagedRecord), x);
          for (int p = 0; p < kLanePixels; ++p)
            alpha[i][p] = math::alpha_at(record[i].column, static_cast<float>(row + p) + 0.5f);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const LaneRecord& r = record[i];
          float dL_dsigma[kLanePixels], weight[kLanePixels];
#pragma unroll
          for (int p = 0; p < kLanePixels; ++p) {
            weight[p] = math::patch_step(alpha[i][p], pixel[p]).weight;
            float colour_dot = math::mul_add(g[p].x, r.red, math::mul_add(g[p].y, r.green, g[p].z * r.blue));
            if constexpr (kDepth) colour_dot = math::mul_add(g[p].w, r.depth, colour_dot);
            dL_dsigma[p] = math::patch_step_backward(alpha[i][p], weight[p], pixel[p].transmittance,
                                                     colour_dot, behind[p]);
          }
          PixelMatrix* matrix = work.matrix[side];
          const auto put = [&](int which, float upper, float lower) {
            *reinterpret_cast<float2*>(&matrix[which].at[i0 + i][kLanePixels * patch_lane]) =
                make_float2(upper, lower);
          };
          put(0, dL_dsigma[0], dL_dsigma[1]);
          put(1, weight[0], weight[1]);
          if constexpr (kAbs) {
            const StagedRecord& staged = work.record[side].at[part * kRows + i0 + i];
            const math::Falloff f{staged.shape.z, staged.shape.w, staged.rest.x};
            const float dx = x - staged.shape.x;
            float along_x[kLanePixels], along_y[kLanePixels];
            for (int p = 0; p < kLanePixels; ++p) {  // 1 / ln 2 times |dL_dmean2d|
              const float dy = static_cast<float>(row + p) + 0.5f - staged.shape.y;
              along_x[p] = fabsf(dL_dsigma[p] * (2.f * f.a * dx + f.b * dy));
              along_y[p] = fabsf(dL_dsigma[p] * (f.b * dx + 2.f * f.c * dy));
            }
            put(2, along_x[0], along_x[1]);
            put(3, along_y[0], along_y[1]);
          }
        }
      }
      __syncwarp();
      float moments[kSides][4] = {}, colours[kSides][4] = {}, absolute[kSides][2][4] = {};
#pragma unroll
      for (int k = 0; k < kSides; ++k) {
        multiply_pixels(moments[k], work.matrix[k][0], basis);
        multiply_pixels(colours[k], work.matrix[k][1], pixel_grad[k]);
        if constexpr (kAbs) {
          multiply_pixels(absolute[k][0], work.matrix[k][2], basis);
          multiply_pixels(absolute[k][1], work.matrix[k][3], basis);
        }
      }
      __syncwarp();

      // to one lane a record: columns 0..5 moments, 6, 7 absgrad, 8..15 rgbd in two parts
#pragma unroll
      for (int k = 0; k < kSides; ++k) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          float* to = work.sum[k][lower * 8 + lane / 4] + lane % 4 * 2;
          float2 pair = make_float2(moments[k][2 * lower], moments[k][2 * lower + 1]);
          if constexpr (kAbs) {  // column 0 of their products is in each row's first lane
            const float along_x = __shfl_sync(kAllLanes, absolute[k][0][2 * lower], lane & ~3);
            const float along_y = __shfl_sync(kAllLanes, absolute[k][1][2 * lower], lane & ~3);
            if (lane % 4 == 3) pair = make_float2(along_x, along_y);
          }
          *reinterpret_cast<float2*>(to) = pair;
          *reinterpret_cast<float2*>(to + 8) = make_float2(colours[k][2 * lower], colours[k][2 * lower + 1]);
        }
      }
      __syncwarp();
      RecordGrad grad;
      {
        const float* sum = work.sum[side][patch_lane];
        const float4 low = *reinterpret_cast<const float4*>(sum);
        const float4 high = *reinterpret_cast<const float4*>(sum + 4);
        const float4 upper = *reinterpret_cast<const float4*>(sum + 8);
        const float4 lower = *reinterpret_cast<const float4*>(sum + 12);
        const StagedRecord& staged = work.record[side].at[part * kRows + patch_lane];
        const float4 shape = staged.shape, rest = staged.rest;
        const math::SigmaMoments m = about_mean({low.x, low.y, low.z, low.w, high.x, high.y},
                                                static_cast<float>(head.z) + 0.5f * math::kPatchX - shape.x,
                                                static_cast<float>(head.w) + 0.5f * math::kPatchY - shape.y);
        float conic[3];
        math::conic_of({shape.z, shape.w, rest.x}, conic);
        math::moments_to_gradient(m, conic, rest.y, grad.mean2d, grad.conic, grad.opacity);
        grad.rgb[0] = upper.x + lower.x;
        grad.rgb[1] = upper.y + lower.y;
        grad.rgb[2] = upper.z + lower.z;
        grad.depth = kDepth ? upper.w + lower.w : 0.f;
        constexpr float kLn2 = 0.693147180559945309f;
        grad.abs_mean2d[0] = kAbs ? kLn2 * high.z : 0.f;
        grad.abs_mean2d[1] = kAbs ? kLn2 * high.w : 0.f;
      }
      if constexpr (kSlots) {
        if (id[part] >= 0) {
          store48(out.slot_grad + at + part * kLanes, grad);
          out.slot_key[at + part * kLanes] =
              static_cast<uint64_t>(id[part]) << 32 | static_cast<uint32_t>(head.x);
        }
      } else {  // three lanes a record: neighbours in memory in one transaction
        __syncwarp();
        store48(reinterpret_cast<RecordGrad*>(work.record_grad[side][patch_lane]), grad);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          const int of = (k * kWarp + lane) / 3, third = (k * kWarp + lane) % 3;
          const int32_t which = __shfl_sync(kAllLanes, id[part], of);
          const float4 v = work.record_grad[of / kLanes][of % kLanes][third];
          if (which >= 0)
            add_four(reinterpret_cast<float*>(out.record_grad + which) + 4 * third, v.x, v.y, v.z, v.w);
        }
      }
      __syncwarp();  // the workspace is free again
    }
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
    const int64_t resident = prepare_kernel(reinterpret_cast<const void*>(kernel), kBackThreads, bytes, self);
    const int64_t blocks = std::min((most_buckets + kBackWarps - 1) / kBackWarps, resident);
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
  for_each_shard("blend", work, Access::kLocal, Launch::kSideBySide);
  if (frame.images_are_local()) return;
  // Images may lie with other shards: whoever reads them waits. They are written at once, because the host
  // has waited for all shards in stage "assign": nobody can still be using their memory for something else.
  join_shards();
}

void blend_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  const auto work = [&](const Shard& shard) {
    backward_owner(frame, shard.index, frame.owners[static_cast<size_t>(shard.index)], grads);
  };
  for_each_shard("blend_backward", work, frame.images_are_local() ? Access::kLocal : Access::kExchange,
                 Launch::kSideBySide);
}

}  // namespace mgpu::splat
