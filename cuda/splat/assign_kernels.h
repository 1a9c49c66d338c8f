// SPDX-License-Identifier: Apache-2.0
// assign_kernels.h: what stage "project" does on GPUs for stage "assign", on several shards: counts what its
// records meet, and brings that along with its read-back.
#pragma once
#include <memory>

#include "memory/buffer.h"
#include "memory/transfer.h"
#include "splat/frame.h"
#include "splat/look_back.h"

namespace mgpu::splat {

// A curve in memory of a shard; cached.
std::shared_ptr<const DeviceCurve> device_curve(const View& view, const TileCurve& curve, int shard);

// Zeros on the host, for shards without rows.
void start_tile_counts(Frame& frame);

// Counts the home's first `room` measured records, of which there are as many as `records` [views] say, into
// `counts`, and asks for that.
void count_tiles(const Frame& frame, int home, const SumState* records, int64_t room,
                 Buffer<uint64_t>& counts);
void ask_tile_counts(Frame& frame, int home, const Buffer<uint64_t>& counts, ReadBack& read_back);

}  // namespace mgpu::splat
