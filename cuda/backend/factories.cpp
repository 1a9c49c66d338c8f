// SPDX-License-Identifier: Apache-2.0
// factories.cpp: empty tensors in aggregate memory; every other factory (zeros, full, rand, ...) is made of
// these.
#include "backend/operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/resize_native.h>

#include "backend/allocator.h"
#include "backend/device.h"

namespace mgpu::ops {

namespace {

void check_options(std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                   std::optional<bool> pin_memory) {
  TORCH_CHECK(!device || device->index() <= 0, "There is one mgpu device, mgpu:0, and no ", *device,
              "; its shards are in torch.mgpu.mesh().");
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided,
              "Device mgpu has strided tensors only, and got layout ", c10::layout_or_default(layout),
              ". Make the tensor on the CPU, or dense.");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned.");
}

}  // namespace

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                 std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, device, pin_memory);
  return at::detail::empty_generic(size, mgpu_allocator(), c10::DispatchKeySet(kDeviceKey),
                                   c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  check_options(layout, device, pin_memory);
  return at::detail::empty_strided_generic(size, stride, mgpu_allocator(), c10::DispatchKeySet(kDeviceKey),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<c10::MemoryFormat> memory_format) {
  const c10::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size);
  // torch's own resize_ would move the contents with the CPU's memcpy, which cannot read a GPU's memory: so
  // the storage is grown before, by the backend's way (hooks.cpp), and torch finds it large enough
  const size_t needed = at::detail::computeStorageNbytesContiguous(
      sizes, self.dtype().itemsize(), static_cast<size_t>(self.storage_offset()));
  if (self.sizes() != sizes && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return at::native::resize_(self, sizes, memory_format);
}

}  // namespace mgpu::ops
