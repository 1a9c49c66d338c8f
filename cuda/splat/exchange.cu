// SPDX-License-Identifier: Apache-2.0
// exchange.cu: packing records for the owners of their tiles, and adding up what comes back. All sizes are
// known from the read-back of stage "assign".
#include "splat/exchange.h"

#include <utility>
#include <vector>

#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

// ---- pack, at home

// count: [ranges, blocks] records of the block for the range's owner.
__global__ void __launch_bounds__(kThreads)
    count_parcels_kernel(const uint64_t* range_mask, int64_t records, int ranges, int32_t* count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint32_t mask = i < records ? static_cast<uint32_t>(range_mask[i]) : 0;
  for (int range = 0; range < ranges; ++range) {
    const int total = __syncthreads_count(mask >> range & 1u);
    if (threadIdx.x == 0) count[int64_t{range} * gridDim.x + blockIdx.x] = total;
  }
}

struct ParcelTarget {
  Record* record[kMaxShards];
  int64_t* record_from_parcel[kMaxShards];
};

// offset: the running sum of `count` above; a parcel's records keep their order.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const Record* record, const uint64_t* range_mask, int64_t records, int ranges,
                const int64_t* offset, const __grid_constant__ ParcelTarget out) {
  __shared__ int warp_count[kWarps];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t mask = i < records ? static_cast<uint32_t>(range_mask[i]) : 0;
  Record mine;
  if (mask) mine = load48(record + i);
  for (int range = 0; range < ranges; ++range) {
    const bool goes = mask >> range & 1u;
    const unsigned lanes = __ballot_sync(kAllLanes, goes);
    if (lane == 0) warp_count[warp] = __popc(lanes);
    __syncthreads();
    if (goes) {
      int64_t position = offset[int64_t{range} * gridDim.x + blockIdx.x] - offset[int64_t{range} * gridDim.x];
      for (int w = 0; w < warp; ++w) position += warp_count[w];
      position += __popc(lanes & ((1u << lane) - 1u));
      store48(out.record[range] + position, mine);
      out.record_from_parcel[range][position] = i;
    }
    __syncthreads();
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

// A record is in a parcel once, so no two threads meet.
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const RecordGrad* part, const int64_t* record_from_parcel, int64_t count,
                   RecordGrad* grad) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  RecordGrad* to = grad + record_from_parcel[i];
  RecordGrad sum = load48(to);
  add_to(sum, load48(part + i));
  store48(to, sum);
}

}  // namespace

namespace flavour {

void pack(Frame& frame, int home, const std::vector<Record*>& targets) {
  const ShardRecords& in = frame.shards[static_cast<size_t>(home)];
  const int ranges = static_cast<int>(frame.ranges.owner.size());
  ParcelTarget target{};
  for (int range = 0; range < ranges; ++range) {
    const auto owner = static_cast<size_t>(frame.ranges.owner[static_cast<size_t>(range)]);
    Parcel& parcel = frame.parcels[static_cast<size_t>(home)][owner];
    parcel.record_from_parcel = Buffer<int64_t>(parcel.count, home);
    target.record[range] = targets[owner];
    target.record_from_parcel[range] = parcel.record_from_parcel.data();
  }
  if (in.count == 0) return;
  const unsigned blocks = blocks_for(in.count, kThreads);
  Buffer<int32_t> count(int64_t{blocks} * ranges, home);
  Buffer<int64_t> offset(count.size(), home);
  const cudaStream_t stream = shard_stream(home);
  count_parcels_kernel<<<blocks, kThreads, 0, stream>>>(in.range_mask.data(), in.count, ranges, count.data());
  KERNEL_CHECK("pack", home, in.count);
  exclusive_sum(count.data(), offset.data(), count.size(), home);
  pack_kernel<<<blocks, kThreads, 0, stream>>>(in.record.data(), in.range_mask.data(), in.count, ranges,
                                               offset.data(), target);
  KERNEL_CHECK("pack", home, in.count);
}

void fill_views(Frame& frame, int self) {
  TileOwner& owner = frame.owners[static_cast<size_t>(self)];
  if (frame.views.size() == 1) {
    zero(owner.view);
    return;
  }
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    const Parcel& parcel = frame.parcels[home][static_cast<size_t>(self)];
    if (parcel.count == 0) continue;
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
