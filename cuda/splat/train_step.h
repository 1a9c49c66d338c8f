// SPDX-License-Identifier: Apache-2.0
// train_step.h: one training step in one call: render all views, their losses, the way back and the
// optimizer's step, without autograd. Images and their gradients are temporaries; loss values stay on the
// device until they are asked for.
#pragma once
#include <cstdint>
#include <vector>

#include "memory/buffer.h"
#include "splat/frame.h"
#include "splat/history.h"
#include "splat/step.h"

namespace mgpu::splat {

// The photograph of one view, row-major, in the memory of a tensor. One of the first two is set; bytes stand
// for 0..1 in 255 steps.
struct TrainTarget {
  const float* values = nullptr;   // [H, W, 3]
  const uint8_t* bytes = nullptr;  // [H, W, 3]
  const uint8_t* mask = nullptr;   // [H, W], non-zero: the pixel counts; null: all do
  float* image = nullptr;          // [H, W, 3], where the rendered image is left; null: nowhere
  // [3, 4], the map that takes the rendered colours to the photograph's (splat/exposure.h), and where its
  // gradient goes; null: none, colours are compared as they are rendered.
  const float* exposure = nullptr;
  float* dL_dexposure = nullptr;
};

struct TrainSettings {
  float ssim_weight = 0.2f;
  bool wanted_viewmats = false;
  bool wanted_step = true;  // false: the gradients wait in the frame
  StepSettings step;
};

struct TrainOutcome {
  static constexpr int kLossFloats = 3;
  Buffer<float> losses;              // lead shard; [views, 3]: loss, L1, SSIM
  std::vector<double> dL_dviewmats;  // [views, 12], row-major 3x4; empty if not wanted
  StepReport step;
  std::vector<StageTime> times;    // in the order they ran, as Frame::times
  FrameLinks links;                // as Frame::links
  std::vector<CullCounts> culled;  // [shards]
};

// Trains on the mean loss of the frame's views. The frame has columns, state, history, views, settings and
// homes; `targets` has one entry a view. `pending`: frames of earlier calls whose gradients take part in the
// step, which is then pushed to `history`.
TrainOutcome train_step(Frame& frame, std::vector<const Frame*> pending,
                        const std::vector<TrainTarget>& targets, const TrainSettings& settings,
                        History& history);

}  // namespace mgpu::splat
