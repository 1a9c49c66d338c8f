// SPDX-License-Identifier: Apache-2.0
// exchange.cu: packing records for the owners of their tiles, and adding up what comes back. All sizes are
// known from the read-back of stage "assign".
#include "splat/exchange.h"

#include <vector>

#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/look_back.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

// ---- pack, at home

struct ParcelTarget {
  Record* record[kMaxShards];  // perhaps on another GPU
  int32_t* view[kMaxShards];   // null: their owner does it
  int64_t* record_from_parcel[kMaxShards];
};

// A block 256 records. A parcel's records keep their order: where the block's go follows from a running sum
// for each range. What goes to one owner is laid side by side first, so that it crosses a link in whole
// lines. state: [ranges, blocks], zero before; view: null for a single one.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const Record* record, const int32_t* view, const uint64_t* range_mask, int64_t records,
                int ranges, SumState* state, const __grid_constant__ ParcelTarget out) {
  __shared__ float4 s_record[3 * kThreads];
  __shared__ int32_t s_thread[kThreads];
  __shared__ int s_before[kMaxShards][kWarps];
  __shared__ int s_total[kMaxShards];
  __shared__ int64_t s_begin[kMaxShards];
  const int64_t first = int64_t{blockIdx.x} * kThreads, i = first + threadIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t mask = i < records ? static_cast<uint32_t>(range_mask[i]) : 0;
  Record mine;
  if (mask) mine = load48(record + i);
  for (int range = 0; range < ranges; ++range) {
    const unsigned lanes = __ballot_sync(kAllLanes, mask >> range & 1u);
    if (lane == 0) s_before[range][warp] = __popc(lanes);
  }
  __syncthreads();
  for (int range = warp; range < ranges; range += kWarps) {
    const int count = lane < kWarps ? s_before[range][lane] : 0;
    int inclusive = count;
    for (int step = 1; step < kWarps; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    const int total = __shfl_sync(kAllLanes, inclusive, kWarps - 1);
    if (lane < kWarps) s_before[range][lane] = inclusive - count;
    const int64_t begin = sum_of_blocks_before(state + int64_t{range} * gridDim.x, blockIdx.x, total);
    if (lane == 0) {
      s_total[range] = total;
      s_begin[range] = begin;
    }
  }
  __syncthreads();
  for (int range = 0; range < ranges; ++range) {
    const int total = s_total[range];
    if (total == 0) continue;
    const bool goes = mask >> range & 1u;
    const unsigned lanes = __ballot_sync(kAllLanes, goes);
    if (goes) {
      const int place = s_before[range][warp] + __popc(lanes & ((1u << lane) - 1u));
      store48(reinterpret_cast<Record*>(s_record) + place, mine);
      s_thread[place] = threadIdx.x;
    }
    __syncthreads();
    const int64_t begin = s_begin[range];
    float4* const to = reinterpret_cast<float4*>(out.record[range] + begin);
    for (int k = threadIdx.x; k < 3 * total; k += kThreads) to[k] = s_record[k];
    if (threadIdx.x < total) {
      const int64_t from = first + s_thread[threadIdx.x];
      out.record_from_parcel[range][begin + threadIdx.x] = from;
      if (out.view[range]) out.view[range][begin + threadIdx.x] = view ? view[from] : 0;
    }
    __syncthreads();  // the place is free again
  }
}

// ---- at the owner

// view_begin: [views + 1], of one parcel.
__global__ void __launch_bounds__(kThreads)
    fill_views_kernel(const int64_t* view_begin, int views, int64_t count, int32_t* view) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  int v = 0;
  while (v + 1 < views && i >= view_begin[v + 1]) ++v;
  view[i] = v;
}

// ---- the way back

// A record is in a parcel once, so no two threads meet. `part` may be on another GPU: it is read in whole
// lines.
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const RecordGrad* part, const int64_t* record_from_parcel, int64_t count,
                   RecordGrad* grad) {
  __shared__ float4 s_part[3 * kThreads];
  const int64_t first = int64_t{blockIdx.x} * kThreads, i = first + threadIdx.x;
  const int held = count - first < kThreads ? static_cast<int>(count - first) : kThreads;
  const float4* const from = reinterpret_cast<const float4*>(part + first);
  for (int k = threadIdx.x; k < 3 * held; k += kThreads) s_part[k] = from[k];
  __syncthreads();
  if (i >= count) return;
  RecordGrad* to = grad + record_from_parcel[i];
  RecordGrad sum = load48(to);
  add_to(sum, load48(reinterpret_cast<const RecordGrad*>(s_part) + threadIdx.x));
  store48(to, sum);
}

}  // namespace

namespace flavour {

void pack(Frame& frame, int home, const std::vector<Record*>& targets) {
  ShardRecords& in = frame.shards[static_cast<size_t>(home)];
  const int ranges = static_cast<int>(frame.ranges.owner.size());
  ParcelTarget target{};
  for (int range = 0; range < ranges; ++range) {
    const int to = frame.ranges.owner[static_cast<size_t>(range)];
    TileOwner& owner = frame.owners[static_cast<size_t>(to)];
    Parcel& parcel = frame.parcels[static_cast<size_t>(home)][static_cast<size_t>(to)];
    parcel.record_from_parcel = Buffer<int64_t>(parcel.count, home);
    target.record[range] = targets[static_cast<size_t>(to)];
    target.record_from_parcel[range] = parcel.record_from_parcel.data();
    if (parcel.count > 0 && transport().reaches(home, to))
      target.view[range] = owner.view.data() + owner.peer_begin[static_cast<size_t>(home)];
  }
  if (in.count > 0) {
    pack_kernel<<<blocks_for(in.count, kThreads), kThreads, 0, shard_stream(home)>>>(
        in.record.data(), frame.views.size() > 1 ? in.view.data() : nullptr, in.range_mask.data(), in.count,
        ranges, in.parcel_states.data(), target);
    KERNEL_CHECK("pack", home, in.count);
  }
  in.parcel_states = Buffer<SumState>();
}

void fill_views(Frame& frame, int self) {
  TileOwner& owner = frame.owners[static_cast<size_t>(self)];
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    const Parcel& parcel = frame.parcels[home][static_cast<size_t>(self)];
    if (parcel.count == 0 || transport().reaches(static_cast<int>(home), self)) continue;  // done by pack
    const Buffer<int64_t> view_begin = to_buffer(parcel.view_begin, self);
    fill_views_kernel<<<blocks_for(parcel.count, kThreads), kThreads, 0, shard_stream(self)>>>(
        view_begin.data(), static_cast<int>(frame.views.size()), parcel.count,
        owner.view.data() + owner.peer_begin[home]);
    KERNEL_CHECK("exchange", self, parcel.count);
  }
}

void collect(Frame& frame, int self, const std::vector<const RecordGrad*>& part) {
  ShardRecords& home = frame.shards[static_cast<size_t>(self)];
  home.grad = Buffer<RecordGrad>(home.count, self);
  zero(home.grad);
  for (size_t owner = 0; owner < part.size(); ++owner) {
    const Parcel& parcel = frame.parcels[static_cast<size_t>(self)][owner];
    if (parcel.count == 0) continue;
    collect_kernel<<<blocks_for(parcel.count, kThreads), kThreads, 0, shard_stream(self)>>>(
        part[owner], parcel.record_from_parcel.data(), parcel.count, home.grad.data());
    KERNEL_CHECK("collect", self, parcel.count);
  }
}

}  // namespace flavour

}  // namespace mgpu::splat
