// SPDX-License-Identifier: Apache-2.0
// convolution.cpp: torch sends convolutions of foreign devices to `convolution_overrideable`, which has no
// kernel anywhere; hand them back to the ordinary convolution, on the aliases.
#include "backend/operators.h"

#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "backend/alias.h"
#include "backend/flavour.h"
#include "backend/op_table.h"
#include "backend/shards.h"

namespace mgpu::ops {

namespace {

void count(const char* name, const at::Tensor& input) {
  count_run(operator_entry(name), Run::kFallback, is_large(input));
}

}  // namespace

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  count("aten::convolution", input);
  Aliases aliases;
  std::optional<at::Tensor> bias_alias;
  if (bias && bias->defined()) bias_alias = aliases.to_backing(*bias);
  const at::Tensor x = aliases.to_backing(input);
  const at::Tensor w = aliases.to_backing(weight);
  BelowAutograd below_autograd;
  OperatorScope scope;
  AllocationScope results_from_the_pool;
  return aliases.from_backing(at::convolution_symint(x, w, bias_alias, stride, padding, dilation, transposed,
                                                     output_padding, std::move(groups)));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& dL_doutput, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  count("aten::convolution_backward", input);
  Aliases aliases;
  const std::vector<c10::SymInt> bias_size{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const at::Tensor dy = aliases.to_backing(dL_doutput);
  const at::Tensor x = aliases.to_backing(input);
  const at::Tensor w = aliases.to_backing(weight);
  BelowAutograd below_autograd;
  OperatorScope scope;
  AllocationScope results_from_the_pool;
  const auto [dx, dw, db] = at::convolution_backward_symint(
      dy, x, w, wanted[2] ? at::OptionalSymIntArrayRef(bias_size) : std::nullopt, stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  return {aliases.from_backing(dx), aliases.from_backing(dw), aliases.from_backing(db)};
}

}  // namespace mgpu::ops
