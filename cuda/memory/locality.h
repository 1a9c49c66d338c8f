// SPDX-License-Identifier: Apache-2.0
// locality.h: the check that local means local (host flavour, MGPU_CHECK_LOCALITY=1).
#pragma once
#include "mesh/fork_join.h"
#include "mesh/mesh.h"

namespace mgpu {

// True when MGPU_CHECK_LOCALITY=1 was set at init().
bool locality_checked();

// While alive, the pages of all other shards are protected; a touch ends the process with a message (exit code 86).
// Does nothing unless locality_checked(), or when `access` is kExchange.
class LocalityScope {
 public:
  LocalityScope(const Shard& shard, const char* stage, Access access);
  ~LocalityScope();
  LocalityScope(const LocalityScope&) = delete;
  LocalityScope& operator=(const LocalityScope&) = delete;

 private:
  bool active_;
};

}  // namespace mgpu
