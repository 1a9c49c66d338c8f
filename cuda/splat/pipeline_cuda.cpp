// SPDX-License-Identifier: Apache-2.0
// pipeline_cuda.cpp: the stages in their order on GPUs. The read-back of stage "project" is the only one of a
// render on one shard; on several, stage "assign" reads what goes to whom.
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "memory/waits_cuda.h"
#include "mesh/launch.h"
#include "splat/assign.h"
#include "splat/bin.h"
#include "splat/exchange.h"
#include "splat/pipeline.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

enum class Timing {
  kCall,  // what the call took
  kGpus,  // MGPU_STAGE_TIMES=1: the GPUs, for which the host waits around each stage
  kHost,  // MGPU_STAGE_TIMES=host: the call without its waits for read-backs, which are a stage "wait" behind
          // it
};

Timing timing() {
  const char* const value = std::getenv("MGPU_STAGE_TIMES");
  if (!value) return Timing::kCall;
  return std::strcmp(value, "1") == 0      ? Timing::kGpus
         : std::strcmp(value, "host") == 0 ? Timing::kHost
                                           : Timing::kCall;
}

}  // namespace

void run_stage(Frame& frame, const char* stage, const std::function<void()>& work) {
  const Timing wanted = timing();
  if (wanted == Timing::kGpus) synchronise_shards();
  const auto start = std::chrono::steady_clock::now();
  const double waited_before = seconds_waited();
  work();
  if (wanted == Timing::kGpus) synchronise_shards();
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double waited = wanted == Timing::kHost ? seconds_waited() - waited_before : 0.0;
  frame.times.push_back({stage, took - waited});
  if (waited > 0.0) frame.times.push_back({"wait", waited});
}

void run_project(Frame& frame) {
  JoinedOperator joined;
  run_stage(frame, "project", [&] { project(frame); });
}

void run_forward(Frame& frame, const std::vector<ImagePointers>& images) {
  run_forward(frame, [&] { return images; });
}

void run_forward(Frame& frame, const std::function<std::vector<ImagePointers>()>& images) {
  JoinedOperator joined;
  order_tiles(frame);
  run_project(frame);
  run_stage(frame, "assign", [&] { assign_tiles(frame); });
  run_stage(frame, "exchange", [&] { exchange_records(frame); });
  count_links(frame);
  run_stage(frame, "bin", [&] { bin_records(frame); });
  run_stage(frame, "blend", [&] {
    frame.images = images();
    blend(frame);
  });
}

void run_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  if (!frame.settings.wanted_backward) {
    throw std::logic_error("this frame was rendered without what its way back needs; render it in grad mode");
  }
  JoinedOperator joined;
  run_stage(frame, "blend_backward", [&] { blend_backward(frame, grads); });
  run_stage(frame, "return", [&] { return_gradients(frame); });
  count_returned(frame);
}

// GPUs with peer access both ways. Asked of the driver once a pair.
bool shards_reach(int from, int to) {
  const int a = shard_device(from), b = shard_device(to);
  if (a == b) return true;
  constexpr size_t kGpus = 64;
  static std::array<std::array<std::atomic<signed char>, kGpus>, kGpus> known{};  // 0: not asked yet
  std::atomic<signed char>& answer = known.at(static_cast<size_t>(a)).at(static_cast<size_t>(b));
  if (answer.load(std::memory_order_relaxed) == 0) {
    int there = 0, back = 0;
    CUDA_CHECK(cudaDeviceCanAccessPeer(&there, a, b));
    CUDA_CHECK(cudaDeviceCanAccessPeer(&back, b, a));
    answer.store(there && back ? 1 : -1, std::memory_order_relaxed);
  }
  return answer.load(std::memory_order_relaxed) > 0;
}

}  // namespace mgpu::splat
