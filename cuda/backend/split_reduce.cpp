// SPDX-License-Identifier: Apache-2.0
// split_reduce.cpp: reductions. Along other dimensions than the first, each row is reduced by itself. Over
// the first dimension each shard makes a partial value, and the operator is applied once more to those.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty.h>
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
      "aten::sum",  "aten::mean",      "aten::amax",
      "aten::amin", "aten::any",       "aten::all",
      "aten::prod", "aten::logsumexp", "aten::linalg_vector_norm"};
  if (!names.count(entry.base_name)) return false;
  // the 0-norm counts, it would count the counts
  return entry.base_name != "aten::linalg_vector_norm" || !arguments[1].isScalar() ||
         arguments[1].toScalar().toDouble() != 0.0;
}

// A partial value in 16 bits would be rounded once more than on one device.
bool keeps_precision(const at::Tensor& tensor) {
  return tensor.scalar_type() != at::kHalf && tensor.scalar_type() != at::kBFloat16;
}

bool is_plain(const at::Tensor& tensor) {
  return is_mgpu(tensor) && tensor.layout() == c10::kStrided && tensor.is_contiguous() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor._is_zerotensor();
}

// One call of a reduction, functional or with out=: the input is the first argument, outputs are the written
// ones.
class Reduction {
 public:
  Reduction(const Operator& entry, torch::jit::Stack* stack) : entry_(entry), stack_(stack) {
    const size_t count = entry.writes.size();
    arguments_.assign(stack->end() - static_cast<int64_t>(count), stack->end());
    for (size_t i = 0; i < count; ++i)
      if (entry.writes[i]) outputs_.push_back(arguments_[i].toTensor());
    input_ = aliases_.to_backing(arguments_[0].toTensor());
  }

  const at::Tensor& input() const { return input_; }
  const torch::jit::Stack& arguments() const { return arguments_; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  at::Tensor alias(const at::Tensor& tensor) { return aliases_.to_backing(tensor); }

  // Results for a part of the input. With out=, into `outs`, or where there are none into fresh tensors.
  std::vector<at::Tensor> call(const at::Tensor& part, const std::vector<at::Tensor>& outs,
                               bool keepdim) const {
    torch::jit::Stack call;
    size_t written = 0;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (i == 0)
        call.emplace_back(part);
      else if (entry_.writes[i]) {
        const at::Tensor& output = outputs_[written];
        call.emplace_back(outs.empty() ? at::empty({0}, output.options().device(part_device()))
                                       : outs[written]);
        ++written;
      } else if (keepdim && static_cast<int>(i) == entry_.keepdim_argument)
        call.emplace_back(true);
      else
        call.push_back(backing_value(entry_, i, arguments_[i]));
    }
    call_backing(*entry_.handle, &call);
    std::vector<at::Tensor> results;
    for (const c10::IValue& value : call) results.push_back(value.toTensor());
    return results;
  }

  // Apply the operator to the partial values, and leave the result on the stack.
  void finish(const at::Tensor& values) {
    std::vector<at::Tensor> outs;
    for (const at::Tensor& output : outputs_) outs.push_back(aliases_.to_backing(output));
    AllocationScope results_from_the_pool;
    at::Tensor result = call(values, outs, false).back();
    for (size_t i = 0; i < outs.size(); ++i) aliases_.sync_back(outputs_[i], outs[i]);
    give({outputs_.empty() ? aliases_.from_backing(result) : outputs_[0]});
  }

  void give(const std::vector<at::Tensor>& results) {
    torch::jit::drop(*stack_, arguments_.size());
    for (const at::Tensor& result : results) stack_->emplace_back(result);
  }

 private:
  const Operator& entry_;
  torch::jit::Stack* stack_;
  torch::jit::Stack arguments_;
  std::vector<at::Tensor> outputs_;  // mgpu
  Aliases aliases_;
  at::Tensor input_;  // alias
};

bool run_each_row(Reduction& reduction) {
  const at::Tensor& input = reduction.input();
  const int64_t rows = input.size(0);
  if (input.dim() < 2) return false;
  std::vector<at::Tensor> results = reduction.outputs();
  const std::vector<at::Tensor> samples = reduction.call(row_slice(input, {0, 1}), {}, false);
  for (size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].dim() == 0 || samples[i].size(0) != 1) return false;
    std::vector<int64_t> sizes = samples[i].sizes().vec();
    sizes[0] = rows;
    if (reduction.outputs().empty()) {
      results.push_back(empty_mgpu(sizes, contiguous_strides(sizes), samples[i].scalar_type()));
    } else if (results[i].sizes() != c10::IntArrayRef(sizes) || !is_plain(results[i])) {
      return false;  // out= of another shape: the kernel resizes it
    }
  }
  if (results.size() != samples.size()) return false;
  std::vector<at::Tensor> outs;
  for (const at::Tensor& result : results) outs.push_back(reduction.alias(result));
  for (const at::Tensor& out : outs)
    if (overlaps(out, input) || out.is_alias_of(input)) return false;
  run_on_parts([&](int part) {
    const RowRange range = part_range(rows, part);
    if (range.empty()) return;
    std::vector<at::Tensor> parts;
    for (const at::Tensor& out : outs) parts.push_back(row_slice(out, range));
    if (!reduction.outputs().empty()) {
      reduction.call(row_slice(input, range), parts, false);
      return;
    }
    const std::vector<at::Tensor> values = reduction.call(row_slice(input, range), {}, false);
    for (size_t i = 0; i < parts.size(); ++i) at::_ops::copy_::call(parts[i], values[i], false);
  });
  reduction.give(results);
  return true;
}

bool run_over_rows(const Operator& entry, Reduction& reduction) {
  const at::Tensor& input = reduction.input();
  if (!can_be_applied_again(entry, reduction.arguments()) || entry.keepdim_argument < 0 ||
      !keeps_precision(input))
    return false;
  const int64_t rows = input.size(0);
  const int count = part_count();
  std::vector<at::Tensor> values(static_cast<size_t>(count));
  run_on_parts([&](int part) {
    const RowRange range = part_range(rows, part);
    if (!range.empty())
      values[static_cast<size_t>(part)] = reduction.call(row_slice(input, range), {}, true).back();
  });
  bring_to_lead(values);
  int64_t parts = 0;
  for (const at::Tensor& value : values) parts += value.defined();
  if (entry.base_name == "aten::mean") {
    // the mean of means: a chunk counts as many times as it has rows
    for (int part = 0; part < count; ++part) {
      at::Tensor& value = values[static_cast<size_t>(part)];
      if (!value.defined()) continue;
      const double share = static_cast<double>(part_range(rows, part).size()) / static_cast<double>(rows);
      value = at::_ops::mul_Scalar::call(value, share * static_cast<double>(parts));
    }
  }
  std::erase_if(values, [](const at::Tensor& value) { return !value.defined(); });
  reduction.finish(at::_ops::cat::call(values, 0));
  return true;
}

}  // namespace

bool run_row_wise(const Operator& entry, torch::jit::Stack* stack) {
  const torch::jit::Stack& all = *stack;
  const c10::IValue& first = all[all.size() - entry.writes.size()];
  if (!first.isTensor()) return false;
  const at::Tensor& self = first.toTensor();
  if (!is_plain(self) || self.dim() == 0 || self.size(0) < part_count() || self.numel() == 0) return false;
  Reduction reduction(entry, stack);
  for (const at::Tensor& output : reduction.outputs())
    if (!is_mgpu(output)) return false;

  const c10::IValue& dims = reduction.arguments()[static_cast<size_t>(entry.dim_argument)];
  const int64_t last = -self.dim();
  bool over_rows = false;  // dimension 0 is reduced
  if (dims.isInt()) {
    over_rows = dims.toInt() == 0 || dims.toInt() == last;
  } else if (dims.isIntList() && !dims.toIntVector().empty()) {
    for (int64_t dim : dims.toIntVector()) over_rows |= dim == 0 || dim == last;
  } else {
    over_rows = true;  // all dimensions
  }
  return over_rows ? run_over_rows(entry, reduction) : run_each_row(reduction);
}

bool run_reduce_all(const Operator& entry, torch::jit::Stack* stack) {
  const at::Tensor& self = (*stack)[stack->size() - entry.writes.size()].toTensor();
  if (!is_plain(self) || !keeps_precision(self) || self.dim() == 0) return false;
  Reduction reduction(entry, stack);
  for (const at::Tensor& output : reduction.outputs())
    if (!is_mgpu(output)) return false;
  const at::Tensor operands[] = {reduction.input()};
  const auto cut = ElementwiseCut::of(operands, reduction.input().sizes(), /*flat_only=*/true);
  if (!cut) return false;
  std::vector<at::Tensor> values(static_cast<size_t>(part_count()));
  run_on_parts([&](int part) {
    const RowRange range = cut->range(part);
    if (range.empty()) return;
    values[static_cast<size_t>(part)] =
        reduction.call(cut->slice(reduction.input(), range), {}, false).back();
  });
  bring_to_lead(values);
  std::erase_if(values, [](const at::Tensor& value) { return !value.defined(); });
  reduction.finish(at::_ops::stack::call(values, 0));
  return true;
}

}  // namespace mgpu
