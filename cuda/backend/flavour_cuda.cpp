// SPDX-License-Identifier: Apache-2.0
#include "backend/flavour.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <chrono>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "backend/device.h"
#include "backend/shards.h"
#include "backend/streams_cuda.h"
#include "memory/pool.h"
#include "memory/provider_cuda.h"
#include "memory/temporaries.h"
#include "mesh/lanes.h"
#include "mesh/late.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

// A call more costs 6 us of the host's time, and an operator of 8 MiB takes 6 us on one GPU, so that less is
// not worth cutting; nor can it be dealt to four shards in pages.
constexpr int64_t kThreshold = 8 << 20;

c10::DeviceIndex lead_index() { return static_cast<c10::DeviceIndex>(lead_gpu); }

// A capture goes on in a stream of its own, so the stream that everything runs on needs no asking.
void refuse_capture() {
  const c10::cuda::CUDAStream& usual = streams_of(current_stream_id())[0];
  const c10::cuda::CUDAStream stream = current_on(lead_gpu);
  if (stream == usual) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  TORCH_CHECK(
      status == cudaStreamCaptureStatusNone,
      "An operator on device mgpu cannot be captured into a CUDA graph: its memory and its streams are "
      "not the graph's. Capture plain CUDA tensors, or run without torch.cuda.graph.");
}

// ---- the order of the pool's reuse (memory/pool.h)

// Blocks are used again on the CUDA stream that they were taken on.
int64_t reuse_tag() {
  refuse_capture();
  return current_on(lead_gpu).id();
}
void* mark_stream(int64_t stream) {
  StreamEvent* event = make_event(false);
  record_event(*event, stream);
  return event;
}
bool mark_passed(void* mark, bool wait) {
  auto* event = static_cast<StreamEvent*>(mark);
  if (wait) wait_event(*event);
  if (!wait && !query_event(*event)) return false;
  destroy_event(event);
  return true;
}

// ---- torch's CUDA allocator, made to take its segments from the pool
//
// With managed memory, results of backing kernels must be managed too, and on several GPUs large ones should
// not all lie on the lead shard. torch can direct a thread's allocations to a MemPool whose segments come
// from functions of ours. A MemPool serves one thread at a time, so there are as many as threads were ever
// inside a scope at once.
// torch cannot give caches back while any thread is directed so: whoever wants that waits for the others to
// leave their scopes.
class Routes {
 public:
  static Routes& instance() {
    static Routes* routes = new Routes;  // its memory may outlive static destruction
    return *routes;
  }

  void set_active(bool active) { active_ = active; }
  bool active() const { return active_; }

  at::cuda::MemPool* enter() {
    scopes_.lock_shared();
    try {
      return begin();
    } catch (...) {
      scopes_.unlock_shared();
      throw;
    }
  }

  void leave(at::cuda::MemPool* pool) {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(lead_index(), pool->id());
    c10::cuda::CUDACachingAllocator::releasePool(lead_index(), pool->id());  // what begin... took
    {
      std::lock_guard<std::mutex> lock(mutex_);
      free_.emplace_back(pool);
    }
    scopes_.unlock_shared();
  }

  // torch gives a MemPool's segments back when the MemPool is gone, and those in use when they are free as
  // well. Not from inside a scope; and if another thread stays in one for long (it may wait for us), caches
  // stay.
  void drop_caches() {
    if (inside || !scopes_.try_lock_for(std::chrono::seconds(2))) return;
    std::vector<std::unique_ptr<at::cuda::MemPool>> gone;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      gone.swap(free_);
    }
    {
      c10::cuda::CUDAGuard guard(lead_index());
      gone.clear();
      c10::cuda::CUDACachingAllocator::emptyCache();
    }
    scopes_.unlock();
  }

  static thread_local bool inside;  // a scope

 private:
  Routes()
      : segments_(torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
            [](size_t bytes, int, cudaStream_t) { return allocate_segment(static_cast<int64_t>(bytes)); },
            [](void* data, size_t, int, cudaStream_t) { free_block(data); })) {}

  at::cuda::MemPool* begin() {
    std::unique_ptr<at::cuda::MemPool> pool;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        pool = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!pool) {
      c10::cuda::CUDAGuard guard(lead_index());
      pool = std::make_unique<at::cuda::MemPool>(segments_);
    }
    const std::thread::id self = std::this_thread::get_id();
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(lead_index(), pool->id(), [self](cudaStream_t) {
      return std::this_thread::get_id() == self && !RepeatedGpuScope::inside();
    });
    return pool.release();
  }

  std::shared_timed_mutex scopes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<at::cuda::MemPool>> free_;
  std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> segments_;
  bool active_ = false;
};

thread_local bool Routes::inside = false;
thread_local at::cuda::MemPool* route = nullptr;

// ---- adopted memory that other streams still use

struct Parked {
  c10::Storage storage;
  std::vector<void*> marks;
};
std::mutex parked_mutex;
std::vector<Parked>& parked() {
  static auto* list = new std::vector<Parked>;
  return *list;
}

// Let go of parked storages whose streams have come past them.
void visit_parked(bool wait) {
  std::vector<c10::Storage> done;  // freed outside the lock
  std::lock_guard<std::mutex> lock(parked_mutex);
  std::erase_if(parked(), [&](Parked& entry) {
    std::erase_if(entry.marks, [&](void* mark) { return mark_passed(mark, wait); });
    if (entry.marks.empty()) done.push_back(std::move(entry.storage));
    return entry.marks.empty();
  });
}

bool release_others() {
  for (const int gpu : mesh_gpus()) {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(physical_gpu(gpu)));
    C10_CUDA_CHECK(cudaDeviceSynchronize());
  }
  visit_parked(true);
  Routes::instance().drop_caches();
  trim_temporaries();
  return true;
}

}  // namespace

OperatorScope::OperatorScope(On on) {
  refuse_forked_child();
  launch_.emplace();
  refuse_capture();
  order_before(on == On::kAllShards);  // may throw: the current GPU is still the caller's
  former_gpu_ = c10::cuda::ExchangeDevice(lead_index());
  if (on == On::kLead) be_late(lead_gpu, current_on(lead_gpu).stream());
}

OperatorScope::~OperatorScope() {
  try {
    order_after(false);  // of all GPUs: run_on_parts has said so
    if (former_gpu_ != lead_gpu) c10::cuda::MaybeExchangeDevice(static_cast<c10::DeviceIndex>(former_gpu_));
    // kernels of other libraries read managed memory on all GPUs, and ask nobody
    if (memory_is_managed()) order_all();
  } catch (...) {  // after a kernel's fault every call fails; the next operator says so
  }
}

std::string start_flavour(const std::string& memory) {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  lead_gpu = mesh_gpus().front();  // also of repeated ones the first
  for (const int gpu : mesh_gpus()) {
    const auto device = static_cast<c10::DeviceIndex>(physical_gpu(gpu));
    c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaFree(nullptr));  // makes the context
    // memory that a kernel on one GPU makes is read by kernels on the others
    for (const int other : mesh_gpus()) {
      const auto peer = static_cast<c10::DeviceIndex>(physical_gpu(other));
      if (peer != device) at::cuda::get_p2p_access(device, peer);
    }
  }
  const std::string chosen = choose_memory(memory);
  set_stream_order({&reuse_tag, &mark_stream, &mark_passed, &release_others});
  set_stream_provider({&shard_stream_provider, &stream_set_provider});
  set_lane_context({&current_stream_id, &adopt_stream_id});
  set_pressure_hook(&release_caches);
  Routes::instance().set_active(memory_is_managed() || several_gpus());
  current_stream_id();
  set_shard_threshold(kThreshold);
  return chosen;
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  OperatorScope scope;
  C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, current_on(lead_gpu)));
}

at::Generator make_backing_generator() { return at::make_generator<at::CUDAGeneratorImpl>(lead_index()); }

// Philox counts from an offset in a sequence for each thread. A chunk's kernel has at least 16,384 threads,
// so it takes at most length / 16,384 draws of four numbers from each.
ChunkedNumbers::ChunkedNumbers(const at::Generator& generator, int64_t length, int64_t chunks) {
  auto* main = at::check_generator<at::CUDAGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(main->mutex_);
  seed_ = main->current_seed();
  first_ = main->get_offset();
  stride_ = 4 * static_cast<uint64_t>((length + 16383) / 16384);
  main->set_offset(first_ + stride_ * static_cast<uint64_t>(chunks));
}
at::Generator ChunkedNumbers::of_chunk(int64_t chunk) const {
  at::Generator generator = at::make_generator<at::CUDAGeneratorImpl>(part_device().index());
  generator.set_current_seed(seed_);
  generator.set_offset(first_ + stride_ * static_cast<uint64_t>(chunk));
  return generator;
}

bool release_caches() {
  empty_cache();
  return true;
}

void throw_out_of_memory(const c10::OutOfMemoryError& error) {
  const std::string text = error.what_without_backtrace();
  if (text.find("Shards:") != std::string::npos) throw error;
  TORCH_CHECK_WITH(OutOfMemoryError, false, text, " ", memory_table());
}

void adopted(const c10::Storage& storage) {
  adopt_memory(storage.unsafeGetStorageImpl()->mutable_data(), static_cast<int64_t>(storage.nbytes()));
}

void dropped(const c10::Storage& storage, const c10::SmallVectorImpl<c10::StreamId>& used_on) {
  drop_adopted(storage.unsafeGetStorageImpl()->mutable_data());
  if (used_on.empty() || in_forked_child()) return;
  try {
    visit_parked(false);
    Parked entry{storage, {}};
    for (const c10::StreamId stream : used_on) entry.marks.push_back(mark_stream(stream));
    std::lock_guard<std::mutex> lock(parked_mutex);
    parked().push_back(std::move(entry));
  } catch (...) {  // the driver is gone: the process ends, and its memory with it
  }
}

void enter_allocation_scope() {
  if (!Routes::instance().active()) return;
  route = Routes::instance().enter();
  Routes::inside = true;
}

void leave_allocation_scope() {
  if (!route) return;
  Routes::inside = false;
  Routes::instance().leave(route);
  route = nullptr;
}

}  // namespace mgpu
