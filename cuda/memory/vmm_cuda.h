// SPDX-License-Identifier: Apache-2.0
// vmm_cuda.h: CUDA's virtual memory management, as thin as it can be: addresses, physical memory, and what
// puts the one behind the other. Used by the pages of tensors (provider_vmm_cuda.cpp) and by the temporaries
// of stages (buffer_cuda.cpp).
//
// Facts of the driver: the granule is 2 MiB; a mapping starts at the beginning of a handle and can only be
// taken away whole.
#pragma once
#include <cuda.h>  // types only: the functions are found through the runtime, so that no -lcuda is needed

#include <cstdint>
#include <string>
#include <vector>

namespace mgpu::vmm {

using Handle = CUmemGenericAllocationHandle;

// Bulk memory comes in handles of this size: 2 MiB each would take longer, larger ones are dear to split.
constexpr int64_t kHandleBytes = int64_t{64} << 20;

// Whether all GPUs of the mesh can do it; the reason why not is put into `obstacle`, if it is given.
bool supported(std::string* obstacle = nullptr);

// An address range with nothing behind it; null if there is none left.
char* reserve(int64_t bytes);
void unreserve(void* base, int64_t bytes) noexcept;

// Physical memory on a GPU, or (-1) in the host's RAM next to the lead shard's GPU. Released with the object
// unless it is taken over.
class Physical {
 public:
  // Throws OutOfMemory.
  Physical(int64_t bytes, int gpu);
  // Of a handle that take() gave.
  Physical(Handle handle, int64_t bytes, int gpu) : handle_(handle), bytes_(bytes), gpu_(gpu) {}
  Physical(Physical&& other) noexcept : handle_(other.handle_), bytes_(other.bytes_), gpu_(other.gpu_) {
    other.bytes_ = 0;
  }
  Physical& operator=(Physical&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(bytes_, other.bytes_);
    std::swap(gpu_, other.gpu_);
    return *this;
  }
  Physical(const Physical&) = delete;
  ~Physical();

  Handle handle() const { return handle_; }
  int64_t bytes() const { return bytes_; }
  int gpu() const { return gpu_; }
  Handle take() {
    bytes_ = 0;
    return handle_;
  }

 private:
  Handle handle_ = 0;
  int64_t bytes_ = 0;  // 0: nothing is owned
  int gpu_ = 0;
};

// Put memory behind [at, at + its size), which no GPU may touch before open().
void map(void* at, const Physical& memory);
// Let GPUs read and write [at, at + bytes), all of it mapped.
void open(void* at, int64_t bytes, const std::vector<int>& gpus);
// Take whole mappings away; the memory stays whose it was.
void unmap(void* at, int64_t bytes) noexcept;

// GPUs of the mesh that can reach the memory of one of them, itself included.
std::vector<int> reachable_from(int gpu);

// Bytes of all Physical memory on a GPU, or (-1) in host memory, mapped or not: what this process holds.
int64_t held_bytes(int gpu);

}  // namespace mgpu::vmm
