// SPDX-License-Identifier: Apache-2.0
#include "splat/bindings_columns.h"

#include <sstream>
#include <stdexcept>

#include "memory/locality.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

constexpr std::array<const char*, kColumns> kColumnNames = {"means",     "quats", "scales",
                                                            "opacities", "sh0",   "shN"};

}  // namespace

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

float* column_data(const at::Tensor& tensor, const std::string& name, int64_t rows, int64_t row_floats) {
  require(tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.dim() >= 1 &&
              tensor.size(0) == rows && tensor.numel() == rows * row_floats,
          name + " is " + shape_of(tensor) + ", expected contiguous float32 with " + std::to_string(rows) +
              " rows (as means) of " + std::to_string(row_floats) + " values.");
  return tensor.data_ptr<float>();
}

std::array<int64_t, kColumns> row_floats_of(const std::vector<at::Tensor>& columns) {
  require(columns.size() == kColumns, "The table has " + std::to_string(columns.size()) +
                                          " columns, expected 6: means, quats, scales, opacities, sh0, shN.");
  require(columns[0].dim() == 2 && columns[5].dim() == 3,
          "means must be [N, 3] and shN [N, K, 3]; they are " + shape_of(columns[0]) + " and " +
              shape_of(columns[5]) + ".");
  const int64_t rest = columns[5].size(1);
  require(rest == 0 || rest == 3 || rest == 8 || rest == 15,
          "shN has " + std::to_string(rest) + " coefficients; degrees 0 to 3 have 0, 3, 8 or 15.");
  return {3, 4, 3, 1, 3, 3 * rest};
}

SplatColumns columns_of(const std::vector<at::Tensor>& tensors) {
  const auto floats = row_floats_of(tensors);
  const int64_t rows = tensors[0].size(0);
  std::array<float*, kColumns> data;
  const auto homes = equal_homes(rows);
  for (size_t i = 0; i < kColumns; ++i) {
    data[i] = column_data(tensors[i], kColumnNames[i], rows, floats[i]);
    set_row_split(data[i], rows, floats[i] * static_cast<int64_t>(sizeof(float)), homes.data(),
                  kColumnNames[i]);
  }
  return {data[0], data[1], data[2], data[3], data[4], data[5], rows, static_cast<int>(floats[5] / 3)};
}

AdamState state_of(const std::vector<at::Tensor>& state, const std::vector<at::Tensor>& columns) {
  const auto floats = row_floats_of(columns);
  const int64_t rows = columns[0].size(0);
  require(state.size() == 2 * kColumns + 1,
          "The optimizer state has " + std::to_string(state.size()) +
              " tensors, expected 13: exp_avg and exp_avg_sq of 6 columns, last_step.");
  const auto homes = equal_homes(rows);
  AdamState out{};
  for (size_t i = 0; i < kColumns; ++i) {
    const std::string name = kColumnNames[i];
    out.exp_avg[i] = column_data(state[i], "exp_avg of " + name, rows, floats[i]);
    out.exp_avg_sq[i] = column_data(state[kColumns + i], "exp_avg_sq of " + name, rows, floats[i]);
    const int64_t row_bytes = floats[i] * static_cast<int64_t>(sizeof(float));
    set_row_split(out.exp_avg[i], rows, row_bytes, homes.data(), "exp_avg");
    set_row_split(out.exp_avg_sq[i], rows, row_bytes, homes.data(), "exp_avg_sq");
  }
  const at::Tensor& last = state[2 * kColumns];
  require(last.scalar_type() == at::kInt && last.is_contiguous() && last.dim() == 1 && last.size(0) == rows,
          "last_step is " + shape_of(last) + ", expected int32 [" + std::to_string(rows) + "].");
  out.last_step = last.data_ptr<int32_t>();
  set_row_split(out.last_step, rows, sizeof(int32_t), homes.data(), "last_step");
  return out;
}

}  // namespace mgpu::splat
