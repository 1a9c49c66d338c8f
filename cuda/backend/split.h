// SPDX-License-Identifier: Apache-2.0
// split.h: how one call of an operator is cut into a call per shard.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <vector>

#include "backend/alias.h"
#include "backend/op_table.h"
#include "mesh/mesh.h"

namespace mgpu {

// Run a call shard by shard; false (and nothing done) if this call cannot be cut. `entry.cut` says which kind
// it is.
bool run_sharded(const Operator& entry, torch::jit::Stack* stack);
bool run_pointwise(const Operator& entry, torch::jit::Stack* stack);
bool run_foreach(const Operator& entry, torch::jit::Stack* stack);
bool run_row_wise(const Operator& entry, torch::jit::Stack* stack);
bool run_reduce_all(const Operator& entry, torch::jit::Stack* stack);

// The cut of operands that go element by element: each has the elements of `shape`, or is broadcast to it.
//
// Flat where all have the same dense layout: every slice is one stretch of memory, cut at a row where that is
// possible. Otherwise along the first dimension that is long enough; operands that are broadcast along it are
// taken whole.
class ElementwiseCut {
 public:
  // Nothing if the operands cannot be cut: an undense layout for a flat cut, no long dimension, a conjugate
  // view.
  static std::optional<ElementwiseCut> of(c10::ArrayRef<at::Tensor> operands, c10::IntArrayRef shape,
                                          bool flat_only);

  bool flat() const { return dimension_ < 0; }
  RowRange range(int part) const;
  // What a part (shards.h) works on, of an operand.
  at::Tensor slice(const at::Tensor& operand, RowRange range) const;
  // Layout of a result that has the shape of the cut; nothing if the operands do not determine it.
  std::optional<std::vector<int64_t>> result_strides(c10::ArrayRef<at::Tensor> operands) const;

 private:
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;  // of the full operands, if flat
  int64_t dimension_ = -1;        // -1: flat
  int64_t extent_ = 0;            // items that are dealt to the shards
  int64_t unit_ = 1;              // elements per item, if flat
};

// Rows [range) along dimension 0.
at::Tensor row_slice(const at::Tensor& tensor, RowRange range);
// At most one element along every dimension: to ask a kernel for the dtype of its result.
at::Tensor one_element(const at::Tensor& tensor);
// True if writing `written` shard by shard could change what another shard reads from `read`.
bool overlaps(const at::Tensor& written, const at::Tensor& read);
// The shape that all tensors are broadcast to; nothing if they do not fit.
std::optional<std::vector<int64_t>> broadcast_shape(c10::ArrayRef<at::Tensor> tensors);
// An uninitialised mgpu tensor.
at::Tensor empty_mgpu(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

}  // namespace mgpu
