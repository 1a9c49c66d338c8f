// SPDX-License-Identifier: Apache-2.0
#include "backend/growth.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>

#include "backend/alias.h"
#include "memory/homes.h"
#include "memory/page.h"
#include "memory/pool.h"
#include "memory/provider.h"
#include "mesh/mesh.h"

namespace mgpu {

namespace {

void drop_block(void* data) { free_block(data); }

// Run pool code, with its exceptions as torch's, after "what".
template <typename F>
auto with_torch_errors(const std::string& what, F work) {
  try {
    return work();
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const std::exception& error) {
    std::string why = error.what();
    if (why.empty() || why.back() != '.') why += '.';
    TORCH_CHECK(false, what, ": ", why);
  }
}

int64_t row_bytes_of(c10::IntArrayRef shape, size_t item) {
  int64_t bytes = static_cast<int64_t>(item);
  for (size_t i = 1; i < shape.size(); ++i)
    TORCH_CHECK_VALUE(!__builtin_mul_overflow(bytes, shape[i], &bytes), "A row of shape ", shape,
                      " is too large.");
  return bytes;
}

// First byte, and the one after the last, of a tensor's elements.
std::pair<const char*, const char*> byte_range(const at::Tensor& tensor) {
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.dtype().itemsize())};
}

void check_mgpu(const at::Tensor& tensor, const char* function) {
  TORCH_CHECK_VALUE(is_mgpu(tensor), "torch.mgpu.", function,
                    " needs a tensor on device mgpu, and got one on ", tensor.device(), ".");
}

// Tensors and Python storages beside one tensor that hold a storage. A storage that Python has once seen
// keeps a Python object, and that one a reference, for good: it does not count while nobody else holds it.
int64_t other_holders(const c10::Storage& storage) {
  const bool only_remembered = storage.unsafeGetStorageImpl()->pyobj_slot()->has_unique_reference();
  return static_cast<int64_t>(storage.use_count()) - 1 - (only_remembered ? 1 : 0);
}

std::vector<int64_t> chosen_pages(const std::optional<std::vector<int64_t>>& pages, size_t count) {
  if (pages) return *pages;
  std::vector<int64_t> all(count);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

at::Tensor reserve(const std::vector<int64_t>& shape, int64_t capacity_rows, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(!shape.empty(),
                    "torch.mgpu.reserve needs a shape with at least one dimension: its rows.");
  for (int64_t size : shape)
    TORCH_CHECK_VALUE(size >= 0, "torch.mgpu.reserve got the negative size ", size, ".");
  TORCH_CHECK_VALUE(capacity_rows >= shape[0], "torch.mgpu.reserve got a capacity of ", capacity_rows,
                    " rows for a tensor that starts with ", shape[0], "; give capacity_rows >= shape[0].");
  const int64_t row_bytes = row_bytes_of(shape, c10::elementSize(dtype));
  int64_t capacity = 0;
  TORCH_CHECK_VALUE(!__builtin_mul_overflow(row_bytes, capacity_rows, &capacity), "A capacity of ",
                    capacity_rows, " rows of ", row_bytes, " bytes is too large.");
  const int64_t bytes = shape[0] * row_bytes;
  void* data = with_torch_errors("torch.mgpu.reserve", [&] { return reserve_tensor(bytes, capacity); });
  c10::Storage storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(bytes),
      c10::DataPtr(data, data, &drop_block, mgpu_device()), mgpu_allocator(), /*resizable=*/true);
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(kDeviceKey),
                                                   c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_contiguous(shape);
  return at::Tensor(std::move(impl));
}

namespace {

// What growing and shrinking have in common: refuses tensors whose number of rows cannot change in place.
struct Resizable {
  Resizable(const at::Tensor& tensor, const char* function) {
    const std::string name = std::string("torch.mgpu.") + function;
    check_mgpu(tensor, function);
    TORCH_CHECK(
        tensor.dim() >= 1 && tensor.is_contiguous() && tensor.storage_offset() == 0 &&
            static_cast<size_t>(tensor.numel()) * tensor.dtype().itemsize() == tensor.storage().nbytes(),
        name,
        " needs the whole tensor that torch.mgpu.reserve made, and got a view of a part of it, of shape ",
        tensor.sizes(), ".");
    TORCH_CHECK(!tensor.grad_fn(), name,
                " needs a tensor outside of any graph, and this one was made by an operator with gradient. ",
                "Call it between steps, and detach() first.");
    TORCH_CHECK(!tensor.grad().defined(), name, ": the tensor still has a .grad of its old size, ",
                tensor.grad().sizes(), ". Set .grad to None first.");
    row_bytes = row_bytes_of(tensor.sizes(), tensor.dtype().itemsize());
    const void* base = tensor.storage().data();  // the tensor's own data_ptr() is null while it has no rows
    block = find_block(base);
    TORCH_CHECK(row_bytes == 0 || (block.base == base && block.base != nullptr && block.capacity > 0), name,
                ": this tensor was not made by torch.mgpu.reserve(), or with a capacity of no rows, so it "
                "has no room to grow in place.");
    const int64_t others = other_holders(tensor.storage());
    TORCH_CHECK(
        others == 0, name, ": ", others,
        " other tensor(s) or storage(s) share this memory. They would be left at their old size: drop "
        "the views first.");
  }

  int64_t row_bytes;
  BlockInfo block;
};

// Stands at the end of a graph that leads to a tensor as it was.
struct StaleGraph final : torch::autograd::FunctionPreHook {
  explicit StaleGraph(std::string text) : text_(std::move(text)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& /*grads*/) override {
    TORCH_CHECK(false, text_);
  }
  std::string text_;
};

// While a graph lives (a loss of an earlier step is still a variable), torch takes the place where it adds up
// the tensor's gradients for the next graph, too: that one has the old shape. The next graph gets a new one,
// and the old graph may not be gone through any more.
void part_from_graphs(const at::Tensor& tensor, int64_t rows) {
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (!meta || rows == tensor.size(0)) return;
  const std::lock_guard<std::mutex> lock(meta->mutex_);
  if (const auto end = meta->grad_accumulator_.lock())
    end->add_pre_hook(
        std::make_unique<StaleGraph>("backward() through a graph that was made before torch.mgpu.grow() or "
                                     "shrink() gave one of its leaves " +
                                     std::to_string(rows) + " rows instead of " +
                                     std::to_string(tensor.size(0)) + ". Render again first."));
  meta->grad_accumulator_.reset();
}

void set_rows(const at::Tensor& tensor, int64_t rows, int64_t row_bytes) {
  part_from_graphs(tensor, rows);
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(static_cast<size_t>(rows * row_bytes));
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape[0] = rows;
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  // a graph that saved the old tensor must not use it
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void grow(const at::Tensor& tensor, int64_t rows) {
  const Resizable self(tensor, "grow");
  const int64_t row_bytes = self.row_bytes, capacity = row_bytes ? self.block.capacity / row_bytes : 0;
  TORCH_CHECK(rows >= tensor.size(0), "torch.mgpu.grow: the tensor has ", tensor.size(0),
              " rows and was asked for ", rows, " in total; it can only grow.");
  TORCH_CHECK(row_bytes == 0 || rows <= capacity, "torch.mgpu.grow: ", rows,
              " rows do not fit the reserved capacity of ", capacity,
              " rows. Reserve more, or make a new tensor and copy.");
  if (row_bytes > 0)
    with_torch_errors("torch.mgpu.grow", [&] { grow_block(self.block.base, rows * row_bytes); });
  set_rows(tensor, rows, row_bytes);
}

void shrink(const at::Tensor& tensor, int64_t rows) {
  const Resizable self(tensor, "shrink");
  TORCH_CHECK(rows >= 0 && rows <= tensor.size(0), "torch.mgpu.shrink: the tensor has ", tensor.size(0),
              " rows and was asked for ", rows, " in total; it can only shrink.");
  if (self.row_bytes > 0) {
    at::NoGradGuard no_grad;
    tensor.detach().narrow(0, rows, tensor.size(0) - rows).zero_();  // growth takes it for zero
    with_torch_errors("torch.mgpu.shrink", [&] { shrink_block(self.block.base, rows * self.row_bytes); });
  }
  set_rows(tensor, rows, self.row_bytes);
}

at::Tensor placement(const at::Tensor& tensor) {
  check_mgpu(tensor, "placement");
  std::vector<int16_t> places;
  if (tensor.numel() > 0) {
    const auto [begin, end] = byte_range(tensor);
    places = with_torch_errors("torch.mgpu.placement", [&] { return page_places(begin, end); });
  }
  at::Tensor out = at::empty({static_cast<int64_t>(places.size())}, at::TensorOptions().dtype(at::kShort));
  std::copy(places.begin(), places.end(), out.mutable_data_ptr<int16_t>());
  return out;
}

void place(const at::Tensor& tensor, const std::vector<int64_t>& shards) {
  check_mgpu(tensor, "place");
  const int64_t pages = placement(tensor).numel();
  TORCH_CHECK_VALUE(static_cast<int64_t>(shards.size()) == pages, "torch.mgpu.place got ", shards.size(),
                    " shards for a tensor of ", pages, " pages of 2 MiB; give one for each page.");
  std::vector<int16_t> places;
  for (int64_t shard : shards) {
    TORCH_CHECK_VALUE(shard >= kHostPage && shard < mesh().size(), "torch.mgpu.place got shard ", shard,
                      "; this mesh has shards 0 to ", mesh().size() - 1, ", and -1 means host memory.");
    places.push_back(static_cast<int16_t>(shard));
  }
  if (pages == 0) return;
  with_torch_errors("torch.mgpu.place", [&] {
    move_pages(byte_range(tensor).first, chosen_pages(std::nullopt, shards.size()), places);
  });
}

int64_t place_rows(const at::Tensor& tensor, const std::vector<std::pair<int64_t, int64_t>>& homes) {
  check_mgpu(tensor, "place_rows");
  TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.is_contiguous() && tensor.storage_offset() == 0,
                    "torch.mgpu.place_rows needs a whole contiguous tensor with rows, and got one of shape ",
                    tensor.sizes(), ".");
  const int64_t rows = tensor.size(0);
  std::vector<RowRange> ranges;
  int64_t next = 0;
  for (const auto& [begin, end] : homes) {
    TORCH_CHECK_VALUE(begin == next && end >= begin, "torch.mgpu.place_rows: homes[", ranges.size(), "] is (",
                      begin, ", ", end, "), expected a range that begins at row ", next, ".");
    ranges.push_back({begin, end});
    next = end;
  }
  TORCH_CHECK_VALUE(static_cast<int>(ranges.size()) == mesh().size() && next == rows,
                    "torch.mgpu.place_rows got ", ranges.size(), " ranges up to row ", next,
                    "; expected one for each of ", mesh().size(), " shards, up to row ", rows, ".");
  if (tensor.nbytes() == 0) return 0;
  const int64_t row_bytes = static_cast<int64_t>(tensor.nbytes()) / rows;
  const auto [begin, end] = byte_range(tensor);
  return with_torch_errors("torch.mgpu.place_rows", [&, begin = begin, end = end] {
    const std::vector<int16_t> before = page_places(begin, end);
    const int64_t bytes = end - begin;
    std::vector<int64_t> pages;
    std::vector<int16_t> places;
    size_t home = 0;
    for (int64_t page = 0; page < static_cast<int64_t>(before.size()); ++page) {
      const int64_t last = std::min(bytes, (page + 1) * kPageBytes);
      const int64_t row = (page * kPageBytes + last) / 2 / row_bytes;  // of the page's middle
      while (row >= ranges[home].end) ++home;
      const int16_t was = before[static_cast<size_t>(page)];
      if (was == static_cast<int16_t>(home) || was == kHostPage) continue;
      pages.push_back(page);
      places.push_back(static_cast<int16_t>(home));
    }
    if (!pages.empty() || !has_row_homes(begin))
      move_pages(begin, pages, places);  // or growth deals them anew
    set_row_homes(begin, ranges);
    return static_cast<int64_t>(pages.size());
  });
}

std::vector<std::pair<int64_t, int64_t>> row_homes_of(const at::Tensor& tensor) {
  check_mgpu(tensor, "row_homes");
  const int64_t rows = tensor.dim() ? tensor.size(0) : 0;
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const RowRange& range : row_homes(rows ? tensor.const_data_ptr() : nullptr, rows))
    out.emplace_back(range.begin, range.end);
  return out;
}

void to_host(const at::Tensor& tensor, const std::optional<std::vector<int64_t>>& pages) {
  check_mgpu(tensor, "to_host");
  if (tensor.numel() == 0) return;
  const std::vector<int64_t> chosen = chosen_pages(pages, static_cast<size_t>(placement(tensor).numel()));
  with_torch_errors("torch.mgpu.to_host", [&] {
    move_pages(byte_range(tensor).first, chosen, std::vector<int16_t>(chosen.size(), kHostPage));
  });
}

void to_device(const at::Tensor& tensor, const std::optional<std::vector<int64_t>>& pages) {
  check_mgpu(tensor, "to_device");
  if (tensor.numel() == 0) return;
  const auto [begin, end] = byte_range(tensor);
  with_torch_errors("torch.mgpu.to_device", [&, begin = begin, end = end] {
    const std::vector<int16_t> shards = page_shards(begin, end);
    const std::vector<int64_t> chosen = chosen_pages(pages, shards.size());
    std::vector<int16_t> places;
    for (int64_t page : chosen)
      places.push_back(
          page >= 0 && page < static_cast<int64_t>(shards.size()) ? shards[static_cast<size_t>(page)] : 0);
    move_pages(begin, chosen, places);  // refuses pages that do not exist
  });
}

}  // namespace mgpu
