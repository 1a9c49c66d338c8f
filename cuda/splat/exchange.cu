// SPDX-License-Identifier: Apache-2.0
// exchange.cu: records to the owners of their tiles and gradients back: one contiguous copy per pair of
// shards each way. On a mesh of one shard nothing moves. All sizes are known from the read-back of stage
// "project".
#include "splat/exchange.h"

#include <utility>
#include <vector>

#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

// ---- pack, at home

// count: [owners, blocks] records of the block for the owner.
__global__ void __launch_bounds__(kThreads)
    count_parcels_kernel(const uint32_t* owner_mask, int64_t records, int owners, int32_t* count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const uint32_t mask = i < records ? owner_mask[i] : 0;
  for (int owner = 0; owner < owners; ++owner) {
    const int total = __syncthreads_count(mask >> owner & 1u);
    if (threadIdx.x == 0) count[int64_t{owner} * gridDim.x + blockIdx.x] = total;
  }
}

struct ParcelTarget {
  Record* record[kMaxShards];
  int64_t* record_from_parcel[kMaxShards];
};

// offset: the running sum of `count` above; a parcel's records keep their order.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const Record* record, const uint32_t* owner_mask, int64_t records, int owners,
                const int64_t* offset, const __grid_constant__ ParcelTarget out) {
  __shared__ int warp_count[kWarps];
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t mask = i < records ? owner_mask[i] : 0;
  Record mine;
  if (mask) mine = load48(record + i);
  for (int owner = 0; owner < owners; ++owner) {
    const bool goes = mask >> owner & 1u;
    const unsigned lanes = __ballot_sync(kAllLanes, goes);
    if (lane == 0) warp_count[warp] = __popc(lanes);
    __syncthreads();
    if (goes) {
      int64_t position = offset[int64_t{owner} * gridDim.x + blockIdx.x] - offset[int64_t{owner} * gridDim.x];
      for (int w = 0; w < warp; ++w) position += warp_count[w];
      position += __popc(lanes & ((1u << lane) - 1u));
      store48(out.record[owner] + position, mine);
      out.record_from_parcel[owner][position] = i;
    }
    __syncthreads();
  }
}

void pack(Frame& frame, int home) {
  const ShardRecords& in = frame.shards[static_cast<size_t>(home)];
  const int owners = static_cast<int>(frame.owners.size());
  ParcelTarget target{};
  for (int owner = 0; owner < owners; ++owner) {
    Parcel& parcel = frame.parcels[static_cast<size_t>(home)][static_cast<size_t>(owner)];
    parcel.record = Buffer<Record>(parcel.count, home);
    parcel.record_from_parcel = Buffer<int64_t>(parcel.count, home);
    target.record[owner] = parcel.record.data();
    target.record_from_parcel[owner] = parcel.record_from_parcel.data();
  }
  if (in.count == 0) return;
  const unsigned blocks = blocks_for(in.count, kThreads);
  Buffer<int32_t> count(int64_t{blocks} * owners, home);
  Buffer<int64_t> offset(count.size(), home);
  const cudaStream_t stream = shard_stream(home);
  count_parcels_kernel<<<blocks, kThreads, 0, stream>>>(in.owner_mask.data(), in.count, owners, count.data());
  KERNEL_CHECK("pack", home, in.count);
  exclusive_sum(count.data(), offset.data(), count.size(), home);
  pack_kernel<<<blocks, kThreads, 0, stream>>>(in.record.data(), in.owner_mask.data(), in.count, owners,
                                               offset.data(), target);
  KERNEL_CHECK("pack", home, in.count);
}

// ---- pull, at the owner

// view_begin: [views + 1], of one parcel.
__global__ void __launch_bounds__(kThreads)
    fill_views_kernel(const int64_t* view_begin, int views, int64_t count, int32_t* view) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  int v = 0;
  while (v + 1 < views && i >= view_begin[v + 1]) ++v;
  view[i] = v;
}

void pull(Frame& frame, int self) {
  TileOwner& owner = frame.owners[static_cast<size_t>(self)];
  const int64_t total = owner.received();
  owner.record = Buffer<Record>(total, self);
  owner.view = Buffer<int32_t>(total, self);
  if (frame.views.size() == 1) zero(owner.view);
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    const Parcel& parcel = frame.parcels[home][static_cast<size_t>(self)];
    if (parcel.count == 0) continue;
    copy_between(owner.record.data() + owner.peer_begin[home], self, parcel.record.data(),
                 static_cast<int>(home), parcel.count * static_cast<int64_t>(sizeof(Record)));
    if (frame.views.size() == 1) continue;
    const Buffer<int64_t> view_begin = to_buffer(parcel.view_begin, self);
    fill_views_kernel<<<blocks_for(parcel.count, kThreads), kThreads, 0, shard_stream(self)>>>(
        view_begin.data(), static_cast<int>(frame.views.size()), parcel.count,
        owner.view.data() + owner.peer_begin[home]);
    KERNEL_CHECK("exchange", self, parcel.count);
  }
}

// ---- the way back

__device__ __forceinline__ void add(RecordGrad& sum, const RecordGrad& part) {
  for (int i = 0; i < 2; ++i) sum.mean2d[i] += part.mean2d[i];
  for (int i = 0; i < 3; ++i) sum.conic[i] += part.conic[i];
  sum.opacity += part.opacity;
  for (int i = 0; i < 3; ++i) sum.rgb[i] += part.rgb[i];
  sum.depth += part.depth;
  for (int i = 0; i < 2; ++i) sum.abs_mean2d[i] += part.abs_mean2d[i];
}

// A record is in a parcel once, so no two threads meet.
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const RecordGrad* part, const int64_t* record_from_parcel, int64_t count,
                   RecordGrad* grad) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  RecordGrad* to = grad + record_from_parcel[i];
  RecordGrad sum = load48(to);
  add(sum, load48(part + i));
  store48(to, sum);
}

void collect(Frame& frame, int self) {
  ShardRecords& home = frame.shards[static_cast<size_t>(self)];
  home.grad = Buffer<RecordGrad>(home.count, self);
  zero(home.grad);
  for (size_t from = 0; from < frame.owners.size(); ++from) {
    const Parcel& parcel = frame.parcels[static_cast<size_t>(self)][from];
    if (parcel.count == 0) continue;
    const TileOwner& owner = frame.owners[from];
    const RecordGrad* part = owner.record_grad.data() + owner.peer_begin[static_cast<size_t>(self)];
    Buffer<RecordGrad> pulled;
    if (shard_device(static_cast<int>(from)) != shard_device(self)) {
      pulled = Buffer<RecordGrad>(parcel.count, self);
      copy_between(pulled.data(), self, part, static_cast<int>(from),
                   parcel.count * static_cast<int64_t>(sizeof(RecordGrad)));
      part = pulled.data();
    }
    collect_kernel<<<blocks_for(parcel.count, kThreads), kThreads, 0, shard_stream(self)>>>(
        part, parcel.record_from_parcel.data(), parcel.count, home.grad.data());
    KERNEL_CHECK("collect", self, parcel.count);
  }
}

}  // namespace

void exchange_records(Frame& frame) {
  for (size_t self = 0; self < frame.owners.size(); ++self)
    count_received(frame.parcels, static_cast<int>(self), frame.owners[self]);
  if (frame.homes.size() == 1) return;
  for_each_shard("pack", [&](const Shard& shard) { pack(frame, shard.index); });
  for_each_shard("exchange", [&](const Shard& shard) { pull(frame, shard.index); }, Access::kExchange);
  for (auto& from_home : frame.parcels) {
    for (Parcel& parcel : from_home) parcel.record = Buffer<Record>();  // delivered
  }
}

void return_gradients(Frame& frame) {
  if (frame.homes.size() == 1) {
    frame.shards[0].grad = std::move(frame.owners[0].record_grad);
    frame.owners[0].record_grad = Buffer<RecordGrad>();
    return;
  }
  for_each_shard("collect", [&](const Shard& shard) { collect(frame, shard.index); }, Access::kExchange);
  for (TileOwner& owner : frame.owners) owner.record_grad = Buffer<RecordGrad>();
}

}  // namespace mgpu::splat
