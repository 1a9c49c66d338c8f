// SPDX-License-Identifier: Apache-2.0
#include "splat/pipeline.h"

#include <chrono>

#include "splat/assign.h"
#include "splat/bin.h"
#include "splat/exchange.h"
#include "splat/transport.h"

namespace mgpu::splat {

void run_stage(Frame& frame, const char* stage, const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  frame.times.push_back(
      {stage, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()});
}

void run_project(Frame& frame) {
  run_stage(frame, "project", [&] { project(frame); });
}

void run_forward(Frame& frame, const std::vector<ImagePointers>& images) {
  run_forward(frame, [&] { return images; });
}

void run_forward(Frame& frame, const std::function<std::vector<ImagePointers>()>& images) {
  order_tiles(frame);
  run_project(frame);
  run_stage(frame, "assign", [&] { assign_tiles(frame); });
  run_stage(frame, "exchange", [&] { exchange_records(frame); });
  run_stage(frame, "bin", [&] { bin_records(frame); });
  count_links(frame);
  run_stage(frame, "blend", [&] {
    frame.images = images();
    blend(frame);
  });
}

void run_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  run_stage(frame, "blend_backward", [&] { blend_backward(frame, grads); });
  run_stage(frame, "return", [&] { return_gradients(frame); });
  count_returned(frame);
}

bool shards_reach(int from, int to) { return from == to; }

}  // namespace mgpu::splat
