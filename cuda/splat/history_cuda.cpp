// SPDX-License-Identifier: Apache-2.0
// history_cuda.cpp: a history's tables as GPUs take them.
#include <cstring>
#include <vector>

#include "splat/history.h"

namespace mgpu::splat {

PackedHistory::PackedHistory(const AdamHistory& history, std::vector<float>& packed) : history_(history) {
  const auto length = static_cast<size_t>(history.now - history.base);
  constexpr size_t kTwoFloats = sizeof(math::TwoSteps) / sizeof(float);
  packed.resize((packed.size() + 3) / 4 * 4);  // TwoSteps first, so that they stay aligned
  packed.reserve(packed.size() + (length + 1) * ((kTwoFloats + 1) * kColumns + 5));
  const auto append = [&](const void* array, size_t floats) {
    const size_t first = packed.size();
    packed.resize(first + floats);
    if (floats > 0) std::memcpy(packed.data() + first, array, floats * sizeof(float));
    return first;
  };
  for (size_t column = 0; column < kColumns; ++column)
    two_[column] = append(history.two[column], (length + 1) * kTwoFloats);
  for (size_t column = 0; column < kColumns; ++column)
    step_size_[column] = append(history.step_size[column], length);
  inv_sqrt_bc2_ = append(history.inv_sqrt_bc2, length);
  closed_from_ = append(history.closed_from, length + 1);
  beta1_power_ = append(history.beta1_power, length + 1);
  beta2_power_ = append(history.beta2_power, length + 1);
  if (history.noise_var) noise_var_ = append(history.noise_var, length + 1);
}

AdamHistory PackedHistory::in(const float* copy) const {
  AdamHistory out = history_;
  for (size_t column = 0; column < kColumns; ++column) {
    out.two[column] = reinterpret_cast<const math::TwoSteps*>(copy + two_[column]);
    out.step_size[column] = copy + step_size_[column];
  }
  out.inv_sqrt_bc2 = copy + inv_sqrt_bc2_;
  out.closed_from = copy + closed_from_;
  out.beta1_power = copy + beta1_power_;
  out.beta2_power = copy + beta2_power_;
  if (out.noise_var) out.noise_var = copy + noise_var_;
  return out;
}

}  // namespace mgpu::splat
