// SPDX-License-Identifier: Apache-2.0
#include "mesh/gate.h"

#include <shared_mutex>

namespace mgpu {

namespace {

std::shared_mutex& gate() {
  static std::shared_mutex* instance = new std::shared_mutex;  // threads may outlive static destruction
  return *instance;
}

thread_local int depth = 0;

}  // namespace

LaunchScope::LaunchScope() {
  if (depth++ == 0) gate().lock_shared();
}

LaunchScope::~LaunchScope() {
  if (--depth == 0) gate().unlock_shared();
}

// Inside a LaunchScope of its own the thread would wait for itself: it stays in, and the pages move all the
// same, because a thread that is moving pages launches nothing.
StillScope::StillScope() : shut_(depth == 0) {
  if (!shut_) return;
  gate().lock();
  depth = 1;  // launches from inside pass
}

StillScope::~StillScope() {
  if (!shut_) return;
  depth = 0;
  gate().unlock();
}

}  // namespace mgpu
