// SPDX-License-Identifier: Apache-2.0
// bindings_exposure.h: an exposure's map as a tensor.
#pragma once
#include <ATen/core/Tensor.h>

namespace mgpu::splat {

// Data of a contiguous float32 [3, 4] on mgpu; `name` is for messages.
float* map_of(const at::Tensor& map, const char* name);

}  // namespace mgpu::splat
