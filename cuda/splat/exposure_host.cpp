// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "math/exposure.h"
#include "mesh/fork_join.h"
#include "splat/exposure.h"

namespace mgpu::splat {

namespace {

using math::kExposureFloats;
constexpr int64_t kChannels = 3, kGrain = 32;  // rows of a thread's piece
using MapSum = std::array<double, kExposureFloats>;

// work(row) for the rows of each shard's band.
void for_each_row(const char* stage, const LossImages& images, const std::function<void(int64_t)>& work) {
  const int shards = mesh().size();
  for_each_shard(
      stage,
      [&](const Shard& shard) {
        const RowRange band = loss_band(images, shard.index, shards);
        parallel_for(band.size(), kGrain, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) work(band.begin + row);
        });
      },
      Access::kExchange);  // rows of an image lie anywhere
}

}  // namespace

void expose(const LossImages& images, const float* map, float* exposed) {
  const int64_t length = kChannels * images.width;
  for_each_row("exposure", images, [&](int64_t row) {
    const float* in = images.rgb + row * length;
    float* out = exposed + row * length;
    for (int64_t i = 0; i < length; i += kChannels) math::expose(map, in + i, out + i);
  });
}

void expose_backward(const LossImages& images, const float* map, float* gradient, float* dL_dmap) {
  const int64_t length = kChannels * images.width;
  std::vector<MapSum> sums(static_cast<size_t>(images.height), MapSum{});
  for_each_row("exposure backward", images, [&](int64_t row) {
    const float* in = images.rgb + row * length;
    float* both = gradient + row * length;
    double* sum = sums[static_cast<size_t>(row)].data();
    for (int64_t i = 0; i < length; i += kChannels)
      math::expose_backward(map, in + i, both + i, both + i, sum);
  });
  MapSum total{};
  for (const MapSum& sum : sums) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += sum[i];
  }
  for (size_t i = 0; i < total.size(); ++i) dL_dmap[i] = static_cast<float>(total[i]);
}

std::vector<Buffer<float>> expose_patches(const View& view, float ssim_weight, const float* map,
                                          std::vector<LossPatch>& patches) {
  const LossReach reach = loss_reach(view.height, view.width, ssim_weight);
  const int64_t length = kChannels * view.width;
  std::vector<Buffer<float>> memory(patches.size());
  const auto work = [&](const Shard& shard) {
    const auto self = static_cast<size_t>(shard.index);
    LossPatch& patch = patches[self];
    if (patch.patch.empty()) return;
    const RowRange rows = rows_held(view, patch.patch, reach);
    memory[self] = Buffer<float>(rows.size() * length, shard.index);
    float* const exposed = memory[self].data();
    const float* const rgb = patch.rgb + rows.begin * length;
    for (int64_t i = 0; i < rows.size() * length; i += kChannels) math::expose(map, rgb + i, exposed + i);
    patch.rgb = exposed - rows.begin * length;  // of the first row of all
  };
  for_each_shard("exposure", work, Access::kExchange);  // the map lies on one shard
  return memory;
}

void expose_patches_backward(const PatchedImage& image, const float* map, float* dL_dmap) {
  const int64_t height = image.images.height, width = image.images.width;
  const int64_t tiles_x = (width + kTileSize - 1) / kTileSize;
  std::vector<MapSum> sums(image.patches.size(), MapSum{});
  const auto work = [&](const Shard& shard) {
    const auto self = static_cast<size_t>(shard.index);
    const LossPatch& patch = image.patches[self];
    if (patch.patch.empty()) return;
    for (int64_t tile_y = patch.patch.y0; tile_y < patch.patch.y1; ++tile_y) {
      for (int64_t tile_x = patch.patch.x0; tile_x < patch.patch.x1; ++tile_x) {
        const int64_t tile = tile_y * tiles_x + tile_x;
        const int64_t position = patch.position_from_tile ? patch.position_from_tile[tile] : tile;
        if (position < patch.tiles.begin || position >= patch.tiles.end) continue;
        for (int64_t y = tile_y * kTileSize; y < std::min(height, (tile_y + 1) * kTileSize); ++y) {
          for (int64_t x = tile_x * kTileSize; x < std::min(width, (tile_x + 1) * kTileSize); ++x) {
            const int64_t at = kChannels * (y * width + x);
            math::expose_backward(map, patch.rgb + at, patch.dL_drgb + at, patch.dL_drgb + at,
                                  sums[self].data());
          }
        }
      }
    }
  };
  for_each_shard("exposure backward", work, Access::kExchange);
  MapSum total{};
  for (const MapSum& sum : sums) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += sum[i];
  }
  for (size_t i = 0; i < total.size(); ++i) dL_dmap[i] = static_cast<float>(total[i]);
}

void exposure_step(const ExposureTable& table, int64_t row, const float* gradient,
                   const math::AdamConstants& adam, float step_size, float inv_sqrt_bc2) {
  for (int i = 0; i < kExposureFloats; ++i) {
    const int64_t at = row * kExposureFloats + i;
    math::adam_step(adam, step_size, inv_sqrt_bc2, gradient[i], table.map[at], table.exp_avg[at],
                    table.exp_avg_sq[at]);
  }
  MapSum mean{};
  for (int64_t at = 0; at < table.count * kExposureFloats; ++at)
    mean[static_cast<size_t>(at % kExposureFloats)] += table.map[at];
  std::array<float, kExposureFloats> off;
  for (size_t i = 0; i < off.size(); ++i)
    off[i] = static_cast<float>(mean[i] / static_cast<double>(table.count) -
                                math::identity_exposure(static_cast<int>(i)));
  for (int64_t at = 0; at < table.count * kExposureFloats; ++at)
    table.map[at] -= off[static_cast<size_t>(at % kExposureFloats)];
}

}  // namespace mgpu::splat
