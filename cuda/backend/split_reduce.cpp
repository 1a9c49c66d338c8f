// SPDX-License-Identifier: Apache-2.0
// split_reduce.cpp: reductions. Along other dimensions than the first, each row is reduced by itself. Over
// the first dimension each shard makes a partial value, and the operator is applied once more to those.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/stack_ops.h>

#include <unordered_set>

#include "backend/fallback.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu {

namespace {

// Operators for which op(op(part 1), op(part 2), ...) = op(whole). mean needs weights, see below.
bool can_be_applied_again(const Operator& entry, const torch::jit::Stack& arguments) {
  static const std::unordered_set<std::string> names = {
      "aten::sum.dim_IntList",   "aten::mean.dim", "aten::amax",         "aten::amin",
      "aten::any.dim",           "aten::all.dim",  "aten::prod.dim_int", "aten::logsumexp",
      "aten::linalg_vector_norm"};
  if (!names.count(entry.name)) return false;
  // the 0-norm counts, it would count the counts
  if (entry.name == "aten::linalg_vector_norm" && arguments[1].isScalar() &&
      arguments[1].toScalar().toDouble() == 0.0)
    return false;
  return true;
}

// A partial value in 16 bits would be rounded once more than on one device.
bool keeps_precision(const at::Tensor& tensor) {
  return tensor.scalar_type() != at::kHalf && tensor.scalar_type() != at::kBFloat16;
}

}  // namespace

bool run_row_wise(const Operator& entry, torch::jit::Stack* stack) {
  const size_t arguments = entry.writes.size();
  const size_t first = stack->size() - arguments;
  const torch::jit::Stack original(stack->begin() + static_cast<int64_t>(first), stack->end());
  if (!original[0].isTensor()) return false;
  const at::Tensor& self = original[0].toTensor();
  if (!is_mgpu(self) || self.layout() != c10::kStrided || self.dim() == 0 || !self.is_contiguous() ||
      self.is_conj() || self.is_neg() || self._is_zerotensor() || self.size(0) < mesh().size() ||
      self.numel() == 0)
    return false;

  if (entry.dim_argument < 0) return false;
  const c10::IValue& dims = original[static_cast<size_t>(entry.dim_argument)];
  bool over_rows = false;  // dimension 0 is reduced
  auto visit = [&](int64_t dim) { over_rows |= dim == 0 || dim == -self.dim(); };
  if (dims.isInt())
    visit(dims.toInt());
  else if (dims.isIntList() && !dims.toIntVector().empty())
    for (int64_t dim : dims.toIntVector()) visit(dim);
  else
    over_rows = true;  // all dimensions

  Aliases aliases;
  const at::Tensor alias = aliases.to_backing(self);
  const int64_t rows = self.size(0);
  auto call_on = [&](const at::Tensor& part, const torch::jit::Stack& with) {
    torch::jit::Stack call;
    call.emplace_back(part);
    for (size_t i = 1; i < arguments; ++i) call.push_back(backing_value(entry, i, with[i]));
    call_backing(*entry.handle, &call);
    return call;
  };

  if (!over_rows) {
    if (self.dim() < 2) return false;
    const torch::jit::Stack samples = call_on(row_slice(alias, {0, 1}), original);
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> outs;
    for (const c10::IValue& sample : samples) {
      if (!sample.isTensor() || sample.toTensor().dim() == 0 || sample.toTensor().size(0) != 1) return false;
      std::vector<int64_t> sizes = sample.toTensor().sizes().vec();
      sizes[0] = rows;
      std::vector<int64_t> strides(sizes.size(), 1);
      for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(1, sizes[i]);
      results.push_back(empty_mgpu(sizes, strides, sample.toTensor().scalar_type()));
      outs.push_back(aliases.to_backing(results.back()));
    }
    run_on_shards([&](int shard) {
      const RowRange range = equal_chunk(rows, shard, mesh().size());
      if (range.empty()) return;
      const torch::jit::Stack parts = call_on(row_slice(alias, range), original);
      for (size_t i = 0; i < outs.size(); ++i) {
        at::Tensor out = row_slice(outs[i], range);
        at::_ops::copy_::call(out, parts[i].toTensor(), false);
      }
    });
    torch::jit::drop(*stack, arguments);
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
    return true;
  }

  if (!can_be_applied_again(entry, original) || entry.keepdim_argument < 0 || !keeps_precision(self)) return false;
  torch::jit::Stack partial(original);
  partial[static_cast<size_t>(entry.keepdim_argument)] = true;
  std::vector<at::Tensor> values(static_cast<size_t>(mesh().size()));
  run_on_shards([&](int shard) {
    const RowRange range = equal_chunk(rows, shard, mesh().size());
    if (range.empty()) return;
    at::Tensor value = call_on(row_slice(alias, range), partial).back().toTensor();
    values[static_cast<size_t>(shard)] = std::move(value);
  });
  if (entry.name == "aten::mean.dim") {
    // a chunk counts as many times as it has rows
    int64_t parts = 0;
    for (const at::Tensor& value : values) parts += value.defined();
    for (int shard = 0; shard < mesh().size(); ++shard) {
      at::Tensor& value = values[static_cast<size_t>(shard)];
      if (!value.defined()) continue;
      const double share =
          static_cast<double>(equal_chunk(rows, shard, mesh().size()).size()) / static_cast<double>(rows);
      value = at::_ops::mul_Scalar::call(value, share * static_cast<double>(parts));
    }
  }
  std::erase_if(values, [](const at::Tensor& value) { return !value.defined(); });
  at::Tensor result;
  {
    AllocationScope results_from_the_pool;
    result = call_on(at::_ops::cat::call(values, 0), original).back().toTensor();
  }
  torch::jit::drop(*stack, arguments);
  stack->emplace_back(aliases.from_backing(result));
  return true;
}

bool run_reduce_all(const Operator& entry, torch::jit::Stack* stack) {
  const size_t arguments = entry.writes.size();
  const size_t first = stack->size() - arguments;
  const torch::jit::Stack original(stack->begin() + static_cast<int64_t>(first), stack->end());
  const at::Tensor& self = original[0].toTensor();
  if (!is_mgpu(self) || self.layout() != c10::kStrided || !keeps_precision(self) ||
      entry.name == "aten::mean" || self.numel() < mesh().size())
    return false;
  Aliases aliases;
  const at::Tensor alias = aliases.to_backing(self);
  const at::Tensor operands[] = {alias};
  const auto cut = ElementwiseCut::of(operands, alias.sizes(), /*flat_only=*/true);
  if (!cut) return false;
  auto call_on = [&](const at::Tensor& part) {
    torch::jit::Stack call;
    call.emplace_back(part);
    for (size_t i = 1; i < arguments; ++i) call.push_back(backing_value(entry, i, original[i]));
    call_backing(*entry.handle, &call);
    return call.back().toTensor();
  };
  std::vector<at::Tensor> values(static_cast<size_t>(mesh().size()));
  run_on_shards([&](int shard) {
    const RowRange range = cut->range(shard);
    if (!range.empty()) values[static_cast<size_t>(shard)] = call_on(cut->slice(alias, range));
  });
  std::erase_if(values, [](const at::Tensor& value) { return !value.defined(); });
  at::Tensor result;
  {
    AllocationScope results_from_the_pool;
    result = call_on(at::_ops::stack::call(values, 0));
  }
  torch::jit::drop(*stack, arguments);
  stack->emplace_back(aliases.from_backing(result));
  return true;
}

}  // namespace mgpu
