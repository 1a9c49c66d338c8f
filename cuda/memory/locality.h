// SPDX-License-Identifier: Apache-2.0
// locality.h: the check that local means local (host flavour, MGPU_CHECK_LOCALITY=1).
//
// While a shard runs a local stage, every hardware page that is another shard's alone is protected:
//   - a Buffer with an owner: all of it;
//   - a tensor whose rows were declared with set_row_split: the rows of the other shards;
//   - any other tensor of at least the sharding threshold: the other shards' equal chunks of its bytes.
// A hardware page that two shards share is open to both, and so is a tensor of less than one such page per
// shard.
#pragma once
#include <cstdint>

#include "mesh/fork_join.h"
#include "mesh/mesh.h"

namespace mgpu {

// True when MGPU_CHECK_LOCALITY=1 was set at init().
bool locality_checked();
// Called by init(), before the first allocation.
void set_locality_checked(bool checked);

// Say which rows of the column at `base` (rows x row_bytes) are whose: row_from_shard[s] for each shard s of
// the mesh. Holds until the memory is freed or declared anew; a no-op unless locality_checked(). `what` names
// it in messages.
void set_row_split(const void* base, int64_t rows, int64_t row_bytes, const RowRange* row_from_shard,
                   const char* what = nullptr);

// While alive, the pages of all other shards are protected; a touch ends the process with a message (exit
// code 86). Does nothing unless locality_checked(), or when `access` is kExchange. Scopes of several threads
// exclude each other; a thread outside any stage that touches a protected page waits until the stage is over.
class LocalityScope {
 public:
  LocalityScope(const Shard& shard, const char* stage, Access access);
  ~LocalityScope();
  LocalityScope(const LocalityScope&) = delete;
  LocalityScope& operator=(const LocalityScope&) = delete;

 private:
  bool active_;
};

constexpr int kLocalityExitCode = 86;

// ---- called by the pool and by the threads of fork_join

// A block is freed, perhaps inside a stage: make it accessible again.
void unprotect_block(void* base, int64_t bytes) noexcept;
// This thread runs pieces of stages (parallel_for), so the check holds for it too.
void mark_stage_thread();

}  // namespace mgpu
