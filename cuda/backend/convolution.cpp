// SPDX-License-Identifier: Apache-2.0
// convolution.cpp: torch sends convolutions of foreign devices to `convolution_overrideable`, which has no
// kernel anywhere; hand them back to the ordinary convolution, on the aliases. A large batch is cut over the
// shards, image by image.
#include "backend/operators.h"

#include <ATen/ops/add_ops.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/copy_ops.h>

#include "backend/alias.h"
#include "backend/flavour.h"
#include "backend/op_table.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu::ops {

namespace {

bool is_plain(const at::Tensor& tensor) { return is_mgpu(tensor) && !tensor.is_conj() && !tensor.is_neg(); }

void count(Operator& entry, const at::Tensor& input, bool by_batch) {
  const bool large = is_large(input);
  const bool sharded = by_batch || (large && part_count() == 1);
  count_run(entry, sharded ? Run::kSharded : Run::kLead, large);
}

bool can_be_cut(const at::Tensor& input) {
  return part_count() > 1 && is_large(input) && is_plain(input) && input.size(0) >= part_count();
}

// Results of the parts as one tensor in aggregate memory, in their layout.
at::Tensor put_together(const std::vector<at::Tensor>& parts, int64_t images) {
  const at::Tensor* model = nullptr;
  for (const at::Tensor& part : parts)
    if (part.defined() && !model) model = &part;
  std::vector<int64_t> sizes = model->sizes().vec();
  sizes[0] = images;
  const at::MemoryFormat format = model->suggest_memory_format();
  at::Tensor result =
      ops::empty(sizes, model->scalar_type(), std::nullopt, std::nullopt, std::nullopt, format);
  Aliases aliases;
  const at::Tensor to = aliases.to_backing(result);
  run_on_parts([&](int part) {
    const RowRange range = part_range(images, part);
    if (range.empty()) return;
    at::Tensor own = row_slice(to, range);
    at::_ops::copy_::call(own, parts[static_cast<size_t>(part)], false);
  });
  return result;
}

// The parts' gradients of the weights, added in order.
at::Tensor sum_in_order(std::vector<at::Tensor> parts) {
  bring_to_lead(parts);
  std::erase_if(parts, [](const at::Tensor& part) { return !part.defined(); });
  if (parts.empty()) return at::Tensor();
  for (size_t i = 1; i < parts.size(); ++i) at::_ops::add__Tensor::call(parts[0], parts[i], 1);
  return parts[0];
}

}  // namespace

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const bool by_batch = can_be_cut(input);
  static Operator& entry = operator_entry("aten::convolution");
  count(entry, input, by_batch);
  Aliases aliases;
  std::optional<at::Tensor> bias_alias;
  if (bias && bias->defined()) bias_alias = aliases.to_backing(*bias);
  const at::Tensor x = aliases.to_backing(input);
  const at::Tensor w = aliases.to_backing(weight);
  BelowAutograd below_autograd;
  if (by_batch) {
    std::vector<at::Tensor> parts(static_cast<size_t>(part_count()));
    run_on_parts([&](int part) {
      const RowRange range = part_range(x.size(0), part);
      if (range.empty()) return;
      const std::optional<at::Tensor> b = bias_alias ? std::optional(for_part(*bias_alias)) : std::nullopt;
      parts[static_cast<size_t>(part)] = at::convolution_symint(
          row_slice(x, range), for_part(w), b, stride, padding, dilation, transposed, output_padding, groups);
    });
    return put_together(parts, x.size(0));
  }
  OperatorScope scope;
  AllocationScope results_from_the_pool;
  return aliases.from_backing(at::convolution_symint(x, w, bias_alias, stride, padding, dilation, transposed,
                                                     output_padding, std::move(groups)));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& dL_doutput, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  const bool by_batch = can_be_cut(input) && is_plain(dL_doutput) && dL_doutput.size(0) == input.size(0);
  static Operator& entry = operator_entry("aten::convolution_backward");
  count(entry, input, by_batch);
  Aliases aliases;
  const std::vector<c10::SymInt> bias_size{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const at::OptionalSymIntArrayRef bias_sizes =
      wanted[2] ? at::OptionalSymIntArrayRef(bias_size) : std::nullopt;
  const at::Tensor dy = aliases.to_backing(dL_doutput);
  const at::Tensor x = aliases.to_backing(input);
  const at::Tensor w = aliases.to_backing(weight);
  BelowAutograd below_autograd;
  if (by_batch) {
    std::array<std::vector<at::Tensor>, 3> parts;
    for (auto& list : parts) list.resize(static_cast<size_t>(part_count()));
    run_on_parts([&](int part) {
      const RowRange range = part_range(x.size(0), part);
      if (range.empty()) return;
      const auto at = static_cast<size_t>(part);
      std::tie(parts[0][at], parts[1][at], parts[2][at]) = at::convolution_backward_symint(
          row_slice(dy, range), row_slice(x, range), for_part(w), bias_sizes, stride, padding, dilation,
          transposed, output_padding, groups, wanted);
    });
    OperatorScope scope;
    AllocationScope results_from_the_pool;
    return {wanted[0] ? put_together(parts[0], x.size(0)) : at::Tensor(),
            aliases.from_backing(sum_in_order(std::move(parts[1]))),
            aliases.from_backing(sum_in_order(std::move(parts[2])))};
  }
  OperatorScope scope;
  AllocationScope results_from_the_pool;
  const auto [dx, dw, db] = at::convolution_backward_symint(dy, x, w, bias_sizes, stride, padding, dilation,
                                                            transposed, output_padding, groups, wanted);
  return {aliases.from_backing(dx), aliases.from_backing(dw), aliases.from_backing(db)};
}

}  // namespace mgpu::ops
