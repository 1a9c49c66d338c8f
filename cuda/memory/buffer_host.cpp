// SPDX-License-Identifier: Apache-2.0
// buffer_host.cpp: temporaries are blocks of the pool, so that the locality check sees them.
#include "memory/buffer.h"

#include "memory/pool.h"
#include "memory/temporaries.h"

namespace mgpu {

void* allocate_temporary(int64_t bytes, int owner) { return allocate_block(bytes, owner); }
void free_temporary(void* data, int64_t /*bytes*/, int /*owner*/) noexcept { free_block(data); }

int64_t temporaries_reserved(int /*shard*/) { return 0; }
void trim_temporaries() {}
void set_pressure_hook(bool (* /*release*/)()) {}

}  // namespace mgpu
