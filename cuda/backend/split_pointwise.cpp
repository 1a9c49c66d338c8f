// SPDX-License-Identifier: Apache-2.0
// split_pointwise.cpp: operators that treat every element by itself (torch marks them with the tag
// `pointwise`): in place, with out=, and functional. A functional one gets a fresh result in aggregate memory
// and runs in its out= form.
#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_ops.h>

#include "backend/fallback.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu {

bool run_pointwise(const Operator& entry, torch::jit::Stack* stack) {
  const size_t arguments = entry.writes.size();
  const size_t first = stack->size() - arguments;
  auto argument = [&](size_t i) -> c10::IValue& { return (*stack)[first + i]; };
  if (entry.memory_format_argument >= 0 &&
      !argument(static_cast<size_t>(entry.memory_format_argument)).isNone())
    return false;

  // the operands, as aliases
  Aliases aliases;
  std::vector<at::Tensor> operands;
  std::vector<at::Tensor> inputs;
  std::vector<int> operand_of(arguments, -1);
  int written = -1;
  for (size_t i = 0; i < arguments; ++i) {
    if (!argument(i).isTensor() || !argument(i).toTensor().defined()) continue;
    const at::Tensor& tensor = argument(i).toTensor();
    if (!is_mgpu(tensor) && tensor.dim() > 0) return false;  // the fallback explains
    if (tensor.layout() != c10::kStrided) return false;
    operand_of[i] = static_cast<int>(operands.size());
    if (entry.writes[i]) {
      if (written >= 0) return false;
      written = static_cast<int>(operands.size());
    }
    if (!entry.is_out[i]) inputs.push_back(tensor);  // out= takes the result's shape, and gives it none
    operands.push_back(aliases.to_backing(tensor));
  }
  if (entry.in_place && written < 0) return false;

  const auto shape = broadcast_shape(inputs);
  if (!shape) return false;
  if (written >= 0) {
    const at::Tensor& out = operands[static_cast<size_t>(written)];
    if (out.sizes() != c10::IntArrayRef(*shape)) return false;
    for (const at::Tensor& operand : operands)
      if (overlaps(out, operand)) return false;
  }
  const auto cut = ElementwiseCut::of(operands, *shape, /*flat_only=*/false);
  if (!cut) return false;

  // one call: `pick` chooses the part of each operand
  auto fill = [&](torch::jit::Stack& call, auto&& pick) {
    for (size_t i = 0; i < arguments; ++i) {
      if (operand_of[i] >= 0)
        call.emplace_back(pick(operands[static_cast<size_t>(operand_of[i])]));
      else
        call.push_back(backing_value(entry, i, argument(i)));
    }
  };

  at::Tensor result;
  at::Tensor out;  // its alias
  if (!entry.in_place) {
    const auto strides = cut->result_strides(operands);
    if (!strides) return false;
    torch::jit::Stack probe;
    fill(probe, [](const at::Tensor& operand) { return one_element(operand); });
    call_backing(*entry.handle, &probe);
    if (!probe.back().isTensor()) return false;
    const at::Tensor& sample = probe.back().toTensor();
    if (sample.layout() != c10::kStrided || sample.dim() != static_cast<int64_t>(shape->size()) ||
        sample.numel() != 1 || sample.is_conj() || sample.is_neg() || sample._is_zerotensor())
      return false;
    result = empty_mgpu(*shape, *strides, sample.scalar_type());
    out = aliases.to_backing(result);
  }

  run_on_parts([&](int part_index) {
    const RowRange range = cut->range(part_index);
    if (range.empty()) return;
    torch::jit::Stack call;
    fill(call, [&](const at::Tensor& operand) { return cut->slice(operand, range); });
    if (!entry.in_place && entry.out_overload) {
      call.emplace_back(cut->slice(out, range));
      call_backing(*entry.out_overload, &call);
      return;
    }
    call_backing(*entry.handle, &call);
    if (!entry.in_place) {
      at::Tensor part = cut->slice(out, range);
      at::_ops::copy_::call(part, call.back().toTensor(), false);
    }
  });

  c10::IValue returned(result);
  if (entry.in_place) {
    for (size_t i = 0; i < arguments; ++i)
      if (operand_of[i] == written) returned = argument(i);
  }
  torch::jit::drop(*stack, arguments);
  stack->push_back(std::move(returned));
  return true;
}

}  // namespace mgpu
