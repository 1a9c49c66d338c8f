// SPDX-License-Identifier: Apache-2.0
#include "memory/vmm_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>

#include "memory/page.h"
#include "memory/provider.h"
#include "mesh/launch.h"

namespace mgpu::vmm {

namespace {

constexpr int kDriverVersion = 12000;  // whose interface of the functions below is asked for

struct Driver {
  decltype(&::cuMemAddressReserve) address_reserve;
  decltype(&::cuMemAddressFree) address_free;
  decltype(&::cuMemCreate) create;
  decltype(&::cuMemRelease) release;
  decltype(&::cuMemMap) map;
  decltype(&::cuMemUnmap) unmap;
  decltype(&::cuMemSetAccess) set_access;
  decltype(&::cuGetErrorName) error_name;
  decltype(&::cuDeviceGetAttribute) attribute;

  Driver() {
    find("cuMemAddressReserve", address_reserve);
    find("cuMemAddressFree", address_free);
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
    find("cuGetErrorName", error_name);
    find("cuDeviceGetAttribute", attribute);
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

// By GPU; the last is the host. Constant-initialised, without a destructor.
std::array<std::atomic<int64_t>, kMaxGpus + 1> held;
std::atomic<int64_t>& held_on(int gpu) { return held.at(static_cast<size_t>(gpu < 0 ? kMaxGpus : gpu)); }

CUdeviceptr address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }

std::string mebibytes(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

void check(CUresult code, const std::string& what) {
  if (code == CUDA_SUCCESS) return;
  if (code == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfMemory("mgpu could not " + what + ".");
  const char* name = nullptr;
  driver().error_name(code, &name);
  throw std::runtime_error("mgpu could not " + what + ": " + (name ? name : "unknown driver error"));
}

CUmemLocation location_of(int gpu) {
  CUmemLocation location{};
  if (gpu >= 0) {
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = physical_gpu(gpu);
  } else {
    static const int node = [] {
      int found = 0;
      CUDA_CHECK(cudaDeviceGetAttribute(&found, cudaDevAttrHostNumaId, physical_gpu(mesh().gpus().front())));
      return std::max(found, 0);
    }();
    location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    location.id = node;
  }
  return location;
}

}  // namespace

bool supported(std::string* obstacle) {
  for (const int gpu : mesh().gpus()) {
    int yes = 0;
    const CUresult code =
        driver().attribute(&yes, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, physical_gpu(gpu));
    if (code == CUDA_SUCCESS && yes) continue;
    if (obstacle) *obstacle = gpu_name(gpu) + " has no virtual memory management";
    return false;
  }
  return true;
}

char* reserve(int64_t bytes) {
  CUdeviceptr base = 0;
  const CUresult code =
      driver().address_reserve(&base, static_cast<size_t>(bytes), static_cast<size_t>(kPageBytes), 0, 0);
  return code == CUDA_SUCCESS ? reinterpret_cast<char*>(base) : nullptr;
}

void unreserve(void* base, int64_t bytes) noexcept {
  driver().address_free(address(base), static_cast<size_t>(bytes));
}

Physical::Physical(int64_t bytes, int gpu) : gpu_(gpu) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location_of(gpu);
  check(driver().create(&handle_, static_cast<size_t>(bytes), &properties, 0),
        "get " + mebibytes(bytes) + " on " + (gpu < 0 ? "the host" : gpu_name(gpu)));
  bytes_ = bytes;
  held_on(gpu).fetch_add(bytes, std::memory_order_relaxed);
}

Physical::~Physical() {
  if (bytes_ == 0) return;
  driver().release(handle_);
  held_on(gpu_).fetch_sub(bytes_, std::memory_order_relaxed);
}

void map(void* at, const Physical& memory) {
  check(driver().map(address(at), static_cast<size_t>(memory.bytes()), 0, memory.handle(), 0),
        "map " + mebibytes(memory.bytes()));
}

void open(void* at, int64_t bytes, const std::vector<int>& gpus) {
  std::array<CUmemAccessDesc, kMaxGpus> access{};
  size_t count = 0;
  for (const int gpu : gpus) {
    if (is_repeated(gpu)) continue;  // each once
    access[count].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[count].location.id = gpu;
    access[count].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    ++count;
  }
  check(driver().set_access(address(at), static_cast<size_t>(bytes), access.data(), count),
        "open " + mebibytes(bytes) + " to the GPUs");
}

void unmap(void* at, int64_t bytes) noexcept { driver().unmap(address(at), static_cast<size_t>(bytes)); }

std::vector<int> reachable_from(int gpu) {
  std::vector<int> out;
  for (const int peer : mesh().gpus()) {
    int reachable = 1;
    const int from = physical_gpu(peer), to = physical_gpu(gpu);
    if (from != to) CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, from, to));
    if (reachable) out.push_back(peer);
  }
  return out;
}

int64_t held_bytes(int gpu) { return held_on(gpu).load(std::memory_order_relaxed); }

}  // namespace mgpu::vmm
