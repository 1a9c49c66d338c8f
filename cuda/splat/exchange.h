// SPDX-License-Identifier: Apache-2.0
// exchange.h: stages 4 and 8: records travel from their homes to the owners of the tiles they touch, and
// their gradients back; one contiguous copy per pair of shards each way (transport.h). But for the loss's
// halo (pixels.h), and for images that are asked for, the only place where shards meet each other's data.
#pragma once
#include <vector>

#include "splat/frame.h"

namespace mgpu::splat {

// Stages "pack" (at home) and "exchange" (at the owner), with the parcels' counts known: fills
// frame.owners[*].{record, view, peer_begin}, on the host frame.parcels[*][*].record_from_parcel, and on GPUs
// frame.owners[*].tile_mask, which is 0 (the owner finds out) of large records, and of those that are copied:
// a link that needs a copy takes longer for the mask than the owner does. Received records are in the order
// of their homes, so within a view in the order of their rows. CUDA: on a mesh of one shard nothing moves,
// the owner reads the home's records; and of a single view there is no `view`.
void exchange_records(Frame& frame);

// Fills frame.shards[*].grad from frame.owners[*].record_grad, which is freed: at home, stage "collect" adds
// what the owners have, in their order.
void return_gradients(Frame& frame);

// ---- each flavour's own

namespace flavour {

// At home: the records of each parcel into target[owner], in record order. Keeps what collect() needs to find
// them again: on the host record_from_parcel, CUDA ShardRecords::parcel_words.
void pack(Frame& frame, int home, const std::vector<Record*>& target);
// At the owner: fills its `view`.
void fill_views(Frame& frame, int owner);
// At home: `grad` is the sum of part[owner] over the owners, in their order.
void collect(Frame& frame, int home, const std::vector<const RecordGrad*>& part);

}  // namespace flavour

// For tests: which of the home's records are in its parcel for the owner, in order. After the exchange.
std::vector<int64_t> records_of_parcel(const Frame& frame, size_t home, size_t owner);

// Bytes that cross with a record from its home to another shard: it, and on GPUs that reach each other its
// mask of the owner's tiles and, of several views, which one. The gradient takes sizeof(RecordGrad) back.
int64_t bytes_of_record(const Frame& frame, int home, int owner);

// Bytes that crossed from one shard to another with the records.
int64_t exchanged_bytes(const Frame& frame);

}  // namespace mgpu::splat
