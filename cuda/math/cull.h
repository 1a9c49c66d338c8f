// SPDX-License-Identifier: Apache-2.0
// cull.h: which rows cannot be seen, from their means and scales alone: a test that reads 24 bytes of a row
// and none of its moments, and never rejects a row that project_gaussian accepts (tests/cuda, check_cull).
// The same of a cell, a run of rows, from the box of their means.
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
  CameraModel model;
  // Of a fisheye, where reach_x and reach are focal lengths and pixels a unit of s / r:
  float norm, max_angle, distortion[4];  // norm: of the rotation, as an operator
  float image_radius;                    // focal lengths, with what does not depend on s
};

constexpr float kCullRootK = 3.68f;  // G: sqrt(2 ln 255 + 1e-5), and a tenth for what tile.h adds to it
constexpr float kCullRootDilation = 0.55f;  // above sqrt(0.3)
constexpr float kCullLargestSigma = 100.f;  // px; beyond, tile.h may add more than a tenth

template <bool kAnyModel = true>
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
  out.model = view.model;
  if (kAnyModel && view.model == CameraModel::kOrtho) {
    out.reach = kSlack * std::fmax(out.abs_fx * norm_at(0, 0.f), out.abs_fy * norm_at(1, 0.f));
    out.reach_x = kCullRootK * kSlack * out.abs_fx * norm_at(0, 0.f);
    out.reach_y = kCullRootK * kSlack * out.abs_fy * norm_at(1, 0.f);
  }
  if (kAnyModel && view.model == CameraModel::kFisheye) {
    float largest_sum = 0.f;  // of a row of W W^T: 1 of a rotation
    for (int i = 0; i < 3; ++i) {
      float sum = 0.f;
      for (int k = 0; k < 3; ++k) sum += std::fabs(dot3(w + 3 * i, w + 3 * k));
      largest_sum = std::fmax(largest_sum, sum);
    }
    out.norm = kSlack * std::sqrt(largest_sum);
    out.max_angle = view.max_angle;
    for (int i = 0; i < 4; ++i) out.distortion[i] = view.distortion[i];
    out.reach = view.stretch * out.norm * std::fmax(out.abs_fx, out.abs_fy);
    out.reach_x = kCullRootK * view.stretch * out.norm;
    out.image_radius =
        view.image_radius + (kCullRootK * kCullRootDilation + 1.f) / std::fmin(out.abs_fx, out.abs_fy);
  }
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

// The test by a cone: of means within `distance` of the point (x, y, z) of the camera, with scales up to
// `scale`.
HOST_DEVICE inline bool beyond_cone(const CullView& view, const float camera[3], float distance,
                                    float scale) {
  const float r2 = camera[0] * camera[0] + camera[1] * camera[1];
  const float far = std::sqrt(r2 + camera[2] * camera[2]);
  if (far + distance <= 0.9999f * kNearPlane) return true;
  if (!(distance < 0.999f * far)) return false;
  const float around = mul_add(1.001f, std::asin(distance / far), 1e-5f);
  const float angle = std::atan2(std::sqrt(r2), camera[2]);
  const float low = std::fmax(angle - around, 0.f);
  if (low > view.max_angle) return true;
  const float high = std::fmin(angle + around, view.max_angle);
  const float stretch = high < 0.01f ? 1.001f : high / std::sin(high);
  const float nearest = std::fmax(far - distance, kNearPlane);
  const bool bounded = view.reach * stretch * scale <= kCullLargestSigma * nearest;
  return bounded & (fisheye_radius(view.distortion, low) >
                    view.image_radius + view.reach_x * stretch * scale / nearest);
}

// True only if no Gaussian can be seen whose largest log scale is at most `largest_log_scale` and whose mean
// is, on each axis, within mean_margin + noise s^2 of `mean`, s being the largest scale. What is not finite
// is never rejected.
template <bool kAnyModel = true>
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
  if (kAnyModel && view.model == CameraModel::kFisheye)
    return beyond_cone(view, camera, mul_add(1.7321f * margin, view.norm, 2.f * rounding), scale);
  const float dx = mul_add(margin, view.row_norm[0], rounding),
              dy = mul_add(margin, view.row_norm[1], rounding);
  const float dz = mul_add(margin, view.row_norm[2], rounding), z = camera[2];
  const bool ortho = kAnyModel && view.model == CameraModel::kOrtho;
  const float away = ortho ? 1.f : z, away_margin = ortho ? 0.f : dz;
  const float nearest = ortho ? 1.f : z - dz > kNearPlane ? z - dz : kNearPlane;
  const bool bounded = view.reach * scale <= kCullLargestSigma * nearest;
  const float half_x = mul_add(view.abs_fx, dx, view.reach_x * scale);
  const float half_y = mul_add(view.abs_fy, dy, view.reach_y * scale);
  const float across_x = view.fx * camera[0], across_y = view.fy * camera[1];
  const auto beyond = [&](int side, float along, float half) {
    return mul_add(-view.abs_slope[side], away_margin, mul_add(-view.slope[side], away, along)) > half;
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

// ---- cells

// What is stored of a run of rows, less those that are not finite, which nobody sees. Without rows the box is
// inside out.
struct alignas(16) Cell {
  float low[3];     // of the means
  float log_scale;  // the largest
  float high[3];
  float log_reach;  // largest noise_log_reach
};
static_assert(sizeof(Cell) == 32);

HOST_DEVICE inline Cell empty_cell() {
  return {{INFINITY, INFINITY, INFINITY}, -INFINITY, {-INFINITY, -INFINITY, -INFINITY}, -INFINITY};
}

// One row as it is stored; `drift_ratio` is |exp_avg| / sqrt(exp_avg_sq) of its opacity, 0 without optimizer.
struct CellRow {
  float mean[3], log_scale[3], logit, drift_ratio;

  HOST_DEVICE bool finite() const {
    float zero = 0.f;
    for (int i = 0; i < 3; ++i) zero += 0.f * mean[i] + 0.f * log_scale[i];
    return zero == 0.f;
  }
};

// An upper bound of that ratio for moments that are at hand.
HOST_DEVICE inline float drift_ratio_of(float exp_avg, float exp_avg_sq, float largest) {
  if (exp_avg == 0.f) return 0.f;
  const float ratio = 1.01f * std::fabs(exp_avg) * quick_inverse_sqrt(exp_avg_sq);
  return ratio < largest ? ratio : largest;
}

// The logarithm of what a row's noise is at most, over the longest draw and sigma: s^2 times the gate of
// add_mcmc_noise, which opens as a row becomes transparent: `logit_drift` bounds largest_drift of its
// opacity.
HOST_DEVICE inline float noise_log_reach(float log_scale, float logit, float drift_ratio, float logit_drift) {
  const float drift = drift_ratio > 0.f && logit_drift > 0.f ? drift_ratio * logit_drift : 0.f;
  const float opacity = sigmoid(logit - drift);
  const float x = 100.f * (opacity - 0.005f);  // the gate is 1 / (1 + exp(x))
  const float log_gate = x > 20.f ? -x : -std::log(1.f + std::exp(x));
  return mul_add(0.999f, log_gate, mul_add(2.f, log_scale, 2e-3f));
}

// What a row asks of its cell.
struct CellDemand {
  float mean[3], log_scale, log_reach;

  HOST_DEVICE CellDemand(const CellRow& row, float logit_drift)
      : mean{row.mean[0], row.mean[1], row.mean[2]},
        log_scale(std::fmax(std::fmax(row.log_scale[0], row.log_scale[1]), row.log_scale[2])),
        log_reach(noise_log_reach(log_scale, row.logit, row.drift_ratio, logit_drift)) {}
  HOST_DEVICE bool met_by(const Cell& cell) const {
    bool met = log_scale <= cell.log_scale && !(log_reach > cell.log_reach);  // NaN: its noise is none
    for (int i = 0; i < 3; ++i) met &= cell.low[i] <= mean[i] && mean[i] <= cell.high[i];
    return met;
  }
};

HOST_DEVICE inline void join(Cell& cell, const CellDemand& row) {
  for (int i = 0; i < 3; ++i) {
    cell.low[i] = std::fmin(cell.low[i], row.mean[i]);
    cell.high[i] = std::fmax(cell.high[i], row.mean[i]);
  }
  cell.log_scale = std::fmax(cell.log_scale, row.log_scale);
  cell.log_reach = std::fmax(cell.log_reach, row.log_reach);
}

// How far missed steps may have taken any row from what is stored of it.
struct CellMargins {
  float mean, log_scale;  // drift
  float noise;            // longest draw times sigma, of all steps that are held
};

// True only if no row can be seen that is in the cell, or whose missed steps started in it. The box is tested
// plane by plane, exactly; see above for the plane that the test against an image side is.
template <bool kAnyModel = true>
HOST_DEVICE inline bool surely_unseen(const CullView& view, const Cell& cell, const CellMargins& margins) {
  const float* w = view.rotation;
  const float scale = cull_exp(cell.log_scale + margins.log_scale);
  float margin = margins.mean;
  if (margins.noise > 0.f)
    margin = mul_add(margins.noise, cull_exp(mul_add(2.f, margins.log_scale, cell.log_reach)), margin);
  float centre[3], half[3], camera[3], size = 0.f;
  for (int i = 0; i < 3; ++i) {
    centre[i] = 0.5f * cell.low[i] + 0.5f * cell.high[i];
    half[i] = 0.5f * cell.high[i] - 0.5f * cell.low[i] + margin;
    size += std::fabs(centre[i]) + half[i];
  }
  for (int i = 0; i < 3; ++i) {
    camera[i] =
        mul_add(w[3 * i], centre[0],
                mul_add(w[3 * i + 1], centre[1], mul_add(w[3 * i + 2], centre[2], view.translation[i])));
  }
  const float rounding = mul_add(view.rounding_per_mean, size, view.rounding);
  if (kAnyModel && view.model == CameraModel::kFisheye) {
    const float across = std::sqrt(dot3(half, half));
    return beyond_cone(view, camera, mul_add(view.norm, across, 2.f * rounding), scale);
  }
  const bool ortho = kAnyModel && view.model == CameraModel::kOrtho;
  const auto extent = [&](float x, float y, float z) {
    return mul_add(std::fabs(x), half[0], mul_add(std::fabs(y), half[1], std::fabs(z) * half[2]));
  };
  const float z = camera[2], dz = extent(w[6], w[7], w[8]) + rounding;
  const float nearest = ortho ? 1.f : z - dz > kNearPlane ? z - dz : kNearPlane;
  const bool bounded = view.reach * scale <= kCullLargestSigma * nearest;
  const auto beyond = [&](int side, float focal, const float* row, float along, float reach) {
    const float slope = view.slope[side], with_z = ortho ? 0.f : -slope;
    const float away = extent(mul_add(with_z, w[6], focal * row[0]), mul_add(with_z, w[7], focal * row[1]),
                              mul_add(with_z, w[8], focal * row[2]));
    const float rounded = (std::fabs(focal) + view.abs_slope[side]) * rounding;
    return mul_add(-slope, ortho ? 1.f : z, focal * along) > away + rounded + reach * scale;
  };
  return (z + dz <= kNearPlane) | (bounded & (beyond(0, view.fx, w, camera[0], view.reach_x) |
                                              beyond(1, -view.fx, w, camera[0], view.reach_x) |
                                              beyond(2, view.fy, w + 3, camera[1], view.reach_y) |
                                              beyond(3, -view.fy, w + 3, camera[1], view.reach_y)));
}

}  // namespace mgpu::math
