// SPDX-License-Identifier: Apache-2.0
// buffer_cuda.cpp: temporaries of stages. Each GPU and stream has a heap: one long range of addresses, with
// memory behind the front of it. A freed block is used again by what the stream is given next, without
// waiting, so after the first step nothing is asked of the driver and a block costs a fifth of a microsecond.
//
// PYTORCH_NO_CUDA_MEMORY_CACHING=1 (torch's own switch) asks the driver for every block instead, so that
// compute-sanitizer sees where each begins and ends.
#include "memory/buffer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory/page.h"
#include "memory/provider.h"
#include "memory/tally.h"
#include "memory/temporaries.h"
#include "memory/vmm_cuda.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

constexpr int64_t kAlignment = 512;
constexpr int64_t kLeastGrowth = int64_t{32} << 20;  // asking the driver costs as much as a small kernel
constexpr int64_t kRange = int64_t{1} << 40;         // of addresses a heap, more than a GPU has memory

struct Piece {
  char* begin;
  int64_t bytes;
  char* end() const { return begin + bytes; }
};

// Memory of one GPU that one stream uses in order. Not thread-safe by itself.
class Heap {
 public:
  Heap(int gpu, cudaStream_t stream) : gpu_(gpu), stream_(stream), range_(vmm::reserve(kRange)) {
    if (!range_)
      throw OutOfMemory("mgpu could not reserve addresses for temporaries on " + gpu_name(gpu) + ".");
    holes_.push_back({range_, kRange});
  }

  int gpu() const { return gpu_; }
  cudaStream_t stream() const { return stream_; }
  int64_t held() const { return held_; }
  bool contains(const void* at) const {
    return static_cast<const char*>(at) >= range_ && static_cast<const char*>(at) < range_ + kRange;
  }

  // The smallest free piece that is large enough, cut to size; null if there is none. There are a few dozen
  // pieces at most, so looking at all of them is quicker than a tree.
  char* take(int64_t bytes) {
    auto best = free_.end();
    for (auto piece = free_.begin(); piece != free_.end(); ++piece) {
      if (piece->bytes < bytes || (best != free_.end() && piece->bytes >= best->bytes)) continue;
      best = piece;
      if (best->bytes == bytes) break;
    }
    if (best == free_.end()) return nullptr;
    char* const at = best->begin;
    if (best->bytes == bytes) {
      free_.erase(best);
    } else {
      best->begin += bytes;
      best->bytes -= bytes;
    }
    return at;
  }

  void give(char* at, int64_t bytes) { insert(free_, {at, bytes}); }

  // Put memory behind the first hole that has room for what `bytes` need beyond the free piece before it.
  // Throws OutOfMemory; some memory may have come then, all of it free.
  void grow(int64_t bytes) {
    for (const Piece hole : std::vector<Piece>(holes_)) {
      const int64_t before = free_bytes_before(hole.begin);
      const int64_t more = round_up(std::max(bytes - before, kLeastGrowth), kPageBytes);
      if (more > hole.bytes) continue;
      for (int64_t done = 0; done < more;) {
        const int64_t piece = std::min(vmm::kHandleBytes, more - done);
        fill(hole.begin + done, piece);
        done += piece;
      }
      return;
    }
    throw OutOfMemory("mgpu could not get " + std::to_string(bytes >> 20) + " MiB of temporaries on " +
                      gpu_name(gpu_) + ".");
  }

  // Give handles of which nothing is in use back to the driver. Nobody may be using them any more: the GPUs
  // have been waited for.
  void trim() {
    const std::vector<Piece> pieces = free_;
    for (const Piece& piece : pieces) {
      for (auto mapping = mappings_.lower_bound(piece.begin);
           mapping != mappings_.end() && mapping->first + mapping->second.bytes() <= piece.end();) {
        char* const at = mapping->first;
        const int64_t bytes = mapping->second.bytes();
        vmm::unmap(at, bytes);
        mapping = mappings_.erase(mapping);
        held_ -= bytes;
        remove(at, bytes);
        insert(holes_, {at, bytes});
      }
    }
  }

 private:
  // Of the free piece that ends at an address.
  int64_t free_bytes_before(const char* at) const {
    for (const Piece& piece : free_)
      if (piece.end() == at) return piece.bytes;
    return 0;
  }

  // One more handle, at the beginning of a hole.
  void fill(char* at, int64_t bytes) {
    vmm::Physical memory(bytes, gpu_);
    vmm::map(at, memory);
    try {
      vmm::open(at, bytes, vmm::reachable_from(gpu_));
      mappings_.emplace(at, std::move(memory));
    } catch (...) {
      vmm::unmap(at, bytes);
      throw;
    }
    held_ += bytes;
    for (Piece& hole : holes_) {
      if (hole.begin != at) continue;
      hole.begin += bytes;
      hole.bytes -= bytes;
    }
    std::erase_if(holes_, [](const Piece& hole) { return hole.bytes == 0; });
    give(at, bytes);
  }

  // Into a list in the order of addresses, in which neighbours merge.
  static void insert(std::vector<Piece>& list, Piece piece) {
    auto next = std::lower_bound(list.begin(), list.end(), piece.begin,
                                 [](const Piece& a, const char* begin) { return a.begin < begin; });
    if (next != list.end() && piece.end() == next->begin) {
      next->begin = piece.begin;
      next->bytes += piece.bytes;
    } else {
      next = list.insert(next, piece);
    }
    if (next != list.begin() && std::prev(next)->end() == next->begin) {
      std::prev(next)->bytes += next->bytes;
      list.erase(next);
    }
  }

  // [at, at + bytes) lies in one free piece and is free no longer.
  void remove(char* at, int64_t bytes) {
    for (size_t i = 0; i < free_.size(); ++i) {
      const Piece whole = free_[i];
      if (at < whole.begin || at >= whole.end()) continue;
      free_.erase(free_.begin() + static_cast<int64_t>(i));
      if (at > whole.begin) insert(free_, {whole.begin, at - whole.begin});
      if (at + bytes < whole.end()) insert(free_, {at + bytes, whole.end() - (at + bytes)});
      return;
    }
  }

  const int gpu_;
  const cudaStream_t stream_;
  char* const range_;
  std::vector<Piece> free_;   // mapped and not in use, in the order of addresses
  std::vector<Piece> holes_;  // nothing behind them, in the order of addresses
  std::map<char*, vmm::Physical> mappings_;
  int64_t held_ = 0;
};

// A block of the driver's own (PYTORCH_NO_CUDA_MEMORY_CACHING).
struct Single {
  int gpu;
  cudaStream_t stream;
};

// Never destroyed: Buffers in statics may outlive it.
struct Temporaries {
  std::mutex mutex;
  std::vector<std::unique_ptr<Heap>> heaps;
  std::unordered_map<void*, Single> singles;
  std::map<int, cudaEvent_t> event;  // by GPU
  bool (*pressure_hook)() = nullptr;
  const bool uncached = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") || !vmm::supported();
};

Temporaries& temporaries() {
  static Temporaries* instance = new Temporaries;
  return *instance;
}

int shard_of_owner(int owner) { return owner == kExchange ? 0 : owner; }

// With the mutex held.
Heap& heap_of(Temporaries& all, int gpu, cudaStream_t stream) {
  for (const std::unique_ptr<Heap>& heap : all.heaps)
    if (heap->gpu() == gpu && heap->stream() == stream) return *heap;
  all.heaps.push_back(std::make_unique<Heap>(gpu, stream));
  return *all.heaps.back();
}

void* take_single(Temporaries& all, int64_t bytes, int gpu, cudaStream_t stream) {
  DeviceGuard guard(gpu);
  void* data = nullptr;
  CUDA_CHECK(cudaMallocAsync(&data, static_cast<size_t>(bytes), stream));
  std::lock_guard<std::mutex> lock(all.mutex);
  all.singles.emplace(data, Single{gpu, stream});
  return data;
}

void* take_from_heap(Temporaries& all, int64_t bytes, int gpu, cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(all.mutex);
  Heap& heap = heap_of(all, gpu, stream);
  if (char* const data = heap.take(bytes)) return data;
  heap.grow(bytes);
  return heap.take(bytes);
}

// What `first` has been given comes before what `then` is given from now on.
void order(Temporaries& all, int gpu, cudaStream_t first, cudaStream_t then) {
  if (first == then) return;
  DeviceGuard guard(gpu);
  cudaEvent_t& event = all.event[gpu];
  if (!event) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CUDA_CHECK(cudaEventRecord(event, first));
  CUDA_CHECK(cudaStreamWaitEvent(then, event, 0));
}

}  // namespace

void* allocate_temporary(int64_t bytes, int owner) {
  if (bytes <= 0) return nullptr;
  Temporaries& all = temporaries();
  const int shard = shard_of_owner(owner), gpu = shard_gpu(shard);
  bytes = round_up(bytes, kAlignment);
  const auto take = [&] {  // the driver's own block is there for other GPUs when the stream has come past
    return all.uncached ? take_single(all, bytes, gpu, shard_stream(shard))
                        : take_from_heap(all, bytes, gpu, quiet_stream(shard));
  };
  void* data = nullptr;
  try {
    data = take();
  } catch (const std::bad_alloc&) {
    trim_temporaries();  // the heaps of other streams may hold what is missing
    try {
      data = take();
    } catch (const std::bad_alloc&) {
      if (!all.pressure_hook || !all.pressure_hook()) throw;
      data = take();
    }
  }
  tally(shard, bytes);
  return data;
}

void free_temporary(void* data, int64_t bytes, int owner) noexcept {
  if (!data) return;
  Temporaries& all = temporaries();
  const int shard = shard_of_owner(owner);
  bytes = round_up(bytes, kAlignment);
  tally(shard, -bytes);
  try {
    const int gpu = shard_gpu(shard);
    const cudaStream_t stream = quiet_stream(shard);
    std::lock_guard<std::mutex> lock(all.mutex);
    for (const std::unique_ptr<Heap>& heap : all.heaps) {
      if (!heap->contains(data)) continue;
      order(all, gpu, stream, heap->stream());  // freed behind the work of both streams
      heap->give(static_cast<char*>(data), bytes);
      return;
    }
    const auto found = all.singles.find(data);
    if (found == all.singles.end()) return;
    order(all, gpu, stream, found->second.stream);
    DeviceGuard guard(gpu);
    cudaFreeAsync(data, found->second.stream);
    all.singles.erase(found);
  } catch (...) {  // the driver is gone: the process ends, and its memory with it
  }
}

int64_t temporaries_reserved(int shard) {
  const int gpu = shard_gpu(shard);
  for (int before = 0; before < shard; ++before)
    if (shard_gpu(before) == gpu) return 0;
  Temporaries& all = temporaries();
  std::lock_guard<std::mutex> lock(all.mutex);
  int64_t bytes = 0;
  for (const std::unique_ptr<Heap>& heap : all.heaps)
    if (heap->gpu() == gpu) bytes += heap->held();
  return bytes;
}

void trim_temporaries() {
  Temporaries& all = temporaries();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.heaps.empty()) return;
  // not for the heaps' streams alone: if a stage between GPUs ended in an exception, nobody has made a heap's
  // stream wait for those that read its memory
  for (const int gpu : mesh().gpus()) {
    DeviceGuard guard(gpu);
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  for (const std::unique_ptr<Heap>& heap : all.heaps) heap->trim();
}

void set_pressure_hook(bool (*release)()) { temporaries().pressure_hook = release; }

}  // namespace mgpu
