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

enum class Outcome {
  kDone,   // ran shard by shard
  kWhole,  // nothing done: this call cannot be cut
  kSmall,  // nothing done: this call works through less than the sharding threshold, whatever its operands
           // have
};

// Run a call shard by shard, if it can be cut. `entry.cut` says which kind it is.
Outcome run_sharded(const Operator& entry, torch::jit::Stack* stack);
Outcome run_rows(const Operator& entry, torch::jit::Stack* stack);
Outcome run_index(const Operator& entry, torch::jit::Stack* stack);
Outcome run_scatter(const Operator& entry, torch::jit::Stack* stack);
Outcome run_random(const Operator& entry, torch::jit::Stack* stack);
bool run_pointwise(const Operator& entry, torch::jit::Stack* stack);
bool run_foreach(const Operator& entry, torch::jit::Stack* stack);
// Refuse parameters whose gradients or moments are of another size: the fused kernels do not ask.
void check_fused_optimizer(const Operator& entry, const torch::jit::Stack& stack);
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

// Call before what a part made is read outside of the parts. Where tensors go from one device to another,
// torch makes the one wait for the other by itself, but GPUs that are apart (mesh.h) are one device to it.
void wait_for_parts();
// Partial values from the GPUs that made them to the lead's.
void bring_to_lead(std::vector<at::Tensor>& values);

// A call whose tensors are cut along one dimension each, all at the same places, or taken whole.
class CutCall {
 public:
  CutCall(const Operator& entry, torch::jit::Stack* stack);

  // True if every tensor is strided, on mgpu and no conjugate or negative view: if not, the call runs whole.
  bool can_be_cut() const;
  // An argument by its name; None if there is none.
  const c10::IValue& argument(const char* name) const;
  // The same as a tensor; an undefined one if it is not there.
  at::Tensor tensor(const char* name) const;
  void replace(const char* name, c10::IValue value);
  // Cut an argument along a dimension of its own. Arguments are taken whole unless said otherwise.
  void cut(const char* name, int64_t dimension);
  // The dimensions of a list's tensors, -1 for those that are taken whole.
  void cut_list(const char* name, std::vector<int64_t> dimensions);
  // Of an operator that writes `out` as well as `self`: let `out` have what `self` has and stand for both.
  // False if it does not have self's shape.
  bool work_in_out();

  // Run the operator itself, or `handle` with `result` (mgpu) as one argument more, cut along its first
  // dimension. `extent` is the length of the dimensions that are cut. Leaves what the operator returns on the
  // stack.
  void run(int64_t extent);
  void run_into(const c10::OperatorHandle& handle, const at::Tensor& result, int64_t extent);
  // Leave this on the stack.
  void give(const at::Tensor& result) { give(std::vector<at::Tensor>{result}); }
  void give(const std::vector<at::Tensor>& results);

  // Other arguments than the call's own, for run_into: each with its dimensions as in cut_list.
  void set(std::vector<c10::IValue> arguments, std::vector<std::vector<int64_t>> cut);

  const Operator& entry() const { return entry_; }

 private:
  void run_parts(const c10::OperatorHandle& handle, int64_t extent);

  const Operator& entry_;
  torch::jit::Stack* stack_;
  std::vector<c10::IValue> arguments_;
  std::vector<std::vector<int64_t>> cut_;  // by argument: of its tensor, or of those in its list
};

// [range) along a dimension.
at::Tensor slice_along(const at::Tensor& tensor, int64_t dimension, RowRange range);
// Rows [range) along dimension 0.
at::Tensor row_slice(const at::Tensor& tensor, RowRange range);
// Bytes of a tensor's elements, and whether a call that works through so many is worth a fork.
int64_t bytes_of(const at::Tensor& tensor);
bool is_worth_it(int64_t bytes);
// A dimension as a kernel counts it; -1 if there is no such dimension.
int64_t wrapped(int64_t dimension, int64_t dimensions);
// Strides of a contiguous tensor.
std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes);
// At most one element along every dimension: to ask a kernel for the dtype of its result.
at::Tensor one_element(const at::Tensor& tensor);
// True if writing `written` shard by shard could change what another shard reads from `read`.
bool overlaps(const at::Tensor& written, const at::Tensor& read);
// The shape that all tensors are broadcast to; nothing if they do not fit.
std::optional<std::vector<int64_t>> broadcast_shape(c10::ArrayRef<at::Tensor> tensors);
// Indices of what is not zero in a mgpu tensor, [n, dim] int64, in order; found shard by shard. Waits for the
// count. `dealt`: in memory that is dealt to the shards, also where one call finds them all.
at::Tensor sharded_nonzero(const at::Tensor& tensor, bool dealt);
// An index list with masks as the indices of what they choose, and all of them on mgpu; nothing if a mask
// does not fit.
std::optional<std::vector<at::Tensor>> expand_masks(const at::Tensor& self, const c10::IValue& indices);
// An uninitialised mgpu tensor.
at::Tensor empty_mgpu(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

}  // namespace mgpu
