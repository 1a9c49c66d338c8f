// SPDX-License-Identifier: Apache-2.0
// history_cuda.cpp: a history's tables on a GPU.
#include <cstring>
#include <utility>
#include <vector>

#include "memory/transfer.h"
#include "splat/history.h"

namespace mgpu::splat {

AdamHistory upload_history(const AdamHistory& history, std::vector<float>& packed, Buffer<float>& tables,
                           int shard) {
  AdamHistory out = history;
  const int64_t length = history.now - history.base;
  packed.resize((packed.size() + 3) / 4 * 4);
  packed.reserve(packed.size() + static_cast<size_t>((length + 1) * (5 * kColumns + 5)));
  std::vector<std::pair<const float**, size_t>> places;  // where each array starts
  const auto pack = [&](const float*& array, int64_t floats) {
    places.emplace_back(&array, packed.size());
    packed.insert(packed.end(), array, array + floats);
  };
  // first, so that they stay aligned
  std::vector<std::pair<const math::TwoSteps**, size_t>> two_places;
  for (const math::TwoSteps*& two : out.two) {
    two_places.emplace_back(&two, packed.size());
    const size_t floats = static_cast<size_t>(length + 1) * (sizeof(math::TwoSteps) / sizeof(float));
    packed.resize(packed.size() + floats);
    std::memcpy(packed.data() + packed.size() - floats, two, floats * sizeof(float));
  }
  for (const float*& step_size : out.step_size) pack(step_size, length);
  pack(out.inv_sqrt_bc2, length);
  pack(out.closed_from, length + 1);
  pack(out.beta1_power, length + 1);
  pack(out.beta2_power, length + 1);
  if (out.noise_var) pack(out.noise_var, length + 1);
  tables = Buffer<float>(static_cast<int64_t>(packed.size()), shard);
  upload(tables.data(), packed.data(), tables.size(), shard);
  for (const auto& [array, first] : places) *array = tables.data() + first;
  for (const auto& [array, first] : two_places)
    *array = reinterpret_cast<const math::TwoSteps*>(tables.data() + first);
  return out;
}

}  // namespace mgpu::splat
