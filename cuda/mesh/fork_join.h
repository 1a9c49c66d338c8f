// SPDX-License-Identifier: Apache-2.0
// fork_join.h: run work on every shard and wait for all of it (host flavour: a pool of threads).
#pragma once
#include <cstdint>
#include <functional>

#include "mesh/mesh.h"

namespace mgpu {

// What a stage may touch while it runs, for the locality check (memory/locality.h).
enum class Access {
  kLocal,     // only pages of its own shard, and exchange buffers
  kExchange,  // pages of any shard: the stage is one of the declared exchanges
};

// How GPUs are given their work (CUDA flavour).
enum class Launch {
  kInTurn,      // by the calling thread, shard after shard
  kSideBySide,  // by a thread for each GPU (mesh/lanes.h): `work` touches nothing that another shard's does
};

// Run `work` once per shard, concurrently, and return when all are done. If some throw, the exception of the
// lowest shard is thrown again as std::runtime_error, with stage and shard in its text (std::bad_alloc stays
// what it is). With MGPU_CHECK_LOCALITY=1 the shards run in turn, each with the other shards' pages
// protected.
void for_each_shard(const char* stage, const std::function<void(const Shard&)>& work,
                    Access access = Access::kLocal, Launch launch = Launch::kInTurn);

// Cut [0, count) into pieces of about `grain` items and run `work(begin, end)` on them with all threads of
// the pool. Pieces are the same whatever the number of threads. May be called from inside for_each_shard or
// parallel_for.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

// Threads that parallel_for uses, the caller's own included. Default: torch.get_num_threads() at init().
void set_num_threads(int threads);
int num_threads();

// Called on a pool thread when it starts; the backend sets it to switch off ATen's inner threading there.
void set_thread_start_hook(void (*hook)());

}  // namespace mgpu
