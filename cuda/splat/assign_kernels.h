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

// Words of a home in frame.run_table.
int64_t run_table_words(const Frame& frame);

// Adds what the home's first `room` measured records meet, of which there are as many as `records` [views]
// say, to a row of the table on the device.
void count_tiles(const Frame& frame, int home, const SumState* records, int64_t room, SumState* counts);

}  // namespace mgpu::splat
