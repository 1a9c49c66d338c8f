// SPDX-License-Identifier: Apache-2.0
#include "backend/alias.h"

#include <mutex>

#include "backend/flavour.h"
#include "backend/shards.h"

#include "memory/pool.h"

namespace mgpu {

namespace {

// An alias keeps its storage alive through its DataPtr's context: a reference on it.
void drop_storage(void* context) {
  c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(context));
}

c10::Storage storage_over(const c10::Storage& kept, c10::Device device, c10::Allocator* allocator) {
  c10::StorageImpl* impl = kept.unsafeGetStorageImpl();
  c10::Storage reference = kept;
  c10::DataPtr data(impl->mutable_data(), reference.unsafeReleaseStorageImpl(), &drop_storage, device);
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                                               std::move(data), allocator, /*resizable=*/true);
}

// A backing kernel's memory as an mgpu storage's: who else uses it is asked when it is dropped.
struct Adopted {
  c10::Storage storage;
  std::mutex mutex;
  c10::SmallVector<c10::StreamId, 2> used_on;
};
void drop_adoption(void* context) {
  auto* adoption = static_cast<Adopted*>(context);
  dropped(adoption->storage, adoption->used_on);
  delete adoption;
}
c10::Storage adopt(const c10::Storage& fresh) {
  c10::StorageImpl* impl = fresh.unsafeGetStorageImpl();
  adopted(fresh);
  c10::DataPtr data(impl->mutable_data(), new Adopted{fresh, {}, {}}, &drop_adoption, mgpu_device());
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                                               std::move(data), mgpu_allocator(), /*resizable=*/true);
}

// Of this part: original storage, the same with the part's label.
thread_local c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 8> relabelled;

void copy_bits(const at::Tensor& from, c10::TensorImpl* to) {
  if (from.is_conj()) to->_set_conj(true);
  if (from.is_neg()) to->_set_neg(true);
}

}  // namespace

at::Tensor make_view(const c10::Storage& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype,
                     c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, for_part(storage), keys, dtype);
  impl->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(impl));
}

Aliases::Aliases() { refuse_forked_child(); }

c10::Storage for_part(const c10::Storage& storage) {
  if (part_gpu < 0 || storage.device() != backing_device()) return storage;
  for (const auto& [from, to] : relabelled)
    if (from.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return to;
  relabelled.emplace_back(storage, storage_over(storage, part_device(), backing_allocator()));
  return relabelled.back().second;
}

at::Tensor for_part(const at::Tensor& tensor) {
  if (part_gpu < 0 || !tensor.defined() || tensor.layout() != c10::kStrided ||
      tensor.device() != backing_device())
    return tensor;
  at::Tensor view = make_view(tensor.storage(), tensor.key_set(), tensor.dtype(), tensor.sizes(),
                              tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  copy_bits(tensor, view.unsafeGetTensorImpl());
  return view;
}

void forget_relabelled() { relabelled.clear(); }

bool note_use_of_adopted(const c10::Storage& storage, c10::StreamId stream) {
  const c10::DataPtr& data = storage.data_ptr();
  if (data.get_deleter() != &drop_adoption) return false;
  auto* adoption = static_cast<Adopted*>(data.get_context());
  std::lock_guard<std::mutex> lock(adoption->mutex);
  for (const c10::StreamId known : adoption->used_on)
    if (known == stream) return true;
  adoption->used_on.push_back(stream);
  return true;
}

Aliases::Entry* Aliases::find(const c10::StorageImpl* storage) {
  if (many_.empty()) {
    for (Entry& entry : entries_)
      if (entry.original == storage || entry.alias.unsafeGetStorageImpl() == storage) return &entry;
    return nullptr;
  }
  const auto found = many_.find(storage);
  return found == many_.end() ? nullptr : &entries_[found->second];
}

c10::Storage Aliases::alias_storage(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  if (const Entry* known = find(impl)) return known->alias;
  c10::Storage alias = storage_over(storage, backing_device(), backing_allocator());
  entries_.push_back({impl, alias, impl->mutable_data()});
  constexpr size_t kMany = 16;
  if (entries_.size() < kMany) return alias;
  for (size_t i = many_.empty() ? 0 : entries_.size() - 1; i < entries_.size(); ++i) {
    many_.emplace(entries_[i].original, i);
    many_.emplace(entries_[i].alias.unsafeGetStorageImpl(), i);
  }
  return alias;
}

at::Tensor Aliases::to_backing(const at::Tensor& tensor, bool in_list) {
  if (!is_mgpu(tensor)) return tensor;
  TORCH_CHECK(tensor.layout() == c10::kStrided, "Device mgpu has strided tensors only, and got layout ",
              tensor.layout(), ". Use to_dense(), or move the tensor to the CPU.");
  at::Tensor alias = make_view(alias_storage(tensor.storage()),
                               in_list ? backing_list_keys() : c10::DispatchKeySet(kBackingKey),
                               tensor.dtype(), tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  copy_bits(tensor, alias.unsafeGetTensorImpl());
  return alias;
}

at::Tensor Aliases::from_backing(const at::Tensor& result) {
  if (!result.defined() || result.device().type() != kBackingType) return result;
  TORCH_CHECK(result.layout() == c10::kStrided && !result.is_quantized(),
              "Device mgpu has strided tensors of plain numbers only, and this operator makes one of ",
              result.is_quantized() ? c10::toString(result.scalar_type()) : "layout ",
              result.is_quantized() ? "" : c10::str(result.layout()),
              ". Move its arguments to the CPU first.");
  const c10::Storage& storage = result.storage();
  c10::Storage home;
  if (const Entry* entry = find(storage.unsafeGetStorageImpl()))
    home = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(entry->original));
  if (!home) home = adopt(storage);
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
  c10::StorageImpl* impl = alias.storage().unsafeGetStorageImpl();
  Entry* entry = find(impl);
  if (entry && impl->mutable_data() != entry->data) {
    // the kernel resized the alias: its new block, relabelled, becomes the original's
    c10::DataPtr data = impl->set_data_ptr(c10::DataPtr());
    void* address = data.get();
    const c10::DeleterFnPtr deleter = data.get_deleter();
    void* context = data.release_context();
    entry->original->set_data_ptr_noswap(c10::DataPtr(address, context, deleter, mgpu_device()));
    entry->original->set_nbytes(impl->nbytes());
    entry->data = nullptr;
  }
  if (original.sizes() != alias.sizes() || original.strides() != alias.strides() ||
      original.storage_offset() != alias.storage_offset())
    original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                          alias.storage_offset());
}

}  // namespace mgpu
