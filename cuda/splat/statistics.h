// SPDX-License-Identifier: Apache-2.0
// statistics.h: what default densification wants to know of each row: how strongly pixels pull at it, and how
// large it is on the screen. Gathered by the step, from its records, until the next refinement.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "math/host_device.h"
#include "math/view.h"
#include "splat/frame.h"

namespace mgpu::splat {

// What rows gathered since the last refinement, [N] each; home. All null: nothing is gathered.
struct RowStatistics {
  float* gradient = nullptr;  // sum of |dL/dmean2d|, in half image sides, over the views that saw the row
  int32_t* views = nullptr;   // how many these are
  float* radius = nullptr;  // largest three standard deviations on the screen, in longer image sides; or null
  bool absgrad = false;     // of the sums of |dL/dmean2d| over pixels (Ye et al. 2024), else of its sum
};

// Add what the frames of one step saw, in their order and that of their views: the same bits from run to run.
// The loss of a frame is a mean over its views, which a factor makes up for. Stage "statistics".
void add_statistics(const std::vector<const Frame*>& frames, const RowStatistics& statistics);

// ---- one row, one record

HOST_DEVICE inline float mean_gradient(const RowStatistics& statistics, int64_t row) {
  const int32_t views = statistics.views[row];
  return statistics.gradient[row] / static_cast<float>(views > 1 ? views : 1);
}

// What a record adds to the statistics of its row.
struct RecordStatistics {
  float gradient, radius;
};
HOST_DEVICE inline RecordStatistics record_statistics(const View& view, const Record& record,
                                                      const RecordGrad& grad, bool absgrad, int64_t views) {
  const float half_width = 0.5f * static_cast<float>(view.width) * static_cast<float>(views),
              half_height = 0.5f * static_cast<float>(view.height) * static_cast<float>(views);
  const float x = (absgrad ? grad.abs_mean2d[0] : grad.mean2d[0]) * half_width,
              y = (absgrad ? grad.abs_mean2d[1] : grad.mean2d[1]) * half_height;
  // the smaller eigenvalue of the conic is 1 / variance along the longer axis
  const float middle = 0.5f * (record.conic[0] + record.conic[2]);
  const float half = 0.5f * (record.conic[0] - record.conic[2]);
  const float least = middle - std::sqrt(half * half + record.conic[1] * record.conic[1]);
  const float pixels = least > 0.0f ? 3.0f / std::sqrt(least) : 0.0f;
  const int side = view.width > view.height ? view.width : view.height;
  return {std::sqrt(x * x + y * y), pixels / static_cast<float>(side)};
}

}  // namespace mgpu::splat
