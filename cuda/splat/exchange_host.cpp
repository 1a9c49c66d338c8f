// SPDX-License-Identifier: Apache-2.0
#include "splat/exchange.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kGrain = 4096;  // records a piece

// Calls visit(owner) for every owner that has a tile of the record.
template <typename Visit>
void for_each_owner(const Frame& frame, const ShardRecords& in, int64_t r, const Visit& visit) {
  if (frame.owners.size() == 1) {
    visit(0);
    return;
  }
  for (uint64_t left = in.range_mask[r]; left; left &= left - 1)
    visit(frame.ranges.owner[static_cast<size_t>(std::countr_zero(left))]);
}

}  // namespace

namespace flavour {

void pack(Frame& frame, int home, const std::vector<Record*>& target) {
  ShardRecords& in = frame.shards[home];
  const int64_t shards = static_cast<int64_t>(frame.owners.size());
  const int64_t pieces = (in.count + kGrain - 1) / kGrain;
  std::vector<int64_t> position(static_cast<size_t>(pieces * shards),
                                0);  // [piece, owner] counts, then offsets
  parallel_for(in.count, kGrain, [&](int64_t begin, int64_t end) {
    int64_t* counts = &position[begin / kGrain * shards];
    for (int64_t r = begin; r < end; ++r) for_each_owner(frame, in, r, [&](int owner) { ++counts[owner]; });
  });
  for (int64_t owner = 0; owner < shards; ++owner) {
    Parcel& parcel = frame.parcels[home][owner];
    int64_t sum = 0;
    for (int64_t piece = 0; piece < pieces; ++piece)
      sum += std::exchange(position[piece * shards + owner], sum);
    parcel.record_from_parcel = Buffer<int64_t>(parcel.count, home);
  }
  parallel_for(in.count, kGrain, [&](int64_t begin, int64_t end) {
    int64_t* next = &position[begin / kGrain * shards];
    for (int64_t r = begin; r < end; ++r) {
      for_each_owner(frame, in, r, [&](int owner) {
        const int64_t slot = next[owner]++;
        target[owner][slot] = in.record[r];
        frame.parcels[home][owner].record_from_parcel[slot] = r;
      });
    }
  });
  in.range_mask = Buffer<RangeMask>();
}

void fill_views(Frame& frame, int self) {
  TileOwner& owner = frame.owners[self];
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    const Parcel& parcel = frame.parcels[home][self];
    int32_t* const view = owner.view.data() + owner.peer_begin[home];
    for (size_t v = 0; v + 1 < parcel.view_begin.size(); ++v)
      std::fill(view + parcel.view_begin[v], view + parcel.view_begin[v + 1], static_cast<int32_t>(v));
  }
}

void collect(Frame& frame, int self, const std::vector<const RecordGrad*>& part) {
  ShardRecords& home = frame.shards[self];
  home.grad = Buffer<RecordGrad>(home.count, self);
  std::fill(home.grad.begin(), home.grad.end(), RecordGrad{});
  for (size_t owner = 0; owner < part.size(); ++owner) {
    const Parcel& parcel = frame.parcels[self][owner];
    parallel_for(parcel.count, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) add_to(home.grad[parcel.record_from_parcel[i]], part[owner][i]);
    });
  }
}

}  // namespace flavour

}  // namespace mgpu::splat
