// SPDX-License-Identifier: Apache-2.0
#include "splat/train_step.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "splat/exposure.h"
#include "splat/loss.h"
#include "splat/pipeline.h"
#include "splat/pixels.h"
#include "splat/project.h"

namespace mgpu::splat {

namespace {

int64_t pixels_of(const View& view) { return int64_t{view.height} * view.width; }

LossImages photograph_of(const View& view, const TrainTarget& target) {
  LossImages images;
  images.target = target.values;
  images.target_bytes = target.bytes;
  images.mask = target.mask;
  images.height = view.height;
  images.width = view.width;
  return images;
}

// Stages 2 to 8: afterwards frame.shards[*].grad holds the gradient of the views' mean loss.
void render_loss_backward(Frame& frame, const std::vector<TrainTarget>& targets, float ssim_weight,
                          float* losses) {
  const size_t views = frame.views.size();
  std::vector<Buffer<float>> rgb(views), accumulation(views), gradient(views);
  std::vector<ImagePointers> images(views);
  for (size_t v = 0; v < views; ++v) {
    const int64_t pixels = pixels_of(frame.views[v]);
    if (!targets[v].image) rgb[v] = Buffer<float>(3 * pixels, kExchange);
    accumulation[v] = Buffer<float>(pixels, kExchange);
    images[v] = {targets[v].image ? targets[v].image : rgb[v].data(), nullptr, accumulation[v].data()};
  }
  run_forward(frame, images);
  std::vector<ImageGradPointers> grads(views);
  run_stage(frame, "loss", [&] {
    for (size_t v = 0; v < views; ++v) {
      gradient[v] = Buffer<float>(3 * pixels_of(frame.views[v]), kExchange);
      LossImages loss = photograph_of(frame.views[v], targets[v]);
      loss.rgb = images[v].rgb;
      LossImages compared = loss;
      Buffer<float> exposed;
      if (targets[v].exposure) {
        exposed = Buffer<float>(3 * pixels_of(frame.views[v]), kExchange);
        expose(loss, targets[v].exposure, exposed.data());
        compared.rgb = exposed.data();
      }
      l1_ssim_into(compared, ssim_weight, gradient[v].data(),
                   losses + v * static_cast<size_t>(TrainOutcome::kLossFloats),
                   1.0f / static_cast<float>(views));
      if (targets[v].exposure)
        expose_backward(loss, targets[v].exposure, gradient[v].data(), targets[v].dL_dexposure);
      grads[v] = {gradient[v].data(), nullptr, nullptr};
    }
  });
  run_backward(frame, grads);
}

// The same on several shards: each has its own tiles' pixels, their loss and their gradient.
void render_loss_backward_by_owners(Frame& frame, const std::vector<TrainTarget>& targets, float ssim_weight,
                                    float* losses) {
  const size_t views = frame.views.size();
  std::optional<ShardImages> own;
  run_forward(frame, [&] {
    own.emplace(frame, ssim_weight);
    return own->images();
  });
  run_stage(frame, "loss", [&] {
    own->share_halo(frame);
    std::vector<PatchedImage> images;
    for (size_t v = 0; v < views; ++v)
      images.push_back(
          {photograph_of(frame.views[v], targets[v]), own->loss_patches(frame, v), own->owners(v)});
    std::vector<PatchedImage> compared = images;
    std::vector<std::vector<Buffer<float>>> exposed(views);  // of the shards
    for (size_t v = 0; v < views; ++v) {
      if (targets[v].exposure)
        exposed[v] = expose_patches(frame.views[v], ssim_weight, targets[v].exposure, compared[v].patches);
    }
    patch_losses_into(compared, ssim_weight, losses, 1.0f / static_cast<float>(views));
    for (size_t v = 0; v < views; ++v) {
      if (targets[v].exposure)
        expose_patches_backward(images[v], targets[v].exposure, targets[v].dL_dexposure);
    }
  });
  count_pixels(frame, own->halo());
  if (std::any_of(targets.begin(), targets.end(), [](const TrainTarget& t) { return t.image != nullptr; })) {
    std::vector<float*> wanted;
    for (const TrainTarget& target : targets) wanted.push_back(target.image);
    run_stage(frame, "images", [&] { own->put_together(frame, wanted); });
  }
  run_backward(frame, own->gradients());
  frame.images.clear();
  frame.halo = own->halo();
}

}  // namespace

TrainOutcome train_step(Frame& frame, std::vector<const Frame*> pending,
                        const std::vector<TrainTarget>& targets, const TrainSettings& settings,
                        History& history) {
  const auto views = static_cast<int64_t>(frame.views.size());
  TrainOutcome out;
  out.losses = Buffer<float>(views * TrainOutcome::kLossFloats, 0);
  const auto render = frame.homes.size() > 1 ? render_loss_backward_by_owners : render_loss_backward;
  render(frame, targets, settings.ssim_weight, out.losses.data());
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
