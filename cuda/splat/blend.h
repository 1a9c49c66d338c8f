// SPDX-License-Identifier: Apache-2.0
// blend.h: stages 6 and 7: each owner blends its tiles front to back, and walks them back for the gradients.
#pragma once
#include "splat/frame.h"

namespace mgpu::splat {

// dL/d(image) of one view; a null pointer stands for zeros.
struct ImageGradPointers {
  const float* rgb;
  const float* depth;
  const float* accumulation;
};

// Stage "blend": writes frame.images, and keeps in frame.owners what the way back needs.
void blend(Frame& frame);

// Stage "blend_backward", from dL/d(image) and frame.images as stage "blend" left them: the gradients of the
// records that each owner received. CUDA flavour: frame.owners[*].record_grad; host flavour:
// frame.owners[*].slot_grad, one RecordGrad per pair of (tile, record), without atomics.
void blend_backward(Frame& frame, const std::vector<ImageGradPointers>& grads);

}  // namespace mgpu::splat
