// SPDX-License-Identifier: Apache-2.0
// columns.h: the splat table as stages see it: plain pointers, valid on every shard.
#pragma once
#include <cstdint>

#include "math/adam.h"

namespace mgpu::splat {

constexpr int kColumns = 6;  // order everywhere: means, quats, scales, opacities, sh0, shN
constexpr int kShColumn = 5;

// All float32, row-major: means [N,3], quats [N,4] wxyz, scales [N,3] log, opacities [N] logit, sh0 [N,3],
// shN [N,sh_rest,3].
struct SplatColumns {
  float *means, *quats, *scales, *opacities, *sh0, *shN;
  int64_t num_rows;
  int sh_rest;  // 0, 3, 8 or 15: bands above the constant one
};

// Optimizer state of a table, and what is needed to replay missed steps. All pointers may be null (no
// replay).
struct AdamState {
  float* exp_avg[kColumns];
  float* exp_avg_sq[kColumns];
  int32_t* last_step;  // last_step[row]: steps already applied to the row
};

// Steps base+1 .. now; made and kept by History (splat/history.h). Arrays per step have length now - base,
// index j - base - 1; arrays per last step l = base .. now have one more, index l - base.
struct AdamHistory {
  int64_t base, now;
  double beta1, beta2;
  float eps;
  const float* step_size[kColumns];     // lr_j / (1 - beta1^j)
  const float* inv_sqrt_bc2;            // 1 / sqrt(1 - beta2^j)
  const math::TwoSteps* two[kColumns];  // by l: the steps after l in two
  const float* closed_from;             // by l: second moment from which these hold
  float max_step_size[kColumns];        // of the steps held
  const float* beta1_power;             // beta1^k, k = 0 .. now - base
  const float* beta2_power;             // beta2^k
  const float* noise_var;               // prefix sums of the squared MCMC noise scale, by l; null: no noise
  uint64_t seed;
};

}  // namespace mgpu::splat
