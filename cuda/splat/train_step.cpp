// SPDX-License-Identifier: Apache-2.0
#include "splat/train_step.h"

#include <utility>

#include "math/ssim.h"
#include "splat/bands.h"
#include "splat/loss.h"
#include "splat/pipeline.h"
#include "splat/project.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

int64_t pixels_of(const View& view) { return int64_t{view.height} * view.width; }

// Stages 2 to 8: afterwards frame.shards[*].grad holds the gradient of the views' mean loss.
void render_loss_backward(Frame& frame, const std::vector<TrainTarget>& targets, float ssim_weight,
                          float* losses) {
  const size_t views = frame.views.size();
  std::vector<Buffer<float>> rgb(views), accumulation(views), gradient(views);  // any shard may own a tile
  std::vector<ImagePointers> images(views);
  for (size_t v = 0; v < views; ++v) {
    const int64_t pixels = pixels_of(frame.views[v]);
    if (!targets[v].image) rgb[v] = Buffer<float>(3 * pixels, kExchange);
    accumulation[v] = Buffer<float>(pixels, kExchange);
    images[v] = {targets[v].image ? targets[v].image : rgb[v].data(), nullptr, accumulation[v].data()};
  }
  run_forward(frame, images);
  const int64_t halo = ssim_weight == 0.f ? 0 : 2 * math::kSsimRadius;
  const bool several = frame.homes.size() > 1;

  std::vector<ImageGradPointers> grads(views);
  if (several) frame.bands = bands_of_owners(frame);
  run_stage(frame, "loss", [&] {
    for (size_t v = 0; v < views; ++v) {
      gradient[v] = Buffer<float>(3 * pixels_of(frame.views[v]), kExchange);
      LossImages loss;
      loss.rgb = images[v].rgb;
      loss.target = targets[v].values;
      loss.target_bytes = targets[v].bytes;
      loss.mask = targets[v].mask;
      loss.height = frame.views[v].height;
      loss.width = frame.views[v].width;
      if (several) loss.bands = frame.bands[v].data();
      if (several) transport().share_tiles(frame, static_cast<int>(v), images[v].rgb, 3, halo);
      l1_ssim_into(loss, ssim_weight, gradient[v].data(),
                   losses + v * static_cast<size_t>(TrainOutcome::kLossFloats),
                   1.0f / static_cast<float>(views));
      if (several) transport().share_bands(frame, static_cast<int>(v), gradient[v].data(), 3);
      grads[v] = {gradient[v].data(), nullptr, nullptr};
    }
  });
  if (several) count_pixels(frame, halo);
  run_backward(frame, grads);
}

}  // namespace

TrainOutcome train_step(Frame& frame, std::vector<const Frame*> pending,
                        const std::vector<TrainTarget>& targets, const TrainSettings& settings,
                        History& history) {
  const auto views = static_cast<int64_t>(frame.views.size());
  TrainOutcome out;
  out.losses = Buffer<float>(views * TrainOutcome::kLossFloats, 0);
  render_loss_backward(frame, targets, settings.ssim_weight, out.losses.data());
  if (settings.wanted_viewmats) {
    out.dL_dviewmats.resize(static_cast<size_t>(views) * 12);
    run_stage(frame, "viewmats", [&] { project_backward(frame, nullptr, out.dL_dviewmats.data()); });
  }
  if (settings.wanted_step) {
    pending.push_back(&frame);
    run_stage(frame, "step", [&] {
      out.step = step(pending, frame.columns, frame.state, history, settings.step);
      history.push(settings.step.lrs, settings.step.noise_scale);
    });
  }
  for (const ShardRecords& shard : frame.shards) out.culled.push_back(shard.culled);
  out.times = frame.times;
  out.links = frame.links;
  return out;
}

}  // namespace mgpu::splat
