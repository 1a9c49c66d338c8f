// SPDX-License-Identifier: Apache-2.0
// allocator.h: torch's view of the pool (memory/pool.h).
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include "backend/flavour.h"

namespace mgpu {

// Memory labelled as device `mgpu`: for tensors.
c10::Allocator* mgpu_allocator();
// The same memory, labelled as the backing device: for a backing kernel that resizes an alias.
c10::Allocator* backing_allocator();

// Memory of the pool with a device's label; torch.OutOfMemoryError if there is none.
c10::DataPtr pool_data(size_t bytes, c10::Device device);

// Give an mgpu storage new memory of `bytes`, with what fits of its contents.
void resize_storage(const c10::Storage& storage, size_t bytes);

// Let tensors that a backing kernel makes inside an AllocationScope come from the pool too, so that the
// results of the fallback are aggregate memory: counted, placed, and reused. Called once, by init(). Nothing
// to do in the CUDA flavour, which goes through torch's own allocator (flavour_cuda.cpp).
void install_allocation_scope();

// While alive, this thread's new backing tensors come from the pool, where the flavour needs that.
class AllocationScope {
 public:
  AllocationScope() : outer_(active) {
    if (outer_) return;
    enter_allocation_scope();
    active = true;
  }
  ~AllocationScope() {
    if (outer_) return;
    active = false;
    leave_allocation_scope();
  }
  AllocationScope(const AllocationScope&) = delete;
  AllocationScope& operator=(const AllocationScope&) = delete;

  static thread_local bool active;

 private:
  bool outer_;
};

}  // namespace mgpu
