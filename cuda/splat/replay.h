// SPDX-License-Identifier: Apache-2.0
// replay.h: read a row of the table as dense Adam has it after the latest step, in registers: the steps that
// the row missed (zero gradient) are taken while it is loaded (math/adam.h). The step and flush stages write
// the result back.
#pragma once
#include <cmath>

#include "math/adam.h"
#include "math/random.h"
#include "math/vec.h"
#include "splat/columns.h"

namespace mgpu::splat {

HOST_DEVICE inline math::MissedSteps missed_steps(const AdamHistory& history, int column, int64_t last_step) {
  const int64_t index = last_step - history.base;
  const int64_t count = history.now - last_step;
  math::MissedSteps missed;
  missed.count = count;
  missed.two = history.two[column][index];
  missed.beta1_power = history.beta1_power[count];
  missed.beta2_power = history.beta2_power[count];
  missed.closed_from = history.closed_from[index];
  missed.step_size = history.step_size[column] + index;
  missed.inv_sqrt_bc2 = history.inv_sqrt_bc2 + index;
  missed.max_step_size = history.max_step_size[column];
  return missed;
}

// The noise of all steps after `last_step` as one draw with the summed variance, keyed by the latest step.
HOST_DEVICE inline void replay_noise(const AdamHistory& history, int64_t last_step, int64_t row,
                                     const float quat[4], const float log_scale[3], float opacity_logit,
                                     float mean[3]) {
  if (!history.noise_var) return;
  const float variance =
      history.noise_var[history.now - history.base] - history.noise_var[last_step - history.base];
  if (!(variance > 0.0f)) return;
  const math::Random4 random = math::draw(history.seed, math::Stream::kNoise, history.now, row);
  math::add_mcmc_noise(random, std::sqrt(variance), quat, log_scale, opacity_logit, mean);
}

// The bits with which the float `k` of a row's column is rounded when it is stored after step `step`; the
// upper half is its first moment's.
HOST_DEVICE inline uint32_t rounding_bits(uint64_t seed, int64_t step, int64_t row, int column, int k) {
  constexpr int kFirst[kColumns] = {0, 3, 7, 10, 11, 0};
  if (column == kShColumn) return math::draw_rounding(seed, step, row, k % 16).x[k / 16];
  k += kFirst[column];
  return math::draw_rounding(seed, step, row, 16 + k / 4).x[k % 4];
}

// A component whose moments are near eps.
RARE_HOST_DEVICE inline float replay_slowly(const AdamHistory& history, int column, int64_t last_step,
                                            float parameter, float exp_avg, float exp_avg_sq) {
  return math::replay_missed_slowly(math::adam_constants(history.beta1, history.beta2, history.eps),
                                    missed_steps(history, column, last_step), parameter, exp_avg, exp_avg_sq);
}

// `size` components of one column of one row; the moments are only read.
HOST_DEVICE inline void replay_components(const AdamHistory& history, int column, int64_t last_step, int size,
                                          const float* exp_avg, const float* exp_avg_sq, float* parameter) {
  const math::MissedSteps missed = missed_steps(history, column, last_step);
  bool closed = true;  // for all components: then the loop has no branch
  for (int i = 0; i < size; ++i)
    closed &= math::closed_form_holds(missed.closed_from, exp_avg[i], exp_avg_sq[i]);
  if (closed) {
    for (int i = 0; i < size; ++i) {
      parameter[i] -= math::missed_drift(missed.two, exp_avg[i], exp_avg_sq[i]);
    }
  } else {
    for (int i = 0; i < size; ++i) {
      if (math::closed_form_holds(missed.closed_from, exp_avg[i], exp_avg_sq[i]))
        parameter[i] -= math::missed_drift(missed.two, exp_avg[i], exp_avg_sq[i]);
      else
        parameter[i] = replay_slowly(history, column, last_step, parameter[i], exp_avg[i], exp_avg_sq[i]);
    }
  }
}

// The same with moments from the table, `size` floats at `offset`.
HOST_DEVICE inline void replay_column(const AdamState& state, const AdamHistory& history, int column,
                                      int64_t last_step, int64_t offset, int size, float* parameter) {
  const float* exp_avg_sq = state.exp_avg_sq[column] + offset;
  if (state.exp_avg[column].is_float32()) {
    replay_components(history, column, last_step, size, state.exp_avg[column].float32() + offset, exp_avg_sq,
                      parameter);
  } else {
    for (int i = 0; i < size; ++i) {
      const float exp_avg = state.exp_avg[column][offset + i];
      replay_components(history, column, last_step, 1, &exp_avg, exp_avg_sq + i, parameter + i);
    }
  }
}

// Mean, quaternion, log scales and opacity logit of a row. Null state or history: as stored.
HOST_DEVICE inline void replay_geometry(const SplatColumns& columns, const AdamState* state,
                                        const AdamHistory* history, int64_t row, float mean[3], float quat[4],
                                        float log_scale[3], float& opacity_logit) {
  for (int i = 0; i < 3; ++i) mean[i] = columns.means[3 * row + i];
  for (int i = 0; i < 4; ++i) quat[i] = columns.quats[4 * row + i];
  for (int i = 0; i < 3; ++i) log_scale[i] = columns.scales[3 * row + i];
  opacity_logit = columns.opacities[row];
  if (!state || !history || state->last_step[row] >= history->now) return;
  const int64_t last = state->last_step[row];
  replay_column(*state, *history, 0, last, 3 * row, 3, mean);
  replay_column(*state, *history, 1, last, 4 * row, 4, quat);
  replay_column(*state, *history, 2, last, 3 * row, 3, log_scale);
  replay_column(*state, *history, 3, last, row, 1, &opacity_logit);
  replay_noise(*history, last, row, quat, log_scale, opacity_logit, mean);
}

// The first `sh_count` coefficients of the row, [sh_count, 3], the constant one first; sh_count <= 1 +
// sh_rest.
HOST_DEVICE inline void replay_sh(const SplatColumns& columns, const AdamState* state,
                                  const AdamHistory* history, int64_t row, int sh_count,
                                  float* sh0_and_rest) {
  const int64_t rest_offset = row * columns.sh_rest * 3;
  for (int i = 0; i < 3; ++i) sh0_and_rest[i] = columns.sh0[3 * row + i];
  for (int i = 3; i < 3 * sh_count; ++i) sh0_and_rest[i] = columns.shN[rest_offset + i - 3];
  if (!state || !history || state->last_step[row] >= history->now) return;
  const int64_t last = state->last_step[row];
  replay_column(*state, *history, 4, last, 3 * row, 3, sh0_and_rest);
  replay_column(*state, *history, 5, last, rest_offset, 3 * (sh_count - 1), sh0_and_rest + 3);
}

}  // namespace mgpu::splat
