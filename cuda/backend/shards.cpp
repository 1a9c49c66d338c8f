// SPDX-License-Identifier: Apache-2.0
#include "backend/shards.h"

#include "backend/alias.h"
#include "memory/pool.h"

namespace mgpu {

c10::Device part_device() {
  return part_gpu < 0 ? backing_device() : c10::Device(kBackingType, static_cast<c10::DeviceIndex>(part_gpu));
}

bool is_large(const at::Tensor& tensor) {
  return is_mgpu(tensor) &&
         tensor.numel() * static_cast<int64_t>(tensor.dtype().itemsize()) >= shard_threshold();
}

bool any_large(const torch::jit::Stack& stack, size_t arguments) {
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) {
      if (is_large(value.toTensor())) return true;
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& entry : value.toListRef())
        if (entry.isTensor() && is_large(entry.toTensor())) return true;
    }
  }
  return false;
}

}  // namespace mgpu
