// SPDX-License-Identifier: Apache-2.0
// exposure.h: an affine map of colours (math/exposure.h) between a rendered image and its loss, the way back
// through it, and Adam's step of the photographs' maps.
#pragma once
#include <cstdint>
#include <vector>

#include "math/adam.h"
#include "math/view.h"
#include "memory/buffer.h"
#include "splat/loss.h"

namespace mgpu::splat {

// exposed [height, width, 3] = map [3, 4] of images.rgb. Each shard maps an equal band of rows. Of `images`,
// rgb, height and width count.
void expose(const LossImages& images, const float* map, float* exposed);

// `gradient` [height, width, 3], by the exposed image, becomes that by images.rgb; dL_dmap [3, 4] is written
// by the lead shard. Sums are taken of the same pixels and in the same order on any mesh.
void expose_backward(const LossImages& images, const float* map, float* gradient, float* dL_dmap);

// The same where the tiles are: each patch's rgb becomes the exposed one of all that its shard holds, in the
// memory that is returned. And back, in place in the gradients of the shards' own tiles; `image` has rgb as
// it was rendered. Sums are of the same numbers, in double, in an order that goes with the owners.
std::vector<Buffer<float>> expose_patches(const View& view, float ssim_weight, const float* map,
                                          std::vector<LossPatch>& patches);
void expose_patches_backward(const PatchedImage& image, const float* map, float* dL_dmap);

// The maps of all photographs and Adam's moments, [count, 3, 4] each.
struct ExposureTable {
  float* map = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  int64_t count = 0;
};

// One Adam step of one row with gradient [3, 4]; then all maps move by the same amount, so that their mean is
// the identity again: a scene and all its exposures could change together and no image would tell.
void exposure_step(const ExposureTable& table, int64_t row, const float* gradient,
                   const math::AdamConstants& adam, float step_size, float inv_sqrt_bc2);

}  // namespace mgpu::splat
