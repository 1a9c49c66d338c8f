// SPDX-License-Identifier: Apache-2.0
// split_rows.cpp: operators whose result has rows (or columns, or matrices of a batch) that are made by
// themselves: gather and its kin, cat, and matrix products. Each shard makes its part of the result, from
// wherever the operands lie.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>

#include <unordered_map>

#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu {

namespace {

bool same_sizes_but(const at::Tensor& a, const at::Tensor& b, int64_t dimension) {
  if (a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (d != dimension && a.size(d) != b.size(d)) return false;
  return true;
}

// `out` can be written part by part: of this type, and no memory of an operand.
bool can_be_written(const at::Tensor& out, const std::vector<at::Tensor>& operands, at::ScalarType type) {
  if (out.scalar_type() != type) return false;
  for (const at::Tensor& operand : operands)
    if (operand.defined() && operand.is_alias_of(out)) return false;
  return true;
}

// Run with the `out` of the call, or with a fresh result of these sizes.
Outcome run_with_result(CutCall& call, const at::Tensor& self, const std::vector<int64_t>& sizes,
                        int64_t extent) {
  const at::Tensor out = call.tensor("out");
  if (out.defined()) {
    call.cut("out", 0);
    call.run(extent);
    return Outcome::kDone;
  }
  if (!call.entry().out_overload) return Outcome::kWhole;
  call.run_into(*call.entry().out_overload, empty_mgpu(sizes, contiguous_strides(sizes), self.scalar_type()),
                extent);
  return Outcome::kDone;
}

Outcome index_select(CutCall& call) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor index = call.tensor("index");
  const at::Tensor out = call.tensor("out");
  const int64_t dimension = wrapped(call.argument("dim").toInt(), self.dim());
  if (self.dim() == 0 || dimension < 0 || index.dim() != 1) return Outcome::kWhole;
  std::vector<int64_t> sizes = self.sizes().vec();
  sizes[static_cast<size_t>(dimension)] = index.numel();
  if (!is_worth_it(c10::multiply_integers(sizes) * static_cast<int64_t>(self.dtype().itemsize())))
    return Outcome::kSmall;
  if (out.defined() &&
      (out.sizes() != c10::IntArrayRef(sizes) || !can_be_written(out, {self, index}, self.scalar_type())))
    return Outcome::kWhole;
  call.cut(dimension == 0 ? "index" : "self", 0);
  return run_with_result(call, self, sizes, sizes[0]);
}

Outcome take(CutCall& call) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor index = call.tensor("index");
  const at::Tensor out = call.tensor("out");
  if (index.dim() == 0) return Outcome::kWhole;
  if (!is_worth_it(index.numel() * static_cast<int64_t>(self.dtype().itemsize()))) return Outcome::kSmall;
  if (out.defined() &&
      (out.sizes() != index.sizes() || !can_be_written(out, {self, index}, self.scalar_type())))
    return Outcome::kWhole;
  call.cut("index", 0);
  return run_with_result(call, self, index.sizes().vec(), index.size(0));
}

Outcome gather(CutCall& call) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor index = call.tensor("index");
  const at::Tensor out = call.tensor("out");
  const int64_t dimension = wrapped(call.argument("dim").toInt(), self.dim());
  if (index.dim() == 0 || index.dim() != self.dim() || dimension < 0 || out.sizes() != index.sizes())
    return Outcome::kWhole;
  if (!is_worth_it(bytes_of(out))) return Outcome::kSmall;
  if (!can_be_written(out, {self, index}, self.scalar_type())) return Outcome::kWhole;
  for (int64_t d = 0; d < index.dim(); ++d)
    if (d != dimension && index.size(d) > self.size(d)) return Outcome::kWhole;
  call.cut("index", 0);
  if (dimension != 0) call.cut("self", 0);
  return run_with_result(call, self, {}, index.size(0));
}

// ---- cat

// Each shard's part of the result, put together from the stretches of the operands that lie in it.
void cat_along(CutCall& call, const std::vector<at::Tensor>& tensors, const at::Tensor& out,
               int64_t dimension) {
  Aliases aliases;
  std::vector<at::Tensor> from;
  for (const at::Tensor& tensor : tensors) from.push_back(aliases.to_backing(tensor, true));
  const at::Tensor to = aliases.to_backing(out);
  run_on_parts([&](int part) {
    const RowRange range = part_range(to.size(dimension), part);
    if (range.empty()) return;
    c10::List<at::Tensor> stretches;
    int64_t begin = 0;  // of this operand in the result
    for (const at::Tensor& tensor : from) {
      const int64_t end = begin + tensor.size(dimension);
      const RowRange mine{std::max(begin, range.begin) - begin, std::min(end, range.end) - begin};
      if (!mine.empty()) stretches.push_back(slice_along(tensor, dimension, mine));
      begin = end;
    }
    torch::jit::Stack parts{c10::IValue(std::move(stretches)), c10::IValue(dimension),
                            c10::IValue(slice_along(to, dimension, range))};
    call_backing(*call.entry().handle, &parts);
  });
  call.give(out);
}

Outcome cat(CutCall& call) {
  const at::Tensor out = call.tensor("out");
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : call.argument("tensors").toTensorVector())
    if (tensor.dim() != 1 || tensor.numel() > 0 || out.dim() == 1)
      tensors.push_back(tensor);  // as torch does
  const int64_t dimension = wrapped(call.argument("dim").toInt(), out.dim());
  if (dimension < 0 || tensors.empty()) return Outcome::kWhole;
  if (!is_worth_it(bytes_of(out))) return Outcome::kSmall;
  int64_t length = 0;
  for (const at::Tensor& tensor : tensors) {
    if (!same_sizes_but(tensor, out, dimension) || tensor.is_alias_of(out)) return Outcome::kWhole;
    length += tensor.size(dimension);
  }
  if (length != out.size(dimension)) return Outcome::kWhole;
  for (int64_t along = 0; along < dimension; ++along) {
    if (out.size(along) < part_count()) continue;
    call.replace("tensors", c10::IValue(c10::List<at::Tensor>(tensors)));
    call.cut_list("tensors", std::vector<int64_t>(tensors.size(), along));
    call.cut("out", along);
    call.run(out.size(along));
    return Outcome::kDone;
  }
  cat_along(call, tensors, out, dimension);
  return Outcome::kDone;
}

// ---- matrix products

// A partial product in 16 bits would be rounded once more than on one device.
bool keeps_precision(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
}

// A small product of long rows: each shard multiplies its stretch of the inner dimension, and the products
// are added in order. `out` = beta * bias + alpha * a @ b.
Outcome sum_of_products(CutCall& call, const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  const at::Tensor bias = call.entry().base_name == "aten::addmm" ? call.tensor("self") : at::Tensor();
  Aliases aliases;
  const at::Tensor left = aliases.to_backing(a);
  const at::Tensor right = aliases.to_backing(b);
  std::vector<at::Tensor> products(static_cast<size_t>(part_count()));
  run_on_parts([&](int part) {
    const RowRange range = part_range(a.size(1), part);
    if (range.empty()) return;
    products[static_cast<size_t>(part)] =
        at::_ops::mm::call(slice_along(left, 1, range), slice_along(right, 0, range));
  });
  bring_to_lead(products);
  BelowAutograd below_autograd;
  at::Tensor sum = products[0];
  for (size_t part = 1; part < products.size(); ++part)
    if (products[part].defined()) at::_ops::add__Tensor::call(sum, products[part], 1);
  at::Tensor to = aliases.to_backing(out);
  if (bias.defined()) {
    const at::Scalar alpha = call.argument("alpha").toScalar();
    const at::Scalar beta = call.argument("beta").toScalar();
    if (alpha.toDouble() != 1.0) at::_ops::mul__Scalar::call(sum, alpha);
    // beta = 0 ignores what is in the bias, as torch does
    if (beta.toDouble() != 0.0) sum = at::_ops::add_Tensor::call(sum, aliases.to_backing(bias), beta);
  }
  at::_ops::copy_::call(to, sum, false);
  call.give(out);
  return Outcome::kDone;
}

Outcome matrix_product(CutCall& call, const char* first, const char* second, const char* bias_name) {
  const at::Tensor a = call.tensor(first);
  const at::Tensor b = call.tensor(second);
  const at::Tensor out = call.tensor("out");
  const at::Tensor bias = bias_name ? call.tensor(bias_name) : at::Tensor();
  if (a.dim() != 2 || b.dim() != 2 || out.dim() != 2 || a.size(1) != b.size(0) || out.size(0) != a.size(0) ||
      out.size(1) != b.size(1) || a.size(1) == 0 || !can_be_written(out, {a, b, bias}, a.scalar_type()))
    return Outcome::kWhole;
  const int64_t largest = std::max(bytes_of(out), std::max(bytes_of(a), bytes_of(b)));
  if (!is_worth_it(largest)) return Outcome::kSmall;
  if (a.size(1) >= 8 * std::max(out.size(0), out.size(1)) && a.size(1) >= part_count() && keeps_precision(a))
    return sum_of_products(call, a, b, out);
  // the longer side of the result is cut
  const int64_t along = out.size(0) >= out.size(1) ? 0 : 1;
  const int64_t extent = out.size(along);
  if (extent < part_count()) return Outcome::kWhole;
  call.cut(along == 0 ? first : second, along);
  if (bias.defined()) {
    const int64_t own = along - (2 - bias.dim());  // the bias is broadcast to the result
    if (own >= 0 && bias.size(own) == extent) call.cut(bias_name, own);
  }
  call.cut("out", along);
  call.run(extent);
  return Outcome::kDone;
}

Outcome mm(CutCall& call) { return matrix_product(call, "self", "mat2", nullptr); }
Outcome addmm(CutCall& call) { return matrix_product(call, "mat1", "mat2", "self"); }

Outcome batch_product(CutCall& call, const char* first, const char* second, const char* bias_name) {
  const at::Tensor a = call.tensor(first);
  const at::Tensor b = call.tensor(second);
  const at::Tensor out = call.tensor("out");
  const at::Tensor bias = bias_name ? call.tensor(bias_name) : at::Tensor();
  if (a.dim() != 3 || b.dim() != 3 || out.dim() != 3 || a.size(0) != b.size(0) || a.size(2) != b.size(1) ||
      out.size(0) != a.size(0) || out.size(1) != a.size(1) || out.size(2) != b.size(2) ||
      !can_be_written(out, {a, b, bias}, a.scalar_type()))
    return Outcome::kWhole;
  if (!is_worth_it(std::max(bytes_of(out), std::max(bytes_of(a), bytes_of(b))))) return Outcome::kSmall;
  if (out.size(0) < part_count()) return Outcome::kWhole;
  call.cut(first, 0);
  call.cut(second, 0);
  call.cut("out", 0);
  if (bias.defined() && bias.dim() == 3 && bias.size(0) == out.size(0)) call.cut(bias_name, 0);
  call.run(out.size(0));
  return Outcome::kDone;
}

Outcome bmm(CutCall& call) { return batch_product(call, "self", "mat2", nullptr); }
Outcome baddbmm(CutCall& call) { return batch_product(call, "batch1", "batch2", "self"); }

Outcome addmv(CutCall& call) {
  const at::Tensor bias = call.tensor("self");
  const at::Tensor matrix = call.tensor("mat");
  const at::Tensor vector = call.tensor("vec");
  const at::Tensor out = call.tensor("out");
  if (matrix.dim() != 2 || vector.dim() != 1 || out.dim() != 1 || matrix.size(1) != vector.size(0) ||
      out.size(0) != matrix.size(0) || matrix.size(1) == 0 ||
      !can_be_written(out, {matrix, vector}, matrix.scalar_type()))
    return Outcome::kWhole;
  if (!is_worth_it(bytes_of(matrix))) return Outcome::kSmall;
  if (out.size(0) < part_count()) return Outcome::kWhole;
  if (bias.is_alias_of(out) && !bias.is_same(out)) return Outcome::kWhole;
  call.cut("mat", 0);
  call.cut("out", 0);
  if (bias.dim() == 1 && bias.size(0) == out.size(0)) call.cut("self", 0);
  call.run(out.size(0));
  return Outcome::kDone;
}

using Planner = Outcome (*)(CutCall& call);

Planner planner_of(const std::string& name) {
  static const std::unordered_map<std::string, Planner> planners = {{"aten::index_select", &index_select},
                                                                    {"aten::take", &take},
                                                                    {"aten::gather", &gather},
                                                                    {"aten::cat", &cat},
                                                                    {"aten::mm", &mm},
                                                                    {"aten::addmm", &addmm},
                                                                    {"aten::bmm", &bmm},
                                                                    {"aten::addmv", &addmv},
                                                                    {"aten::baddbmm", &baddbmm}};
  return planners.at(name);
}

}  // namespace

Outcome run_rows(const Operator& entry, torch::jit::Stack* stack) {
  CutCall call(entry, stack);
  if (!call.can_be_cut()) return Outcome::kWhole;
  return planner_of(entry.base_name)(call);
}

}  // namespace mgpu
