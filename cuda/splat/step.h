// SPDX-License-Identifier: Apache-2.0
// step.h: stage 9: adjoint of projection and SH, and Adam, in one pass over the rows that the step's frames
// saw.
//
// Semantics are dense Adam's: a row that was not seen has gradient zero, and catches up when it is next read
// (splat/replay.h). No gradient of a row is ever stored.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "splat/cells.h"
#include "splat/columns.h"
#include "splat/frame.h"
#include "splat/history.h"
#include "splat/statistics.h"

namespace mgpu::splat {

struct StepSettings {
  std::array<double, kColumns> lrs{};  // of this step
  double noise_scale = 0.0;            // MCMC noise: lr of the means times noise_lr
  double opacity_reg = 0.0;            // weight of the mean opacity of the rows seen in this step
  double scale_reg = 0.0;              // weight of the mean scale of the rows seen, over rows and axes
  bool wanted_means = true;            // of the report; without them a step does not wait for the GPU
  RowStatistics statistics;            // to which the frames are added; null: to none
  const Cells* cells = nullptr;        // whose boxes the step keeps up to date; they hold before it
};

struct StepReport {
  int64_t rows_seen = 0;      // -1: several views on GPUs, and the means were not wanted
  double mean_opacity = 0.0;  // of the rows seen, before the step; if wanted
  double mean_scale = 0.0;
};

// Step history.now() + 1. Gradients of all frames and views of a row are added in the order of `frames`, then
// of views. The caller pushes the step to `history` afterwards. Throws std::invalid_argument if a frame is of
// another table, or was rendered at another step.
StepReport step(const std::vector<const Frame*>& frames, const SplatColumns& columns, const AdamState& state,
                const History& history, const StepSettings& settings);

// Write the replay of all rows back: afterwards last_step is history.now() everywhere. Stage "flush".
void flush(const SplatColumns& columns, const AdamState& state, const History& history);

}  // namespace mgpu::splat
