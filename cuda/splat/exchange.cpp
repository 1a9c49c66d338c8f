// SPDX-License-Identifier: Apache-2.0
// exchange.cpp: what both flavours count of an exchange.
#include "splat/exchange.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace mgpu::splat {

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

int64_t exchanged_bytes(const Frame& frame) {
  int64_t records = 0;
  for (size_t home = 0; home < frame.parcels.size(); ++home) {
    for (size_t owner = 0; owner < frame.parcels[home].size(); ++owner) {
      if (home != owner) records += frame.parcels[home][owner].count;
    }
  }
  return records * static_cast<int64_t>(sizeof(Record));
}

}  // namespace mgpu::splat
