// SPDX-License-Identifier: Apache-2.0
// hooks.cpp: what torch's Python layer and context ask a device for (PrivateUse1HooksInterface).
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>

#include <algorithm>

#include "backend/allocator.h"
#include "backend/device.h"
#include "backend/flavour.h"
#include "backend/generator.h"
#include "memory/pool.h"

namespace mgpu {

namespace {

struct MgpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*device*/) const override { return 0; }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override { return new_generator(); }

  c10::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(find_block(data).base != nullptr, "Address ", data, " is not memory of the mgpu device.");
    return mgpu_device();
  }

  // Pinned memory is CUDA's where there is a CUDA device, and ordinary memory elsewhere.
  bool isPinnedPtr(const void* data) const override {
    return at::globalContext().hasCUDA() && at::detail::getCUDAHooks().isPinnedPtr(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    if (at::globalContext().hasCUDA()) return at::detail::getCUDAHooks().getPinnedMemoryAllocator();
    return c10::GetCPUAllocator();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new MgpuHooks);
  return true;
}();

}  // namespace

}  // namespace mgpu
