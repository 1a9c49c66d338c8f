// SPDX-License-Identifier: Apache-2.0
#include "backend/allocator.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "backend/device.h"
#include "memory/pool.h"
#include "memory/provider.h"

namespace mgpu {

thread_local bool AllocationScope::active = false;

namespace {

void release(void* data) { free_block(data); }

}  // namespace

// The pool's exceptions as torch's own: torch.OutOfMemoryError, RuntimeError.
c10::DataPtr pool_data(size_t bytes, c10::Device device) {
  try {
    void* data = allocate_tensor(static_cast<int64_t>(bytes));
    return {data, data, &release, device};  // context == data: raw_allocate() asserts it
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const std::exception& error) {
    TORCH_CHECK(false, error.what());
  }
}

namespace {

class MgpuAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return pool_data(bytes, mgpu_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { copy_bytes(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    note_use(data.get(), stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    const MemoryCounts counts = memory_counts();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = counts.allocated;
    stats.allocated_bytes[0].peak = counts.peak;
    stats.reserved_bytes[0].current = counts.reserved;
    stats.active_bytes[0].current = counts.allocated;
    stats.active_bytes[0].peak = counts.peak;
    stats.allocation[0].current = counts.live;
    stats.allocation[0].allocated = counts.allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override { reset_peak(); }
};

class BackingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return pool_data(bytes, backing_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { copy_bytes(to, from, bytes); }
};

}  // namespace

c10::Allocator* mgpu_allocator() {
  static MgpuAllocator* instance =
      new MgpuAllocator;  // never destroyed: tensors may outlive static destruction
  return instance;
}

c10::Allocator* backing_allocator() {
  static BackingAllocator* instance = new BackingAllocator;
  return instance;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr data = mgpu_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) copy_bytes(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, mgpu_allocator())

}  // namespace mgpu
