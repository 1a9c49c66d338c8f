// SPDX-License-Identifier: Apache-2.0
// blend_front.h: the adjoint of math::blend_step walked front to back, as a splat's thread sees its pixels.
// Same values as blend_step_backward of tile.h; what lies behind is found by subtracting, so nothing is
// divided out of T.
#pragma once
#include "math/tile.h"

namespace mgpu::math {

// `transmittance` is that before the record; `behind` is dL of all that this light meets from the record on,
// background and accumulation included. Both are moved past the record. Returns dL_dsigma and sets weight =
// alpha T; both 0 if the record did not contribute. colour_dot, contributed: as in blend_step_backward.
HOST_DEVICE inline float blend_step_backward_from_front(float raw_alpha, float colour_dot, bool contributed,
                                                        float& transmittance, float& behind, float& weight) {
  const float alpha = raw_alpha < kAlphaMax ? raw_alpha : kAlphaMax;
  weight = 0.f;
  if (!(contributed && alpha >= kAlphaMin)) return 0.f;
  const float passing = 1.f - alpha;
  weight = alpha * transmittance;
  behind -= weight * colour_dot;
  const float dL_dalpha = transmittance * colour_dot - quick_divide(behind, passing);
  transmittance *= passing;
  return raw_alpha < kAlphaMax ? -raw_alpha * dL_dalpha : 0.f;
}

}  // namespace mgpu::math
