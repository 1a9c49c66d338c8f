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

// A view as the test reads it: constants of one side each, in the order right, left, bottom, top.
struct CullView {
  float rotation[9], translation[3];
  float row_norm[3];  // sum of absolute values of each row of the rotation
  float rounding, rounding_per_mean;
  float fx, fy, abs_fx, abs_fy;
  float reach_x, reach_y, reach;  // pixels a unit of s / z, times G; the larger one, without G
  float slope[4], abs_slope[4];   // pixels from the principal point to where nothing is seen
};

constexpr float kCullRootK = 3.68f;  // G: sqrt(2 ln 255 + 1e-5), and a tenth for what tile.h adds to it
constexpr float kCullRootDilation = 0.55f;  // above sqrt(0.3)
constexpr float kCullLargestSigma = 100.f;  // px; beyond, tile.h may add more than a tenth

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
  const float reach_x =
      kSlack * out.abs_fx * std::fmax(norm_at(0, view.x_over_z_min), norm_at(0, view.x_over_z_max));
  const float reach_y =
      kSlack * out.abs_fy * std::fmax(norm_at(1, view.y_over_z_min), norm_at(1, view.y_over_z_max));
  out.reach = std::fmax(reach_x, reach_y);
  out.reach_x = kCullRootK * reach_x;
  out.reach_y = kCullRootK * reach_y;
  const float side[4] = {static_cast<float>(view.width) - view.cx, view.cx,
                         static_cast<float>(view.height) - view.cy, view.cy};
  for (int i = 0; i < 4; ++i) {
    out.slope[i] = side[i] + kCullRootK * kCullRootDilation + 1.f;
    out.abs_slope[i] = std::fabs(out.slope[i]);
  }
  return out;
}

// exp for the test: 1e-4 too large, within 1e-5 of that.
HOST_DEVICE inline float cull_exp(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f + 1.5e-4f));
  return result;
#else
  return std::exp(x) * 1.0001f;
#endif
}

// True only if no Gaussian can be seen whose largest log scale is at most `largest_log_scale` and whose mean
// is, on each axis, within mean_margin + noise s^2 of `mean`, s being the largest scale. What is not finite
// is never rejected.
HOST_DEVICE inline bool surely_unseen(const CullView& view, const float mean[3], float largest_log_scale,
                                      float mean_margin, float noise) {
  const float* w = view.rotation;
  float camera[3];
  for (int i = 0; i < 3; ++i) {
    camera[i] = mul_add(w[3 * i], mean[0],
                        mul_add(w[3 * i + 1], mean[1], mul_add(w[3 * i + 2], mean[2], view.translation[i])));
  }
  const float scale = cull_exp(largest_log_scale);
  const float margin = mul_add(noise * scale, scale, mean_margin);
  const float rounding = mul_add(view.rounding_per_mean,
                                 std::fabs(mean[0]) + std::fabs(mean[1]) + std::fabs(mean[2]), view.rounding);
  const float dx = mul_add(margin, view.row_norm[0], rounding),
              dy = mul_add(margin, view.row_norm[1], rounding);
  const float dz = mul_add(margin, view.row_norm[2], rounding), z = camera[2];
  const float nearest = z - dz > kNearPlane ? z - dz : kNearPlane;
  const bool bounded = view.reach * scale <= kCullLargestSigma * nearest;
  const float half_x = mul_add(view.abs_fx, dx, view.reach_x * scale);
  const float half_y = mul_add(view.abs_fy, dy, view.reach_y * scale);
  const float across_x = view.fx * camera[0], across_y = view.fy * camera[1];
  const auto beyond = [&](int side, float along, float half) {
    return mul_add(-view.abs_slope[side], dz, mul_add(-view.slope[side], z, along)) > half;
  };
  return (z + dz <= kNearPlane) | (bounded & (beyond(0, across_x, half_x) | beyond(1, -across_x, half_x) |
                                              beyond(2, across_y, half_y) | beyond(3, -across_y, half_y)));
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
