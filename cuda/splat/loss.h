// SPDX-License-Identifier: Apache-2.0
// loss.h: fused L1 + D-SSIM of one image, with its gradient.
//
//   loss = (1 - ssim_weight) * mean |x - y|  +  ssim_weight * (1 - mean SSIM(x, y))
//
// L1 is a mean over all pixels and channels; SSIM (math/ssim.h) over channels and over the centres whose
// whole window is inside the image ("valid" padding). An image with a side below 11 pixels has no such
// centre: its loss is L1 alone.
//
// Mask: what a masked pixel holds has no influence at all. It is absent from L1, it is no SSIM centre, and in
// its neighbours' windows the other pixels' weights are scaled up to sum to one.
#pragma once
#include <cstdint>
#include <vector>

#include "mesh/mesh.h"
#include "splat/patches.h"

namespace mgpu::splat {

class TileOwners;

// Images are [height, width, 3], contiguous. One of target and target_bytes is set; bytes stand for 0..1 in
// 255 steps.
struct LossImages {
  const float* rgb = nullptr;
  const float* target = nullptr;
  const uint8_t* target_bytes = nullptr;
  const uint8_t* mask = nullptr;  // [height, width], non-zero: the pixel counts; null: all do
  int64_t height = 0;
  int64_t width = 0;
};

struct LossValue {
  double loss = 0.0;
  double l1 = 0.0;    // mean absolute difference; 0 if no pixel counts
  double ssim = 1.0;  // mean SSIM; 1 if no centre counts
};

// Value and, unless dL_drgb ([height, width, 3]) is null, gradient. Each shard takes an equal band of rows
// with 5 + 5 rows of its neighbours: 5 for the windows of its pixels, 5 more for the windows that those are
// part of. Sums are taken of the same pixels and in the same order whatever the bands are: the same bits on
// any mesh. The gradient is that of share * loss: a step of several views trains on their mean.
LossValue l1_ssim(const LossImages& images, float ssim_weight, float* dL_drgb, float share = 1.0f);

// The same, with loss, L1 and SSIM written to `value` [3], memory of a tensor: the host does not wait for
// them.
void l1_ssim_into(const LossImages& images, float ssim_weight, float* dL_drgb, float* value,
                  float share = 1.0f);

// Rows of the image that a shard works on.
RowRange loss_band(const LossImages& images, int shard, int shards);

// ---- where the tiles are: a shard's part of an image

// Addresses are as if the whole image were there; `rgb` has the shard's tiles and the pixels within reach,
// dL_drgb its tiles.
struct LossPatch {
  ViewPatch patch;
  RowRange tiles;                               // positions in the order of the view's tiles
  const int32_t* position_from_tile = nullptr;  // memory of the shard; null: row by row
  const float* rgb = nullptr;
  float* dL_drgb = nullptr;
};

struct PatchedImage {
  LossImages images;                   // without rgb
  std::vector<LossPatch> patches;      // [shards]; each tile is in one of them
  const TileOwners* owners = nullptr;  // the same; may be null where the loss is L1 alone
};

// None if the loss of such an image is L1 alone.
LossReach loss_reach(int64_t height, int64_t width, float ssim_weight);

// The loss of each image to `values` [images, 3], memory of the lead shard, and gradients as above: the same
// bits as l1_ssim_into gives. Sums are of the same numbers in another order, in double: `values` differ in
// the last bit of a float in one of some million cases (CUDA: L1 alone, whose sums there begin in float, by
// 1e-6 of it).
void patch_losses_into(const std::vector<PatchedImage>& images, float ssim_weight, float* values,
                       float share = 1.0f);

}  // namespace mgpu::splat
