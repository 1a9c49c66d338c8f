// SPDX-License-Identifier: Apache-2.0
// fork_join_cuda.cpp: stages on GPUs. One host thread launches for all shards in turn, or a thread a GPU
// where a stage has many launches; the GPUs run side by side, and wait for each other only around an
// exchange.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mesh/behalf.h"
#include "mesh/fork_join.h"
#include "mesh/gate.h"
#include "mesh/late.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

constexpr int kMaxDevices = 64;
std::atomic<StreamProvider> stream_provider{nullptr};
std::atomic<int> late_gpu{-1};
std::atomic<intptr_t> late_by{0};  // microseconds

cudaStream_t default_stream(int device) {
  static std::mutex mutex;
  static std::array<cudaStream_t, kMaxDevices> streams{};  // live until the process ends
  std::lock_guard<std::mutex> lock(mutex);
  cudaStream_t& stream = streams.at(static_cast<size_t>(device));
  if (!stream) {
    DeviceGuard guard(device);
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  return stream;
}

using Streams = std::array<cudaStream_t, kMaxDevices>;
thread_local const Streams* streams_on_behalf = nullptr;  // of the thread that this one launches for

cudaStream_t device_stream(int device) {
  if (streams_on_behalf) return streams_on_behalf->at(static_cast<size_t>(device));
  const StreamProvider provider = stream_provider.load();
  return provider ? provider(device) : default_stream(device);
}

// An event to join by, one per thread and device: a wait takes the record that was latest when it was called.
cudaEvent_t join_event(int device) {
  thread_local std::array<cudaEvent_t, kMaxDevices> events{};
  cudaEvent_t& event = events.at(static_cast<size_t>(device));
  if (!event) {
    DeviceGuard guard(device);
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  return event;
}

// Which GPUs have been given work that the others have not been made to wait for, a bit each: of one set of
// streams, a GPU each, known by the lead GPU's.
struct WorkAhead {
  std::atomic<cudaStream_t> lead{nullptr};
  std::atomic<uint64_t> gpus{0};
};

// Bits of this thread's current set of streams: those of all threads, and those that this thread set itself.
// It asks for its own, too: between another thread's asking for a stream and its launch may lie a join of a
// third one, which clears what is shared.
struct AheadHere {
  std::atomic<uint64_t>* shared;
  uint64_t* own;

  void mark(int device) const {
    const uint64_t bit = uint64_t{1} << device;
    *own |= bit;
    if (!(shared->load(std::memory_order_relaxed) & bit)) shared->fetch_or(bit);
  }
  void clear(int device) const {
    const uint64_t bit = uint64_t{1} << device;
    *own &= ~bit;
    shared->fetch_and(~bit);
  }
  uint64_t take() const { return std::exchange(*own, 0) | shared->exchange(0); }
};

AheadHere ahead_here() {
  constexpr size_t kSets = 128;
  static std::array<WorkAhead, kSets> sets;
  thread_local std::array<uint64_t, kSets> own{};
  const cudaStream_t lead = device_stream(mesh().gpus().front());
  for (size_t i = 0; i < kSets; ++i) {
    cudaStream_t known = sets[i].lead.load(std::memory_order_acquire);
    if (!known && sets[i].lead.compare_exchange_strong(known, lead)) known = lead;
    if (known == lead) return {&sets[i].gpus, &own[i]};
  }
  throw std::logic_error("more than " + std::to_string(kSets) + " sets of CUDA streams are in use");
}

bool several_gpus() { return mesh().gpus().size() > 1; }

// Runs the work of one shard; an error says whose it was.
void run_shard(const char* stage, const std::function<void(const Shard&)>& work, const Shard& shard) {
  const int device = shard_device(shard.index);
  DeviceGuard guard(device);
  try {
    be_late(device, device_stream(device));
    work(shard);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(stage) + " on shard " + std::to_string(shard.index) + " (" +
                             shard.name + "): " + error.what());
  }
}

void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// What one call of launch_on_shards asks for.
struct Errand {
  const char* stage;
  const std::function<void(const Shard&)>* work;
  Streams streams;
};

// A thread that launches on one GPU. It looks out for the next errand for as long as the stages of a step are
// apart, and then sleeps.
class Launcher {
 public:
  explicit Launcher(int device) : device_(device) { std::thread(&Launcher::loop, this).detach(); }

  void start(const Errand& errand) {
    errand_ = &errand;
    asked_.store(asked_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    asked_.notify_one();
  }
  // The error of the GPU's first shard that had one, and which shard that was.
  std::pair<std::exception_ptr, int> wait() {
    while (done_.load(std::memory_order_acquire) != asked_.load(std::memory_order_relaxed)) pause_thread();
    return {std::exchange(error_, nullptr), failed_};
  }

 private:
  void loop() {
    constexpr int kLooks = 4000;  // some 0.1 to 0.2 ms
    cudaSetDevice(device_);       // for good; where it fails, each errand says so
    for (uint32_t last = 0;; ++last) {
      for (int look = 0; look < kLooks && asked_.load(std::memory_order_acquire) == last; ++look)
        pause_thread();
      asked_.wait(last, std::memory_order_acquire);
      serve(*errand_);
      done_.store(last + 1, std::memory_order_release);
    }
  }
  void serve(const Errand& errand) {
    const LaunchOnBehalf launch;
    streams_on_behalf = &errand.streams;
    int at = -1;
    try {
      for (const Shard& shard : mesh().shards()) {
        at = shard.index;
        if (shard_device(at) == device_) run_shard(errand.stage, *errand.work, shard);
      }
    } catch (...) {
      error_ = std::current_exception();
      failed_ = at;
    }
    streams_on_behalf = nullptr;
  }

  const int device_;
  const Errand* errand_ = nullptr;
  std::atomic<uint32_t> asked_{0}, done_{0};
  std::exception_ptr error_;
  int failed_ = -1;
};

// By place in mesh().gpus(), but for the lead's GPU, which the caller serves. They live until the process
// ends.
std::vector<std::unique_ptr<Launcher>>& launchers() {
  static auto* const all = [] {
    auto* made = new std::vector<std::unique_ptr<Launcher>>;
    const std::vector<int>& gpus = mesh().gpus();
    for (size_t i = 1; i < gpus.size(); ++i) made->push_back(std::make_unique<Launcher>(gpus[i]));
    return made;
  }();
  return *all;
}
std::atomic<bool> launchers_busy{false};  // another thread's errand is under way

bool threads_wanted() {
  const char* const value = std::getenv("MGPU_LAUNCH_THREADS");
  return value && std::strcmp(value, "1") == 0;
}

}  // namespace

int shard_device(int shard) {
  const Shard& known = mesh()[shard];
  if (known.gpu >= 0) return known.gpu;
  throw std::invalid_argument(
      "shard " + std::to_string(shard) + " is \"" + known.name +
      "\", and the CUDA flavour has GPUs only. Set MGPU_DEVICES to GPU numbers, such as 0,1.");
}

cudaStream_t quiet_stream(int shard) { return device_stream(shard_device(shard)); }

cudaStream_t shard_stream(int shard) {
  const int device = shard_device(shard);
  if (several_gpus()) ahead_here().mark(device);
  return device_stream(device);
}

void set_stream_provider(StreamProvider provider) { stream_provider.store(provider); }

void join_shards() {
  if (!several_gpus()) return;
  const std::vector<int>& gpus = mesh().gpus();
  const uint64_t ahead = ahead_here().take();
  std::vector<int> first;
  for (const int gpu : gpus)
    if (ahead >> gpu & 1u) first.push_back(gpu);
  if (first.empty()) return;
  const auto record = [](int device) {
    DeviceGuard guard(device);
    CUDA_CHECK(cudaEventRecord(join_event(device), device_stream(device)));
  };
  const auto wait = [](int waiting, int device) {
    if (waiting == device) return;
    DeviceGuard guard(waiting);
    CUDA_CHECK(cudaStreamWaitEvent(device_stream(waiting), join_event(device), 0));
  };

  // Each to each, unless it takes fewer calls by way of the lead's GPU.
  const int lead = gpus.front();
  const size_t others = first.size() - (first.front() == lead ? 1 : 0);
  if (first.size() * gpus.size() <= 2 * others + gpus.size()) {
    for (const int device : first) record(device);
    for (const int waiting : gpus)
      for (const int device : first) wait(waiting, device);
  } else {
    for (const int device : first) {
      if (device == lead) continue;
      record(device);
      wait(lead, device);
    }
    record(lead);
    for (const int waiting : gpus) wait(waiting, lead);
  }
  for (const int gpu : gpus) {
    DeviceGuard guard(gpu);
    be_late(gpu, device_stream(gpu));
  }
}

void synchronise_shard(int shard) {
  const int device = shard_device(shard);
  {
    DeviceGuard guard(device);
    CUDA_CHECK(cudaStreamSynchronize(device_stream(device)));
  }
  if (several_gpus()) ahead_here().clear(device);
}

void set_late_gpu(int gpu, int microseconds) {
  late_gpu.store(gpu);
  late_by.store(microseconds);
}

void be_late(int gpu, cudaStream_t stream) {
  if (gpu != late_gpu.load(std::memory_order_relaxed)) return;
  // a thread of the driver sleeps, and the stream waits for it
  const auto sleep = [](void* by) { usleep(static_cast<useconds_t>(reinterpret_cast<intptr_t>(by))); };
  CUDA_CHECK(cudaLaunchHostFunc(stream, sleep, reinterpret_cast<void*>(late_by.load())));
}

void synchronise_shards() {
  uint64_t done = 0;
  for (const Shard& shard : mesh().shards()) {
    const uint64_t bit = uint64_t{1} << shard_device(shard.index);
    if (!(done & bit)) synchronise_shard(shard.index);
    done |= bit;
  }
}

DeviceGuard::DeviceGuard(int device) {
  check_cuda(cudaGetDevice(&former_), "cudaGetDevice");
  if (device == former_) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  changed_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(former_);
}

void check_cuda(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // not again from the next check
  if (code == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw std::runtime_error(
      std::string(what) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) +
      "). After an illegal access the process cannot use this GPU again: restart it, with "
      "CUDA_LAUNCH_BLOCKING=1 to see which kernel it was.");
}

void check_kernel(const char* stage, int shard, int64_t rows) {
  const cudaError_t code = cudaGetLastError();
  if (code == cudaSuccess) return;
  check_cuda(code, (std::string("stage ") + stage + " on shard " + std::to_string(shard) + " (" +
                    mesh()[shard].name + "), " + std::to_string(rows) + " rows")
                       .c_str());
}

void for_each_shard(const char* stage, const std::function<void(const Shard&)>& work, Access access) {
  const LaunchScope launch;  // pages do not move meanwhile
  if (access == Access::kExchange) join_shards();
  for (const Shard& shard : mesh().shards()) run_shard(stage, work, shard);
  if (access == Access::kExchange) join_shards();
}

void launch_on_shards(const char* stage, const std::function<void(const Shard&)>& work, Access access) {
  if (!several_gpus() || !threads_wanted() || streams_on_behalf || launchers_busy.exchange(true))
    return for_each_shard(stage, work, access);
  const LaunchScope launch;
  std::exception_ptr error;
  int failed = -1;
  const auto record = [&](std::exception_ptr problem, int shard) {  // that of the lowest shard is thrown
    if (problem && (!error || shard < failed)) {
      error = std::move(problem);
      failed = shard;
    }
  };
  try {
    if (access == Access::kExchange) join_shards();
    Errand errand{stage, &work, {}};
    for (const int gpu : mesh().gpus()) {
      errand.streams.at(static_cast<size_t>(gpu)) = device_stream(gpu);
      ahead_here().mark(gpu);  // the threads' own marks are not this one's
    }
    for (const auto& launcher : launchers()) launcher->start(errand);
    int at = -1;
    try {
      for (const Shard& shard : mesh().shards()) {
        at = shard.index;
        if (shard_device(at) == mesh().gpus().front()) run_shard(stage, work, shard);
      }
    } catch (...) {
      record(std::current_exception(), at);
    }
    for (const auto& launcher : launchers()) {
      auto [problem, shard] = launcher->wait();
      record(std::move(problem), shard);
    }
    if (!error && access == Access::kExchange) join_shards();
  } catch (...) {
    record(std::current_exception(), 0);
  }
  launchers_busy.store(false);
  if (error) std::rethrow_exception(error);
}

}  // namespace mgpu
