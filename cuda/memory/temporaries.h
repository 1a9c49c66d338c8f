// SPDX-License-Identifier: Apache-2.0
// temporaries.h: what the CUDA flavour's pools of temporaries hold (buffer_cuda.cpp), for memory_stats and
// empty_cache.
#pragma once
#include <cstdint>

namespace mgpu {

struct TemporaryCounts {
  int64_t allocated = 0;  // bytes in Buffers
  int64_t peak = 0;       // largest `allocated` since reset_temporary_peak
  int64_t reserved = 0;   // bytes that the pool holds, in use or not
};

// Of one GPU, which may carry several shards.
TemporaryCounts temporary_counts(int device);
void reset_temporary_peak();
// The host waits for the shards; then what no Buffer uses goes back to the driver.
void trim_temporaries();

}  // namespace mgpu
