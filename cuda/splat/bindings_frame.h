// SPDX-License-Identifier: Apache-2.0
// bindings_frame.h: from what Python hands over to a frame: columns, optimizer's state, cameras, settings.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "splat/bindings_cells.h"
#include "splat/bindings_columns.h"
#include "splat/frame.h"
#include "splat/history.h"

namespace mgpu::splat {

// viewmat [4, 4] (world to camera; anywhere, of any float type), fx, fy, cx, cy in pixels, width, height, the
// number of the CameraModel, and k1..k4 of a fisheye.
using CameraArguments =
    std::tuple<at::Tensor, double, double, double, double, int, int, int, std::array<double, 4>>;
std::vector<View> views_of(const std::vector<CameraArguments>& cameras);

// [C, 4, 4] on the CPU from [C, 12] sums, row-major 3x4.
at::Tensor viewmat_grads(const std::vector<double>& sums);

// (stage, seconds) in the order they ran.
std::vector<std::pair<std::string, double>> stage_times(const std::vector<StageTime>& times);

// Everything a frame's pointers lean on.
struct KeptAlive {
  Tensors tensors;  // the columns come first
  std::shared_ptr<History> history;
  MaybeCells cells;
};
const KeptAlive& kept_alive(const Frame& frame);

// A frame ready for run_project or run_forward. Without `state` and `history` nothing is replayed. `cells`:
// of the table, or none. `homes`: pairs of row numbers; none: as the table was placed.
std::shared_ptr<Frame> make_frame(
    const Tensors& columns, const std::optional<Tensors>& state, const std::shared_ptr<History>& history,
    const std::vector<CameraArguments>& cameras, const RenderSettings& settings, const MaybeCells& cells,
    const std::optional<std::vector<std::pair<int64_t, int64_t>>>& homes = std::nullopt);

using Background = std::optional<std::array<float, 3>>;  // none: black

// What stage "project" walked, by shard: "cells", "cells_kept" and "candidates" (frame.h, CullCounts).
std::map<std::string, std::vector<int64_t>> cull_counts(const std::vector<CullCounts>& shards);
std::vector<CullCounts> cull_counts_of(const Frame& frame);

// Settings of a render; `deterministic` as torch has it now.
RenderSettings render_settings(const Background& background, bool antialiased, int sh_degree);

}  // namespace mgpu::splat
