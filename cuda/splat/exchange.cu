// SPDX-License-Identifier: Apache-2.0
// exchange.cu: packing records for the owners of their tiles, and adding up what comes back: a thread a
// record of the home, there and back in the same blocks of 256. All sizes are known from the read-back of
// stage "assign". Floor: 56 bytes a record and 52 a record that is sent; back, 52 and 48.
#include "splat/exchange.h"

#include <vector>

#include "memory/transfer.h"
#include "splat/assign_kernels.h"
#include "splat/kernels.h"
#include "splat/look_back.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

// ---- where a block's records are in the home's parcels

// What is in a parcel keeps the order of the records, so that a place follows from counts. What a block has
// for or from each of several parcels is laid side by side, one parcel after the other, so that it crosses a
// link in whole lines.
constexpr int kStaged = 384;  // records at a time: mostly all that the block has, whomever they are for

struct BlockPlaces {
  int before[kMaxShards][kWarps];  // what the block's warps before have in the parcel
  int total[kMaxShards];           // what the block has there
  int64_t begin[kMaxShards];       // where that begins
};

// By all threads; `mask` has the parcels that the thread's record is in. begin_of(parcel, total), by a whole
// warp: where the block begins in the parcel.
template <typename BeginOf>
__device__ __forceinline__ void find_places(uint32_t mask, int parcels, const BeginOf& begin_of,
                                            BlockPlaces& places) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int parcel = 0; parcel < parcels; ++parcel) {
    const unsigned lanes = __ballot_sync(kAllLanes, mask >> parcel & 1u);
    if (lane == 0) places.before[parcel][warp] = __popc(lanes);
  }
  __syncthreads();
  for (int parcel = warp; parcel < parcels; parcel += kWarps) {
    const int count = lane < kWarps ? places.before[parcel][lane] : 0;
    int inclusive = count;
    for (int step = 1; step < kWarps; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    const int total = __shfl_sync(kAllLanes, inclusive, kWarps - 1);
    const int64_t begin = begin_of(parcel, total);
    if (lane < kWarps) places.before[parcel][lane] = inclusive - count;
    if (lane == 0) {
      places.total[parcel] = total;
      places.begin[parcel] = begin;
    }
  }
  __syncthreads();
}

// The parcels from `first` on of which the block's records fit side by side: one at least.
__device__ __forceinline__ int end_of_group(const BlockPlaces& places, int parcels, int first) {
  static_assert(kStaged >= kThreads);
  int end = first;
  for (int staged = 0; end < parcels; ++end) {
    staged += places.total[end];
    if (staged > kStaged) break;
  }
  return end;
}

// By a whole warp: the thread's place among those that the block has in the parcel, if it has one.
__device__ __forceinline__ int place_in(const BlockPlaces& places, uint32_t mask, int parcel) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned lanes = __ballot_sync(kAllLanes, mask >> parcel & 1u);
  return places.before[parcel][warp] + __popc(lanes & ((1u << lane) - 1u));
}

// By all threads: at most kThreads times 48 bytes, all of a thread's on their way at once.
__device__ __forceinline__ void copy48(const float4* from, float4* to, int count) {
  float4 held[3];
  const int left = 3 * count - static_cast<int>(threadIdx.x);
  from += threadIdx.x;
  to += threadIdx.x;
#pragma unroll
  for (int k = 0; k < 3; ++k)
    if (k * kThreads < left) held[k] = from[k * kThreads];
#pragma unroll
  for (int k = 0; k < 3; ++k)
    if (k * kThreads < left) to[k * kThreads] = held[k];
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

  // Of the record's mask of tiles, the bits of the range's.
  __device__ __forceinline__ uint32_t tiles_of_range(int64_t i, int range) const {
    const View& view_of = views[num_views > 1 ? view[i] : 0];
    const uint16_t* const rect = record[i].tile_rect;
    const int columns = rect[2] - rect[0];
    const RangeRun* const corner =
        range_runs + view_of.tile_begin + int64_t{rect[1]} * view_of.tiles_x + rect[0];
    uint32_t of_range = 0;
    for (uint32_t left = tile_mask[i]; left; left &= left - 1) {
      const int bit = __ffs(left) - 1, row = bit / columns;
      if (corner[int64_t{row} * view_of.tiles_x + bit - row * columns].range == range) of_range |= 1u << bit;
    }
    return of_range;
  }
};

// By range; perhaps on another GPU.
struct ParcelTarget {
  Record* record[kMaxShards];
  uint32_t* tile_mask[kMaxShards];  // null: not wanted; so are views
  int32_t* view[kMaxShards];
};

// state: of ParcelWords.
__global__ void __launch_bounds__(kThreads, 5)
    pack_kernel(const __grid_constant__ PackSource in, SumState* state,
                const __grid_constant__ ParcelTarget out) {
  __shared__ float4 s_record[3 * kStaged];
  __shared__ uint32_t s_tiles[kStaged];
  __shared__ int32_t s_view[kStaged];
  __shared__ BlockPlaces places;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int ranges = in.ranges;
  const uint32_t mask = i < in.records ? in.range_mask[i] : 0;
  uint32_t tiles = 0;
  Record mine;
  if (mask) {
    mine = load48(in.record + i);
    tiles = in.tile_mask[i];
  }
  const auto begin_of = [&](int range, int total) {
    return sum_of_blocks_before(state + int64_t{range} * gridDim.x, blockIdx.x, total);
  };
  find_places(mask, ranges, begin_of, places);
  const bool in_several = (mask & (mask - 1)) != 0;
  for (int first = 0; first < ranges;) {
    const int end = end_of_group(places, ranges, first);
    for (int range = first, at = 0; range < end; at += places.total[range++]) {
      if (places.total[range] == 0) continue;
      const int place = at + place_in(places, mask, range);
      if (!(mask >> range & 1u)) continue;
      store48(reinterpret_cast<Record*>(s_record) + place, mine);
      if (out.tile_mask[range]) s_tiles[place] = in_several ? in.tiles_of_range(i, range) : tiles;
      if (out.view[range]) s_view[place] = in.view[i];
    }
    __syncthreads();
    for (int range = first, at = 0; range < end; at += places.total[range++]) {
      const int total = places.total[range];
      if (total == 0) continue;
      const int64_t begin = places.begin[range];
      copy48(s_record + 3 * at, reinterpret_cast<float4*>(out.record[range] + begin), total);
      if (out.tile_mask[range] && threadIdx.x < total)
        out.tile_mask[range][begin + threadIdx.x] = s_tiles[at + threadIdx.x];
      if (out.view[range] && threadIdx.x < total)
        out.view[range][begin + threadIdx.x] = s_view[at + threadIdx.x];
    }
    first = end;
    if (first < ranges) __syncthreads();  // the place is free again
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

// A record's parts are added in the order of their owners. state: as pack_kernel leaves it.
__global__ void __launch_bounds__(kThreads, 5)
    collect_kernel(const RangeMask* range_mask, int64_t records, int owners, const SumState* state,
                   const __grid_constant__ PartSource in, RecordGrad* grad) {
  __shared__ float4 s_part[3 * kStaged];
  __shared__ BlockPlaces places;
  const auto record = [] { return int64_t{blockIdx.x} * kThreads + threadIdx.x; };
  const uint32_t ranges = record() < records ? range_mask[record()] : 0;
  uint32_t mask = 0;
  for (int owner = 0; owner < owners; ++owner) mask |= (ranges >> in.range[owner] & 1u) << owner;
  const auto begin_of = [&](int owner, int) -> int64_t {
    if (blockIdx.x == 0) return 0;
    return static_cast<int64_t>(state[int64_t{in.range[owner]} * gridDim.x + blockIdx.x - 1] & kCountMask);
  };
  find_places(mask, owners, begin_of, places);
  RecordGrad sum{};
  for (int first = 0; first < owners;) {
    const int end = end_of_group(places, owners, first);
    for (int owner = first, at = 0; owner < end; at += places.total[owner++]) {
      if (places.total[owner] == 0) continue;
      copy48(reinterpret_cast<const float4*>(in.part[owner] + places.begin[owner]), s_part + 3 * at,
             places.total[owner]);
    }
    __syncthreads();
    for (int owner = first, at = 0; owner < end; at += places.total[owner++]) {
      if (places.total[owner] == 0) continue;
      const int place = at + place_in(places, mask, owner);
      if (mask >> owner & 1u) add_to(sum, load48(reinterpret_cast<const RecordGrad*>(s_part) + place));
    }
    first = end;
    if (first < owners) __syncthreads();  // the place is free again
  }
  if (record() < records) store48(grad + record(), sum);
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
  pack_kernel<<<blocks_for(in.count, kThreads), kThreads, 0, shard_stream(home)>>>(
      source, in.parcel_words.data() + layout.states(), target);
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
      home.range_mask.data(), home.count, owners, home.parcel_words.data() + layout.states(), source,
      home.grad.data());
  KERNEL_CHECK("collect", self, home.count);
}

}  // namespace flavour

}  // namespace mgpu::splat
