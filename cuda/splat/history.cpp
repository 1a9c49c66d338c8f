// SPDX-License-Identifier: Apache-2.0
#include "splat/history.h"

#include <algorithm>
#include <cmath>
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
    drift_[column].reserve(kMaxSteps + 1);
    drift_eps_[column].reserve(kMaxSteps + 1);
  }
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
  const double ratio = beta1_ / std::sqrt(beta2_), ratio_eps = beta1_ / beta2_;
  for (size_t column = 0; column < kColumns; ++column) {
    step_size_exact_[column].push_back(lrs[column] / (1.0 - std::pow(beta1_, t)));
    step_size_[column].push_back(step.step_size[column]);
    max_step_size_[column] = std::max(max_step_size_[column], std::fabs(step.step_size[column]));
    // D(l) = (a_{l+1} sqrt(bc2_{l+1}) + D(l + 1)) b1 / sqrt(b2), from the newest step back; E(l) likewise.
    const size_t length = inv_sqrt_bc2_.size();
    drift_[column].resize(length + 1);
    drift_eps_[column].resize(length + 1);
    double drift = 0.0, drift_eps = 0.0;
    drift_[column][length] = drift_eps_[column][length] = 0.0f;
    for (size_t index = length; index-- > 0;) {
      drift = ratio * (step_size_exact_[column][index] * std::sqrt(bc2_[index]) + drift);
      drift_eps = ratio_eps * (step_size_exact_[column][index] * bc2_[index] + drift_eps);
      drift_[column][index] = static_cast<float>(drift);
      drift_eps_[column][index] = static_cast<float>(drift_eps);
    }
  }
}

void History::clear() {
  base_ = now();
  for (size_t column = 0; column < kColumns; ++column) {
    step_size_exact_[column].clear();
    step_size_[column].clear();
    drift_[column].assign(1, 0.0f);
    drift_eps_[column].assign(1, 0.0f);
  }
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
    view.drift[column] = drift_[column].data();
    view.drift_eps[column] = drift_eps_[column].data();
    view.max_step_size[column] = max_step_size_[column];
  }
  view.inv_sqrt_bc2 = inv_sqrt_bc2_.data();
  view.beta1_power = beta1_power_.data();
  view.beta2_power = beta2_power_.data();
  view.noise_var = noisy_ ? noise_var_.data() : nullptr;
  view.seed = seed_;
  return view;
}

}  // namespace mgpu::splat
