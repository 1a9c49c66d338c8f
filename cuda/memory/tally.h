// SPDX-License-Identifier: Apache-2.0
// tally.h: bytes in use by shard, and the most there have been: blocks of the pool and temporaries of stages
// alike. Also how many pages have moved. Lock-free; any thread.
#pragma once
#include <cstdint>

namespace mgpu {

struct Tally {
  int64_t allocated = 0;  // bytes
  int64_t peak = 0;       // largest `allocated` since reset_tally_peaks()
};

// More bytes (or fewer, if negative) are in use on a shard, or parked in host memory (kHostPage).
void tally(int place, int64_t bytes) noexcept;

Tally tally_of(int place);
Tally tally_of_all();  // shards and host memory together
void reset_tally_peaks();

// Pages have changed their place: between shards, or to and from host memory.
void tally_moved(int64_t pages) noexcept;
int64_t pages_moved();  // since the start or reset_pages_moved()
void reset_pages_moved();

}  // namespace mgpu
