// SPDX-License-Identifier: Apache-2.0
// provider_managed_cuda.cpp: pages of CUDA's managed memory (MGPU_MEMORY=managed): for GPUs without peer
// access, and for kernels of other libraries that prefetch tensors and read them on the host (fvdb-core,
// gsplat 1.6).
//
// Where a page shall lie is said by advice (preferred location, accessed by all), and brought about by a
// prefetch. The driver would let us have more than there is, and then thrash, or hang: so what is mapped is
// held against what is free.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memory/page.h"
#include "memory/provider_cuda.h"
#include "memory/vmm_cuda.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

constexpr size_t kSpareBytes = size_t{512} << 20;  // left for contexts, cuBLAS and others

size_t bytes_of(int64_t pages) { return static_cast<size_t>(pages * kPageBytes); }

cudaMemLocation location_of(int gpu) {
  cudaMemLocation location{};
  location.type = gpu >= 0 ? cudaMemLocationTypeDevice : cudaMemLocationTypeHost;
  location.id = gpu >= 0 ? physical_gpu(gpu) : 0;
  return location;
}

class ManagedProvider final : public PageProvider {
 public:
  void* reserve(int64_t pages) override {
    size_t total = 0;
    for (const int gpu : mesh_gpus())
      if (!is_repeated(gpu)) total += memory_of(gpu).second;
    if (bytes_of(pages) > total)
      throw OutOfMemory("mgpu could not reserve " + std::to_string(pages * 2) +
                        " MiB of managed memory: the GPUs have " + std::to_string(total >> 20) +
                        " MiB in all. Lower the capacity, or use MGPU_MEMORY=vmm.");
    DeviceGuard guard(mesh_gpus().front());
    void* base = nullptr;
    // a multiple of 2 MiB comes aligned to 2 MiB; nothing is resident before it is touched or prefetched
    const cudaError_t code = cudaMallocManaged(&base, bytes_of(pages), cudaMemAttachGlobal);
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw OutOfMemory("mgpu could not reserve " + std::to_string(pages * 2) + " MiB of managed memory.");
    }
    check_cuda(code, "cudaMallocManaged");
    std::lock_guard<std::mutex> lock(mutex_);
    held_.emplace(static_cast<char*>(base), Held{});
    return base;
  }

  void release(void* base, int64_t /*pages*/) noexcept override {
    cudaFree(base);  // waits for the GPUs by itself
    std::lock_guard<std::mutex> lock(mutex_);
    held_.erase(static_cast<char*>(base));
  }

  void map(void* at, int64_t pages, int place) override {
    const Run run{static_cast<char*>(at), pages, physical_gpu(gpu_of_place(place))};
    if (run.gpu >= 0 && room_on(run.gpu) < bytes_of(pages)) refuse(run);
    send({run});
    note(at, place, pages);
  }
  void unmap(void* /*at*/, int64_t /*pages*/) override {}  // until release(): managed memory has no holes

  void zero(void* at, int64_t pages) override {
    DeviceGuard guard(mesh_gpus().front());
    CUDA_CHECK(cudaMemsetAsync(at, 0, bytes_of(pages), shard_stream(0)));
  }

  bool same(int a, int b) const override { return gpu_of_place(a) == gpu_of_place(b); }

  // As many pages at a time as find room where they go to: what has left makes room for the next ones.
  void move(void* at, std::vector<int16_t>& places, const std::vector<int16_t>& to) override {
    std::vector<Run> runs;
    std::map<int, size_t> room;  // by GPU
    size_t first = 0;            // page from which on `runs` begins
    bool waited = false;
    const auto flush = [&](size_t end) {
      if (!runs.empty() && !waited) wait_for_gpus();
      waited |= !runs.empty();
      send(runs);
      for (size_t i = first; i < end; ++i) {
        const char* const page = static_cast<char*>(at) + static_cast<int64_t>(i) * kPageBytes;
        if (!same(places[i], to[i])) {
          note(page, places[i], -1);
          note(page, to[i], 1);
        }
        places[i] = to[i];
      }
      runs.clear();
      room.clear();
      first = end;
    };
    const auto finds_room = [&](const Run& run) {
      if (run.gpu < 0) return true;
      if (!room.count(run.gpu)) room.emplace(run.gpu, room_on(run.gpu));
      size_t& left = room.at(run.gpu);
      if (left < bytes_of(run.pages)) return false;
      left -= bytes_of(run.pages);
      return true;
    };
    for (size_t i = 0; i < to.size();) {  // runs of pages with the same way to go
      size_t end = i + 1;
      while (end < to.size() && places[end] == places[i] && to[end] == to[i]) ++end;
      if (!same(places[i], to[i])) {
        const Run run{static_cast<char*>(at) + static_cast<int64_t>(i) * kPageBytes,
                      static_cast<int64_t>(end - i), physical_gpu(gpu_of_place(to[i]))};
        if (!finds_room(run)) {
          flush(i);
          if (!finds_room(run)) refuse(run);
        }
        runs.push_back(run);
      }
      i = end;
    }
    flush(to.size());
  }

  // Temporaries of stages are not managed, and counted too.
  Held held() const override {
    Held out;
    for (const int gpu : mesh_gpus()) out.shards += vmm::held_bytes(gpu);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [base, one] : held_) {
      out.shards += one.shards;
      out.host += one.host;
    }
    return out;
  }

  int64_t cache_bytes() const override { return INT64_MAX; }

 private:
  static void wait_for_gpus() {
    for (const int gpu : mesh_gpus()) {
      DeviceGuard guard(gpu);
      CUDA_CHECK(cudaDeviceSynchronize());
    }
  }

  static std::pair<size_t, size_t> memory_of(int gpu) {
    DeviceGuard guard(gpu);
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return {free, total};
  }

  // Pages that go to one place.
  struct Run {
    char* at;
    int64_t pages;
    int gpu;  // CUDA's ordinal; -1: the host
  };

  // What may still be put on a GPU.
  static size_t room_on(int gpu) {
    const size_t free = memory_of(gpu).first;
    return free > kSpareBytes ? free - kSpareBytes : 0;
  }

  [[noreturn]] static void refuse(const Run& run) {
    throw OutOfMemory("mgpu could not get " + std::to_string(run.pages * 2) + " MiB of managed memory on " +
                      gpu_name(run.gpu) + " and leave " + std::to_string(kSpareBytes >> 20) +
                      " MiB to others.");
  }

  // All in one batch; waits, so that whoever asks next sees what is free.
  static void send(const std::vector<Run>& runs) {
    if (runs.empty()) return;
    DeviceGuard guard(mesh_gpus().front());
    std::vector<void*> begins;
    std::vector<size_t> sizes, starts;
    std::vector<cudaMemLocation> locations;
    for (size_t i = 0; i < runs.size(); ++i) {
      const Run& run = runs[i];
      const size_t bytes = bytes_of(run.pages);
      CUDA_CHECK(cudaMemAdvise(run.at, bytes, cudaMemAdviseSetPreferredLocation, location_of(run.gpu)));
      for (const int other : mesh_gpus())
        CUDA_CHECK(cudaMemAdvise(run.at, bytes, cudaMemAdviseSetAccessedBy, location_of(other)));
      begins.push_back(run.at);
      sizes.push_back(bytes);
      if (i > 0 && run.gpu == runs[i - 1].gpu) continue;
      starts.push_back(i);
      locations.push_back(location_of(run.gpu));
    }
    CUDA_CHECK(cudaMemPrefetchBatchAsync(begins.data(), sizes.data(), begins.size(), locations.data(),
                                         starts.data(), starts.size(), 0, cudaStreamPerThread));
    CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
  }

  // More pages (or fewer, if negative) of the range around an address lie at a place.
  void note(const void* at, int place, int64_t pages) {
    std::lock_guard<std::mutex> lock(mutex_);
    Held& range = std::prev(held_.upper_bound(static_cast<char*>(const_cast<void*>(at))))->second;
    (place == kHostPage ? range.host : range.shards) += pages * kPageBytes;
  }

  mutable std::mutex mutex_;
  std::map<char*, Held> held_;  // by range
};

}  // namespace

PageProvider* make_managed_provider() { return new ManagedProvider; }

}  // namespace mgpu
