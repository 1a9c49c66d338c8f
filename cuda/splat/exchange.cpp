// SPDX-License-Identifier: Apache-2.0
// exchange.cpp: who sends what to whom, for both flavours. Where an owner's memory can be reached, its
// records are written there at once, and its gradients read there.
#include "splat/exchange.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

// Fills owner.peer_begin from the parcels' counts. Throws std::runtime_error if record ids would not fit in
// 32 bits.
void count_received(const std::vector<std::vector<Parcel>>& parcels, int self, TileOwner& owner) {
  owner.peer_begin.assign(1, 0);
  for (const auto& from_home : parcels)
    owner.peer_begin.push_back(owner.peer_begin.back() + from_home[static_cast<size_t>(self)].count);
  if (owner.received() > std::numeric_limits<int32_t>::max()) {
    throw std::runtime_error(
        "one shard received " + std::to_string(owner.received()) +
        " visible Gaussians, more than 2^31 - 1; add shards to MGPU_DEVICES or render fewer "
        "cameras in one call");
  }
}

// What owners get beside the records.
#if MGPU_CUDA
constexpr bool kSendsTiles = true;
bool needs_views(const Frame& frame) { return frame.views.size() > 1; }
#else
constexpr bool kSendsTiles = false;
bool needs_views(const Frame&) { return true; }
#endif

// Calls visit(home, owner, parcel) for every parcel that is not empty, in order.
template <typename Visit>
void for_each_parcel(Frame& frame, const Visit& visit) {
  const int shards = static_cast<int>(frame.homes.size());
  for (int home = 0; home < shards; ++home) {
    for (int owner = 0; owner < shards; ++owner) {
      Parcel& parcel = frame.parcels[static_cast<size_t>(home)][static_cast<size_t>(owner)];
      if (parcel.count > 0) visit(home, owner, parcel);
    }
  }
}

}  // namespace

void exchange_records(Frame& frame) {
  const size_t shards = frame.homes.size();
  for (size_t self = 0; self < shards; ++self)
    count_received(frame.parcels, static_cast<int>(self), frame.owners[self]);
#if MGPU_CUDA
  if (shards == 1) return;
#endif
  std::vector<Shipment> shipments;
  bool crosses = false;  // whether homes write to other shards
  std::vector<std::vector<Record*>> target(shards, std::vector<Record*>(shards, nullptr));
  for (size_t self = 0; self < shards; ++self) {
    TileOwner& owner = frame.owners[self];
    owner.record = Buffer<Record>(owner.received(), static_cast<int>(self));
    if (needs_views(frame)) owner.view = Buffer<int32_t>(owner.received(), static_cast<int>(self));
    if (kSendsTiles) {
      owner.tile_mask = Buffer<uint32_t>(owner.received(), static_cast<int>(self));
      bool all_packed = true;  // straight into it
      for (size_t home = 0; home < shards; ++home)
        all_packed &= transport().reaches(static_cast<int>(home), static_cast<int>(self));
      if (!all_packed) zero(owner.tile_mask);
    }
  }
  for_each_parcel(frame, [&](int home, int owner, Parcel& parcel) {
    TileOwner& to = frame.owners[static_cast<size_t>(owner)];
    Record* const place = to.record.data() + to.peer_begin[static_cast<size_t>(home)];
    Record*& packed = target[static_cast<size_t>(home)][static_cast<size_t>(owner)];
    packed = place;
    if (transport().reaches(home, owner)) {
      crosses |= home != owner;
      return;
    }
    parcel.record = Buffer<Record>(parcel.count, home);
    packed = parcel.record.data();
    shipments.push_back({home, owner, packed, place, parcel.count * static_cast<int64_t>(sizeof(Record))});
  });
  for_each_shard(
      "pack",
      [&](const Shard& shard) {
        flavour::pack(frame, shard.index, target[static_cast<size_t>(shard.index)]);
      },
      crosses ? Access::kExchange : Access::kLocal, Launch::kSideBySide);
  transport().ship("exchange", shipments);
  for_each_shard("exchange", [&](const Shard& shard) { flavour::fill_views(frame, shard.index); });
  for_each_parcel(frame, [](int, int, Parcel& parcel) { parcel.record = Buffer<Record>(); });  // delivered
}

void return_gradients(Frame& frame) {
  const size_t shards = frame.homes.size();
#if MGPU_CUDA
  if (shards == 1) {
    frame.shards[0].grad = std::move(frame.owners[0].record_grad);
    frame.owners[0].record_grad = Buffer<RecordGrad>();
    return;
  }
#endif
  std::vector<Shipment> shipments;
  bool crosses = false;  // whether homes read from other shards
  std::vector<std::vector<const RecordGrad*>> part(shards, std::vector<const RecordGrad*>(shards, nullptr));
  for_each_parcel(frame, [&](int home, int owner, Parcel& parcel) {
    const TileOwner& from = frame.owners[static_cast<size_t>(owner)];
    const RecordGrad* const summed = from.record_grad.data() + from.peer_begin[static_cast<size_t>(home)];
    const RecordGrad*& here = part[static_cast<size_t>(home)][static_cast<size_t>(owner)];
    here = summed;
    if (transport().reaches(owner, home)) {
      crosses |= home != owner;
      return;
    }
    parcel.grad = Buffer<RecordGrad>(parcel.count, home);
    here = parcel.grad.data();
    shipments.push_back(
        {owner, home, summed, parcel.grad.data(), parcel.count * static_cast<int64_t>(sizeof(RecordGrad))});
  });
  transport().ship("return", shipments);
  for_each_shard(
      "collect",
      [&](const Shard& shard) {
        flavour::collect(frame, shard.index, part[static_cast<size_t>(shard.index)]);
      },
      crosses ? Access::kExchange : Access::kLocal, Launch::kSideBySide);
  for_each_parcel(frame, [](int, int, Parcel& parcel) { parcel.grad = Buffer<RecordGrad>(); });
  for (TileOwner& owner : frame.owners) owner.record_grad = Buffer<RecordGrad>();
}

std::vector<int64_t> records_of_parcel(const Frame& frame, size_t home, size_t owner) {
#if MGPU_CUDA
  std::vector<RangeMask> masks(static_cast<size_t>(frame.shards[home].count), 1);
  if (frame.homes.size() > 1) masks = to_vector(frame.shards[home].range_mask);
  size_t range = 0;
  while (frame.ranges.owner[range] != static_cast<int>(owner)) ++range;
  std::vector<int64_t> records;
  for (size_t i = 0; i < masks.size(); ++i)
    if (masks[i] >> range & 1u) records.push_back(static_cast<int64_t>(i));
  return records;
#else
  return to_vector(frame.parcels[home][owner].record_from_parcel);
#endif
}

int64_t bytes_of_record(const Frame& frame, int home, int owner) {
  int64_t bytes = sizeof(Record);
  if (kSendsTiles && transport().reaches(home, owner)) {
    bytes += sizeof(uint32_t);
    if (needs_views(frame)) bytes += sizeof(int32_t);
  }
  return bytes;
}

int64_t exchanged_bytes(const Frame& frame) {
  int64_t bytes = 0;
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    const std::vector<Parcel>& parcels = frame.parcels[home];  // none, of a frame that was only projected
    for (size_t owner = 0; owner < parcels.size(); ++owner) {
      if (home == owner) continue;
      bytes += parcels[owner].count * bytes_of_record(frame, static_cast<int>(home), static_cast<int>(owner));
    }
  }
  return bytes;
}

}  // namespace mgpu::splat
