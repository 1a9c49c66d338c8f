// SPDX-License-Identifier: Apache-2.0
// adam.h: one component's Adam step, and the sum of the zero-gradient steps that it missed.
//
// Dense Adam moves a parameter also where its gradient is zero: the moments decay, and what is left of the
// first one still pushes. Over k missed steps after step l (m, v: moments then; a_j: step size; s_j = 1 /
// sqrt(1 - beta2^j)):
//
//   sum over j = l+1..l+k of  a_j m b1^(j-l) / (sqrt(v b2^(j-l)) s_j + eps)
//     = m / sqrt(v) * D  -  eps m / v * E  +  O((eps / sqrt(v))^2),
//   D = sum a_j / s_j (b1 / sqrt(b2))^(j-l),    E = sum a_j / s_j^2 (b1 / b2)^(j-l).
//
// D and E hold for all components of a column, so they come from a table (splat/history.h), and a replay
// costs the same for any k. Where eps matters (sqrt(v) below 4096 eps) the steps are taken one by one.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/host_device.h"
#include "math/vec.h"

namespace mgpu::math {

// Betas and eps as torch.optim.Adam uses them: 1 - beta is rounded after the subtraction.
struct AdamConstants {
  float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
};

HOST_DEVICE inline AdamConstants adam_constants(double beta1, double beta2, float eps) {
  return {static_cast<float>(beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta1),
          static_cast<float>(1.0 - beta2), eps};
}

// One step with gradient `grad`: step_size = lr / (1 - beta1^t), inv_sqrt_bc2 = 1 / sqrt(1 - beta2^t).
HOST_DEVICE inline void adam_step(const AdamConstants& c, float step_size, float inv_sqrt_bc2, float grad,
                                  float& parameter, float& exp_avg, float& exp_avg_sq) {
  exp_avg += c.one_minus_beta1 * (grad - exp_avg);
  exp_avg_sq = c.beta2 * exp_avg_sq + c.one_minus_beta2 * grad * grad;
  parameter -= quick_divide(step_size * exp_avg, quick_sqrt(exp_avg_sq) * inv_sqrt_bc2 + c.eps);
}

// The missed steps of one row and one column.
struct MissedSteps {
  int64_t count;              // k; 0: nothing to replay
  float drift, drift_eps;     // D and E above
  float beta1_power;          // beta1^k
  float beta2_power;          // beta2^k
  float closed_from;          // exp_avg_sq from which the closed form holds to float rounding
  const float* step_size;     // of the missed steps, [k]
  const float* inv_sqrt_bc2;  // likewise
  float max_step_size;        // an upper bound of |step_size|
};

// The second moment from which on eps is small enough for two terms: the third is then below 6e-8 of the
// first.
HOST_DEVICE inline float closed_form_from(float eps, float beta2_power) {
  const float floor = 4096.0f * eps;
  return floor * floor / beta2_power;
}

// How far missed steps with sums `drift` (D) and `drift_eps` (E) move a parameter, closed form. Zero where
// nothing was ever seen (exp_avg = 0).
HOST_DEVICE inline float missed_drift(float eps, float drift, float drift_eps, float exp_avg,
                                      float exp_avg_sq) {
  const float inv_sqrt = quick_inverse_sqrt(exp_avg_sq);
  const float moved = exp_avg * inv_sqrt * (drift - eps * inv_sqrt * drift_eps);
  return exp_avg == 0.0f ? 0.0f : moved;
}

// Whether the closed form holds for a component.
HOST_DEVICE inline bool closed_form_holds(float closed_from, float exp_avg, float exp_avg_sq) {
  return (exp_avg_sq >= closed_from) | (exp_avg == 0.0f);
}

// The same one step at a time, for moments near eps; returns the moved parameter. It stops when all steps
// that are left together cannot change the parameter any more: |m| falls by beta1 a step, the denominator at
// most by sqrt(beta2).
HOST_DEVICE inline float replay_missed_slowly(const AdamConstants& c, const MissedSteps& missed,
                                              float parameter, float exp_avg, float exp_avg_sq) {
  if (exp_avg == 0.0f) return parameter;
  const float ratio = c.beta1 / std::sqrt(c.beta2);
  const float tail = ratio < 1.0f ? missed.max_step_size * ratio / (1.0f - ratio) : INFINITY;
  for (int64_t k = 0; k < missed.count; ++k) {
    exp_avg *= c.beta1;
    exp_avg_sq *= c.beta2;
    const float root = std::sqrt(exp_avg_sq);
    parameter -= missed.step_size[k] * exp_avg / (root * missed.inv_sqrt_bc2[k] + c.eps);
    const float rest = tail * std::fabs(exp_avg) / (root + c.eps);
    if (parameter + rest == parameter && parameter - rest == parameter) break;
  }
  return parameter;
}

// Replay the missed steps of one component; the moments are only read.
HOST_DEVICE inline float replay_missed(const AdamConstants& c, const MissedSteps& missed, float parameter,
                                       float exp_avg, float exp_avg_sq) {
  return closed_form_holds(missed.closed_from, exp_avg, exp_avg_sq)
             ? parameter - missed_drift(c.eps, missed.drift, missed.drift_eps, exp_avg, exp_avg_sq)
             : replay_missed_slowly(c, missed, parameter, exp_avg, exp_avg_sq);
}

}  // namespace mgpu::math
