// SPDX-License-Identifier: Apache-2.0
// device.h: the aggregate device as torch names it, and the device that its kernels run on. The one place
// that knows the flavour: the host flavour hands aliases to the CPU kernels, the CUDA flavour to CUDA's.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>

namespace mgpu {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKey kDeviceKey = c10::DispatchKey::PrivateUse1;

// The backing device: where an operator without a kernel of its own runs, on the same memory.
#if MGPU_CUDA
constexpr c10::DeviceType kBackingType = c10::DeviceType::CUDA;
constexpr c10::DispatchKey kBackingKey = c10::DispatchKey::CUDA;
// Keys of aliases in lists: CUDA's kernels on lists count a version of what they write, and only tensors with
// keys of autograd have one; the kernels run below autograd all the same.
inline c10::DispatchKeySet backing_list_keys() {
  return c10::DispatchKeySet(
      {kBackingKey, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCUDA});
}
inline int lead_gpu = 0;  // of the lead shard; set by start_flavour()
inline c10::Device backing_device() {
  return c10::Device(kBackingType, static_cast<c10::DeviceIndex>(lead_gpu));
}
#else
constexpr c10::DeviceType kBackingType = c10::DeviceType::CPU;
constexpr c10::DispatchKey kBackingKey = c10::DispatchKey::CPU;
inline c10::DispatchKeySet backing_list_keys() { return c10::DispatchKeySet(kBackingKey); }
inline c10::Device backing_device() { return c10::Device(kBackingType); }
#endif

inline c10::Device mgpu_device() { return c10::Device(kDeviceType, 0); }

}  // namespace mgpu
