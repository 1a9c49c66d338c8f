// SPDX-License-Identifier: Apache-2.0
#include "splat/train_step.h"

#include "splat/loss.h"
#include "splat/pipeline.h"
#include "splat/project.h"

namespace mgpu::splat {

namespace {

int64_t pixels_of(const View& view) { return int64_t{view.height} * view.width; }

}  // namespace

TrainLosses render_loss_backward(Frame& frame, const std::vector<TrainTarget>& targets,
                                 const TrainSettings& settings) {
  const size_t views = frame.views.size();
  TrainLosses out;
  out.value = Buffer<float>(static_cast<int64_t>(views) * TrainLosses::kFloats, 0);

  // any shard may own a tile of a view
  std::vector<Buffer<float>> rgb(views), accumulation(views), gradient(views);
  std::vector<ImagePointers> images(views);
  for (size_t v = 0; v < views; ++v) {
    const int64_t pixels = pixels_of(frame.views[v]);
    rgb[v] = Buffer<float>(3 * pixels, kExchange);
    accumulation[v] = Buffer<float>(pixels, kExchange);
    images[v] = {rgb[v].data(), nullptr, accumulation[v].data()};
  }
  run_forward(frame, images);

  const float share = 1.0f / static_cast<float>(views);
  std::vector<ImageGradPointers> grads(views);
  for (size_t v = 0; v < views; ++v) {
    gradient[v] = Buffer<float>(3 * pixels_of(frame.views[v]), kExchange);
    LossImages loss;
    loss.rgb = rgb[v].data();
    loss.target = targets[v].values;
    loss.target_bytes = targets[v].bytes;
    loss.mask = targets[v].mask;
    loss.height = frame.views[v].height;
    loss.width = frame.views[v].width;
    l1_ssim_into(loss, settings.ssim_weight, gradient[v].data(),
                 out.value.data() + static_cast<int64_t>(v) * TrainLosses::kFloats, share);
    grads[v] = {gradient[v].data(), nullptr, nullptr};
  }
  run_backward(frame, grads);
  if (settings.wanted_viewmats) {
    out.dL_dviewmats.resize(views * 12);
    project_backward(frame, nullptr, out.dL_dviewmats.data());
  }
  return out;
}

}  // namespace mgpu::splat
