// SPDX-License-Identifier: Apache-2.0
// allocator.h: torch's view of the pool (memory/pool.h).
#pragma once
#include <c10/core/Allocator.h>

namespace mgpu {

// Memory labelled as device `mgpu`: for tensors.
c10::Allocator* mgpu_allocator();
// The same memory, labelled as the backing device: for a backing kernel that resizes an alias.
c10::Allocator* backing_allocator();

// Let tensors that a backing kernel makes inside an AllocationScope come from the pool too, so that the
// results of the fallback are aggregate memory: counted, placed, and reused. Called once, by init().
void install_allocation_scope();

// While alive, this thread's new backing tensors come from the pool.
class AllocationScope {
 public:
  AllocationScope() : outer_(active) { active = true; }
  ~AllocationScope() { active = outer_; }
  AllocationScope(const AllocationScope&) = delete;
  AllocationScope& operator=(const AllocationScope&) = delete;

  static thread_local bool active;

 private:
  bool outer_;
};

}  // namespace mgpu
