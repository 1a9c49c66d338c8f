// SPDX-License-Identifier: Apache-2.0
// allocation_host.cpp: backing kernels of the host flavour allocate with torch's CPU allocator; ours stands
// in front of it.
#include <c10/core/CPUAllocator.h>

#include "backend/allocator.h"
#include "backend/device.h"
#include "memory/pool.h"

namespace mgpu {

namespace {

// torch's CPU allocator as it was, but for threads inside an AllocationScope.
class ScopedCpuAllocator final : public c10::Allocator {
 public:
  explicit ScopedCpuAllocator(c10::Allocator* inner) : inner_(inner) { inner_deleter = inner->raw_deleter(); }
  c10::DataPtr allocate(size_t bytes) override {
    return AllocationScope::active ? pool_data(bytes, backing_device()) : inner_->allocate(bytes);
  }
  // only for raw_allocate(): a block's own DataPtr knows whom it belongs to
  c10::DeleterFnPtr raw_deleter() const override { return inner_deleter ? &raw_release : nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  static void raw_release(void* data) {
    find_block(data).base == data&& data ? free_block(data) : inner_deleter(data);
  }
  static c10::DeleterFnPtr inner_deleter;
  c10::Allocator* inner_;
};
c10::DeleterFnPtr ScopedCpuAllocator::inner_deleter = nullptr;

}  // namespace

void install_allocation_scope() {
  static const bool installed = [] {
    c10::SetCPUAllocator(new ScopedCpuAllocator(c10::GetCPUAllocator()), /*priority=*/1);
    return true;
  }();
  (void)installed;
}

}  // namespace mgpu
