// SPDX-License-Identifier: Apache-2.0
// pixels.h: the images of a training step on several shards. Each shard has the pixels of its own tiles in
// its own memory, blends into them, takes their loss and walks back from its gradient there; what crosses is
// the halo, pixels around a shard's tiles that the windows of D-SSIM reach.
#pragma once
#include <vector>

#include "memory/buffer.h"
#include "splat/blend.h"
#include "splat/frame.h"
#include "splat/loss.h"
#include "splat/patches.h"
#include "splat/tile_owners.h"

namespace mgpu::splat {

class ShardImages {
 public:
  // After stage "assign". Without SSIM (ssim_weight 0, or an image without a centre) there is no halo.
  ShardImages(const Frame& frame, float ssim_weight);

  // [shards * views]: as Frame::images and the gradients of run_backward want them. Addresses are as if the
  // whole image were there; memory is there for what the shard holds.
  std::vector<ImagePointers> images() const;
  std::vector<ImageGradPointers> gradients() const;

  // After stage "blend": one copy for each pair of shards with a common border. What that is, is worked out
  // here, while GPUs blend.
  void share_halo(const Frame& frame);
  // What `gather` has for each view: null, or where all tiles go, in the memory of a tensor.
  void put_together(const Frame& frame, const std::vector<float*>& gather) const;
  // What the loss of view `v` takes, but for photograph, mask and size.
  std::vector<LossPatch> loss_patches(const Frame& frame, size_t v) const;
  // After share_halo(); of a view without a halo null.
  const TileOwners* owners(size_t v) const { return reach_[v].side > 0 ? &owners_[v] : nullptr; }

  const std::vector<HaloPiece>& halo() const { return halo_; }

 private:
  float* rgb_of(size_t shard, size_t v) const { return rgb_[shard * views_ + v]; }

  size_t views_;
  std::vector<std::vector<ViewPatch>> patches_;        // [shards][views]
  std::vector<LossReach> reach_;                       // [views]
  std::vector<TileOwners> owners_;                     // [views], after share_halo()
  std::vector<HaloPiece> halo_;                        // the same
  std::vector<Buffer<float>> memory_;                  // [shards]
  std::vector<float*> rgb_, accumulation_, gradient_;  // [shards * views], null if the shard has no tile
};

// A rectangle of pixels from one image to another, or to an array of its own.
struct CopyRect {
  const float* from;
  float* to;
  int64_t from_row, to_row;  // floats from row to row
  int32_t width, height;     // floats, rows
};

namespace flavour {

// In work of `shard`.
void copy_rects(const std::vector<CopyRect>& rects, int shard);

}  // namespace flavour

}  // namespace mgpu::splat
