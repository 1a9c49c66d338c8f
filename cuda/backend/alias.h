// SPDX-License-Identifier: Apache-2.0
// alias.h: the same memory as a tensor of the backing device, and back: what the fallback and the sharded
// operators hand to torch's own kernels. No byte is copied.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include "backend/allocator.h"
#include "backend/device.h"

namespace mgpu {

inline bool is_mgpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

// A tensor over a storage, made without the dispatcher, for kernels below autograd: it has no autograd keys
// and no version, as torch's inference tensors.
at::Tensor make_view(const c10::Storage& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype,
                     c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);

// While alive, this thread's calls skip autograd, which aliases know nothing of.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

// The aliases of one call. Tensors that share a storage get aliases that share one, so overlap checks hold.
class Aliases {
 public:
  // The alias of an mgpu tensor; any other tensor as it is. Layouts other than strided are refused.
  at::Tensor to_backing(const at::Tensor& tensor);

  // A backing kernel's result as an mgpu tensor: a view of the original storage if it is a view of an alias,
  // else a tensor that owns the fresh storage. Tensors of other devices as they are.
  at::Tensor from_backing(const at::Tensor& result) const;

  // After a kernel wrote `alias`: give `original` its new sizes, and its storage the new memory if it was
  // resized.
  void sync_back(const at::Tensor& original, const at::Tensor& alias);

 private:
  struct Entry {
    c10::StorageImpl* original;
    c10::Storage alias;
    void* data;  // of the original when the alias was made
  };
  c10::Storage alias_storage(const c10::Storage& storage);
  c10::SmallVector<Entry, 8> entries_;
};

}  // namespace mgpu
