// SPDX-License-Identifier: Apache-2.0
// exchange.h: stages 4 and 8: records travel from their homes to the owners of the tiles they touch, and
// their gradients back; one contiguous copy per pair of shards each way (transport.h). But for the loss's
// halo (pixels.h), and for images that are asked for, the only place where shards meet each other's data.
#pragma once
#include <vector>

#include "splat/frame.h"

namespace mgpu::splat {

// Stages "pack" (at home) and "exchange" (at the owner), with the parcels' counts known: fills
// frame.parcels[*][*].record_from_parcel and frame.owners[*].{record, view, peer_begin}. Received records are
// in the order of their homes, so within a view in the order of their rows. CUDA: on a mesh of one shard
// nothing moves, the owner reads the home's records.
void exchange_records(Frame& frame);

// Fills frame.shards[*].grad from frame.owners[*].record_grad, which is freed: at home, stage "collect" adds
// what the owners have, in their order.
void return_gradients(Frame& frame);

// ---- each flavour's own

namespace flavour {

// At home: the records of each parcel into target[owner], in record order; fills record_from_parcel.
void pack(Frame& frame, int home, const std::vector<Record*>& target);
// At the owner: fills its `view`.
void fill_views(Frame& frame, int owner);
// At home: adds part[owner] to `grad`, parcel by parcel.
void collect(Frame& frame, int home, const std::vector<const RecordGrad*>& part);

}  // namespace flavour

// Bytes that crossed from one shard to another with the records (the way back takes as many).
int64_t exchanged_bytes(const Frame& frame);

}  // namespace mgpu::splat
