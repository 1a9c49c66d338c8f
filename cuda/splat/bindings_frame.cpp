// SPDX-License-Identifier: Apache-2.0
#include "splat/bindings_frame.h"

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "math/sh.h"
#include "mesh/mesh.h"

namespace mgpu::splat {

using at::Tensor;

namespace {

std::vector<RowRange> checked_homes(const std::vector<std::pair<int64_t, int64_t>>& wanted, int64_t rows) {
  TORCH_CHECK_VALUE(static_cast<int>(wanted.size()) == mesh().size(), "homes has ", wanted.size(),
                    " ranges, the mesh has ", mesh().size(), " shards");
  std::vector<RowRange> homes;
  int64_t next = 0;
  for (const auto& [begin, end] : wanted) {
    TORCH_CHECK_VALUE(begin == next && end >= begin, "homes must be ascending ranges without gaps");
    homes.push_back({begin, end});
    next = end;
  }
  TORCH_CHECK_VALUE(next == rows, "homes ends at row ", next, ", the table has ", rows);
  return homes;
}

}  // namespace

std::vector<View> views_of(const std::vector<CameraArguments>& cameras) {
  std::vector<View> views;
  views.reserve(cameras.size());
  int64_t tile_begin = 0;
  for (size_t v = 0; v < cameras.size(); ++v) {
    const auto& [given, fx, fy, cx, cy, width, height, model, distortion] = cameras[v];
    TORCH_CHECK_VALUE(given.dim() == 2 && given.size(0) == 4 && given.size(1) == 4, "viewmat of cameras[", v,
                      "] is ", shape_of(given), ", expected [4, 4].");
    const bool ready = given.device().is_cpu() && given.scalar_type() == at::kFloat && given.is_contiguous();
    const Tensor viewmat = ready ? given : given.detach().to(at::kCPU, at::kFloat).contiguous();
    const float* matrix = viewmat.const_data_ptr<float>();
    TORCH_CHECK_VALUE(std::all_of(matrix, matrix + 16, [](float x) { return std::isfinite(x); }),
                      "viewmat of cameras[", v, "] has NaN or infinite entries.");
    TORCH_CHECK_VALUE(width >= 1 && height >= 1 && width <= kMaxTilesAcross * kTileSize &&
                          height <= kMaxTilesAcross * kTileSize,
                      "camera ", v, " is ", width, "x", height, " pixels; each side must be 1 to ",
                      kMaxTilesAcross * kTileSize);
    TORCH_CHECK_VALUE(model >= 0 && model <= static_cast<int>(CameraModel::kOrtho), "camera ", v,
                      " has model number ", model, "; there are 0 (pinhole), 1 (fisheye) and 2 (ortho).");
    CameraLens lens{static_cast<CameraModel>(model)};
    std::copy(distortion.begin(), distortion.end(), lens.distortion);
    views.push_back(make_view(matrix, fx, fy, cx, cy, width, height, tile_begin, lens));
    tile_begin += views.back().tile_count();
  }
  return views;
}

Tensor viewmat_grads(const std::vector<double>& sums) {
  const auto views = static_cast<int64_t>(sums.size() / 12);
  Tensor out = at::zeros({views, 4, 4}, at::TensorOptions().dtype(at::kFloat));
  float* data = out.mutable_data_ptr<float>();
  for (size_t i = 0; i < sums.size(); ++i) data[i / 12 * 16 + i % 12] = static_cast<float>(sums[i]);
  return out;
}

std::vector<std::pair<std::string, double>> stage_times(const std::vector<StageTime>& times) {
  std::vector<std::pair<std::string, double>> out;
  for (const StageTime& time : times) out.emplace_back(time.stage, time.seconds);
  return out;
}

const KeptAlive& kept_alive(const Frame& frame) {
  return *static_cast<const KeptAlive*>(frame.keep_alive.get());
}

std::shared_ptr<Frame> make_frame(const Tensors& columns, const std::optional<Tensors>& state,
                                  const std::shared_ptr<History>& history,
                                  const std::vector<CameraArguments>& cameras, const RenderSettings& settings,
                                  const MaybeCells& cells,
                                  const std::optional<std::vector<std::pair<int64_t, int64_t>>>& homes) {
  auto frame = std::make_shared<Frame>();
  auto kept = std::make_shared<KeptAlive>();
  kept->tensors = columns;
  frame->homes = homes ? checked_homes(*homes, columns.at(0).size(0)) : homes_of(columns);
  frame->columns = columns_of(columns, frame->homes);
  frame->settings = settings;
  TORCH_CHECK_VALUE(settings.sh_degree >= 0 && settings.sh_degree <= math::kMaxShDegree &&
                        settings.sh_count() <= frame->columns.sh_rest + 1,
                    "sh_degree ", settings.sh_degree, " needs ", settings.sh_count() - 1,
                    " higher coefficients; shN has ", frame->columns.sh_rest);
  if (state && history) {
    frame->state = state_of(*state, columns, frame->homes);
    frame->history = history->view();
    frame->replays = true;
    kept->tensors.insert(kept->tensors.end(), state->begin(), state->end());
    kept->history = history;
  }
  frame->views = views_of(cameras);
  if (cells) {
    frame->cells = cells->for_frame(columns, frame->columns, frame->replays ? state : std::nullopt,
                                    frame->state_or_null(), frame->history_or_null(), frame->homes);
    kept->cells = cells;
  }
  frame->keep_alive = std::move(kept);
  return frame;
}

std::vector<CullCounts> cull_counts_of(const Frame& frame) {
  std::vector<CullCounts> out;
  for (const ShardRecords& shard : frame.shards) out.push_back(shard.culled);
  return out;
}

std::map<std::string, std::vector<int64_t>> cull_counts(const std::vector<CullCounts>& shards) {
  std::map<std::string, std::vector<int64_t>> out;
  for (const CullCounts& shard : shards) {
    out["cells"].push_back(shard.cells);
    out["cells_kept"].push_back(shard.cells_kept);
    out["candidates"].push_back(shard.candidates);
  }
  return out;
}

RenderSettings render_settings(const Background& background, bool antialiased, int sh_degree) {
  RenderSettings settings;
  settings.antialiased = antialiased;
  settings.sh_degree = sh_degree;
  settings.deterministic = at::globalContext().deterministicAlgorithms();
  if (background) std::copy(background->begin(), background->end(), settings.background);
  return settings;
}

}  // namespace mgpu::splat
