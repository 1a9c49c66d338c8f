// SPDX-License-Identifier: Apache-2.0
// screen_gradients.h: how strongly the loss pulls each Gaussian over the screen, summed over steps: what the
// default densification of 3DGS splits and clones by.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/host_device.h"
#include "splat/frame.h"

namespace mgpu::splat {

// Columns of the table, in the memory of tensors.
struct ScreenGradients {
  float* sum;     // [N]: adds |dL/dmean2d| in half images (W / 2, H / 2), times the number of views
  int32_t* seen;  // [N]: adds 1 for each view that sees the row
  bool absolute =
      false;  // of the sums over pixels of absolute values (AbsGS); the frame must have wanted_absgrad
};

// From frame.shards[*].grad, after run_backward. The factor of the views makes up for the mean of their
// losses. Views are added in their order: the same bits from run to run. Stage "screen gradients".
void add_screen_gradients(const Frame& frame, const ScreenGradients& to);

// One record's share.
HOST_DEVICE inline float screen_gradient(const RecordGrad& grad, const View& view, int views, bool absolute) {
  const float* dL_dmean2d = absolute ? grad.abs_mean2d : grad.mean2d;
  const float x = dL_dmean2d[0] * 0.5f * static_cast<float>(view.width),
              y = dL_dmean2d[1] * 0.5f * static_cast<float>(view.height);
  return static_cast<float>(views) * sqrtf(x * x + y * y);
}

}  // namespace mgpu::splat
