// SPDX-License-Identifier: Apache-2.0
// bindings_columns.h: from Python's tensors to what stages take, with the checks that memory safety needs.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "splat/columns.h"

namespace mgpu::splat {

// Throws std::invalid_argument with the message unless `holds`.
void require(bool holds, const std::string& message);

// "Float [20, 3] on cpu", for messages.
std::string shape_of(const at::Tensor& tensor);

// Data of a table's column or moment: contiguous float32 of `rows` rows. `name` is for messages.
float* column_data(const at::Tensor& tensor, const std::string& name, int64_t rows, int64_t row_floats);

// Floats a row of each column.
std::array<int64_t, kColumns> row_floats_of(const std::vector<at::Tensor>& columns);

// The six columns; declares for the locality check whose rows are whose.
SplatColumns columns_of(const std::vector<at::Tensor>& tensors);

// State: exp_avg of the six columns, exp_avg_sq of the six columns, last_step.
AdamState state_of(const std::vector<at::Tensor>& state, const std::vector<at::Tensor>& columns);

}  // namespace mgpu::splat
