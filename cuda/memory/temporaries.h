// SPDX-License-Identifier: Apache-2.0
// temporaries.h: what stages' temporaries hold beyond what is in use (buffer.h): for memory_stats,
// empty_cache and whoever is short of memory.
#pragma once
#include <cstdint>

namespace mgpu {

// Bytes of GPU memory that the heaps of a shard's GPU hold, in use or not; 0 for all but the first shard of a
// GPU. On the host temporaries are blocks of the pool, and counted there.
int64_t temporaries_reserved(int shard);

// The host waits for the GPUs; then what no Buffer uses goes back to the driver.
void trim_temporaries();

// Called when a temporary finds no memory: shall make others give back what they keep. True: try again.
void set_pressure_hook(bool (*release)());

}  // namespace mgpu
