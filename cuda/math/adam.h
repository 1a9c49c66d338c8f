// SPDX-License-Identifier: Apache-2.0
// adam.h: one component's Adam step, and the sum of the zero-gradient steps that it missed.
//
// Dense Adam moves a parameter also where its gradient is zero: the moments decay, and what is left of the
// first one still pushes. Over k missed steps after step l (m, v: moments then; a_j: step size; s_j = 1 /
// sqrt(1 - beta2^j)) it moves by
//
//   sum over j = l+1..l+k of  a_j m b1^(j-l) / (sqrt(v b2^(j-l)) s_j + eps)
//     = m sum w_j / (sqrt(v) + eps t_j),   t_j = b2^(-(j-l)/2) / s_j,   w_j = a_j b1^(j-l) t_j.
//
// All t_j lie close together, and then k fractions are as good as two: those of the 2-point Gauss quadrature
// for the weights w_j on the points t_j, which agree in the terms up to eps^3. So k missed steps cost two,
// whatever eps. The error is below 0.33 (spread / mean of t)^4 of the movement: 1e-9 late in training. Only
// in the first hundred steps is the spread large (s_j falls fast); from there, steps are taken one by one
// where eps matters. The fractions hold for all components of a column, so they come from a table
// (splat/history.h).
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

// Two steps that stand for all missed ones: moved = exp_avg * sum of step[q] / (sqrt(exp_avg_sq) + eps[q]).
struct alignas(16) TwoSteps {
  float step[2], eps[2];
};

// How far they move a parameter at most, as a multiple of |exp_avg| / sqrt(exp_avg_sq).
HOST_DEVICE inline float largest_drift(const TwoSteps& two) {
  return std::fabs(two.step[0]) + std::fabs(two.step[1]);
}

// The missed steps of one row and one column.
struct MissedSteps {
  int64_t count;  // k; 0: nothing to replay
  TwoSteps two;
  float beta1_power;          // beta1^k
  float beta2_power;          // beta2^k
  float closed_from;          // exp_avg_sq from which `two` holds to float rounding; mostly 0
  const float* step_size;     // of the missed steps, [k]
  const float* inv_sqrt_bc2;  // likewise
  float max_step_size;        // an upper bound of |step_size|
};

// How far missed steps move a parameter. Zero where nothing was ever seen (exp_avg = 0).
HOST_DEVICE inline float missed_drift(const TwoSteps& two, float exp_avg, float exp_avg_sq) {
  const float root = quick_sqrt(exp_avg_sq);
  const float moved =
      exp_avg * (quick_divide(two.step[0], root + two.eps[0]) + quick_divide(two.step[1], root + two.eps[1]));
  return exp_avg == 0.0f ? 0.0f : moved;
}

// Whether that holds for a component.
HOST_DEVICE inline bool closed_form_holds(float closed_from, float exp_avg, float exp_avg_sq) {
  return (exp_avg_sq >= closed_from) | (exp_avg == 0.0f);
}

// The same one step at a time; returns the moved parameter. It stops when all steps
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
             ? parameter - missed_drift(missed.two, exp_avg, exp_avg_sq)
             : replay_missed_slowly(c, missed, parameter, exp_avg, exp_avg_sq);
}

}  // namespace mgpu::math
