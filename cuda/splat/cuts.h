// SPDX-License-Identifier: Apache-2.0
// cuts.h: cut sorted lists of several GPUs where their union would be cut, without merging them. CUDA
// flavour.
#pragma once
#include <cstdint>
#include <vector>

#include "memory/buffer.h"

namespace mgpu::splat {

// For each of `ranks` (ascending), how many of the first `rank` elements of the union are in each list:
// [ranks, lists], in the exchange. The lists are sorted, one a shard; equal keys count by list, then by
// place. Stage "cut lists".
Buffer<int64_t> cut_lists(const std::vector<Buffer<uint64_t>>& lists, const std::vector<int64_t>& ranks);

}  // namespace mgpu::splat
