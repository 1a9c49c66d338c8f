// SPDX-License-Identifier: Apache-2.0
// alias.h: the same memory as a tensor of the backing device, and back: what the fallback and the sharded
// operators hand to torch's own kernels. No byte is copied.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <unordered_map>

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

// ---- on another GPU than the lead shard's (shards.h, part_gpu)

// Relabel what is on the backing device as the part's: kernels run where their operands say they are.
c10::Storage for_part(const c10::Storage& storage);
at::Tensor for_part(const at::Tensor& tensor);
void forget_relabelled();

// Remember that a stream works on a tensor that a backing kernel made. False if it did not.
bool note_use_of_adopted(const c10::Storage& storage, c10::StreamId stream);

// The aliases of one call. Tensors that share a storage get aliases that share one, so overlap checks hold.
class Aliases {
 public:
  Aliases();  // RuntimeError in a forked process
  // The alias of an mgpu tensor; any other tensor as it is. Layouts other than strided are refused.
  // In a list, the alias gets the keys that kernels on lists need.
  at::Tensor to_backing(const at::Tensor& tensor, bool in_list = false);

  // A backing kernel's result as an mgpu tensor: a view of the original storage if it is a view of an alias,
  // else a tensor that owns the fresh storage. Tensors of other devices as they are.
  at::Tensor from_backing(const at::Tensor& result);

  // After a kernel wrote `alias`: give `original` its new sizes, and its storage the new memory if it was
  // resized.
  void sync_back(const at::Tensor& original, const at::Tensor& alias);

  // After a kernel failed: forget the aliases, so that the next ones do not see what it may have resized.
  void reset() {
    entries_.clear();
    many_.clear();
  }

 private:
  struct Entry {
    c10::StorageImpl* original;
    c10::Storage alias;
    void* data;  // of the original when the alias was made
  };
  // The entry whose original or alias this is; null if there is none.
  Entry* find(const c10::StorageImpl* storage);
  c10::Storage alias_storage(const c10::Storage& storage);
  c10::SmallVector<Entry, 8> entries_;
  // The same by their addresses, from 16 entries on: a list of all parameters of a model may be long.
  std::unordered_map<const c10::StorageImpl*, size_t> many_;
};

}  // namespace mgpu
