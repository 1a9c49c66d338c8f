// SPDX-License-Identifier: Apache-2.0
// exchange.cu: packing records for the owners of their tiles, and adding up what comes back: blocks of 256
// records, there and back the same. All sizes are known from the read-back of stage "assign". Floor: 4 bytes
// a record for the places in the parcels (which are 4 bytes a range for 32 records); 56 a record and 52 a
// record that is sent; back, 52 and 48.
#include "splat/exchange.h"

#include <cuda_pipeline_primitives.h>

#include <vector>

#include "memory/transfer.h"
#include "splat/assign_kernels.h"
#include "splat/kernels.h"
#include "splat/look_back.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

// ---- where each warp's records are in the home's parcels

// What is in a parcel keeps the order of the records, so that a place follows from counts. They are summed up
// before the records move: a block that looked back for its sums would hold its records all the while, and
// with 14 KB a block it is the number of blocks on their way that fills the memory's bandwidth.

// A block for kSummedWarps warps of records, of which one of its own warps has kWarp, all of them on their
// way at once. begin and state: of ParcelWords, state zero before.
__global__ void __launch_bounds__(kThreads)
    begin_parcels_kernel(const RangeMask* range_mask, int64_t records, int ranges, SumState* state,
                         uint32_t* begin) {
  static_assert(kSummedWarps == kWarps * kWarp);
  __shared__ uint16_t s_before[kWarps][kMaxShards][kWarp];  // of a warp's warps of records, those before
  __shared__ uint32_t s_total[kWarps][kMaxShards], s_begin[kWarps][kMaxShards];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * kWarp;
  uint32_t mask[kWarp], met = 0;
#pragma unroll
  for (int k = 0; k < kWarp; ++k) {
    const int64_t i = (first + k) * kWarp + lane;
    mask[k] = i < records ? range_mask[i] : 0;
  }
#pragma unroll
  for (int k = 0; k < kWarp; ++k) met |= mask[k];
  met = __reduce_or_sync(kAllLanes, met);
  for (int range = 0; range < ranges; ++range) {
    unsigned of_lane = 0;  // of the lane's warp of records: which have the range
    if (met >> range & 1u) {
#pragma unroll
      for (int k = 0; k < kWarp; ++k) {
        const unsigned of_k = __ballot_sync(kAllLanes, mask[k] >> range & 1u);
        if (lane == k) of_lane = of_k;
      }
    }
    const int count = __popc(of_lane);
    int sum = count;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    s_before[warp][range][lane] = static_cast<uint16_t>(sum - count);
    if (lane == kWarp - 1) s_total[warp][range] = static_cast<uint32_t>(sum);
  }
  __syncthreads();
  for (int range = warp; range < ranges; range += kWarps) {
    uint32_t before = 0, all = 0;  // of the block's warps: those before warp `lane`, and all
    for (int other = 0; other < kWarps; ++other) {
      before += other < lane ? s_total[other][range] : 0;
      all += s_total[other][range];
    }
    const int64_t at = sum_of_blocks_before<4>(state + int64_t{range} * gridDim.x, blockIdx.x, all);
    if (lane < kWarps) s_begin[lane][range] = static_cast<uint32_t>(at) + before;
  }
  __syncthreads();
  const int64_t left_here = (warps_of(records) + 1 - first) * ranges;
  for (int at = lane; at < kWarp * ranges && at < left_here; at += kWarp) {
    const int k = at / ranges, range = at - k * ranges;
    begin[first * ranges + at] = s_begin[warp][range] + s_before[warp][range][k];
  }
}

// Of a block and one of its warps, a lane a range: how many records of the parcel are before them.
struct BlockBegins {
  uint32_t block = 0, warp = 0, next_block = 0;

  __device__ __forceinline__ BlockBegins(const uint32_t* begin, int64_t records, int ranges) {
    const int lane = threadIdx.x % kWarp;
    const int64_t last = warps_of(records), first = int64_t{blockIdx.x} * kWarps;
    const int64_t self = first + threadIdx.x / kWarp, next = first + kWarps;
    if (lane >= ranges) return;
    block = begin[first * ranges + lane];
    warp = begin[(self < last ? self : last) * ranges + lane];
    next_block = begin[(next < last ? next : last) * ranges + lane];
  }
  // By whole warps: of one range.
  __device__ __forceinline__ int64_t begin_of(int range) const {
    return __shfl_sync(kAllLanes, block, range);
  }
  __device__ __forceinline__ int total(int range) const {
    return static_cast<int>(__shfl_sync(kAllLanes, next_block - block, range));
  }
  // The thread's place among those that the block has in the parcel, if its mask has the range.
  __device__ __forceinline__ int place_in(int range, uint32_t mask) const {
    const unsigned lanes = __ballot_sync(kAllLanes, mask >> range & 1u);
    const int before = static_cast<int>(__shfl_sync(kAllLanes, warp - block, range));
    return before + __popc(lanes & ((1u << threadIdx.x % kWarp) - 1u));
  }
};

// What a block has for or from a parcel is one stretch there, perhaps on another GPU. The thread's first item
// of it; its next one is kThreads further. Such that a warp's lie in whole lines wherever the stretch begins:
// it crosses a link in no more packets than it has lines.
template <typename Item>
__device__ __forceinline__ int first_item(const Item* stretch) {
  return (threadIdx.x - static_cast<unsigned>(reinterpret_cast<uintptr_t>(stretch) / sizeof(Item))) %
         kThreads;
}

// Calls visit(k) for the thread's items of a stretch of `count` records, 16 bytes each.
template <typename Visit>
__device__ __forceinline__ void for_items(const float4* stretch, int count, const Visit& visit) {
  const int first = first_item(stretch);
#pragma unroll
  for (int k = 0; k < 3 * kThreads; k += kThreads)
    if (first + k < 3 * count) visit(first + k);
}

// ---- pack, at home

struct PackSource {
  const Record* record;
  const int32_t* view;  // of several views
  const RangeMask* range_mask;
  const uint32_t* tile_mask;
  int64_t records;
  const View* views;
  int num_views;
  const RangeRun* range_runs;
  int ranges;

  // By a whole warp, a lane a tile: of a record's mask of tiles, which has some, the bits of the range's.
  __device__ __forceinline__ uint32_t tiles_of_range(const Record& of, int32_t view_of, uint32_t tiles,
                                                     int range) const {
    const int lane = threadIdx.x % kWarp;
    const View& in = views[view_of];
    const int columns = of.tile_rect[2] - of.tile_rect[0];
    const int row = lane / columns, x = of.tile_rect[0] + lane - row * columns, y = of.tile_rect[1] + row;
    bool of_range = false;
    if (tiles >> lane & 1u) of_range = range_runs[in.tile_begin + int64_t{y} * in.tiles_x + x].range == range;
    return __ballot_sync(kAllLanes, of_range);
  }
};

// By range; perhaps on another GPU.
struct ParcelTarget {
  Record* record[kMaxShards];
  uint32_t* tile_mask[kMaxShards];  // null: not wanted; so are views
  int32_t* view[kMaxShards];
};

// A block brings its records in as they lie, says of each range which of them it gets, and writes these
// stretches: with a single barrier, and all that it reads on its way at once. Stretches are a block's and not
// a warp's for many ranges' sake: of 8 that are met alike a warp has 4 records each, and 16 bytes of masks.
// begin: of ParcelWords.
__global__ void __launch_bounds__(kThreads, 8)
    pack_kernel(const __grid_constant__ PackSource in, const uint32_t* begin,
                const __grid_constant__ ParcelTarget out) {
  __shared__ float4 s_record[3 * kThreads];
  __shared__ uint32_t s_ranges[kThreads], s_tiles[kThreads];
  __shared__ int32_t s_view[kThreads];
  __shared__ uint8_t s_sent[kMaxShards][kThreads];  // which of the block's records, in order
  const int64_t first = int64_t{blockIdx.x} * kThreads, i = first + threadIdx.x;
  const int ranges = in.ranges, lane = threadIdx.x % kWarp;
  const uint32_t mask = i < in.records ? in.range_mask[i] : 0;
  const uint32_t tiles = i < in.records ? in.tile_mask[i] : 0;
  const int32_t view = in.num_views > 1 && i < in.records ? in.view[i] : 0;
  const BlockBegins begins(begin, in.records, ranges);
  const float4* const records = reinterpret_cast<const float4*>(in.record + first);
  const int64_t left_here = 3 * (in.records - first);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const int at = k * kThreads + static_cast<int>(threadIdx.x);
    if (at < left_here) __pipeline_memcpy_async(s_record + at, records + at, sizeof(float4));
  }
  __pipeline_commit();
  s_ranges[threadIdx.x] = mask;
  s_tiles[threadIdx.x] = tiles;
  s_view[threadIdx.x] = view;
  for (uint32_t left = __reduce_or_sync(kAllLanes, mask); left; left &= left - 1) {
    const int range = __ffs(left) - 1;
    const int place = begins.place_in(range, mask);
    if (mask >> range & 1u) s_sent[range][place] = static_cast<uint8_t>(threadIdx.x);
  }
  __pipeline_wait_prior(0);
  __syncthreads();
  for (int range = 0; range < ranges; ++range) {
    const int total = begins.total(range);
    if (total == 0) continue;
    const int64_t begin_there = begins.begin_of(range);
    const uint8_t* const sent = s_sent[range];
    float4* const record = reinterpret_cast<float4*>(out.record[range] + begin_there);
    for_items(record, total, [&](int k) { record[k] = s_record[3 * sent[k / 3] + k % 3]; });
    if (out.tile_mask[range]) {
      uint32_t* const tile_mask = out.tile_mask[range] + begin_there;
      const int k = first_item(tile_mask), at = k < total ? sent[k] : 0;
      uint32_t of_range = k < total ? s_tiles[at] : 0;
      const bool in_several = of_range != 0 && (s_ranges[at] & (s_ranges[at] - 1)) != 0;
      for (unsigned left = __ballot_sync(kAllLanes, in_several); left; left &= left - 1) {
        const int source = __ffs(left) - 1, of = __shfl_sync(kAllLanes, at, source);
        const uint32_t part =
            in.tiles_of_range(reinterpret_cast<const Record*>(s_record)[of], s_view[of], s_tiles[of], range);
        if (lane == source) of_range = part;
      }
      if (k < total) tile_mask[k] = of_range;
    }
    if (out.view[range]) {
      int32_t* const view_there = out.view[range] + begin_there;
      const int k = first_item(view_there);
      if (k < total) view_there[k] = s_view[sent[k]];
    }
  }
}

// ---- at the owner

// begin: [parcels * views], ascending: where what the owner received of each home and view begins.
__global__ void __launch_bounds__(kThreads)
    fill_views_kernel(const int64_t* begin, int64_t begins, int views, int64_t count, int32_t* view) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  int64_t first = 0, end = begins;  // the last one that is at most i is among them
  while (end - first > 1) {
    const int64_t middle = (first + end) / 2;
    (begin[middle] <= i ? first : end) = middle;
  }
  view[i] = static_cast<int32_t>(first % views);
}

// ---- the way back

struct PartSource {                    // by owner
  const RecordGrad* part[kMaxShards];  // of the home's parcel; perhaps on another GPU
  int32_t range[kMaxShards];
};

// A block's records at a time that are brought in: mostly all that it has, from whichever owners.
constexpr int kStaged = 384;
static_assert(kStaged >= kThreads);

// A record's parts are added in the order of their owners. begin: of ParcelWords. The stretches that a block
// reads follow from its begins alone: a thread's own record matters when they are there.
__global__ void __launch_bounds__(kThreads, 8)
    collect_kernel(const RangeMask* range_mask, int64_t records, int owners, const uint32_t* begin,
                   const __grid_constant__ PartSource in, RecordGrad* grad) {
  __shared__ float4 s_part[3 * kStaged];
  const int64_t block = int64_t{blockIdx.x} * kThreads;
  const BlockBegins begins(begin, records, owners);
  const uint32_t mask = block + threadIdx.x < records ? range_mask[block + threadIdx.x] : 0;
  RecordGrad sum{};
  for (int first = 0, end = 0; first < owners; first = end) {
    for (int at = 0; end < owners; ++end) {
      const int range = in.range[end], total = begins.total(range);
      if (at + total > kStaged) break;
      const float4* const part = reinterpret_cast<const float4*>(in.part[end] + begins.begin_of(range));
      for_items(part, total,
                [&](int k) { __pipeline_memcpy_async(s_part + 3 * at + k, part + k, sizeof(float4)); });
      at += total;
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
#pragma unroll 1
    for (int owner = first, at = 0; owner < end; ++owner) {
      const int range = in.range[owner], total = begins.total(range);
      if (total == 0) continue;
      const int place = at + begins.place_in(range, mask);
      if (mask >> range & 1u) add_to(sum, load48(reinterpret_cast<const RecordGrad*>(s_part) + place));
      at += total;
    }
    __syncthreads();  // the place is free again
  }
  // Through shared memory, as a thread's 48 bytes are half a sector more than one.
  const int lane = threadIdx.x % kWarp, warp_first = static_cast<int>(threadIdx.x) - lane;
  store48(reinterpret_cast<RecordGrad*>(s_part) + threadIdx.x, sum);
  __syncwarp();
  float4* const out = reinterpret_cast<float4*>(grad + block);
  const int64_t left_here = 3 * (records - block);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const int at = 3 * warp_first + k * kWarp + lane;
    if (at < left_here) out[at] = s_part[at];
  }
}

}  // namespace

namespace flavour {

void pack(Frame& frame, int home, const std::vector<Record*>& targets) {
  ShardRecords& in = frame.shards[static_cast<size_t>(home)];
  const int ranges = static_cast<int>(frame.ranges.owner.size());
  if (in.count == 0) return;
  ParcelTarget target{};
  for (int range = 0; range < ranges; ++range) {
    const int to = frame.ranges.owner[static_cast<size_t>(range)];
    TileOwner& owner = frame.owners[static_cast<size_t>(to)];
    target.record[range] = targets[static_cast<size_t>(to)];
    if (!transport().reaches(home, to)) continue;
    const int64_t begin = owner.peer_begin[static_cast<size_t>(home)];
    target.tile_mask[range] = owner.tile_mask.data() + begin;
    if (frame.views.size() > 1) target.view[range] = owner.view.data() + begin;
  }
  const ParcelWords layout = parcel_words(frame, home);
  const PackSource source{in.record.data(),
                          in.view.data(),
                          in.range_mask.data(),
                          in.tile_mask.data(),
                          in.count,
                          frame.constants[static_cast<size_t>(home)].views,
                          static_cast<int>(frame.views.size()),
                          layout.range_runs(in.parcel_words.data()),
                          ranges};
  SumState* const words = in.parcel_words.data();
  begin_parcels_kernel<<<static_cast<unsigned>(layout.sums()), kThreads, 0, shard_stream(home)>>>(
      in.range_mask.data(), in.count, ranges, words + layout.states(), layout.begin_of_warp(words));
  KERNEL_CHECK("pack", home, in.count);
  pack_kernel<<<blocks_for(in.count, kThreads), kThreads, 0, shard_stream(home)>>>(
      source, layout.begin_of_warp(words), target);
  KERNEL_CHECK("pack", home, in.count);
  in.tile_mask = Buffer<uint32_t>();
}

void fill_views(Frame& frame, int self) {
  TileOwner& owner = frame.owners[static_cast<size_t>(self)];
  if (frame.views.size() == 1 || owner.received() == 0) return;
  bool packed = true;  // with their views
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    packed &= frame.parcels[home][static_cast<size_t>(self)].count == 0 ||
              transport().reaches(static_cast<int>(home), self);
  }
  if (packed) return;
  std::vector<int64_t> begin;
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    const Parcel& parcel = frame.parcels[home][static_cast<size_t>(self)];
    for (size_t v = 0; v + 1 < parcel.view_begin.size(); ++v)
      begin.push_back(owner.peer_begin[home] + parcel.view_begin[v]);
  }
  const Buffer<int64_t> begins = to_buffer(begin, self);
  fill_views_kernel<<<blocks_for(owner.received(), kThreads), kThreads, 0, shard_stream(self)>>>(
      begins.data(), begins.size(), static_cast<int>(frame.views.size()), owner.received(),
      owner.view.data());
  KERNEL_CHECK("exchange", self, owner.received());
}

void collect(Frame& frame, int self, const std::vector<const RecordGrad*>& part) {
  ShardRecords& home = frame.shards[static_cast<size_t>(self)];
  home.grad = Buffer<RecordGrad>(home.count, self);
  if (home.count == 0) return;
  PartSource source{};
  const int owners = static_cast<int>(part.size());
  for (int range = 0; range < owners; ++range) {
    const int owner = frame.ranges.owner[static_cast<size_t>(range)];
    source.part[owner] = part[static_cast<size_t>(owner)];
    source.range[owner] = range;
  }
  const ParcelWords layout = parcel_words(frame, self);
  collect_kernel<<<blocks_for(home.count, kThreads), kThreads, 0, shard_stream(self)>>>(
      home.range_mask.data(), home.count, owners, layout.begin_of_warp(home.parcel_words.data()), source,
      home.grad.data());
  KERNEL_CHECK("collect", self, home.count);
}

}  // namespace flavour

}  // namespace mgpu::splat
