// SPDX-License-Identifier: Apache-2.0
// pair_counts.h: how much a view gives the blend stages to do, counted as plainly as possible: for the floors
// that benchmarks/fast_step.py prints. Not part of a training step.
#pragma once
#include <cstdint>

#include "splat/frame.h"

namespace mgpu::splat {

constexpr int kPatchWidth = 8, kPatchHeight = 4;  // pixels of a warp

struct PairCounts {
  int64_t lit = 0;      // pairs of a pixel and a record that contributes to it
  int64_t patches = 0;  // pairs of an 8 x 4 patch of pixels and a record that contributes to one of them
};

// Of a frame after stage "blend" and before its way back. Waits for the shards.
PairCounts count_pairs(const Frame& frame);

}  // namespace mgpu::splat
