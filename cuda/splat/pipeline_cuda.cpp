// SPDX-License-Identifier: Apache-2.0
// pipeline_cuda.cpp: the stages in their order on GPUs. The read-back of stage "project" is the only one of a
// render on one shard; on several, stage "assign" reads what goes to whom.
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

bool times_stages() {
  static const bool wanted = [] {
    const char* value = std::getenv("MGPU_STAGE_TIMES");
    return value && std::strcmp(value, "1") == 0;
  }();
  return wanted;
}

}  // namespace

void run_stage(Frame& frame, const char* stage, const std::function<void()>& work) {
  if (times_stages()) synchronise_shards();
  const auto start = std::chrono::steady_clock::now();
  work();
  if (times_stages()) synchronise_shards();
  frame.times.push_back(
      {stage, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()});
}

void run_project(Frame& frame) {
  JoinedOperator joined;
  run_stage(frame, "project", [&] { project(frame); });
}

void run_forward(Frame& frame, const std::vector<ImagePointers>& images) {
  JoinedOperator joined;
  order_tiles(frame);
  run_project(frame);
  run_stage(frame, "assign", [&] { assign_tiles(frame); });
  run_stage(frame, "exchange", [&] { exchange_records(frame); });
  count_links(frame);
  run_stage(frame, "bin", [&] { bin_records(frame); });
  frame.images = images;
  run_stage(frame, "blend", [&] { blend(frame); });
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

}  // namespace mgpu::splat
