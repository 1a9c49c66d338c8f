// SPDX-License-Identifier: Apache-2.0
#include "backend/fallback.h"

#include <c10/util/SmallVector.h>

#include "backend/alias.h"
#include "backend/flavour.h"
#include "backend/generator.h"
#include "backend/shards.h"
#include "backend/split.h"
#include "memory/pool.h"

namespace mgpu {

namespace {

// As on CUDA: a CPU tensor may be an operand only if it has no dimensions. Otherwise a model that fails on
// the GPU would pass here.
void check_device(const Operator& entry, const at::Tensor& tensor) {
  TORCH_CHECK(entry.takes_cpu_tensors || !tensor.defined() ||
                  tensor.device().type() != c10::DeviceType::CPU || tensor.dim() == 0,
              "Expected all tensors to be on the same device, but found at least two devices, mgpu:0 and "
              "cpu! (when calling ",
              entry.name, ")");
  TORCH_CHECK(kBackingType == c10::DeviceType::CPU || !tensor.defined() || tensor.dim() == 0 ||
                  tensor.device().type() != c10::DeviceType::CUDA || entry.takes_cpu_tensors,
              "Expected all tensors to be on the same device, but found at least two devices, mgpu:0 and ",
              tensor.device(), "! (when calling ", entry.name,
              "). torch.mgpu.from_cuda() makes a mgpu tensor over the same memory.");
}

// True if rows that an index chooses can make a large result of operands that are not large.
bool may_grow_large(const Operator& entry, const torch::jit::Stack& stack) {
  if (entry.in_place || (entry.cut != Cut::kRows && entry.cut != Cut::kIndex)) return false;
  const size_t first = stack.size() - entry.writes.size();
  if (!stack[first].isTensor()) return false;
  const at::Tensor& self = stack[first].toTensor();
  int64_t chosen = 0;  // at most so many
  auto count = [&](const at::Tensor& index) {
    if (index.defined() && index.scalar_type() != at::kBool) chosen = std::max(chosen, index.numel());
  };
  for (size_t i = first + 1; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      count(stack[i].toTensor());
    } else if (stack[i].isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& index : stack[i].toOptionalTensorVector())
        if (index) count(*index);
    }
  }
  return chosen > 1 &&
         chosen * self.numel() * static_cast<int64_t>(self.dtype().itemsize()) >= shard_threshold();
}

}  // namespace

c10::IValue backing_value(const Operator& entry, size_t argument, const c10::IValue& value) {
  if (value.isDevice()) return value.toDevice().type() == kDeviceType ? c10::IValue(backing_device()) : value;
  if (value.isGenerator()) return c10::IValue(backing_generator(value.toGenerator()));
  if (value.isNone() && static_cast<int>(argument) == entry.generator_argument)
    return c10::IValue(backing_generator(default_generator()));
  return value;
}

void run_on_lead(const Operator& entry, torch::jit::Stack* stack) {
  const size_t arguments = entry.writes.size();
  const size_t first = stack->size() - arguments;
  Aliases aliases;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4> written;  // (original, alias)
  c10::SmallVector<c10::IValue, 8> originals;
  for (size_t i = 0; i < arguments; ++i) originals.push_back(std::move((*stack)[first + i]));

  auto convert = [&](const at::Tensor& tensor, bool writes, bool in_list = false) {
    check_device(entry, tensor);
    at::Tensor alias = aliases.to_backing(tensor, in_list);
    if (writes) written.emplace_back(tensor, alias);
    return alias;
  };
  auto converted = [&](size_t i) -> c10::IValue {
    const c10::IValue& value = originals[i];
    const bool writes = entry.writes[i];
    if (value.isTensor()) return c10::IValue(convert(value.toTensor(), writes));
    if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (at::Tensor& tensor : list) tensor = convert(tensor, writes, true);
      return c10::IValue(c10::List<at::Tensor>(list));
    }
    if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      for (auto& tensor : list)
        if (tensor) tensor = convert(*tensor, writes, true);
      return c10::IValue(c10::List<std::optional<at::Tensor>>(list));
    }
    return backing_value(entry, i, value);
  };
  for (size_t i = 0; i < arguments; ++i) (*stack)[first + i] = converted(i);
  try {
    AllocationScope results_from_the_pool;
    call_backing(*entry.handle, stack);
  } catch (const c10::OutOfMemoryError& error) {
    // once more with all that is kept for reuse given back, unless an argument may be half written
    if (entry.in_place || !release_caches()) throw_out_of_memory(error);
    aliases.reset();
    stack->resize(first);
    for (size_t i = 0; i < arguments; ++i) stack->push_back(converted(i));
    try {
      AllocationScope results_from_the_pool;
      call_backing(*entry.handle, stack);
    } catch (const c10::OutOfMemoryError& again) {
      throw_out_of_memory(again);
    }
  }
  for (auto& [original, alias] : written) aliases.sync_back(original, alias);

  const size_t results = entry.returned_argument.size();
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& value = (*stack)[stack->size() - results + i];
    const int argument = entry.returned_argument[i];
    if (value.isTensor()) {
      if (argument >= 0 && originals[static_cast<size_t>(argument)].isTensor())
        value = originals[static_cast<size_t>(argument)];
      else
        value = c10::IValue(aliases.from_backing(value.toTensor()));
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (at::Tensor& tensor : list) tensor = aliases.from_backing(tensor);
      value = c10::IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      for (auto& tensor : list)
        if (tensor) tensor = aliases.from_backing(*tensor);
      value = c10::IValue(c10::List<std::optional<at::Tensor>>(list));
    }
  }
}

namespace {

// Short of memory: once more with all that is kept for reuse given back, unless an argument may be half
// written.
Outcome run_sharded_with_retry(const Operator& entry, torch::jit::Stack* stack) {
  try {
    return run_sharded(entry, stack);
  } catch (const c10::OutOfMemoryError& error) {
    if (entry.in_place || !release_caches()) throw_out_of_memory(error);
  }
  try {
    return run_sharded(entry, stack);
  } catch (const c10::OutOfMemoryError& again) {
    throw_out_of_memory(again);
  }
}

// Autograd counts what is written to tensors, not to lists of them: torch's CUDA operators count that
// themselves.
void count_list_writes(const Operator& entry, const torch::jit::Stack& stack) {
  const size_t arguments = entry.writes.size();
  for (size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = stack[stack.size() - arguments + i];
    if (!entry.writes[i] || !value.isTensorList()) continue;
    for (const c10::IValue& element : value.toListRef()) {
      const at::Tensor& tensor = element.toTensor();
      if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace

void run_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  BelowAutograd below_autograd;
  Operator& entry = operator_entry(handle);
  std::optional<OperatorScope> scope;
  if (!entry.is_view) scope.emplace();
  if (entry.fused) check_fused_optimizer(entry, *stack);
  if (entry.in_place) count_list_writes(entry, *stack);
  bool large = any_large(*stack, entry.writes.size());
  if (entry.cut != Cut::kNone && (large || may_grow_large(entry, *stack))) {
    // a reduction's small result may be made by the kernel; others come from the pool, so that their pages
    // are dealt to the shards
    const bool reduces = entry.cut == Cut::kRowWise || entry.cut == Cut::kReduceAll;
    if (one_part_runs_whole() && (reduces || (entry.in_place && entry.cut != Cut::kRandom))) {
      run_on_lead(entry, stack);
      count_run(entry, Run::kSharded, true);
      return;
    }
    const Outcome outcome = run_sharded_with_retry(entry, stack);
    if (outcome == Outcome::kDone) {
      count_run(entry, Run::kSharded, true);
      return;
    }
    if (outcome == Outcome::kSmall) large = false;
    scope.emplace();  // the attempt may have given other GPUs work on these operands: it comes first
  }
  run_on_lead(entry, stack);
  // a view touches no memory, so it counts as no run
  if (!entry.is_view) count_run(entry, entry.cut == Cut::kNone ? Run::kFallback : Run::kLead, large);
}

}  // namespace mgpu
