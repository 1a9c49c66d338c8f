// SPDX-License-Identifier: Apache-2.0
#include "splat/cells.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "memory/transfer.h"

namespace mgpu::splat {

namespace {

bool same(const std::vector<RowRange>& a, const std::vector<RowRange>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](RowRange x, RowRange y) { return x.begin == y.begin && x.end == y.end; });
}

}  // namespace

DriftBounds drift_bounds(const AdamHistory& history, bool half) {
  DriftBounds out;
  out.moment_ratio = math::moment_ratio_bound(history.beta1, history.beta2, history.eps);
  if (half) out.moment_ratio *= 1.05f;  // rounded up by 2^-8 in each of ten steps that a moment is made of
  const int64_t length = history.now - history.base;
  if (length == 0) return out;
  const auto farthest = [&](int column) {
    float most = 0.f;
    for (int64_t i = 0; i <= length; ++i) most = std::max(most, math::largest_drift(history.two[column][i]));
    return most;
  };
  out.mean = out.moment_ratio * farthest(0);
  out.log_scale = out.moment_ratio * farthest(2);
  out.logit = farthest(3);
  // At most the sum over k > 0 of shrink^k learning rates (History::update_two_steps), bias corrections
  // aside.
  const double shrink = history.beta1 / std::sqrt(history.beta2);
  double rate = 0.0;
  for (int64_t i = 0; i < length; ++i) {
    const double correction = 1.0 - std::pow(history.beta1, static_cast<double>(history.base + i + 1));
    rate = std::max(rate, std::fabs(static_cast<double>(history.step_size[3][i])) * correction);
  }
  out.logit_to_come =
      1.01f * std::max(out.logit, shrink < 1.0 ? static_cast<float>(rate * shrink / (1.0 - shrink)) : 0.f);
  if (history.noise_var) {
    const float variance = history.noise_var[length] - history.noise_var[0];
    out.noise = variance > 0.f ? math::kMaxNormal3 * std::sqrt(variance) : 0.f;
  }
  return out;
}

bool Cells::hold(const std::vector<RowRange>& homes, const DriftBounds* bounds) const {
  if (!any() || !same(homes, homes_)) return false;
  if (!bounds || !(bounds->noise > 0.f)) return true;
  return bounds_noise_ && bounds->logit <= logit_drift_ && bounds->moment_ratio <= moment_ratio_;
}

void Cells::build(const SplatColumns& columns, const AdamState* state, const DriftBounds* bounds,
                  const std::vector<RowRange>& homes) {
  forget();
  bounds_noise_ = state && bounds;
  if (bounds_noise_) {
    moment_ratio_ = bounds->moment_ratio;
    if (bounds->logit_to_come > 0.f) logit_drift_ = bounds->logit_to_come;  // else: as before the flush
  }
  if (boxes_.size() != homes.size()) {
    boxes_.clear();
    for (size_t shard = 0; shard < homes.size(); ++shard) boxes_.emplace_back(0, static_cast<int>(shard));
  }
  for (size_t shard = 0; shard < homes.size(); ++shard)
    boxes_[shard].resize_discard(cell_count(homes[shard].size()));
  homes_ = homes;
  try {
    measure_cells(columns, bounds_noise_ ? *state : AdamState{}, *this);
  } catch (...) {
    forget();
    throw;
  }
}

int64_t Cells::count() const {
  int64_t sum = 0;
  for (const RowRange& home : homes_) sum += cell_count(home.size());
  return sum;
}

ShardCells Cells::of_shard(size_t shard) const {
  if (!any()) return {};
  const Buffer<math::Cell>& boxes = boxes_[shard];
  return {const_cast<math::Cell*>(boxes.data()), boxes.size(), homes_[shard].begin, logit_drift_,
          moment_ratio_};
}

std::vector<math::Cell> Cells::to_host() const {
  std::vector<math::Cell> out;
  for (size_t shard = 0; shard < homes_.size(); ++shard) {
    const std::vector<math::Cell> part = to_vector(boxes_[shard]);
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

void Cells::from_host(const std::vector<math::Cell>& cells) {
  if (static_cast<int64_t>(cells.size()) != count()) {
    throw std::invalid_argument("there are " + std::to_string(count()) + " cells, got " +
                                std::to_string(cells.size()));
  }
  const math::Cell* from = cells.data();
  for (size_t shard = 0; shard < homes_.size(); ++shard) {
    upload(boxes_[shard].data(), from, boxes_[shard].size(), static_cast<int>(shard));
    from += boxes_[shard].size();
  }
}

}  // namespace mgpu::splat
