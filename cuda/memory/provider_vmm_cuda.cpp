// SPDX-License-Identifier: Apache-2.0
// provider_vmm_cuda.cpp: pages by CUDA's virtual memory management. We reserve addresses, make physical
// memory on a chosen GPU or in the host's RAM, and map it: no page faults, full bandwidth, growth without
// copies.
//
// A mapping can only be taken away whole, so where some pages of a handle move, the handle is replaced: new
// memory is filled at other addresses and then takes the old one's place. Pages that move together come out
// in handles as large as can be.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memory/host_spare_cuda.h"
#include "memory/page.h"
#include "memory/provider_cuda.h"
#include "memory/vmm_cuda.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

constexpr int64_t kHandlePages = vmm::kHandleBytes / kPageBytes;
constexpr int64_t kHostHandlePages = kHostHandleBytes / kPageBytes;
constexpr int64_t kManyPages = 512;  // 1 GiB
constexpr int kCopyStreams = 2;      // one copy starts while another ends

int64_t bytes_of(int64_t pages) { return pages * kPageBytes; }

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
  if (bytes_of(pages) > static_cast<int64_t>(free))
    throw OutOfMemory("mgpu could not get " + std::to_string(bytes_of(pages) >> 20) + " MiB on " +
                      gpu_name(gpu) + ".");
}

class VmmProvider final : public PageProvider {
 public:
  VmmProvider() { host_.fill_ahead(); }  // there is time for it before the first page moves

  void* reserve(int64_t pages) override {
    char* const base = vmm::reserve(bytes_of(pages));
    if (!base)
      throw OutOfMemory("mgpu could not reserve " + std::to_string(bytes_of(pages) >> 20) +
                        " MiB of addresses for GPUs.");
    return base;
  }

  void release(void* base, int64_t pages) noexcept override {
    try {
      unmap(base, pages);
    } catch (...) {  // the driver is gone: the process ends, and its memory with it
      return;
    }
    vmm::unreserve(base, bytes_of(pages));
  }

  void map(void* at, int64_t pages, int place) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const int gpu = gpu_of_place(place);
    if (pages >= kManyPages && gpu >= 0) refuse_hopeless(pages, gpu);
    host_.make_way();
    if (pages >= kHandlePages) host_.fill_ahead();  // again, after trim(): these may go to the host
    char* const begin = static_cast<char*>(at);
    int64_t done = 0;
    try {
      while (done < pages) {
        const int64_t piece = std::min(kHandlePages, pages - done);
        put(begin + bytes_of(done), physical(bytes_of(piece), gpu));
        done += piece;
      }
      vmm::open(at, bytes_of(pages), mesh_gpus());
    } catch (...) {
      take_away(begin, begin + bytes_of(done));
      throw;
    }
  }

  void unmap(void* at, int64_t pages) override {
    wait_for_gpus();  // kernels may still use what is being taken away
    std::lock_guard<std::mutex> lock(mutex_);
    host_.make_way();
    take_away(static_cast<char*>(at), static_cast<char*>(at) + bytes_of(pages));
  }

  void zero(void* at, int64_t pages) override {
    DeviceGuard guard(mesh_gpus().front());
    CUDA_CHECK(cudaMemsetAsync(at, 0, static_cast<size_t>(bytes_of(pages)), shard_stream(0)));
  }

  bool same(int a, int b) const override { return gpu_of_place(a) == gpu_of_place(b); }

  void move(void* at, std::vector<int16_t>& places, const std::vector<int16_t>& to) override {
    const int64_t count = static_cast<int64_t>(to.size());
    bool all_there = true;
    for (size_t i = 0; i < to.size(); ++i) {
      if (same(places[i], to[i]))
        places[i] = to[i];
      else
        all_there = false;
    }
    if (all_there) return;
    host_.make_way();
    wait_for_gpus();
    std::lock_guard<std::mutex> lock(mutex_);
    make_copy_streams();
    const auto arrived = [&](const Stretch& done) {
      const int64_t first = (done.begin - static_cast<char*>(at)) / kPageBytes;
      const int64_t last = first + static_cast<int64_t>(done.gpu.size());
      for (int64_t i = std::max<int64_t>(first, 0); i < std::min(last, count); ++i)
        places[static_cast<size_t>(i)] = to[static_cast<size_t>(i)];
    };
    for (const Stretch& stretch : plan(static_cast<char*>(at), to)) {
      try {
        replace(stretch);
        arrived(stretch);
      } catch (const OutOfMemory&) {
        const std::vector<Stretch> handles = by_handle(stretch);
        if (handles.size() < 2) throw;
        for (const Stretch& handle : handles) {  // what the first leave, the next can use
          replace(handle);
          arrived(handle);
        }
      }
    }
  }

  void trim() override { host_.clear(); }

  Held held() const override {
    Held out{0, vmm::held_bytes(-1)};
    for (const int gpu : mesh_gpus()) out.shards += vmm::held_bytes(gpu);
    return out;
  }

  int64_t cache_bytes() const override {
    return INT64_MAX;
  }  // until somebody is short of memory, as torch does

 private:
  using Extents = std::map<char*, vmm::Physical>;  // mappings, each one handle, by address

  // Neighbouring extents that are replaced together, and where each of their pages shall lie.
  struct Stretch {
    char* begin;
    std::vector<int> gpu;  // by page
  };

  void put(char* at, vmm::Physical&& memory) {
    vmm::map(at, memory);
    extents_.emplace(at, std::move(memory));
  }

  // Extents that lie in [begin, end), all of them whole.
  void take_away(char* begin, char* end) {
    auto extent = extents_.lower_bound(begin);
    while (extent != extents_.end() && extent->first < end) {
      vmm::unmap(extent->first, extent->second.bytes());
      give_back(std::move(extent->second));
      extent = extents_.erase(extent);
    }
  }

  // What has to be replaced so that pages from `at` on lie at places `to`.
  std::vector<Stretch> plan(char* at, const std::vector<int16_t>& to) const {
    std::vector<Stretch> out;
    char* const end = at + bytes_of(static_cast<int64_t>(to.size()));
    for (auto extent = std::prev(extents_.upper_bound(at)); extent != extents_.end() && extent->first < end;
         ++extent) {
      char* const begin = extent->first;
      const int64_t pages = extent->second.bytes() / kPageBytes;
      std::vector<int> gpu(static_cast<size_t>(pages), extent->second.gpu());
      bool changed = false;
      for (int64_t page = 0; page < pages; ++page) {
        char* const address = begin + bytes_of(page);
        if (address < at || address >= end) continue;
        const int wanted = gpu_of_place(to[static_cast<size_t>((address - at) / kPageBytes)]);
        changed |= wanted != extent->second.gpu();
        gpu[static_cast<size_t>(page)] = wanted;
      }
      if (!changed) continue;
      if (out.empty() || out.back().begin + bytes_of(static_cast<int64_t>(out.back().gpu.size())) != begin)
        out.push_back({begin, {}});
      out.back().gpu.insert(out.back().gpu.end(), gpu.begin(), gpu.end());
    }
    return out;
  }

  // The same, a handle at a time.
  std::vector<Stretch> by_handle(const Stretch& stretch) const {
    std::vector<Stretch> out;
    for (size_t done = 0; done < stretch.gpu.size();) {
      char* const begin = stretch.begin + bytes_of(static_cast<int64_t>(done));
      const int64_t pages = extents_.at(begin).bytes() / kPageBytes;
      const auto gpu = stretch.gpu.begin() + static_cast<int64_t>(done);
      out.push_back({begin, {gpu, gpu + pages}});
      done += static_cast<size_t>(pages);
    }
    return out;
  }

  // Put new handles in place of a stretch's. Contents are kept. If there is not enough memory, nothing has
  // changed.
  void replace(const Stretch& stretch) {
    const int64_t pages = static_cast<int64_t>(stretch.gpu.size());
    std::vector<vmm::Physical> parts;
    char* const aside = scratch(pages);
    int64_t mapped = 0;  // bytes
    const auto unmap_aside = [&] {
      int64_t at = 0;
      for (const vmm::Physical& part : parts) {
        if (at < mapped) vmm::unmap(aside + at, part.bytes());
        at += part.bytes();
      }
    };
    try {
      Maker maker(*this, cut(stretch.gpu));
      Copies copies(copy_streams_);
      for (size_t part = 0; part < maker.count(); ++part) {
        parts.push_back(maker.next());
        char* const to = aside + mapped;
        vmm::map(to, parts.back());
        mapped += parts.back().bytes();
        vmm::open(to, parts.back().bytes(), mesh_gpus());
        const char* const from = stretch.begin + (to - aside);
        const int left = std::prev(extents_.upper_bound(const_cast<char*>(from)))->second.gpu();
        const int entered = parts.back().gpu();
        copies.start(to, from, parts.back().bytes(),
                     left >= 0      ? left
                     : entered >= 0 ? entered
                                    : mesh_gpus().front());
      }
      copies.wait();
    } catch (...) {
      unmap_aside();
      throw;
    }
    unmap_aside();
    take_away(stretch.begin, stretch.begin + bytes_of(pages));
    char* at = stretch.begin;
    for (vmm::Physical& part : parts) {
      const int64_t bytes = part.bytes();
      put(at, std::move(part));
      at += bytes;
    }
    vmm::open(stretch.begin, bytes_of(pages), mesh_gpus());
  }

  struct Wanted {
    int64_t bytes;
    int gpu;
  };
  // Handles for pages that shall lie so, in the order of their addresses.
  static std::vector<Wanted> cut(const std::vector<int>& gpu) {
    std::vector<Wanted> out;
    for (size_t page = 0; page < gpu.size();) {
      const int64_t most = gpu[page] < 0 ? kHostHandlePages : kHandlePages;
      size_t end = page + 1;
      while (end < gpu.size() && gpu[end] == gpu[page] && static_cast<int64_t>(end - page) < most) ++end;
      out.push_back({bytes_of(static_cast<int64_t>(end - page)), gpu[page]});
      page = end;
    }
    return out;
  }

  // Makes memory ahead of the copies into it, in a thread of its own if it is the host's, for which the
  // driver needs longer than the copy does.
  class Maker {
   public:
    Maker(VmmProvider& provider, std::vector<Wanted> wanted)
        : provider_(provider), wanted_(std::move(wanted)), made_(wanted_.size()) {
      const bool slow =
          std::any_of(wanted_.begin(), wanted_.end(), [](const Wanted& w) { return w.gpu < 0; });
      if (slow)
        thread_ = std::thread([this] {
          for (size_t index = 0; index < wanted_.size() && !stop_; ++index) make(index);
        });
    }
    ~Maker() {
      stop_ = true;
      if (thread_.joinable()) thread_.join();
    }
    size_t count() const { return wanted_.size(); }

    // The next in order; throws what making it threw.
    vmm::Physical next() {
      const size_t index = next_++;
      if (!thread_.joinable()) make(index);
      return made_[index].get_future().get();
    }

   private:
    void make(size_t index) {
      try {
        made_[index].set_value(provider_.physical(wanted_[index].bytes, wanted_[index].gpu));
      } catch (...) {
        made_[index].set_exception(std::current_exception());
      }
    }
    VmmProvider& provider_;
    const std::vector<Wanted> wanted_;
    std::vector<std::promise<vmm::Physical>> made_;
    size_t next_ = 0;
    std::atomic<bool> stop_{false};
    std::thread thread_;
  };

  // The streams that pages are copied on, some a GPU. Made before any memory for pages is, because a stream
  // takes some of the GPU's too; kept.
  void make_copy_streams() {
    for (const int gpu : mesh_gpus()) {
      for (int turn = 0; turn < kCopyStreams; ++turn) {
        const auto key = std::make_pair(gpu, turn);
        if (copy_streams_.count(key)) continue;
        DeviceGuard guard(gpu);
        cudaStream_t stream = nullptr;
        or_out_of_memory(gpu, [&] { CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); });
        copy_streams_.emplace(key, stream);
      }
    }
  }

  // The driver's own need of memory, in words; move() then tries with less.
  template <typename F>
  static void or_out_of_memory(int gpu, F call) {
    try {
      call();
    } catch (const std::bad_alloc&) {
      throw OutOfMemory("mgpu could not move pages: " + gpu_name(gpu) +
                        " has no memory left for the copy itself.");
    }
  }

  // Copies that run while the next memory is made, on streams of the GPU that they leave.
  class Copies {
   public:
    explicit Copies(const std::map<std::pair<int, int>, cudaStream_t>& streams) : streams_(streams) {}
    ~Copies() {  // nobody takes memory away under a copy
      for (const cudaStream_t stream : used_) cudaStreamSynchronize(stream);
    }
    void start(void* to, const void* from, int64_t bytes, int gpu) {
      DeviceGuard guard(gpu);
      const cudaStream_t stream = streams_.at({gpu, turn_++ % kCopyStreams});
      used_.insert(stream);
      or_out_of_memory(gpu, [&] {
        CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
      });
    }
    void wait() {
      for (const cudaStream_t stream : used_) CUDA_CHECK(cudaStreamSynchronize(stream));
    }

   private:
    const std::map<std::pair<int, int>, cudaStream_t>& streams_;  // by GPU and turn
    std::set<cudaStream_t> used_;
    int turn_ = 0;
  };

  void give_back(vmm::Physical&& memory) {
    if (memory.gpu() < 0) {
      host_.give(std::move(memory));
    } else {
      const vmm::Physical gone(std::move(memory));
    }
  }

  vmm::Physical physical(int64_t bytes, int gpu) {
    return gpu < 0 ? host_.take(bytes) : vmm::Physical(bytes, gpu);
  }

  // Addresses where new memory is filled before it takes its place.
  char* scratch(int64_t pages) {
    if (scratch_pages_ < pages) {
      if (scratch_) vmm::unreserve(scratch_, bytes_of(scratch_pages_));
      scratch_ = nullptr;
      scratch_pages_ = 0;
      scratch_ = static_cast<char*>(reserve(pages));
      scratch_pages_ = pages;
    }
    return scratch_;
  }

  std::mutex mutex_;
  Extents extents_;
  std::map<std::pair<int, int>, cudaStream_t> copy_streams_;
  char* scratch_ = nullptr;
  int64_t scratch_pages_ = 0;
  HostSpare host_;
};

}  // namespace

PageProvider* make_vmm_provider() { return new VmmProvider; }

}  // namespace mgpu
