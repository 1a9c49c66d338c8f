// SPDX-License-Identifier: Apache-2.0
#include "memory/provider_cuda.h"
#include "memory/tally.h"
#include "memory/temporaries.h"
#include "mesh/launch.h"

namespace mgpu {

// A GPU's go to its first shard.
void add_temporaries(std::vector<ShardMemory>& shards) {
  for (const int gpu : mesh_gpus()) {
    const TemporaryCounts temporaries = temporary_counts(gpu);
    for (size_t shard = 0; shard < shards.size(); ++shard) {
      if (shard_device(static_cast<int>(shard)) != gpu) continue;
      shards[shard].allocated += temporaries.allocated;
      shards[shard].peak += temporaries.peak;
      shards[shard].reserved += temporaries.reserved;
      break;
    }
  }
}

void reset_temporaries() { reset_temporary_peak(); }

}  // namespace mgpu
