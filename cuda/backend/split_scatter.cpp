// SPDX-License-Identifier: Apache-2.0
// split_scatter.cpp: operators that write rows which an index names. Where the index stands along another
// dimension than the first, rows are independent. Along the first, every shard picks, in order, the entries
// that fall into its own rows, so that no two shards write one row and duplicates meet in torch's order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/ge_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/logical_and_ops.h>
#include <ATen/ops/lt_ops.h>
#include <ATen/ops/nonzero_ops.h>
#include <ATen/ops/reshape_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/to_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>

#include "backend/fallback.h"
#include "backend/flavour.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu {

namespace {

// Which entries of an index (alias, one dimension) fall into a shard's rows. Out-of-range ones go to the
// first or the last shard, whose kernel refuses them.
at::Tensor entries_of(const at::Tensor& index, RowRange rows, int64_t all_rows) {
  const at::Tensor above = at::_ops::ge_Scalar::call(index, rows.begin);
  const at::Tensor below = at::_ops::lt_Scalar::call(index, rows.end);
  if (rows.end == all_rows) return rows.begin == 0 ? at::_ops::eq_Tensor::call(index, index) : above;
  return rows.begin == 0 ? below : at::_ops::logical_and::call(above, below);
}

// Hand every shard the positions of its entries: work(part, its rows, positions). On GPUs the marks are made
// on all before the first count is waited for. A part that fails, fails because of an entry: the whole call
// then says it in the kernel's words.
void for_each_owner(CutCall& call, const at::Tensor& index, int64_t rows, torch::jit::Stack* stack,
                    const std::function<void(int, RowRange, const at::Tensor&)>& work) {
  std::vector<at::Tensor> marks(static_cast<size_t>(part_count()));
  run_on_parts([&](int part) {
    const RowRange mine = part_range(rows, part);
    if (!mine.empty()) marks[static_cast<size_t>(part)] = entries_of(for_part(index), mine, rows);
  });
  try {
    run_on_parts([&](int part) {
      const RowRange mine = part_range(rows, part);
      if (mine.empty()) return;
      const at::Tensor found = at::_ops::nonzero::call(marks[static_cast<size_t>(part)]);
      if (found.size(0) > 0) work(part, mine, at::_ops::reshape::call(found, c10::SymInt(-1)));
    });
  } catch (const c10::Error&) {
    OperatorScope behind_all_parts;
    run_on_lead(call.entry(), stack);
    throw;
  }
}

at::Tensor picked(const at::Tensor& tensor, const at::Tensor& positions) {
  return at::_ops::index_select::call(for_part(tensor), 0, positions);
}

// The index (alias) with negative entries counted from the front. What is below -rows stays: a kernel refuses
// it. All shards may have made the index just now, a mask's above all, so the lead shard waits for them.
at::Tensor from_front(const at::Tensor& index, int64_t rows) {
  BelowAutograd below_autograd;
  OperatorScope behind_all_parts;
  AllocationScope result_from_the_pool;  // other GPUs read it: CUDA tensors must not get its memory meanwhile
  const at::Tensor wraps = at::_ops::logical_and::call(at::_ops::lt_Scalar::call(index, 0),
                                                       at::_ops::ge_Scalar::call(index, -rows));
  return at::_ops::where_self::call(wraps, at::_ops::add_Scalar::call(index, rows, 1), index);
}

// True if no operand shares memory with what is written. The kernel explains what it will not take.
bool reads_no_written(const CutCall& call, const std::vector<at::Tensor>& operands) {
  const at::Tensor out = call.tensor("out");
  const at::Tensor written = out.defined() ? out : call.tensor("self");
  for (const at::Tensor& operand : operands)
    if (operand.defined() && operand.is_alias_of(written)) return false;
  return true;
}

// ---- index_add, index_copy, index_reduce, index_fill, and scatter of one dimension

Outcome along_first(CutCall& call, const char* source_name, torch::jit::Stack* stack) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor index = call.tensor("index");
  const at::Tensor source = call.tensor(source_name);
  const bool by_rows = source.defined() && source.dim() > 0;
  if (index.dim() != 1 || index.numel() == 0) return Outcome::kWhole;
  if (by_rows && (source.dim() != self.dim() || source.size(0) < index.size(0))) return Outcome::kWhole;
  for (int64_t d = 1; by_rows && d < self.dim(); ++d)
    if (source.size(d) != self.size(d)) return Outcome::kWhole;
  Aliases aliases;
  const at::Tensor to = aliases.to_backing(self);
  at::Tensor where = aliases.to_backing(index);
  if (call.entry().base_name == "aten::index_fill_")  // alone of all, it counts from the end too
    where = from_front(where, self.size(0));
  const at::Tensor from = source.defined() ? aliases.to_backing(source) : source;
  const Operator& entry = call.entry();
  const int at_index = argument_position(entry, "index");
  const int at_source = argument_position(entry, source_name);
  const torch::jit::Stack given(stack->end() - static_cast<int64_t>(entry.writes.size()), stack->end());
  for_each_owner(call, where, self.size(0), stack, [&](int, RowRange rows, const at::Tensor& positions) {
    const at::Tensor own = row_slice(to, rows);
    torch::jit::Stack one;
    for (size_t i = 0; i < given.size(); ++i) {
      if (i == 0 || entry.writes[i])
        one.emplace_back(own);
      else if (static_cast<int>(i) == at_index)
        one.emplace_back(at::_ops::sub_Scalar::call(picked(where, positions), rows.begin, 1));
      else if (static_cast<int>(i) == at_source && from.defined())
        one.emplace_back(by_rows ? picked(from, positions) : from);
      else
        one.push_back(backing_value(entry, i, given[i]));
    }
    call_backing(*entry.handle, &one);
  });
  call.give(call.tensor("out").defined() ? call.tensor("out") : self);
  return Outcome::kDone;
}

Outcome index_rows(CutCall& call, torch::jit::Stack* stack) {
  const bool fills = call.entry().base_name == "aten::index_fill_";
  const char* source_name = fills ? "value" : "source";
  const at::Tensor self = call.tensor("self");
  const at::Tensor index = call.tensor("index");
  const at::Tensor source = call.tensor(source_name);
  const int64_t dimension = wrapped(call.argument("dim").toInt(), self.dim());
  if (dimension < 0 || index.dim() > 1 || self.size(0) < part_count()) return Outcome::kWhole;
  const int64_t row_bytes = bytes_of(self) / std::max<int64_t>(1, self.size(dimension));
  if (!is_worth_it(row_bytes * index.numel())) return Outcome::kSmall;
  if (!reads_no_written(call, {index, source}) || !call.work_in_out()) return Outcome::kWhole;
  if (dimension == 0) return along_first(call, source_name, stack);
  if (source.defined() && source.dim() > 0) {
    if (source.dim() != self.dim() || source.size(0) != self.size(0)) return Outcome::kWhole;
    call.cut(source_name, 0);
  }
  call.cut("self", 0);
  call.cut("out", 0);
  call.run(self.size(0));
  return Outcome::kDone;
}

Outcome scatter(CutCall& call, torch::jit::Stack* stack) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor index = call.tensor("index");
  const at::Tensor source = call.tensor("src");
  const int64_t dimension = wrapped(call.argument("dim").toInt(), self.dim());
  if (dimension < 0 || index.dim() != self.dim() || index.numel() == 0) return Outcome::kWhole;
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (d != dimension && index.size(d) > self.size(d)) return Outcome::kWhole;
    if (source.defined() && (source.dim() != self.dim() || index.size(d) > source.size(d)))
      return Outcome::kWhole;
  }
  if (!is_worth_it(index.numel() * static_cast<int64_t>(self.dtype().itemsize()))) return Outcome::kSmall;
  if (!reads_no_written(call, {index, source})) return Outcome::kWhole;
  int64_t along = dimension == 0 ? 1 : 0;
  if (along < self.dim() && index.size(along) < part_count()) along = self.dim();
  if (along == self.dim() && self.dim() > 1) return Outcome::kWhole;
  if (!call.work_in_out()) return Outcome::kWhole;
  if (self.dim() == 1) return self.size(0) < part_count() ? Outcome::kWhole : along_first(call, "src", stack);
  call.cut("self", along);
  call.cut("out", along);
  call.cut("index", along);
  call.cut("src", along);
  call.run(index.size(along));
  return Outcome::kDone;
}

// ---- index_put

// self[:, indices...] = values: every row by itself.
Outcome put_in_each_row(CutCall& call, const std::vector<at::Tensor>& indices, int64_t chosen_dim) {
  const at::Tensor self = call.tensor("self");
  const at::Tensor values = call.tensor("values");
  int64_t defined = 0, first = -1, last = -1;
  c10::List<std::optional<at::Tensor>> list;
  for (size_t i = 0; i < indices.size(); ++i) {
    list.push_back(indices[i].defined() ? std::optional<at::Tensor>(indices[i]) : std::nullopt);
    if (!indices[i].defined()) continue;
    if (first < 0) first = static_cast<int64_t>(i);
    last = static_cast<int64_t>(i);
    ++defined;
  }
  if (last - first + 1 != defined) return Outcome::kWhole;  // what is chosen comes first, and rows later
  if (!is_worth_it(bytes_of(self) / std::max<int64_t>(1, self.size(first)))) return Outcome::kSmall;
  const int64_t result_dim = self.dim() - defined + chosen_dim;
  if (values.dim() > result_dim) return Outcome::kWhole;
  if (values.dim() == result_dim && values.size(0) != 1) {
    if (values.size(0) != self.size(0)) return Outcome::kWhole;
    call.cut("values", 0);
  }
  call.replace("indices", c10::IValue(list));
  call.cut("self", 0);
  call.run(self.size(0));
  return Outcome::kDone;
}

Outcome index_put(CutCall& call, torch::jit::Stack* stack) {
  const at::Tensor self = call.tensor("self");
  at::Tensor values = call.tensor("values");
  if (self.dim() == 0 || self.size(0) < part_count()) return Outcome::kWhole;
  const auto expanded = expand_masks(self, call.argument("indices"));
  if (!expanded || expanded->empty() || static_cast<int64_t>(expanded->size()) > self.dim())
    return Outcome::kWhole;
  std::vector<at::Tensor> defined{values};
  for (const at::Tensor& index : *expanded)
    if (index.defined()) defined.push_back(index);
  if (!reads_no_written(call, defined)) return Outcome::kWhole;
  defined.erase(defined.begin());
  const auto chosen = broadcast_shape(defined);
  if (!chosen || chosen->empty()) return Outcome::kWhole;
  if (!(*expanded)[0].defined())
    return put_in_each_row(call, *expanded, static_cast<int64_t>(chosen->size()));
  // the first index stands first, so what is chosen comes first: [chosen..., the other dimensions...]
  std::vector<int64_t> rest;
  for (int64_t d = 0; d < self.dim(); ++d)
    if (d >= static_cast<int64_t>(expanded->size()) || !(*expanded)[static_cast<size_t>(d)].defined())
      rest.push_back(self.size(d));
  const int64_t count = c10::multiply_integers(*chosen);
  const int64_t bytes = count * c10::multiply_integers(rest) * static_cast<int64_t>(self.dtype().itemsize());
  if (!is_worth_it(bytes) || count == 0) return Outcome::kSmall;
  std::vector<int64_t> full = *chosen;
  full.insert(full.end(), rest.begin(), rest.end());
  if (values.dim() > static_cast<int64_t>(full.size())) return Outcome::kWhole;
  for (int64_t d = 1; d <= values.dim(); ++d) {
    const int64_t size = values.size(values.dim() - d);
    if (size != 1 && size != full[full.size() - static_cast<size_t>(d)]) return Outcome::kWhole;
  }

  const auto flat = [&](const at::Tensor& tensor, std::vector<int64_t> from, std::vector<int64_t> to) {
    return at::_ops::reshape::call(at::_ops::expand::call(tensor, c10::fromIntArrayRefSlow(from), false),
                                   c10::fromIntArrayRefSlow(to));
  };
  const bool one_for_all = values.dim() <= static_cast<int64_t>(rest.size());
  if (!one_for_all) {
    std::vector<int64_t> rows{count};
    rows.insert(rows.end(), rest.begin(), rest.end());
    values = flat(values, full, rows);
  }
  Aliases aliases;
  const at::Tensor to = aliases.to_backing(self);
  const at::Tensor from = aliases.to_backing(values);
  std::vector<at::Tensor> where;
  for (const at::Tensor& index : *expanded)
    where.push_back(index.defined() ? aliases.to_backing(flat(index, *chosen, {count})) : index);
  where[0] = from_front(where[0], self.size(0));
  const c10::IValue accumulate = call.argument("accumulate");
  const c10::IValue unsafe = call.argument("unsafe");
  for_each_owner(call, where[0], self.size(0), stack, [&](int, RowRange rows, const at::Tensor& positions) {
    c10::List<std::optional<at::Tensor>> list;
    for (size_t i = 0; i < where.size(); ++i) {
      if (!where[i].defined()) {
        list.push_back(std::nullopt);
        continue;
      }
      const at::Tensor mine = picked(where[i], positions);
      list.push_back(i == 0 ? at::_ops::sub_Scalar::call(mine, rows.begin, 1) : mine);
    }
    torch::jit::Stack one{c10::IValue(row_slice(to, rows)), c10::IValue(list),
                          c10::IValue(one_for_all ? from : picked(from, positions)), accumulate, unsafe};
    call_backing(*call.entry().handle, &one);
  });
  call.give(self);
  return Outcome::kDone;
}

// ---- the gradient of an embedding: rows of it that the indices name are sums of rows of the output's
// gradient

Outcome embedding_backward(CutCall& call, torch::jit::Stack* stack) {
  const at::Tensor grad = call.tensor("grad_output");
  const at::Tensor indices = call.tensor("indices");
  const int64_t rows = call.argument("num_weights").toInt();
  const int64_t padding = call.argument("padding_idx").toInt();
  if (rows < part_count() || indices.numel() == 0 || grad.dim() != indices.dim() + 1) return Outcome::kWhole;
  const int64_t width = grad.size(grad.dim() - 1);
  if (!is_worth_it(std::max(bytes_of(grad), rows * width * static_cast<int64_t>(grad.dtype().itemsize()))))
    return Outcome::kSmall;
  const at::Tensor flat_grad = at::_ops::reshape::call(grad, std::vector<c10::SymInt>{-1, width});
  const at::Tensor flat_index = at::_ops::reshape::call(indices, c10::SymInt(-1));
  if (flat_grad.size(0) != flat_index.size(0)) return Outcome::kWhole;
  const at::Tensor result = empty_mgpu({rows, width}, {width, 1}, grad.scalar_type());
  Aliases aliases;
  const at::Tensor out = aliases.to_backing(result);
  const at::Tensor from = aliases.to_backing(flat_grad);
  const at::Tensor where = aliases.to_backing(flat_index);
  run_on_parts([&](int part) {
    const RowRange mine = part_range(rows, part);
    if (mine.empty()) return;
    at::Tensor own = row_slice(out, mine);
    at::_ops::zero_::call(own);
  });
  const c10::IValue by_count = call.argument("scale_grad_by_freq");
  for_each_owner(call, where, rows, stack, [&](int, RowRange mine, const at::Tensor& positions) {
    const bool has_padding = padding >= mine.begin && padding < mine.end;
    torch::jit::Stack one{c10::IValue(picked(from, positions)),
                          c10::IValue(at::_ops::sub_Scalar::call(picked(where, positions), mine.begin, 1)),
                          c10::IValue(mine.size()), c10::IValue(has_padding ? padding - mine.begin : -1),
                          by_count};
    call_backing(*call.entry().handle, &one);
    at::Tensor own = row_slice(out, mine);
    at::_ops::copy_::call(own, one.back().toTensor(), false);
  });
  call.give(result);
  return Outcome::kDone;
}

}  // namespace

Outcome run_scatter(const Operator& entry, torch::jit::Stack* stack) {
  CutCall call(entry, stack);
  if (entry.base_name == "aten::_index_put_impl_") {
    // torch takes a value without dimensions from the CPU
    const at::Tensor values = call.tensor("values");
    if (values.defined() && values.dim() == 0 && values.device().type() == c10::DeviceType::CPU)
      call.replace("values", c10::IValue(at::_ops::to_device::call(
                                 values, mgpu_device(), values.scalar_type(), false, false, std::nullopt)));
  }
  if (!call.can_be_cut()) return Outcome::kWhole;
  if (entry.base_name == "aten::_index_put_impl_") return index_put(call, stack);
  if (entry.base_name == "aten::embedding_dense_backward") return embedding_backward(call, stack);
  if (entry.base_name.rfind("aten::scatter", 0) == 0) return scatter(call, stack);
  return index_rows(call, stack);
}

}  // namespace mgpu
