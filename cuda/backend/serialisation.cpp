// SPDX-License-Identifier: Apache-2.0
// serialisation.cpp: tensors put on a given storage: torch.load, pickle and deepcopy are made of these.
#include "backend/operators.h"

#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>

namespace mgpu::ops {

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

}  // namespace mgpu::ops
