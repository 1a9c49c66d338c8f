// SPDX-License-Identifier: Apache-2.0
#include "splat/history.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace mgpu::splat {

History::History(int64_t steps, double beta1, double beta2, double eps, uint64_t seed)
    : base_(steps), beta1_(beta1), beta2_(beta2), eps_(eps), seed_(seed) {
  if (!(beta1 >= 0.0 && beta1 < 1.0 && beta2 > 0.0 && beta2 < 1.0 && eps >= 0.0 && steps >= 0)) {
    throw std::invalid_argument(
        "Adam needs 0 <= beta1 < 1, 0 < beta2 < 1, eps >= 0 and steps >= 0; got betas (" +
        std::to_string(beta1) + ", " + std::to_string(beta2) + "), eps " + std::to_string(eps) + ", steps " +
        std::to_string(steps) + ".");
  }
  for (size_t column = 0; column < kColumns; ++column) {
    step_size_exact_[column].reserve(kMaxSteps);
    step_size_[column].reserve(kMaxSteps);
    two_[column].reserve(kMaxSteps + 1);
  }
  closed_from_.reserve(kMaxSteps + 1);
  inv_sqrt_bc2_.reserve(kMaxSteps);
  bc2_.reserve(kMaxSteps);
  beta1_power_.reserve(kMaxSteps + 1);
  beta2_power_.reserve(kMaxSteps + 1);
  noise_sum_.reserve(kMaxSteps + 1);
  noise_var_.reserve(kMaxSteps + 1);
  clear();
}

History::Step History::next(const std::array<double, kColumns>& lrs, double noise_scale) const {
  Step step{};
  step.number = now() + 1;
  const double t = static_cast<double>(step.number);
  for (size_t column = 0; column < kColumns; ++column) {
    step.step_size[column] = static_cast<float>(lrs[column] / (1.0 - std::pow(beta1_, t)));
  }
  step.inv_sqrt_bc2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2_, t)));
  step.noise_scale = static_cast<float>(noise_scale);
  return step;
}

void History::push(const std::array<double, kColumns>& lrs, double noise_scale) {
  if (length() >= kMaxSteps) {
    throw std::length_error("The optimizer holds " + std::to_string(kMaxSteps) + " steps; flush it first.");
  }
  const Step step = next(lrs, noise_scale);
  const double t = static_cast<double>(step.number);
  inv_sqrt_bc2_.push_back(step.inv_sqrt_bc2);
  bc2_.push_back(1.0 - std::pow(beta2_, t));
  beta1_power_.push_back(static_cast<float>(std::pow(beta1_, static_cast<double>(length()))));
  beta2_power_.push_back(static_cast<float>(std::pow(beta2_, static_cast<double>(length()))));
  noise_sum_.push_back(noise_sum_.back() + noise_scale * noise_scale);
  noise_var_.push_back(static_cast<float>(noise_sum_.back()));
  noisy_ = noise_sum_.back() > 0.0;
  for (size_t column = 0; column < kColumns; ++column) {
    step_size_exact_[column].push_back(lrs[column] / (1.0 - std::pow(beta1_, t)));
    step_size_[column].push_back(step.step_size[column]);
    max_step_size_[column] = std::max(max_step_size_[column], std::fabs(step.step_size[column]));
  }
  update_two_steps();
}

// Gauss quadrature of the steps after each l, from the sums of w t^p, p = 0..3 (math/adam.h), the newest step
// first: going from l + 1 to l multiplies all t by b2^(-1/2) and all w by b1 b2^(-1/2). A new step is lost in
// rounding for an l far back, so these stay as they are.
void History::update_two_steps() {
  constexpr double kAccuracy = 1e-6, kLost = 1e-10;
  const double grow = 1.0 / std::sqrt(beta2_), shrink = beta1_ * grow;
  const size_t length = inv_sqrt_bc2_.size();
  const double reach = shrink <= 0.0  ? 1.0
                       : shrink < 1.0 ? std::ceil(std::log(kLost) / std::log(shrink))
                                      : kMaxSteps;
  const size_t first = length - std::min(length, static_cast<size_t>(std::min<double>(reach, kMaxSteps)));
  closed_from_.resize(length + 1, 0.0f);
  std::fill(closed_from_.begin() + static_cast<std::ptrdiff_t>(first), closed_from_.end(), 0.0f);
  for (size_t column = 0; column < kColumns; ++column) {
    two_[column].resize(length + 1);
    two_[column][length] = {{0.0f, 0.0f}, {1.0f, 1.0f}};
    double sum[4] = {};
    for (size_t index = length; index-- > first;) {
      double term = step_size_exact_[column][index] * std::sqrt(bc2_[index]), factor = shrink;
      for (double& s : sum) {
        s = factor * (s + term);
        term *= std::sqrt(bc2_[index]);
        factor *= grow;
      }
      if (sum[0] == 0.0) {  // no step, or steps that cancel
        two_[column][index] = {{0.0f, 0.0f}, {1.0f, 1.0f}};
        continue;
      }
      const double mean = sum[1] / sum[0];
      const double variance = sum[2] / sum[0] - mean * mean, spread = variance / (mean * mean);
      double t[2] = {mean, mean}, share[2] = {1.0, 0.0};
      if (spread > 1e-12) {
        const double third = sum[3] / sum[0] - mean * (3.0 * variance + mean * mean);
        const double half = 0.5 * third / variance, root = std::sqrt(half * half + variance);
        t[0] = mean + half + root;
        t[1] = mean + half - root;
        share[0] = (root - half) / (2.0 * root);
        share[1] = (root + half) / (2.0 * root);
      }
      two_[column][index] = {{static_cast<float>(sum[0] * share[0]), static_cast<float>(sum[0] * share[1])},
                             {static_cast<float>(eps_ * t[0]), static_cast<float>(eps_ * t[1])}};
      // Where the fractions do not hold for any eps, at least sqrt(exp_avg_sq) >> eps t is wanted: the fourth
      // power of the quotient is lost in rounding. Negative rates have no quadrature, only its first two
      // terms.
      const bool positive = spread > -1e-12 && t[1] >= 0.0;
      if (!positive || 0.33 * spread * spread > kAccuracy) {
        const double from = (positive ? 64.0 : 4096.0) * eps_ * std::max(1.0, std::fabs(t[0]));
        closed_from_[index] = std::max(closed_from_[index], static_cast<float>(from * from));
      }
    }
  }
}

void History::clear() {
  base_ = now();
  for (size_t column = 0; column < kColumns; ++column) {
    step_size_exact_[column].clear();
    step_size_[column].clear();
    two_[column].assign(1, {{0.0f, 0.0f}, {1.0f, 1.0f}});
  }
  closed_from_.assign(1, 0.0f);
  max_step_size_.fill(0.0f);
  inv_sqrt_bc2_.clear();
  bc2_.clear();
  beta1_power_.assign(1, 1.0f);
  beta2_power_.assign(1, 1.0f);
  noise_sum_.assign(1, 0.0);
  noise_var_.assign(1, 0.0f);
  noisy_ = false;
}

AdamHistory History::view() const {
  AdamHistory view{};
  view.base = base_;
  view.now = now();
  view.beta1 = beta1_;
  view.beta2 = beta2_;
  view.eps = static_cast<float>(eps_);
  for (size_t column = 0; column < kColumns; ++column) {
    view.step_size[column] = step_size_[column].data();
    view.two[column] = two_[column].data();
    view.max_step_size[column] = max_step_size_[column];
  }
  view.closed_from = closed_from_.data();
  view.inv_sqrt_bc2 = inv_sqrt_bc2_.data();
  view.beta1_power = beta1_power_.data();
  view.beta2_power = beta2_power_.data();
  view.noise_var = noisy_ ? noise_var_.data() : nullptr;
  view.seed = seed_;
  return view;
}

}  // namespace mgpu::splat
