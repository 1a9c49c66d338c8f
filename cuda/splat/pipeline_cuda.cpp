// SPDX-License-Identifier: Apache-2.0
// pipeline_cuda.cpp: the stages in their order on GPUs. Tiles are assigned first, so that stage "project" can
// count what goes to whom: its read-back is the only one of a render.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "mesh/launch.h"
#include "splat/assign.h"
#include "splat/bin.h"
#include "splat/exchange.h"
#include "splat/pipeline.h"

namespace mgpu::splat {

namespace {

// With MGPU_STAGE_TIMES=1 the host waits around each stage and frame.times is the GPUs' time; else it is the
// host's.
bool times_stages() {
  static const bool wanted = [] {
    const char* value = std::getenv("MGPU_STAGE_TIMES");
    return value && std::strcmp(value, "1") == 0;
  }();
  return wanted;
}

template <typename Work>
void timed(Frame& frame, const char* stage, const Work& work) {
  if (times_stages()) synchronise_shards();
  const auto start = std::chrono::steady_clock::now();
  work();
  if (times_stages()) synchronise_shards();
  frame.times.push_back(
      {stage, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()});
}

}  // namespace

void run_project(Frame& frame) {
  JoinedOperator joined;
  timed(frame, "project", [&] { project(frame); });
}

void run_forward(Frame& frame, const std::vector<ImagePointers>& images) {
  JoinedOperator joined;
  timed(frame, "assign", [&] { assign_tiles(frame); });
  run_project(frame);
  timed(frame, "exchange", [&] { exchange_records(frame); });
  timed(frame, "bin", [&] { bin_records(frame); });
  frame.images = images;
  timed(frame, "blend", [&] { blend(frame); });
}

void run_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  if (!frame.settings.wanted_backward) {
    throw std::logic_error("this frame was rendered without what its way back needs; render it in grad mode");
  }
  JoinedOperator joined;
  timed(frame, "blend_backward", [&] { blend_backward(frame, grads); });
  timed(frame, "return", [&] { return_gradients(frame); });
}

}  // namespace mgpu::splat
