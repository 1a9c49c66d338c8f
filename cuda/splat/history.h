// SPDX-License-Identifier: Apache-2.0
// history.h: the optimizer's latest steps (learning rates, bias corrections, noise), from which rows that
// were not seen catch up. Bounded: the owner flushes all rows and calls clear().
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "memory/buffer.h"
#include "splat/columns.h"

namespace mgpu::splat {

// Steps and tables behind an AdamHistory. Everything is computed in double and stored as float. Memory for
// kMaxSteps steps is reserved once, so a view never dangles while the object lives, whatever is pushed in the
// meantime.
class History {
 public:
  static constexpr int64_t kMaxSteps = 1024;

  // Throws std::invalid_argument unless 0 <= beta1 < 1, 0 < beta2 < 1, eps >= 0 and steps >= 0.
  History(int64_t steps, double beta1, double beta2, double eps, uint64_t seed);

  // One more step: a learning rate per column, and the scale of the MCMC noise (0: none). Throws
  // std::length_error when kMaxSteps steps are held: flush all rows and clear() before.
  void push(const std::array<double, kColumns>& lrs, double noise_scale);

  // What a step number now + 1 with these rates would use; push() is for after it.
  struct Step {
    int64_t number;
    float step_size[kColumns];
    float inv_sqrt_bc2;
    float noise_scale;
  };
  Step next(const std::array<double, kColumns>& lrs, double noise_scale) const;

  // Forget all steps: every row is up to date with step now().
  void clear();

  int64_t base() const { return base_; }
  int64_t now() const { return base_ + static_cast<int64_t>(inv_sqrt_bc2_.size()); }
  int64_t length() const { return now() - base_; }

  // Pointers into this object; what they point to changes with push and clear.
  AdamHistory view() const;

 private:
  int64_t base_;
  double beta1_, beta2_, eps_;
  uint64_t seed_;
  bool noisy_ = false;
  void update_two_steps();

  std::array<std::vector<double>, kColumns> step_size_exact_;
  std::array<std::vector<float>, kColumns> step_size_;
  std::array<std::vector<math::TwoSteps>, kColumns> two_;
  std::vector<float> closed_from_;
  std::array<float, kColumns> max_step_size_{};
  std::vector<float> inv_sqrt_bc2_, beta1_power_, beta2_power_;
  std::vector<double> bc2_;  // 1 - beta2^j
  std::vector<double> noise_sum_;
  std::vector<float> noise_var_;
};

// CUDA flavour: the arrays of a history in one piece of memory, the same on every shard.
class PackedHistory {
 public:
  // Appends the arrays to `packed`.
  PackedHistory(const AdamHistory& history, std::vector<float>& packed);
  // The history whose arrays are in a copy of `packed`.
  AdamHistory in(const float* copy) const;

 private:
  AdamHistory history_;
  std::array<size_t, kColumns> two_{}, step_size_{};  // where each array starts
  size_t inv_sqrt_bc2_ = 0, closed_from_ = 0, beta1_power_ = 0, beta2_power_ = 0, noise_var_ = 0;
};

}  // namespace mgpu::splat
