// SPDX-License-Identifier: Apache-2.0
// guard.h: what torch's C++ core asks of a device guard (DeviceGuardImplInterface) and both flavours answer
// alike: there is one device.
#pragma once
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "backend/device.h"

namespace mgpu {

inline c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, mgpu_device(), id); }

struct OneDeviceGuard : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return mgpu_device(); }
  c10::Device getDevice() const override { return mgpu_device(); }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return c10::DeviceCapability();
  }
};

// Both events of an elapsed time must have been recorded.
inline void check_recorded(const void* first, const void* second) {
  TORCH_CHECK(first && second,
              "Both mgpu events must be recorded before the time between them is asked for.");
}

}  // namespace mgpu
