// SPDX-License-Identifier: Apache-2.0
// relocation.h: opacity and scale of a Gaussian that is split into n equal ones in the same place.
//
// Kheradmand et al., 3D Gaussian Splatting as Markov Chain Monte Carlo (NeurIPS 2024), equation 9.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/host_device.h"

namespace mgpu::math {

constexpr int kMaxSplit = 51;  // more copies than this count as this many (as gsplat and the paper's code)

struct Relocated {
  float opacity;      // of each copy
  float scale_ratio;  // new scale / old scale, all axes alike
};

// The paper's double sum over i and k collapses over i (sum of C(i-1, k) for i = 1..n is C(n, k+1)):
//   scale ratio = o / sum over j = 1..n of C(n, j) (-1)^(j-1) o_new^j / sqrt(j),   o_new = 1 - (1 - o)^(1/n).
// Double precision, because the sum alternates; its largest term stays below (1 + o_new)^n.
HOST_DEVICE inline Relocated relocate(float opacity, int64_t copies) {
  const int n = static_cast<int>(copies < 1 ? 1 : copies > kMaxSplit ? kMaxSplit : copies);
  const double new_opacity = -std::expm1(std::log1p(-static_cast<double>(opacity)) / n);
  double term = -1.0;  // C(n, j) (-o_new)^j
  double sum = 0.0;
  for (int j = 1; j <= n; ++j) {
    term *= -new_opacity * (n - j + 1) / j;
    sum += term / std::sqrt(static_cast<double>(j));
  }
  return {static_cast<float>(new_opacity), static_cast<float>(opacity / sum)};
}

// The logit for that opacity, kept below 1 and so far above `min_opacity` that its sigmoid in float is above,
// too: a row that has just been moved lives.
HOST_DEVICE inline float relocated_logit(float opacity, float min_opacity) {
  constexpr float kMost = 1.0f - 0x1p-23f;
  const float least = min_opacity * (1.0f + 0x1p-18f);
  float kept = opacity < least ? least : opacity;
  kept = kept > kMost ? kMost : kept;
  return std::log(kept / (1.0f - kept));
}

}  // namespace mgpu::math
