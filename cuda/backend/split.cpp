// SPDX-License-Identifier: Apache-2.0
#include "backend/split.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/copy_ops.h>

#include <algorithm>

#include "backend/allocator.h"
#include "backend/fallback.h"
#include "backend/flavour.h"
#include "backend/shards.h"
#include "memory/pool.h"

namespace mgpu {

Outcome run_sharded(const Operator& entry, torch::jit::Stack* stack) {
  auto outcome = [](bool done) { return done ? Outcome::kDone : Outcome::kWhole; };
  switch (entry.cut) {
    case Cut::kPointwise:
      return outcome(run_pointwise(entry, stack));
    case Cut::kForeach:
      return outcome(run_foreach(entry, stack));
    case Cut::kRowWise:
      return outcome(run_row_wise(entry, stack));
    case Cut::kReduceAll:
      return outcome(run_reduce_all(entry, stack));
    case Cut::kRows:
      return run_rows(entry, stack);
    case Cut::kIndex:
      return run_index(entry, stack);
    case Cut::kScatter:
      return run_scatter(entry, stack);
    case Cut::kRandom:
      return run_random(entry, stack);
    case Cut::kNone:
      return Outcome::kWhole;
  }
  return Outcome::kWhole;
}

std::optional<ElementwiseCut> ElementwiseCut::of(c10::ArrayRef<at::Tensor> operands, c10::IntArrayRef shape,
                                                 bool flat_only) {
  const int shards = mesh().size();
  ElementwiseCut cut;
  cut.shape_ = shape.vec();
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  const at::Tensor* model = nullptr;
  bool flat = true;
  for (const at::Tensor& operand : operands) {
    if (operand.layout() != c10::kStrided || operand.is_conj() || operand.is_neg() ||
        operand._is_zerotensor())
      return std::nullopt;
    if (operand.sizes() == shape) {
      if (!model) {
        model = &operand;
        flat &= operand.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
      }
      flat &= operand.strides() == model->strides();
    } else {
      flat &= operand.numel() == 1;
    }
  }
  if (!model) flat = false;
  if (flat && !shape.empty() && count > 0) {
    cut.strides_ = model->strides().vec();
    // whole rows, if there are enough of them and they follow each other
    const int64_t row = count / shape[0];
    const bool by_row = shape[0] >= 8 * shards && model->stride(0) == row;
    cut.unit_ = by_row ? row : 1;
    cut.extent_ = by_row ? shape[0] : count;
    return cut;
  }
  if (flat_only) return std::nullopt;
  for (size_t dimension = 0; dimension < shape.size(); ++dimension) {
    if (shape[dimension] < shards) continue;
    cut.dimension_ = static_cast<int64_t>(dimension);
    cut.extent_ = shape[dimension];
    return cut;
  }
  return std::nullopt;
}

RowRange ElementwiseCut::range(int part) const { return part_range(extent_, part); }

at::Tensor ElementwiseCut::slice(const at::Tensor& operand, RowRange range) const {
  if (flat()) {
    const bool full = operand.sizes() == c10::IntArrayRef(shape_);
    if (!full && operand.dim() == 0) return operand;  // a scalar keeps its weak type
    const int64_t length = full ? range.size() * unit_ : 1;
    const int64_t offset = full ? range.begin * unit_ : 0;
    return make_view(operand.storage(), operand.key_set(), operand.dtype(), {length}, {1},
                     operand.storage_offset() + offset);
  }
  const int64_t at = dimension_ - (static_cast<int64_t>(shape_.size()) - operand.dim());
  if (at < 0 || operand.size(at) == 1) return operand;
  std::vector<int64_t> sizes = operand.sizes().vec();
  sizes[static_cast<size_t>(at)] = range.size();
  return make_view(operand.storage(), operand.key_set(), operand.dtype(), sizes, operand.strides(),
                   operand.storage_offset() + range.begin * operand.stride(at));
}

std::optional<std::vector<int64_t>> ElementwiseCut::result_strides(c10::ArrayRef<at::Tensor> operands) const {
  if (flat()) return strides_;
  for (const at::Tensor& operand : operands)
    if (!operand.is_contiguous()) return std::nullopt;
  return contiguous_strides(shape_);
}

void wait_for_parts() {
  if (gpus_apart) const OperatorScope behind_all_parts;
}

void bring_to_lead(std::vector<at::Tensor>& values) {
  wait_for_parts();
  for (at::Tensor& value : values)
    if (value.defined() && value.device() != backing_device()) value = value.to(backing_device());
}

CutCall::CutCall(const Operator& entry, torch::jit::Stack* stack)
    : entry_(entry),
      stack_(stack),
      arguments_(stack->end() - static_cast<int64_t>(entry.writes.size()), stack->end()),
      cut_(entry.writes.size()) {}

bool CutCall::can_be_cut() const {
  auto plain = [](const at::Tensor& tensor) {
    return !tensor.defined() || (is_mgpu(tensor) && tensor.layout() == c10::kStrided && !tensor.is_conj() &&
                                 !tensor.is_neg() && !tensor._is_zerotensor());
  };
  for (const c10::IValue& value : arguments_) {
    if (value.isTensor()) {
      if (!plain(value.toTensor())) return false;
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector())
        if (!plain(tensor)) return false;
    }
  }
  return true;
}

const c10::IValue& CutCall::argument(const char* name) const {
  static const c10::IValue none;
  const int at = argument_position(entry_, name);
  return at < 0 ? none : arguments_[static_cast<size_t>(at)];
}

at::Tensor CutCall::tensor(const char* name) const {
  const c10::IValue& value = argument(name);
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

void CutCall::replace(const char* name, c10::IValue value) {
  arguments_[static_cast<size_t>(argument_position(entry_, name))] = std::move(value);
}

void CutCall::cut(const char* name, int64_t dimension) { cut_list(name, {dimension}); }

void CutCall::cut_list(const char* name, std::vector<int64_t> dimensions) {
  const int at = argument_position(entry_, name);
  if (at >= 0) cut_[static_cast<size_t>(at)] = std::move(dimensions);
}

bool CutCall::work_in_out() {
  const at::Tensor out = tensor("out");
  if (!out.defined()) return true;  // in place
  const at::Tensor self = tensor("self");
  if (out.sizes() != self.sizes() || out.scalar_type() != self.scalar_type()) return false;
  if (!out.is_same(self)) {
    if (out.is_alias_of(self) &&
        (out.strides() != self.strides() || out.storage_offset() != self.storage_offset()))
      return false;
    if (!out.is_alias_of(self)) at::_ops::copy_::call(const_cast<at::Tensor&>(out), self, false);
    replace("self", c10::IValue(out));
  }
  return true;
}

void CutCall::set(std::vector<c10::IValue> arguments, std::vector<std::vector<int64_t>> cut) {
  arguments_ = std::move(arguments);
  cut_ = std::move(cut);
}

void CutCall::run(int64_t extent) {
  run_parts(*entry_.handle, extent);
  const auto returned = static_cast<size_t>(entry_.returned_argument.at(0));
  give((*stack_)[stack_->size() - entry_.writes.size() + returned].toTensor());
}

void CutCall::run_into(const c10::OperatorHandle& handle, const at::Tensor& result, int64_t extent) {
  arguments_.emplace_back(result);
  cut_.push_back({0});
  run_parts(handle, extent);
  arguments_.pop_back();
  cut_.pop_back();
  give(result);
}

void CutCall::give(const std::vector<at::Tensor>& results) {
  torch::jit::drop(*stack_, entry_.writes.size());
  for (const at::Tensor& result : results) stack_->emplace_back(result);
}

void CutCall::run_parts(const c10::OperatorHandle& handle, int64_t extent) {
  Aliases aliases;
  std::vector<c10::IValue> backing;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const c10::IValue& value = arguments_[i];
    if (value.isTensor()) {
      backing.emplace_back(aliases.to_backing(value.toTensor()));
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (at::Tensor& tensor : list) tensor = aliases.to_backing(tensor, true);
      backing.emplace_back(c10::List<at::Tensor>(list));
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      for (auto& tensor : list)
        if (tensor) tensor = aliases.to_backing(*tensor, true);
      backing.emplace_back(c10::List<std::optional<at::Tensor>>(list));
    } else {
      backing.push_back(backing_value(entry_, i, value));
    }
  }
  run_on_parts([&](int part) {
    const RowRange range = part_range(extent, part);
    if (range.empty()) return;
    torch::jit::Stack call;
    for (size_t i = 0; i < backing.size(); ++i) {
      const std::vector<int64_t>& cut = cut_[i];
      auto slice = [&](const at::Tensor& tensor, size_t at) {
        return at < cut.size() && cut[at] >= 0 && tensor.defined() ? slice_along(tensor, cut[at], range)
                                                                   : tensor;
      };
      if (cut.empty()) {
        call.push_back(backing[i]);
      } else if (backing[i].isTensor()) {
        call.emplace_back(slice(backing[i].toTensor(), 0));
      } else if (backing[i].isTensorList()) {
        auto list = backing[i].toTensorVector();
        for (size_t at = 0; at < list.size(); ++at) list[at] = slice(list[at], at);
        call.emplace_back(c10::List<at::Tensor>(list));
      } else {
        auto list = backing[i].toOptionalTensorVector();
        for (size_t at = 0; at < list.size(); ++at)
          if (list[at]) list[at] = slice(*list[at], at);
        call.emplace_back(c10::List<std::optional<at::Tensor>>(list));
      }
    }
    call_backing(handle, &call);
  });
}

at::Tensor slice_along(const at::Tensor& tensor, int64_t dimension, RowRange range) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dimension)] = range.size();
  return make_view(tensor.storage(), tensor.key_set(), tensor.dtype(), sizes, tensor.strides(),
                   tensor.storage_offset() + range.begin * tensor.stride(dimension));
}

at::Tensor row_slice(const at::Tensor& tensor, RowRange range) { return slice_along(tensor, 0, range); }

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.dtype().itemsize());
}

bool is_worth_it(int64_t bytes) { return bytes >= shard_threshold(); }

int64_t wrapped(int64_t dimension, int64_t dimensions) {
  const int64_t from_front = dimension < 0 ? dimension + dimensions : dimension;
  return from_front >= 0 && from_front < dimensions ? from_front : -1;
}

std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(1, sizes[i]);
  return strides;
}

at::Tensor one_element(const at::Tensor& tensor) {
  if (tensor.dim() == 0) return tensor;
  std::vector<int64_t> sizes = tensor.sizes().vec();
  for (int64_t& size : sizes) size = std::min<int64_t>(size, 1);
  return make_view(tensor.storage(), tensor.key_set(), tensor.dtype(), sizes, tensor.strides(),
                   tensor.storage_offset());
}

bool overlaps(const at::Tensor& written, const at::Tensor& read) {
  if (written.storage().unsafeGetStorageImpl() != read.storage().unsafeGetStorageImpl()) return false;
  if (written.storage_offset() == read.storage_offset() && written.sizes() == read.sizes() &&
      written.strides() == read.strides() && written.dtype() == read.dtype())
    return false;
  auto extent = [](const at::Tensor& tensor) {
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i)
      last += std::max<int64_t>(0, tensor.size(i) - 1) * tensor.stride(i);
    const int64_t item = static_cast<int64_t>(tensor.dtype().itemsize());
    return RowRange{tensor.storage_offset() * item, (tensor.storage_offset() + last + 1) * item};
  };
  const RowRange a = extent(written);
  const RowRange b = extent(read);
  return a.begin < b.end && b.begin < a.end;
}

std::optional<std::vector<int64_t>> broadcast_shape(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<int64_t> shape;
  for (const at::Tensor& tensor : tensors) {
    const auto sizes = tensor.sizes();
    if (sizes.size() > shape.size()) shape.insert(shape.begin(), sizes.size() - shape.size(), 1);
    const size_t lead = shape.size() - sizes.size();
    for (size_t i = 0; i < sizes.size(); ++i) {
      int64_t& size = shape[lead + i];
      if (size == 1)
        size = sizes[i];
      else if (sizes[i] != 1 && sizes[i] != size)
        return std::nullopt;
    }
  }
  return shape;
}

at::Tensor empty_mgpu(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, mgpu_allocator(), c10::DispatchKeySet(kDeviceKey),
                                           dtype);
}

}  // namespace mgpu
