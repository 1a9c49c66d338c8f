// SPDX-License-Identifier: Apache-2.0
// split_foreach.cpp: operators on lists of tensors, element by element: _foreach_* and the fused optimizers.
// Entry i of all lists forms a group; large groups are cut over the shards, small ones go to the lead shard.
#include "backend/fallback.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu {

namespace {

struct Group {
  std::vector<at::Tensor> operands;   // aliases, in the order of the lists
  std::vector<at::Tensor> inputs;     // those of them that are read, which give the result its shape
  std::optional<ElementwiseCut> cut;  // none: small, whole, on the lead shard
  at::Tensor out;                     // alias of the result, if functional
};

// A list argument without the groups that a shard has no part in.
c10::IValue filtered(const c10::IValue& value, const std::vector<size_t>& kept) {
  const auto list = value.toList();
  c10::impl::GenericList out(list.elementType());
  for (size_t group : kept) out.push_back(list.get(group));
  return out;
}

}  // namespace

void check_fused_optimizer(const Operator& entry, const torch::jit::Stack& stack) {
  const size_t arguments = entry.writes.size();
  const size_t first = stack.size() - arguments;
  if (!stack[first].isTensorList()) return;
  const auto parameters = stack[first].toListRef();
  for (size_t i = 1; i < arguments; ++i) {
    const c10::IValue& argument = stack[first + i];
    if (!argument.isTensorList() || entry.argument_names[i] == "state_steps") continue;
    const auto list = argument.toListRef();
    for (size_t g = 0; g < list.size() && g < parameters.size(); ++g) {
      const at::Tensor& parameter = parameters[g].toTensor();
      const at::Tensor& other = list[g].toTensor();
      if (!parameter.defined() || !other.defined()) continue;
      TORCH_CHECK_VALUE(other.sizes() == parameter.sizes(), entry.base_name, ": ", entry.argument_names[i],
                        "[", g, "] is ", other.sizes(), " and the parameter ", parameter.sizes(),
                        ". After torch.mgpu.grow() or shrink() of a parameter, change its moments alike.");
    }
  }
}

bool run_foreach(const Operator& entry, torch::jit::Stack* stack) {
  const size_t arguments = entry.writes.size();
  const size_t first = stack->size() - arguments;
  auto argument = [&](size_t i) -> c10::IValue& { return (*stack)[first + i]; };
  if (!entry.fused && !entry.in_place && !entry.out_overload) return false;

  Aliases aliases;
  std::vector<std::vector<at::Tensor>> lists(arguments);  // aliases; empty for arguments that are no list
  size_t count = 0;
  for (size_t i = 0; i < arguments; ++i) {
    if (argument(i).isTensorList()) {
      lists[i] = argument(i).toTensorVector();
      if (lists[i].empty()) continue;
      if (count == 0) count = lists[i].size();
      if (lists[i].size() != count) return false;
      for (at::Tensor& tensor : lists[i]) {
        if (!tensor.defined() || tensor.layout() != c10::kStrided) return false;
        if (!is_mgpu(tensor) && tensor.numel() != 1) return false;
        tensor = aliases.to_backing(tensor, true);
      }
    } else if (argument(i).isTensor() && argument(i).toTensor().defined()) {
      if (argument(i).toTensor().numel() != 1) return false;
      lists[i] = {aliases.to_backing(argument(i).toTensor())};
    }
  }
  if (count == 0) return false;
  auto is_list = [&](size_t i) { return argument(i).isTensorList() && !lists[i].empty(); };

  std::vector<Group> groups(count);
  for (size_t g = 0; g < count; ++g) {
    Group& group = groups[g];
    bool large = false;
    at::Tensor written;
    for (size_t i = 0; i < arguments; ++i) {
      if (!is_list(i)) continue;
      group.operands.push_back(lists[i][g]);
      if (!entry.is_out[i]) group.inputs.push_back(lists[i][g]);
      large |= is_large(argument(i).toListRef()[g].toTensor());
      if (entry.writes[i] && !written.defined()) written = lists[i][g];
    }
    if (!large) continue;
    const auto shape = broadcast_shape(group.inputs);
    if (!shape) return false;
    if (written.defined()) {
      if (written.sizes() != c10::IntArrayRef(*shape)) return false;
      for (const at::Tensor& operand : group.operands)
        if (overlaps(written, operand)) return false;
    }
    // the fused kernels walk over memory, so they need slices without gaps
    group.cut = ElementwiseCut::of(group.operands, *shape, /*flat_only=*/entry.fused);
    if (!group.cut) return false;
    if (!entry.in_place && !group.cut->result_strides(group.operands)) return false;
  }

  // one call with the groups in `kept`; `pick` chooses the part of an operand
  auto fill = [&](torch::jit::Stack& call, const std::vector<size_t>& kept, auto&& pick) {
    for (size_t i = 0; i < arguments; ++i) {
      if (is_list(i)) {
        c10::List<at::Tensor> list;
        for (size_t g : kept) list.push_back(pick(groups[g], lists[i][g]));
        call.emplace_back(std::move(list));
      } else if (argument(i).isTensor() && !lists[i].empty()) {
        call.emplace_back(lists[i][0]);
      } else if (argument(i).isList() && !argument(i).isTensorList() &&
                 argument(i).toListRef().size() == count) {
        call.push_back(filtered(argument(i), kept));
      } else {
        call.push_back(backing_value(entry, i, argument(i)));
      }
    }
  };

  c10::List<at::Tensor> results;
  if (!entry.in_place) {
    std::vector<size_t> all;
    for (size_t g = 0; g < count; ++g) all.push_back(g);
    torch::jit::Stack probe;
    fill(probe, all, [](const Group&, const at::Tensor& operand) { return one_element(operand); });
    call_backing(*entry.handle, &probe);
    const auto samples = probe.back().toTensorVector();
    if (samples.size() != count) return false;
    for (size_t g = 0; g < count; ++g) {
      const auto shape = broadcast_shape(groups[g].inputs);
      if (!shape) return false;
      auto cut = groups[g].cut;
      if (!cut) cut = ElementwiseCut::of(groups[g].operands, *shape, false);
      // a small one that cannot be cut (a scalar, say) still needs a result: contiguous
      std::vector<int64_t> strides = contiguous_strides(*shape);
      if (cut) {
        const auto wanted = cut->result_strides(groups[g].operands);
        if (!wanted) return false;
        strides = *wanted;
      }
      at::Tensor result = empty_mgpu(*shape, strides, samples[g].scalar_type());
      results.push_back(result);
      groups[g].out = aliases.to_backing(result, true);
    }
  }

  run_on_parts([&](int part) {
    std::vector<size_t> kept;
    for (size_t g = 0; g < count; ++g) {
      const bool mine = groups[g].cut ? !groups[g].cut->range(part).empty() : part == 0;
      if (mine) kept.push_back(g);
    }
    if (kept.empty()) return;
    auto pick = [&](const Group& group, const at::Tensor& operand) {
      return group.cut ? group.cut->slice(operand, group.cut->range(part)) : operand;
    };
    torch::jit::Stack call;
    fill(call, kept, pick);
    if (entry.in_place) {
      call_backing(*entry.handle, &call);
    } else {
      c10::List<at::Tensor> outs;
      for (size_t g : kept) outs.push_back(pick(groups[g], groups[g].out));
      call.emplace_back(std::move(outs));
      call_backing(*entry.out_overload, &call);
    }
  });

  c10::SmallVector<c10::IValue, 2> returned;
  if (!entry.in_place) {
    returned.emplace_back(std::move(results));
  } else {
    for (int from : entry.returned_argument) returned.push_back(argument(static_cast<size_t>(from)));
  }
  torch::jit::drop(*stack, arguments);
  for (c10::IValue& value : returned) stack->push_back(std::move(value));
  return true;
}

}  // namespace mgpu
