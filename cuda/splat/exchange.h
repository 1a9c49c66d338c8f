// SPDX-License-Identifier: Apache-2.0
// exchange.h: stages 4 and 8: records travel from their homes to the owners of the tiles they touch, and
// their gradients back; one contiguous copy per pair of shards each way. The only place where shards read
// each other's data.
#pragma once
#include "splat/frame.h"

namespace mgpu::splat {

// Stage "pack" (at home) and stage "exchange" (at the owner): fills frame.parcels and
// frame.owners[*].{record, view, peer_begin}. Received records are in the order of their homes, so within a
// view in the order of their rows.
void exchange_records(Frame& frame);

// Fills owner.peer_begin from the parcels' counts. Throws std::runtime_error if record ids would not fit in
// 32 bits.
void count_received(const std::vector<std::vector<Parcel>>& parcels, int self, TileOwner& owner);

// Stage "return" (at the owner) sums the gradient slots of each record in list order and posts them; stage
// "collect" (at home) adds what the owners posted, in their order, into frame.shards[*].grad. Frees the
// slots.
void return_gradients(Frame& frame);

// Bytes that crossed from one shard to another with the records (the way back takes as many).
int64_t exchanged_bytes(const Frame& frame);

}  // namespace mgpu::splat
