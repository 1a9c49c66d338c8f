// SPDX-License-Identifier: Apache-2.0
// tally.h: what stages' temporaries add to the counts of the shards. On the host they are blocks of the pool,
// and counted there; on GPUs they have pools of their own (temporaries.h).
#pragma once
#include <vector>

#include "memory/pool.h"

namespace mgpu {

void add_temporaries(std::vector<ShardMemory>& shards);
void reset_temporaries();

}  // namespace mgpu
