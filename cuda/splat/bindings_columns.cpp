// SPDX-License-Identifier: Apache-2.0
#include "splat/bindings_columns.h"

#include <sstream>

#include "memory/locality.h"

namespace mgpu::splat {

using at::Tensor;

namespace {

constexpr const char* kColumnNames[kColumns] = {"means", "quats", "scales", "opacities", "sh0", "shN"};

struct RowFloats {
  int64_t of[kColumns];
};

RowFloats row_floats_of(const Tensors& columns) {
  TORCH_CHECK_VALUE(columns.size() == kColumns, "The table has ", columns.size(),
                    " columns, expected 6: means, quats, scales, opacities, sh0, shN.");
  TORCH_CHECK_VALUE(columns[0].dim() == 2 && columns[5].dim() == 3,
                    "means must be [N, 3] and shN [N, K, 3]; they are ", shape_of(columns[0]), " and ",
                    shape_of(columns[5]), ".");
  const int64_t rest = columns[5].size(1);
  TORCH_CHECK_VALUE(rest == 0 || rest == 3 || rest == 8 || rest == 15, "shN has ", rest,
                    " coefficients; degrees 0 to 3 have 0, 3, 8 or 15.");
  return {{3, 4, 3, 1, 3, 3 * rest}};
}

// Data of a column, or of a moment of one, with its rows declared.
FloatArray column_data(const Tensor& tensor, const char* what, int column, int64_t rows, int64_t row_floats,
                       const std::vector<RowRange>& homes, at::ScalarType type = at::kFloat) {
  const char* const name = type == at::kFloat ? "float32" : type == at::kHalf ? "float16" : "bfloat16";
  TORCH_CHECK_VALUE(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.dim() >= 1 &&
                        tensor.size(0) == rows && tensor.numel() == rows * row_floats,
                    what, kColumnNames[column], " is ", shape_of(tensor), ", expected contiguous ", name,
                    " with ", rows, " rows (as means) of ", row_floats, " values.");
  FloatArray data(static_cast<float*>(tensor.data_ptr()));
  if (type != at::kFloat) {
    data = {static_cast<uint16_t*>(tensor.data_ptr()),
            type == at::kHalf ? FloatArray::Kind::kFloat16 : FloatArray::Kind::kBfloat16};
  }
  const bool moment = *what != '\0';
  if (rows > 0 && row_floats > 0) {
    set_row_split(data.data(), rows, row_floats * data.bytes(), homes.data(),
                  moment ? "a moment" : kColumnNames[column]);
  }
  return data;
}

// A half table has shN in float16, and its optimizer all first moments in bfloat16.
bool is_half(const Tensors& columns) { return columns[kShColumn].scalar_type() == at::kHalf; }

}  // namespace

std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

float* floats(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat && tensor.is_contiguous(), name,
                    " must be contiguous float32; it is ", shape_of(tensor), ".");
  return static_cast<float*>(tensor.data_ptr());
}

SplatColumns columns_of(const Tensors& columns, const std::vector<RowRange>& homes) {
  const RowFloats floats = row_floats_of(columns);
  const int64_t rows = columns[0].size(0);
  FloatArray data[kColumns];
  for (int i = 0; i < kColumns; ++i) {
    data[i] = column_data(columns[static_cast<size_t>(i)], "", i, rows, floats.of[i], homes,
                          i == kShColumn && is_half(columns) ? at::kHalf : at::kFloat);
  }
  return {data[0].float32(),
          data[1].float32(),
          data[2].float32(),
          data[3].float32(),
          data[4].float32(),
          data[kShColumn],
          rows,
          static_cast<int>(floats.of[kShColumn] / 3)};
}

AdamState state_of(const Tensors& state, const Tensors& columns, const std::vector<RowRange>& homes) {
  const RowFloats floats = row_floats_of(columns);
  const int64_t rows = columns[0].size(0);
  TORCH_CHECK_VALUE(state.size() == 2 * kColumns + 1, "The optimizer state has ", state.size(),
                    " tensors, expected 13: exp_avg and exp_avg_sq of 6 columns, last_step.");
  AdamState out{};
  for (int i = 0; i < kColumns; ++i) {
    const auto at = static_cast<size_t>(i);
    out.exp_avg[i] = column_data(state[at], "exp_avg of ", i, rows, floats.of[i], homes,
                                 is_half(columns) ? at::kBFloat16 : at::kFloat);
    out.exp_avg_sq[i] =
        column_data(state[at + kColumns], "exp_avg_sq of ", i, rows, floats.of[i], homes).float32();
  }
  const Tensor& last = state.back();
  TORCH_CHECK_VALUE(
      last.scalar_type() == at::kInt && last.is_contiguous() && last.dim() == 1 && last.size(0) == rows,
      "last_step is ", shape_of(last), ", expected int32 [", rows, "].");
  out.last_step = static_cast<int32_t*>(last.data_ptr());
  declare_split(last, homes, "last_step");
  return out;
}

RowStatistics statistics_of(const Tensors& statistics, bool absgrad, const std::vector<RowRange>& homes) {
  RowStatistics out;
  if (statistics.empty()) return out;
  const int64_t rows = homes.back().end;
  const auto data = [&](size_t i, at::ScalarType type, const char* name) {
    const Tensor& tensor = statistics[i];
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == type && tensor.is_contiguous() && tensor.dim() == 1 && tensor.size(0) == rows,
        name, " is ", shape_of(tensor), ", expected ", type, " [", rows, "].");
    declare_split(tensor, homes, name);
    return tensor.data_ptr();
  };
  out.gradient = static_cast<float*>(data(0, at::kFloat, "statistics.gradient"));
  out.views = static_cast<int32_t*>(data(1, at::kInt, "statistics.views"));
  if (statistics.size() > 2) out.radius = static_cast<float*>(data(2, at::kFloat, "statistics.radius"));
  out.absgrad = absgrad;
  return out;
}

std::vector<RowRange> homes_of(const Tensors& columns) {
  const int64_t rows = columns.empty() || columns[0].dim() == 0 ? 0 : columns[0].size(0);
  return row_homes(rows > 0 ? columns[0].const_data_ptr() : nullptr, rows);
}

void declare_split(const Tensor& tensor, const std::vector<RowRange>& homes, const char* what) {
  const int64_t rows = tensor.size(0);
  if (rows == 0 || tensor.numel() == 0) return;
  set_row_split(tensor.data_ptr(), rows, static_cast<int64_t>(tensor.nbytes()) / rows, homes.data(), what);
}

}  // namespace mgpu::splat
