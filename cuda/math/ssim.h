// SPDX-License-Identifier: Apache-2.0
// ssim.h: the structural similarity of one pixel from its window's moments, with derivatives.
//
// Wang et al., Image quality assessment: from error visibility to structural similarity (2004): 11 x 11
// Gaussian window of sigma 1.5, C1 = (0.01 L)^2, C2 = (0.03 L)^2, L = 1.
#pragma once
#include "math/vec.h"

namespace mgpu::math {

constexpr int kSsimRadius = 5;
constexpr int kSsimWindow = 2 * kSsimRadius + 1;
constexpr float kSsimC1 = 0.0001f;
constexpr float kSsimC2 = 0.0009f;
// Values enter the moments minus this: variances do not change, and lose four times less to cancellation.
constexpr float kSsimShift = 0.5f;

// exp(-k^2 / 4.5), k = -5..5, divided by its sum; symmetric, so six numbers. Index 5 is the centre.
constexpr float kSsimWeight[kSsimRadius + 1] = {0.00102838008447911f, 0.00759875813523919f,
                                                0.03600077212843083f, 0.10936068950970002f,
                                                0.21300553771125370f, 0.26601172486179436f};

// Derivatives of one pixel's SSIM by the window means of x, x^2 and x y. A pixel p of the window with weight
// g gets g * (by_mean + 2 x_p by_square + y_p by_product), with x and y shifted.
struct SsimDerivative {
  float by_mean, by_square, by_product;
};

// Window means of x, y, x^2 + y^2 and x y of the shifted values to SSIM.
HOST_DEVICE inline float ssim(float mean_x, float mean_y, float mean_squares, float mean_product,
                              SsimDerivative& derivative) {
  const float mu_x = mean_x + kSsimShift, mu_y = mean_y + kSsimShift;
  const float covariance = mean_product - mean_x * mean_y;
  const float a1 = 2.0f * mu_x * mu_y + kSsimC1, a2 = 2.0f * covariance + kSsimC2;
  const float b1 = mu_x * mu_x + (mu_y * mu_y + kSsimC1);
  const float b2 = (mean_squares + kSsimC2) - mean_x * mean_x - mean_y * mean_y;
  const float inv_b1 = quick_inverse(b1), inv_b2 = quick_inverse(b2);
  const float q1 = a1 * inv_b1, q2 = a2 * inv_b2;
  const float value = q1 * q2;
  derivative.by_square = -value * inv_b2;
  derivative.by_product = 2.0f * q1 * inv_b2;
  derivative.by_mean = 2.0f * inv_b1 * (mu_y * q2 - mu_x * value)  // through the means
                       - 2.0f * mean_x * derivative.by_square      // through the variance of x
                       - mean_y * derivative.by_product;           // through the covariance
  return value;
}

}  // namespace mgpu::math
