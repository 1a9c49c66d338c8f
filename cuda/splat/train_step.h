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
};

struct TrainSettings {
  float ssim_weight = 0.2f;
  bool wanted_viewmats = false;
};

// What is left of the losses of a step.
struct TrainLosses {
  static constexpr int kFloats = 3;  // loss, L1, SSIM
  Buffer<float> value;               // lead shard; [views, kFloats]
  std::vector<double> dL_dviewmats;  // [views, 12], row-major 3x4; empty if not wanted
};

// Stages 2 to 8: the gradient of the views' mean loss in frame.shards[*].grad, ready for `step`. The frame
// has columns, views, settings and homes; `targets` has one entry a view.
TrainLosses render_loss_backward(Frame& frame, const std::vector<TrainTarget>& targets,
                                 const TrainSettings& settings);

}  // namespace mgpu::splat
