// SPDX-License-Identifier: Apache-2.0
// fork_join_cuda.cpp: stages on GPUs. A host thread launches for all shards in turn, or, for the stages of a
// training step, one for each GPU (lanes.h); the GPUs run side by side, and wait for each other only around
// an exchange.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "mesh/fork_join.h"
#include "mesh/gate.h"
#include "mesh/lanes.h"
#include "mesh/late.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

StreamProvider stream_provider;  // set once, before the first stage
std::atomic<int> late_gpu{-1};
std::atomic<intptr_t> late_by{0};  // microseconds

cudaStream_t default_stream(int device) {
  static std::mutex mutex;
  static std::array<cudaStream_t, kMaxGpus> streams{};  // live until the process ends
  std::lock_guard<std::mutex> lock(mutex);
  cudaStream_t& stream = streams.at(static_cast<size_t>(device));
  if (!stream) {
    DeviceGuard guard(device);
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  return stream;
}

cudaStream_t device_stream(int device) {
  return stream_provider.stream ? stream_provider.stream(device) : default_stream(device);
}

// An event to join by, one per thread and device: a wait takes the record that was latest when it was called.
cudaEvent_t join_event(int device) {
  thread_local std::array<cudaEvent_t, kMaxGpus> events{};
  cudaEvent_t& event = events.at(static_cast<size_t>(device));
  if (!event) {
    DeviceGuard guard(device);
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  return event;
}

// Which GPUs have been given work that the others have not been made to wait for, a bit each, of this
// thread's set of streams. All threads share it: they launch and join in turns (gate.h), so nobody joins
// between another's asking for a stream and its launch.
//
// By the set and not by one of its streams: users make torch's current stream of a GPU another one for a
// while (torch.cuda.stream()), and what the set was given before is still to be waited for.
std::atomic<uint64_t>& ahead_here() {
  static std::array<std::atomic<uint64_t>, kStreamSets> sets{};
  return sets.at(static_cast<size_t>(stream_provider.set ? stream_provider.set() : 0));
}

uint64_t bit_of(int gpu) { return uint64_t{1} << gpu; }

// Runs the work of one shard; an error says whose it was.
void run_shard(const char* stage, const std::function<void(const Shard&)>& work, const Shard& shard) {
  const int gpu = shard_gpu(shard.index);
  DeviceGuard guard(gpu);
  try {
    be_late(gpu, device_stream(gpu));
    work(shard);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(stage) + " on shard " + std::to_string(shard.index) + " (" +
                             shard.name + "): " + error.what());
  }
}

}  // namespace

int shard_gpu(int shard) {
  const Shard& known = mesh()[shard];
  if (known.gpu >= 0) return known.gpu;
  throw std::invalid_argument(
      "shard " + std::to_string(shard) + " is \"" + known.name +
      "\", and the CUDA flavour has GPUs only. Set MGPU_DEVICES to GPU numbers, such as 0,1.");
}

int shard_device(int shard) { return physical_gpu(shard_gpu(shard)); }

cudaStream_t quiet_stream(int shard) { return device_stream(shard_gpu(shard)); }

cudaStream_t shard_stream(int shard) {
  const int gpu = shard_gpu(shard);
  if (several_gpus()) {
    std::atomic<uint64_t>& ahead = ahead_here();
    if (!(ahead.load(std::memory_order_relaxed) & bit_of(gpu))) ahead.fetch_or(bit_of(gpu));
  }
  return device_stream(gpu);
}

void set_stream_provider(const StreamProvider& provider) { stream_provider = provider; }

namespace {

// Every GPU waits for those of `first`.
void wait_for(const std::vector<int>& first) {
  const std::vector<int>& gpus = mesh().gpus();
  const auto record = [](int device, cudaEvent_t event) {
    DeviceGuard guard(device);
    CUDA_CHECK(cudaEventRecord(event, device_stream(device)));
  };
  const auto wait = [](int waiting, int device, cudaEvent_t event) {
    if (waiting == device) return;
    DeviceGuard guard(waiting);
    CUDA_CHECK(cudaStreamWaitEvent(device_stream(waiting), event, 0));
  };

  const int lead = gpus.front(), lanes = lane_count();
  const size_t others = first.size() - (first.front() == lead ? 1 : 0);
  if (lanes > 2) {  // each to each, all at once
    std::vector<cudaEvent_t> event;
    for (const int device : first) event.push_back(join_event(device));
    const auto is_of = [&](int lane, int gpu) {
      return (std::find(gpus.begin(), gpus.end(), gpu) - gpus.begin()) % lanes == lane;
    };
    run_lanes([&](int lane) {
      for (size_t i = 0; i < first.size(); ++i)
        if (is_of(lane, first[i])) record(first[i], event[i]);
    });
    run_lanes([&](int lane) {
      for (const int waiting : gpus)
        for (size_t i = 0; i < first.size() && is_of(lane, waiting); ++i) wait(waiting, first[i], event[i]);
    });
  } else if (first.size() * gpus.size() <= 2 * others + gpus.size()) {  // each to each
    for (const int device : first) record(device, join_event(device));
    for (const int waiting : gpus)
      for (const int device : first) wait(waiting, device, join_event(device));
  } else {  // by way of the lead's GPU, which takes fewer calls
    for (const int device : first) {
      if (device == lead) continue;
      record(device, join_event(device));
      wait(lead, device, join_event(device));
    }
    record(lead, join_event(lead));
    for (const int waiting : gpus) wait(waiting, lead, join_event(lead));
  }
  for (const int gpu : gpus) {
    DeviceGuard guard(gpu);
    be_late(gpu, device_stream(gpu));
  }
}

}  // namespace

void join_shards() {
  if (!several_gpus()) return;
  device_stream(mesh().gpus().front());  // whoever provides it first orders what he has started himself
  const uint64_t ahead = ahead_here().exchange(0);
  std::vector<int> first;
  for (const int gpu : mesh().gpus())
    if (ahead & bit_of(gpu)) first.push_back(gpu);
  if (first.empty()) return;
  try {
    wait_for(first);
  } catch (...) {  // no event could be had, say: the next join tries again
    ahead_here().fetch_or(ahead);
    throw;
  }
}

JoinedOperator::~JoinedOperator() noexcept(false) {
  if (std::uncaught_exceptions() == 0) {
    join_shards();
    return;
  }
  try {
    join_shards();
  } catch (...) {  // one exception is on its way; what was given stays noted
  }
}

void synchronise_shard(int shard) {
  const int gpu = shard_gpu(shard);
  {
    DeviceGuard guard(gpu);
    CUDA_CHECK(cudaStreamSynchronize(device_stream(gpu)));
  }
  host_has_waited_for(shard);
}

void host_has_waited_for(int shard) {
  if (several_gpus() && !inside_lane()) ahead_here().fetch_and(~bit_of(shard_gpu(shard)));
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
    const uint64_t bit = bit_of(shard_gpu(shard.index));
    if (!(done & bit)) synchronise_shard(shard.index);
    done |= bit;
  }
}

DeviceGuard::DeviceGuard(int gpu) {
  const int device = physical_gpu(gpu);
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

void for_each_shard(const char* stage, const std::function<void(const Shard&)>& work, Access access,
                    Launch launch) {
  const LaunchScope turn;  // pages do not move meanwhile
  const auto run = [&] {
    const auto run_those_of = [&](int lane) {
      for (const Shard& shard : mesh().shards())
        if (lane_of_shard(shard.index) == lane) run_shard(stage, work, shard);
    };
    if (launch == Launch::kSideBySide && lane_count() > 1) {
      run_lanes(run_those_of);
    } else {
      for (const Shard& shard : mesh().shards()) run_shard(stage, work, shard);
    }
  };
  if (access == Access::kLocal) {
    run();
    return;
  }
  const JoinedOperator joined;
  run();
}

}  // namespace mgpu
