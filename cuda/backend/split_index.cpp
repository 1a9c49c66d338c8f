// SPDX-License-Identifier: Apache-2.0
// split_index.cpp: advanced indexing and masks. A mask is turned into the indices of what it chooses, shard
// by shard; then every shard makes its part of the result.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/count_nonzero_ops.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/index_meta_dispatch.h>
#include <ATen/ops/nonzero_ops.h>
#include <ATen/ops/reshape_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/to_ops.h>

#include <algorithm>

#include "backend/flavour.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu {

namespace {

bool is_mask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

// Sizes and strides that torch would give self[indices]: of the dimensions that are not indexed, with what is
// chosen before dimension `at` of self. Where all operands are contiguous, so is the result; for the rest
// torch is asked. Not by the dispatcher: that is Python's kernel, takes 70 us and wants Python's lock, which
// a thread that waits for our turn may have (mesh/gate.h).
std::pair<std::vector<int64_t>, std::vector<int64_t>> result_layout(const at::Tensor& self,
                                                                    const std::vector<at::Tensor>& indices,
                                                                    const std::vector<int64_t>& chosen,
                                                                    int64_t at) {
  const auto is_contiguous = [](const at::Tensor& index) {
    return !index.defined() || index.is_contiguous();
  };
  if (self.is_contiguous() && std::all_of(indices.begin(), indices.end(), is_contiguous)) {
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < self.dim(); ++d) {
      if (d == at) sizes.insert(sizes.end(), chosen.begin(), chosen.end());
      if (d >= static_cast<int64_t>(indices.size()) || !indices[static_cast<size_t>(d)].defined())
        sizes.push_back(self.size(d));
    }
    return {sizes, contiguous_strides(sizes)};
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& index : indices)
    list.push_back(index.defined() ? std::optional<at::Tensor>(on_meta(index)) : std::nullopt);
  const at::Tensor shape = at::meta::index(on_meta(self), list);
  return {shape.sizes().vec(), shape.strides().vec()};
}

// self[indices], none of them a mask.
Outcome pick(CutCall& call, const at::Tensor& self, const std::vector<at::Tensor>& indices,
             const at::Tensor& out, const c10::OperatorHandle& handle) {
  std::vector<at::Tensor> defined;
  int64_t first = -1, last = -1;
  for (size_t i = 0; i < indices.size(); ++i) {
    if (!indices[i].defined()) continue;
    if (first < 0) first = static_cast<int64_t>(i);
    last = static_cast<int64_t>(i);
    defined.push_back(indices[i]);
  }
  const auto chosen = broadcast_shape(defined);
  if (defined.empty() || !chosen || chosen->empty() || static_cast<int64_t>(indices.size()) > self.dim())
    return Outcome::kWhole;
  // the shape of the indices takes the place of the indexed dimensions, or comes first if those are apart
  const bool together = last - first + 1 == static_cast<int64_t>(defined.size());
  const bool chosen_first = !together || first == 0;
  int64_t bytes = c10::multiply_integers(*chosen) * static_cast<int64_t>(self.dtype().itemsize());
  for (int64_t d = 0; d < self.dim(); ++d)
    if (d >= static_cast<int64_t>(indices.size()) || !indices[static_cast<size_t>(d)].defined())
      bytes *= self.size(d);
  if (!is_worth_it(bytes)) return Outcome::kSmall;

  c10::List<std::optional<at::Tensor>> list;
  std::vector<int64_t> cut;
  for (const at::Tensor& index : indices) {
    list.push_back(index.defined() ? std::optional<at::Tensor>(index) : std::nullopt);
    const bool has_rows = chosen_first && index.defined() &&
                          index.dim() == static_cast<int64_t>(chosen->size()) &&
                          index.size(0) == (*chosen)[0];
    cut.push_back(has_rows ? 0 : -1);
  }
  const int64_t extent = chosen_first ? (*chosen)[0] : self.size(0);

  const auto [sizes, strides] = result_layout(self, indices, *chosen, together ? first : 0);
  if (sizes.empty() || sizes[0] != extent) return Outcome::kWhole;
  if (out.defined() && (out.sizes() != c10::IntArrayRef(sizes) || out.scalar_type() != self.scalar_type() ||
                        out.is_alias_of(self)))
    return Outcome::kWhole;

  call.set({c10::IValue(self), c10::IValue(list)}, {{chosen_first ? -1 : 0}, cut});
  call.run_into(handle, out.defined() ? out : empty_mgpu(sizes, strides, self.scalar_type()), extent);
  return Outcome::kDone;
}

}  // namespace

at::Tensor sharded_nonzero(const at::Tensor& tensor, bool dealt) {
  if (tensor.dim() == 0 || tensor.size(0) < part_count()) return at::_ops::nonzero::call(tensor);
  Aliases aliases;
  const at::Tensor alias = aliases.to_backing(tensor);
  if (part_count() == 1 && !dealt) {
    OperatorScope scope;
    AllocationScope results_from_the_pool;
    return aliases.from_backing(at::_ops::nonzero::call(alias));
  }
  std::vector<at::Tensor> found(static_cast<size_t>(part_count()));
  run_on_parts([&](int part) {
    const RowRange range = part_range(alias.size(0), part);
    if (range.empty()) return;
    at::Tensor indices = at::_ops::nonzero::call(row_slice(alias, range));
    if (range.begin > 0) {
      at::Tensor rows = at::_ops::select_int::call(indices, 1, 0);
      at::_ops::add__Scalar::call(rows, range.begin, 1);
    }
    found[static_cast<size_t>(part)] = indices;
  });
  std::vector<int64_t> begin{0};
  for (const at::Tensor& part : found) begin.push_back(begin.back() + (part.defined() ? part.size(0) : 0));
  // column by column, as torch lays it out
  at::Tensor result =
      empty_mgpu({begin.back(), tensor.dim()}, {1, std::max<int64_t>(1, begin.back())}, at::kLong);
  const at::Tensor out = aliases.to_backing(result);
  run_on_parts([&](int part) {
    const at::Tensor& from = found[static_cast<size_t>(part)];
    if (!from.defined() || from.numel() == 0) return;
    at::Tensor to = row_slice(out, {begin[static_cast<size_t>(part)], begin[static_cast<size_t>(part) + 1]});
    at::_ops::copy_::call(to, from, false);
  });
  return result;
}

std::optional<std::vector<at::Tensor>> expand_masks(const at::Tensor& self, const c10::IValue& indices) {
  std::vector<at::Tensor> expanded;
  for (const std::optional<at::Tensor>& given : indices.toOptionalTensorVector()) {
    if (!given || !given->defined()) {
      expanded.emplace_back();
      continue;
    }
    at::Tensor index = *given;
    if (index.layout() != c10::kStrided) return std::nullopt;
    if (!is_mgpu(index)) {
      if (index.device().type() != c10::DeviceType::CPU) return std::nullopt;
      index =
          at::_ops::to_device::call(index, mgpu_device(), index.scalar_type(), false, false, std::nullopt);
    }
    if (!is_mask(index)) {
      expanded.push_back(index);
      continue;
    }
    const int64_t at = static_cast<int64_t>(expanded.size());
    if (index.dim() == 0 || at + index.dim() > self.dim()) return std::nullopt;
    for (int64_t d = 0; d < index.dim(); ++d)
      if (index.size(d) != self.size(at + d)) return std::nullopt;
    const at::Tensor found = sharded_nonzero(index, /*dealt=*/false);
    for (int64_t d = 0; d < index.dim(); ++d) expanded.push_back(at::_ops::select_int::call(found, 1, d));
  }
  return expanded;
}

namespace {

Outcome index(const Operator& entry, CutCall& call) {
  const at::Tensor self = call.tensor("self");
  if (!entry.in_place && !entry.out_overload) return Outcome::kWhole;
  const auto indices = expand_masks(self, call.argument("indices"));
  if (!indices) return Outcome::kWhole;
  return pick(call, self, *indices, call.tensor("out"), entry.in_place ? *entry.handle : *entry.out_overload);
}

// self[mask], both broadcast to one shape.
Outcome masked_select(CutCall& call) {
  static const Operator& index_entry =
      operator_entry(c10::Dispatcher::singleton().findSchemaOrThrow("aten::index", "Tensor"));
  const at::Tensor self = call.tensor("self");
  const at::Tensor mask = call.tensor("mask");
  const at::Tensor operands[] = {self, mask};
  const auto shape = broadcast_shape(operands);
  if (!shape || shape->empty() || mask.scalar_type() != at::kBool || !index_entry.out_overload)
    return Outcome::kWhole;
  const auto wide = c10::fromIntArrayRefSlow(*shape);
  const at::Tensor from = at::_ops::expand::call(self, wide, false);
  const at::Tensor found = sharded_nonzero(at::_ops::expand::call(mask, wide, false), /*dealt=*/false);
  std::vector<at::Tensor> indices;
  for (int64_t d = 0; d < from.dim(); ++d) indices.push_back(at::_ops::select_int::call(found, 1, d));
  return pick(call, from, indices, at::Tensor(), *index_entry.out_overload);
}

// Where the mask is true, the next value of the source. A shard's first is the number of trues before its
// part.
Outcome masked_scatter(CutCall& call) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor source = call.tensor("source");
  const at::Tensor operands[] = {self, call.tensor("mask")};
  const auto shape = broadcast_shape(operands);
  if (!shape || self.sizes() != c10::IntArrayRef(*shape)) return Outcome::kWhole;
  const at::Tensor mask = at::_ops::expand::call(operands[1], c10::fromIntArrayRefSlow(*shape), false);
  if (self.dim() == 0 || mask.scalar_type() != at::kBool || mask.is_alias_of(self) ||
      self.size(0) < part_count() || source.scalar_type() != self.scalar_type() || source.is_alias_of(self))
    return Outcome::kWhole;
  const at::Tensor values = at::_ops::reshape::call(source, c10::SymInt(-1));
  Aliases aliases;
  const at::Tensor to = aliases.to_backing(self);
  const at::Tensor chosen = aliases.to_backing(mask);
  const at::Tensor from = aliases.to_backing(values);
  std::vector<at::Tensor> counts(static_cast<size_t>(part_count()));
  run_on_parts([&](int part) {
    const RowRange range = part_range(self.size(0), part);
    if (!range.empty())
      counts[static_cast<size_t>(part)] =
          at::_ops::count_nonzero::call(row_slice(chosen, range), std::nullopt);
  });
  wait_for_parts();
  std::vector<int64_t> begin{0};
  for (const at::Tensor& count : counts)
    begin.push_back(begin.back() + (count.defined() ? count.item().toLong() : 0));
  if (begin.back() > values.numel()) return Outcome::kWhole;  // the kernel says it in words
  run_on_parts([&](int part) {
    const RowRange range = part_range(self.size(0), part);
    const RowRange mine{begin[static_cast<size_t>(part)], begin[static_cast<size_t>(part) + 1]};
    if (mine.empty()) return;
    torch::jit::Stack one{c10::IValue(row_slice(to, range)), c10::IValue(row_slice(chosen, range)),
                          c10::IValue(row_slice(from, mine))};
    call_backing(*call.entry().handle, &one);
  });
  call.give(self);
  return Outcome::kDone;
}

}  // namespace

Outcome run_index(const Operator& entry, torch::jit::Stack* stack) {
  CutCall call(entry, stack);
  if (!call.can_be_cut()) return Outcome::kWhole;
  if (entry.base_name == "aten::index") return index(entry, call);
  if (entry.base_name == "aten::masked_select") return masked_select(call);
  if (entry.base_name == "aten::masked_scatter_") return masked_scatter(call);
  const at::Tensor self = call.tensor("self");
  if (self.dim() == 0 || self.size(0) < part_count()) return Outcome::kWhole;
  call.give(sharded_nonzero(self, /*dealt=*/true));
  return Outcome::kDone;
}

}  // namespace mgpu
