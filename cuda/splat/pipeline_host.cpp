// SPDX-License-Identifier: Apache-2.0
#include "splat/pipeline.h"

#include <chrono>

#include "splat/assign.h"
#include "splat/bin.h"
#include "splat/exchange.h"

namespace mgpu::splat {

namespace {

template <typename Work>
void timed(Frame& frame, const char* stage, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  frame.times.push_back(
      {stage, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()});
}

}  // namespace

void run_project(Frame& frame) {
  timed(frame, "project", [&] { project(frame); });
}

void run_forward(Frame& frame, const std::vector<ImagePointers>& images) {
  run_project(frame);
  timed(frame, "assign", [&] { assign_tiles(frame); });
  timed(frame, "exchange", [&] { exchange_records(frame); });
  timed(frame, "bin", [&] { bin_records(frame); });
  frame.images = images;
  timed(frame, "blend", [&] { blend(frame); });
}

void run_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  timed(frame, "blend_backward", [&] { blend_backward(frame, grads); });
  timed(frame, "return", [&] { return_gradients(frame); });
}

}  // namespace mgpu::splat
