// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "mesh/gate.h"
#include "mesh/lanes.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

// Looks before a thread sleeps or lets others run: some 50 microseconds, which is more than stages are apart.
// With fewer processors than threads they would keep each other from working.
int looks_at_most() {
  static const int looks =
      std::thread::hardware_concurrency() >= static_cast<unsigned>(lane_count()) ? 2000 : 20;
  return looks;
}

enum class Threads { kOne, kOfGpus, kOfShards };

Threads wanted_threads() {
  static const Threads wanted = [] {
    const char* const value = std::getenv("MGPU_LAUNCH_THREADS");
    if (value && std::strcmp(value, "0") == 0) return Threads::kOne;
    if (value && std::strcmp(value, "shards") == 0) return Threads::kOfShards;
    return Threads::kOfGpus;
  }();
  return wanted;
}

LaneContext lane_context{nullptr, nullptr};  // set once, before any lane

void look_again() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

int first_gpu_of(int lane) {
  if (wanted_threads() == Threads::kOfShards) return shard_gpu(lane);
  return mesh().gpus()[static_cast<size_t>(lane)];
}

thread_local bool in_lanes = false;  // this thread is inside `work`

class Lanes {
 public:
  // False if another thread is in it.
  bool run(int lanes, const std::function<void(int)>& work) {
    const std::unique_lock<std::mutex> mine(mutex_, std::try_to_lock);
    if (!mine) return false;
    for (; threads_ < lanes; ++threads_) std::thread([this, lane = threads_] { serve(lane); }).detach();
    work_ = &work;
    captured_ = lane_context.capture ? lane_context.capture() : 0;
    std::fill(errors_.begin(), errors_.end(), nullptr);
    left_.store(lanes - 1, std::memory_order_relaxed);
    const uint32_t before = round_.load(std::memory_order_relaxed);
    round_.store((before / kRound + 1) * kRound + static_cast<uint32_t>(lanes), std::memory_order_release);
    round_.notify_all();
    do_work(0);
    for (int looks = 0; left_.load(std::memory_order_acquire) > 0; ++looks) {
      if (looks < looks_at_most())
        look_again();
      else
        std::this_thread::yield();
    }
    for (const std::exception_ptr& error : errors_)
      if (error) std::rethrow_exception(error);
    return true;
  }

 private:
  void do_work(int lane) {
    in_lanes = true;
    try {
      if (lane > 0 && lane_context.adopt) lane_context.adopt(captured_);
      (*work_)(lane);
    } catch (...) {
      errors_[static_cast<size_t>(lane)] = std::current_exception();
    }
    in_lanes = false;
  }

  void serve(int lane) {
    const TurnOfAnother turn;                         // whoever runs us holds it
    cudaSetDevice(physical_gpu(first_gpu_of(lane)));  // an error comes again from the first call of the work
    for (uint32_t known = 0;;) {
      for (int looks = 0; looks < looks_at_most() && round_.load(std::memory_order_acquire) == known; ++looks)
        look_again();
      round_.wait(known, std::memory_order_acquire);
      known = round_.load(std::memory_order_acquire);
      if (static_cast<uint32_t>(lane) >= known % kRound) continue;
      do_work(lane);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  static constexpr uint32_t kRound = 256;
  static_assert(kMaxShards < kRound);
  std::mutex mutex_;
  std::atomic<uint32_t> round_{0};  // kRound times its number, and how many lanes work in it
  std::atomic<int> left_{0};        // lanes that are not done
  int threads_ = 1;                 // lanes that have one, the caller's included
  const std::function<void(int)>* work_ = nullptr;
  int64_t captured_ = 0;
  std::array<std::exception_ptr, kMaxShards> errors_;
};

}  // namespace

int lane_count() {
  switch (wanted_threads()) {
    case Threads::kOne:
      return 1;
    case Threads::kOfShards:
      return mesh().size();
    default:
      return static_cast<int>(mesh().gpus().size());
  }
}

int lane_of_shard(int shard) {
  if (lane_count() == 1) return 0;
  if (wanted_threads() == Threads::kOfShards) return shard;
  const std::vector<int>& gpus = mesh().gpus();
  return static_cast<int>(std::find(gpus.begin(), gpus.end(), shard_gpu(shard)) - gpus.begin());
}

void run_lanes(const std::function<void(int lane)>& work) {
  const int lanes = lane_count();
  if (lanes > 1 && !in_lanes) {
    static Lanes* const instance = new Lanes;  // as long as the process: its threads never end
    if (instance->run(lanes, work)) return;
  }
  for (int lane = 0; lane < lanes; ++lane) work(lane);
}

bool inside_lane() { return in_lanes; }

void set_lane_context(const LaneContext& context) { lane_context = context; }

}  // namespace mgpu
