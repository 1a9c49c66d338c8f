// SPDX-License-Identifier: Apache-2.0
// bindings_columns.h: from Python's tensors to what stages take, with the checks that memory safety needs.
// Whatever does not fit is a ValueError; its message is made only then.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "mesh/mesh.h"
#include "splat/columns.h"
#include "splat/statistics.h"

namespace mgpu::splat {

using Tensors = std::vector<at::Tensor>;

// "Float [20, 3] on cpu", for messages.
std::string shape_of(const at::Tensor& tensor);

// Data of a contiguous float32 tensor.
float* floats(const at::Tensor& tensor, const char* name);

// A table's rows over the shards of the mesh.
std::vector<RowRange> homes_of(const Tensors& columns);

// The six columns in the order of columns.h; declares for the locality check whose rows are whose.
SplatColumns columns_of(const Tensors& columns, const std::vector<RowRange>& homes);
inline SplatColumns columns_of(const Tensors& columns) { return columns_of(columns, homes_of(columns)); }

// State: exp_avg of the six columns, exp_avg_sq of the six columns, last_step.
AdamState state_of(const Tensors& state, const Tensors& columns, const std::vector<RowRange>& homes);
inline AdamState state_of(const Tensors& state, const Tensors& columns) {
  return state_of(state, columns, homes_of(columns));
}

// Statistics of default densification: gradient, views and, if wanted, radius; none: nothing is gathered.
RowStatistics statistics_of(const Tensors& statistics, bool absgrad, const std::vector<RowRange>& homes);

// Says whose rows of another array of the table are whose.
void declare_split(const at::Tensor& tensor, const std::vector<RowRange>& homes, const char* what);

}  // namespace mgpu::splat
