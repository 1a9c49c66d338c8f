// SPDX-License-Identifier: Apache-2.0
// provider_vmm_cuda.cpp: pages by CUDA's virtual memory management. We reserve addresses, make physical
// memory on a chosen GPU or in the host's RAM, and map it: no page faults, full bandwidth, growth without
// copies.
//
// Facts of the driver that shape this file: the granule is 2 MiB; a mapping can only be taken away whole, and
// always starts at the beginning of a handle. So bulk memory comes in handles of 64 MiB (2 MiB each would
// take 50 us each), and when some pages of a handle move, the whole handle is replaced by up to three:
// before, moved, after.
#include <cuda.h>  // types only: the functions are found through the runtime, so that no -lcuda is needed
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

#include "memory/page.h"
#include "memory/provider_cuda.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

constexpr int64_t kHandlePages = 32;   // 64 MiB
constexpr size_t kSpareOnHost = 16;    // handles, 1 GiB at most
constexpr int64_t kManyPages = 512;    // 1 GiB
constexpr int kDriverVersion = 12000;  // whose interface of the functions below is asked for

// ---- the driver's functions

struct Driver {
  decltype(&::cuMemAddressReserve) address_reserve;
  decltype(&::cuMemAddressFree) address_free;
  decltype(&::cuMemCreate) create;
  decltype(&::cuMemRelease) release;
  decltype(&::cuMemMap) map;
  decltype(&::cuMemUnmap) unmap;
  decltype(&::cuMemSetAccess) set_access;
  decltype(&::cuGetErrorName) error_name;

  Driver() {
    find("cuMemAddressReserve", address_reserve);
    find("cuMemAddressFree", address_free);
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
    find("cuGetErrorName", error_name);
  }

 private:
  template <typename F>
  static void find(const char* name, F& function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &result),
               name);
    if (result != cudaDriverEntryPointSuccess || !found)
      throw std::runtime_error(std::string("the GPU driver lacks ") + name +
                               "; mgpu needs driver 525 or newer, or MGPU_MEMORY=managed.");
    function = reinterpret_cast<F>(found);
  }
};

const Driver& driver() {
  static const Driver* instance = new Driver;
  return *instance;
}

std::string mebibytes(int64_t pages) { return std::to_string(pages * (kPageBytes >> 20)) + " MiB"; }

void check(CUresult code, const std::string& what) {
  if (code == CUDA_SUCCESS) return;
  const char* name = nullptr;
  driver().error_name(code, &name);
  if (code == CUDA_ERROR_OUT_OF_MEMORY)
    throw OutOfMemory("mgpu could not " + what + ": " + free_memory_table() + ".");
  throw std::runtime_error("mgpu could not " + what + ": " + (name ? name : "unknown driver error"));
}

CUdeviceptr address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }
size_t bytes_of(int64_t pages) { return static_cast<size_t>(pages * kPageBytes); }

// ---- physical memory

// A GPU, or -1 for the host's RAM next to the lead shard's GPU.
CUmemLocation location_of(int gpu) {
  CUmemLocation location{};
  if (gpu >= 0) {
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = gpu;
  } else {
    int node = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, mesh_gpus().front()));
    location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    location.id = std::max(node, 0);
  }
  return location;
}

// Physical memory; released again unless it is taken over.
class Physical {
 public:
  Physical(int64_t pages, int gpu) : pages_(pages) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location_of(gpu);
    check(driver().create(&handle_, bytes_of(pages), &properties, 0),
          "get " + mebibytes(pages) + " on " +
              (gpu < 0 ? std::string("the host") : "cuda:" + std::to_string(gpu)));
    owned_ = true;
  }
  Physical(Physical&& other) noexcept : handle_(other.handle_), pages_(other.pages_), owned_(other.owned_) {
    other.owned_ = false;
  }
  Physical(const Physical&) = delete;
  ~Physical() {
    if (owned_) driver().release(handle_);
  }
  static Physical of(CUmemGenericAllocationHandle handle, int64_t pages) {
    return Physical(handle, pages, true);
  }
  CUmemGenericAllocationHandle handle() const { return handle_; }
  int64_t pages() const { return pages_; }
  CUmemGenericAllocationHandle take() {
    owned_ = false;
    return handle_;
  }

 private:
  Physical(CUmemGenericAllocationHandle handle, int64_t pages, bool owned)
      : handle_(handle), pages_(pages), owned_(owned) {}
  CUmemGenericAllocationHandle handle_ = 0;
  int64_t pages_;
  bool owned_ = false;
};

// Every GPU of the mesh may read and write [at, at + pages), which is mapped.
void open_to_all(void* at, int64_t pages) {
  std::vector<CUmemAccessDesc> access;
  for (const int gpu : mesh_gpus()) {
    CUmemAccessDesc entry{};
    entry.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    entry.location.id = gpu;
    entry.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access.push_back(entry);
  }
  check(driver().set_access(address(at), bytes_of(pages), access.data(), access.size()),
        "open " + mebibytes(pages) + " to all GPUs");
}

void wait_for_gpus() {
  for (const int gpu : mesh_gpus()) {
    DeviceGuard guard(gpu);
    CUDA_CHECK(cudaDeviceSynchronize());
  }
}

// Rather than take all there is first, and then give it back.
void refuse_hopeless(int64_t pages, int gpu) {
  DeviceGuard guard(gpu);
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (bytes_of(pages) > free)
    throw OutOfMemory("mgpu could not get " + mebibytes(pages) + " on cuda:" + std::to_string(gpu) + ": " +
                      free_memory_table() + ".");
}

class VmmProvider final : public PageProvider {
 public:
  void* reserve(int64_t pages) override {
    CUdeviceptr base = 0;
    if (driver().address_reserve(&base, bytes_of(pages), static_cast<size_t>(kPageBytes), 0, 0) !=
        CUDA_SUCCESS)
      throw OutOfMemory("mgpu could not reserve " + mebibytes(pages) + " of addresses for GPUs.");
    return reinterpret_cast<void*>(base);
  }

  void release(void* base, int64_t pages) noexcept override {
    try {
      unmap(base, pages);
    } catch (...) {  // the driver is gone: the process ends, and its memory with it
      return;
    }
    driver().address_free(address(base), bytes_of(pages));
  }

  void map(void* at, int64_t pages, int place) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const int gpu = gpu_of_place(place);
    if (pages >= kManyPages && gpu >= 0) refuse_hopeless(pages, gpu);
    char* const begin = static_cast<char*>(at);
    int64_t done = 0;
    try {
      while (done < pages) {
        const int64_t piece = std::min(kHandlePages, pages - done);
        put(begin + done * kPageBytes, physical(piece, gpu), gpu);
        done += piece;
      }
      open_to_all(at, pages);
    } catch (...) {
      take_away(begin, begin + done * kPageBytes);
      throw;
    }
  }

  void unmap(void* at, int64_t pages) override {
    wait_for_gpus();  // kernels may still use what is being taken away
    std::lock_guard<std::mutex> lock(mutex_);
    char* const begin = static_cast<char*>(at);
    take_away(begin, begin + pages * kPageBytes);
  }

  void zero(void* at, int64_t pages) override {
    DeviceGuard guard(mesh_gpus().front());
    CUDA_CHECK(cudaMemsetAsync(at, 0, bytes_of(pages), shard_stream(0)));
  }

  bool same(int a, int b) const override { return gpu_of_place(a) == gpu_of_place(b); }

  void move(void* at, int64_t pages, int from, int to) override {
    if (same(from, to)) return;
    wait_for_gpus();
    std::lock_guard<std::mutex> lock(mutex_);
    const int gpu = gpu_of_place(to);
    char* const begin = static_cast<char*>(at);
    char* const end = begin + pages * kPageBytes;
    for (char* next = begin; next < end;) {
      const auto extent = std::prev(extents_.upper_bound(next));
      char* const extent_end = extent->first + extent->second.pages * kPageBytes;
      char* const stop = std::min(end, extent_end);
      replace(extent, next, stop, gpu);
      next = stop;
    }
  }

  void trim() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Extent& spare : spare_on_host_) driver().release(spare.handle);
    spare_on_host_.clear();
  }

  int64_t cache_bytes() const override {
    return INT64_MAX;
  }  // until somebody is short of memory, as torch does

 private:
  // A mapping: one handle, whole.
  struct Extent {
    int64_t pages;
    CUmemGenericAllocationHandle handle;
    int gpu;  // -1: the host
  };
  using Extents = std::map<char*, Extent>;

  void put(char* at, Physical&& memory, int gpu) {
    check(driver().map(address(at), bytes_of(memory.pages()), 0, memory.handle(), 0),
          "map " + mebibytes(memory.pages()));
    extents_.emplace(at, Extent{memory.pages(), memory.take(), gpu});
  }

  // Extents that lie in [begin, end), all of them whole.
  void take_away(char* begin, char* end) {
    auto extent = extents_.lower_bound(begin);
    while (extent != extents_.end() && extent->first < end) {
      driver().unmap(address(extent->first), bytes_of(extent->second.pages));
      give_back(extent->second);
      extent = extents_.erase(extent);
    }
  }

  // Put new handles in place of an extent's: [begin, end) of it on `gpu`, what is before and after where it
  // was. Contents are kept. If there is not enough memory, nothing has changed.
  void replace(Extents::iterator extent, char* begin, char* end, int gpu) {
    char* const old_begin = extent->first;
    const Extent old = extent->second;
    if (old.gpu == gpu) return;
    std::vector<std::pair<Physical, int>> parts;  // in the order of the addresses
    if (begin > old_begin) parts.emplace_back(physical((begin - old_begin) / kPageBytes, old.gpu), old.gpu);
    parts.emplace_back(physical((end - begin) / kPageBytes, gpu), gpu);
    char* const old_end = old_begin + old.pages * kPageBytes;
    if (end < old_end) parts.emplace_back(physical((old_end - end) / kPageBytes, old.gpu), old.gpu);

    // fill them at other addresses
    char* const aside = scratch();
    int64_t mapped = 0;
    const auto unmap_aside = [&] {
      for (int64_t page = 0, part = 0; page < mapped;
           page += parts[static_cast<size_t>(part++)].first.pages())
        driver().unmap(address(aside + page * kPageBytes),
                       bytes_of(parts[static_cast<size_t>(part)].first.pages()));
    };
    try {
      for (const auto& [memory, where] : parts) {
        check(driver().map(address(aside + mapped * kPageBytes), bytes_of(memory.pages()), 0, memory.handle(),
                           0),
              "map " + mebibytes(memory.pages()));
        mapped += memory.pages();
      }
      open_to_all(aside, old.pages);
      DeviceGuard guard(old.gpu >= 0 ? old.gpu : gpu >= 0 ? gpu : mesh_gpus().front());
      CUDA_CHECK(
          cudaMemcpyAsync(aside, old_begin, bytes_of(old.pages), cudaMemcpyDefault, cudaStreamPerThread));
      CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
    } catch (...) {
      unmap_aside();
      throw;
    }
    unmap_aside();

    take_away(old_begin, old_end);
    char* at = old_begin;
    for (auto& [memory, where] : parts) {
      const int64_t pages = memory.pages();
      put(at, std::move(memory), where);
      at += pages * kPageBytes;
    }
    open_to_all(old_begin, old.pages);
  }

  // Host memory is slow to get (20 ms for 64 MiB), and the same pages often go there again: keep some
  // handles.
  void give_back(const Extent& memory) {
    if (memory.gpu < 0 && spare_on_host_.size() < kSpareOnHost)
      spare_on_host_.push_back(memory);
    else
      driver().release(memory.handle);
  }

  Physical physical(int64_t pages, int gpu) {
    if (gpu < 0) {
      const auto spare = std::find_if(spare_on_host_.begin(), spare_on_host_.end(),
                                      [&](const Extent& memory) { return memory.pages == pages; });
      if (spare != spare_on_host_.end()) {
        const CUmemGenericAllocationHandle handle = spare->handle;
        spare_on_host_.erase(spare);
        return Physical::of(handle, pages);
      }
    }
    return Physical(pages, gpu);
  }

  // Addresses where a handle is filled before it takes its place.
  char* scratch() {
    if (!scratch_) scratch_ = static_cast<char*>(reserve(kHandlePages));
    return scratch_;
  }

  std::mutex mutex_;
  Extents extents_;
  std::vector<Extent> spare_on_host_;
  char* scratch_ = nullptr;
};

}  // namespace

PageProvider* make_vmm_provider() { return new VmmProvider; }

}  // namespace mgpu
