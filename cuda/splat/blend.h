// SPDX-License-Identifier: Apache-2.0
// blend.h: stages 6 and 7: each owner blends its tiles front to back, and walks them back for the gradients.
#pragma once
#include "splat/frame.h"

namespace mgpu::splat {

// The images of one view, row-major float32; depth is the accumulated one (weight times depth), null if not
// wanted.
struct ImagePointers {
  float* rgb;           // [H, W, 3]
  float* depth;         // [H, W]
  float* accumulation;  // [H, W]
};

// dL/d(image) of one view; a null pointer stands for zeros.
struct ImageGradPointers {
  const float* rgb;
  const float* depth;
  const float* accumulation;
};

// Stage "blend": fills frame.owners[*].{transmittance, contributors, pixels}.
void blend(Frame& frame);

// Stage "assemble" (an exchange): owners write their pixels, over the background, into the images [views];
// frees pixels.
void assemble_images(Frame& frame, const std::vector<ImagePointers>& images);

// Stage "scatter" (an exchange) brings dL/d(image) to the owners; stage "blend_backward" fills
// frame.owners[*].slot_grad, one RecordGrad per pair of (tile, record). No atomics: each slot is written
// once.
void blend_backward(Frame& frame, const std::vector<ImageGradPointers>& grads);

}  // namespace mgpu::splat
