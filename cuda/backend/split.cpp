// SPDX-License-Identifier: Apache-2.0
#include "backend/split.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "backend/allocator.h"
#include "backend/shards.h"

namespace mgpu {

bool run_sharded(const Operator& entry, torch::jit::Stack* stack) {
  switch (entry.cut) {
    case Cut::kPointwise:
      return run_pointwise(entry, stack);
    case Cut::kForeach:
      return run_foreach(entry, stack);
    case Cut::kRowWise:
      return run_row_wise(entry, stack);
    case Cut::kReduceAll:
      return run_reduce_all(entry, stack);
    case Cut::kNone:
      return false;
  }
  return false;
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
  std::vector<int64_t> strides(shape_.size(), 1);
  for (size_t i = shape_.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(1, shape_[i]);
  return strides;
}

at::Tensor row_slice(const at::Tensor& tensor, RowRange range) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[0] = range.size();
  return make_view(tensor.storage(), tensor.key_set(), tensor.dtype(), sizes, tensor.strides(),
                   tensor.storage_offset() + range.begin * tensor.stride(0));
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
