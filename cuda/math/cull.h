// SPDX-License-Identifier: Apache-2.0
// cull.h: which rows cannot be seen, from their means and scales alone: a test that reads 24 bytes of a row
// and none of its moments, and never rejects a row that project_gaussian accepts (tests/cuda, check_cull).
//
// With z the depth, s the largest scale and u = x/z as clamped in the projection's Jacobian, the variance of
// a splat along x is at most (fx / z)^2 max_u |w0 - u w2|^2 s^2 = (reach_x s / z)^2, whatever its rotation.
// So its half width is at most G (reach_x s / z + sqrt(0.3)) with G^2 = 2 ln 255 and what tile.h adds for
// roundings, and the test against an image side, times z, is linear in x and z: a box of means is tested like
// a mean.
#pragma once
#include <cmath>

#include "math/gaussian.h"
#include "math/vec.h"
#include "math/view.h"

namespace mgpu::math {

// A view as the test reads it.
struct CullView {
  float rotation[9], translation[3];
  float row_norm[3];  // sum of absolute values of each row of the rotation
  float rounding, rounding_per_mean;
  float fx, fy, abs_fx, abs_fy;
  float reach_x, reach_y, reach;   // pixels a unit of s / z; the larger one
  float left, right, top, bottom;  // from the principal point to the sides, pixels
};

HOST_DEVICE inline CullView make_cull_view(const View& view) {
  CullView out{};
  const float* w = view.rotation;
  float largest = 0.f, shift = 0.f;
  for (int i = 0; i < 9; ++i) out.rotation[i] = w[i];
  for (int i = 0; i < 3; ++i) {
    out.translation[i] = view.translation[i];
    out.row_norm[i] = std::fabs(w[3 * i]) + std::fabs(w[3 * i + 1]) + std::fabs(w[3 * i + 2]);
    largest = std::fmax(largest, out.row_norm[i]);
    shift = std::fmax(shift, std::fabs(view.translation[i]));
  }
  out.rounding = 1e-6f * shift;
  out.rounding_per_mean = 1e-6f * largest;
  out.fx = view.fx;
  out.fy = view.fy;
  out.abs_fx = std::fabs(view.fx);
  out.abs_fy = std::fabs(view.fy);
  const auto norm_at = [&](int axis, float u) {
    float t[3];
    for (int k = 0; k < 3; ++k) t[k] = w[3 * axis + k] - u * w[6 + k];
    return std::sqrt(dot3(t, t));
  };  // convex in u: largest at an end
  constexpr float kSlack = 1.001f;
  out.reach_x = kSlack * out.abs_fx * std::fmax(norm_at(0, view.x_over_z_min), norm_at(0, view.x_over_z_max));
  out.reach_y = kSlack * out.abs_fy * std::fmax(norm_at(1, view.y_over_z_min), norm_at(1, view.y_over_z_max));
  out.reach = std::fmax(out.reach_x, out.reach_y);
  out.left = view.cx;
  out.right = static_cast<float>(view.width) - view.cx;
  out.top = view.cy;
  out.bottom = static_cast<float>(view.height) - view.cy;
  return out;
}

// True only if no Gaussian with a mean within `mean_margin` of `mean` on each axis and a largest log scale of
// at most `largest_log_scale` can be seen. What is not finite is never rejected.
HOST_DEVICE inline bool surely_unseen(const CullView& view, const float mean[3], float largest_log_scale,
                                      float mean_margin) {
  constexpr float kRootK = 3.34f;         // above sqrt(2 ln 255 + 1e-5)
  constexpr float kRootDilation = 0.55f;  // above sqrt(0.3)
  constexpr float kLargestSigma = 100.f;  // px; beyond, the roundings of tile.h have no simple bound
  constexpr float kGrowth = 1e-5f;        // of G, per squared pixel of sigma: 24 half ulps of ac / det
  float camera[3];
  mat3_mul(view.rotation, mean, camera);
  const float rounding =
      view.rounding + view.rounding_per_mean * (std::fabs(mean[0]) + std::fabs(mean[1]) + std::fabs(mean[2]));
  const float x = camera[0] + view.translation[0], y = camera[1] + view.translation[1];
  const float z = camera[2] + view.translation[2];
  const float dx = mean_margin * view.row_norm[0] + rounding, dy = mean_margin * view.row_norm[1] + rounding;
  const float dz = mean_margin * view.row_norm[2] + rounding;
  if (z + dz <= kNearPlane) return true;
  const float scale = std::exp(largest_log_scale) * 1.0001f;
  const float sigma = quick_divide(view.reach * scale, std::fmax(z - dz, kNearPlane));
  if (!(sigma <= kLargestSigma)) return false;
  const float root = kRootK * (1.f + kGrowth * sigma * sigma);
  const float edge = root * kRootDilation + 1.f;  // px of the half width that do not shrink with z
  const auto beyond = [&](float along, float focal_margin, float side, float reach) {
    const float slope = side + edge;
    return along - slope * z - std::fabs(slope) * dz - focal_margin - root * reach * scale > 0.f;
  };
  const float across_x = view.fx * x, across_y = view.fy * y;
  return beyond(across_x, view.abs_fx * dx, view.right, view.reach_x) |
         beyond(-across_x, view.abs_fx * dx, view.left, view.reach_x) |
         beyond(across_y, view.abs_fy * dy, view.bottom, view.reach_y) |
         beyond(-across_y, view.abs_fy * dy, view.top, view.reach_y);
}

// An upper bound of |exp_avg| / sqrt(exp_avg_sq) of any component that Adam made from zero, by
// Cauchy-Schwarz: (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), and a quarter for moments stored with fewer
// bits. Times largest_drift of adam.h it bounds how far missed steps move a parameter. Infinite where there
// is none: for b1^2 >= b2, and for an eps so small that moments which underflow would count.
inline float moment_ratio_bound(double beta1, double beta2, double eps) {
  if (!(beta1 * beta1 < beta2) || !(eps >= 1e-16)) return INFINITY;
  return static_cast<float>(1.25 * (1.0 - beta1) / std::sqrt((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2)));
}

constexpr float kMaxNormal3 = 8.4f;  // above the longest vector that normal3 draws: its radii end at 5.9

}  // namespace mgpu::math
