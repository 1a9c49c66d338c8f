// SPDX-License-Identifier: Apache-2.0
#include "backend/alias.h"

namespace mgpu {

namespace {

// An alias keeps its storage alive through its DataPtr's context.
void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

c10::Storage storage_over(const c10::Storage& kept, c10::Device device, c10::Allocator* allocator) {
  c10::StorageImpl* impl = kept.unsafeGetStorageImpl();
  c10::DataPtr data(impl->mutable_data(), new c10::Storage(kept), &drop_storage, device);
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                                               std::move(data), allocator, /*resizable=*/true);
}

void copy_bits(const at::Tensor& from, c10::TensorImpl* to) {
  if (from.is_conj()) to->_set_conj(true);
  if (from.is_neg()) to->_set_neg(true);
}

}  // namespace

at::Tensor make_view(const c10::Storage& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype,
                     c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), keys, dtype);
  impl->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(impl));
}

c10::Storage Aliases::alias_storage(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  for (const Entry& entry : entries_)
    if (entry.original == impl) return entry.alias;
  c10::Storage alias = storage_over(storage, backing_device(), backing_allocator());
  entries_.push_back({impl, alias, impl->mutable_data()});
  return alias;
}

at::Tensor Aliases::to_backing(const at::Tensor& tensor) {
  if (!is_mgpu(tensor)) return tensor;
  TORCH_CHECK(tensor.layout() == c10::kStrided, "Device mgpu has strided tensors only, and got layout ",
              tensor.layout(), ". Use to_dense(), or move the tensor to the CPU.");
  at::Tensor alias = make_view(alias_storage(tensor.storage()), c10::DispatchKeySet(kBackingKey),
                               tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  copy_bits(tensor, alias.unsafeGetTensorImpl());
  return alias;
}

at::Tensor Aliases::from_backing(const at::Tensor& result) const {
  if (!result.defined() || result.device().type() != kBackingType || result.layout() != c10::kStrided)
    return result;
  const c10::Storage& storage = result.storage();
  c10::Storage home;
  for (const Entry& entry : entries_)
    if (entry.alias.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl())
      home = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(entry.original));
  if (!home) home = storage_over(storage, mgpu_device(), mgpu_allocator());
  c10::DispatchKeySet keys(kDeviceKey);
  // a zero tensor has no memory; without its key, kernels would read it
  if (result._is_zerotensor()) keys = keys.add(c10::DispatchKey::ZeroTensor);
  // the constructor that knows autograd: this tensor leaves the backend
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(home), keys, result.dtype());
  impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  at::Tensor out(std::move(impl));
  copy_bits(result, out.unsafeGetTensorImpl());
  return out;
}

void Aliases::sync_back(const at::Tensor& original, const at::Tensor& alias) {
  if (!original.defined() || !alias.defined() ||
      original.unsafeGetTensorImpl() == alias.unsafeGetTensorImpl())
    return;
  for (Entry& entry : entries_) {
    c10::StorageImpl* impl = entry.alias.unsafeGetStorageImpl();
    if (impl != alias.storage().unsafeGetStorageImpl() || impl->mutable_data() == entry.data) continue;
    // the kernel resized the alias: its new block, relabelled, becomes the original's
    c10::DataPtr data = impl->set_data_ptr(c10::DataPtr());
    void* address = data.get();
    const c10::DeleterFnPtr deleter = data.get_deleter();
    void* context = data.release_context();
    entry.original->set_data_ptr_noswap(c10::DataPtr(address, context, deleter, mgpu_device()));
    entry.original->set_nbytes(impl->nbytes());
    entry.data = nullptr;
  }
  if (original.sizes() != alias.sizes() || original.strides() != alias.strides() ||
      original.storage_offset() != alias.storage_offset())
    original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                          alias.storage_offset());
}

}  // namespace mgpu
