// SPDX-License-Identifier: Apache-2.0
#include "backend/fallback.h"

#include <c10/util/SmallVector.h>

#include "backend/alias.h"
#include "backend/generator.h"
#include "backend/shards.h"
#include "backend/split.h"

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

  auto convert = [&](const at::Tensor& tensor, bool writes) {
    check_device(entry, tensor);
    at::Tensor alias = aliases.to_backing(tensor);
    if (writes) written.emplace_back(tensor, alias);
    return alias;
  };
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = (*stack)[first + i];
    originals.push_back(value);
    const bool writes = entry.writes[i];
    if (value.isTensor()) {
      value = c10::IValue(convert(value.toTensor(), writes));
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (at::Tensor& tensor : list) tensor = convert(tensor, writes);
      value = c10::IValue(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      for (auto& tensor : list)
        if (tensor) tensor = convert(*tensor, writes);
      value = c10::IValue(c10::List<std::optional<at::Tensor>>(list));
    } else {
      value = backing_value(entry, i, value);
    }
  }
  {
    AllocationScope results_from_the_pool;
    call_backing(*entry.handle, stack);
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

void run_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  BelowAutograd below_autograd;
  Operator& entry = operator_entry(handle);
  const bool large = any_large(*stack, entry.writes.size());
  if (entry.cut != Cut::kNone && large && run_sharded(entry, stack)) {
    count_run(entry, Run::kSharded, true);
    return;
  }
  run_on_lead(entry, stack);
  // a view touches no memory, so it counts as no run
  if (!entry.is_view) count_run(entry, entry.cut == Cut::kNone ? Run::kFallback : Run::kLead, large);
}

}  // namespace mgpu
