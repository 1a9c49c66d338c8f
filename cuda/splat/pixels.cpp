// SPDX-License-Identifier: Apache-2.0
#include "splat/pixels.h"

#include <algorithm>

#include "mesh/fork_join.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kRgb = 3;

int64_t pixels_in(const View& view, RowRange rows) { return rows.size() * view.width; }

RowRange own_rows(const View& view, const ViewPatch& patch) { return rows_held(view, patch, LossReach{}); }

}  // namespace

ShardImages::ShardImages(const Frame& frame, float ssim_weight)
    : views_(frame.views.size()), patches_(view_patches(frame)) {
  for (const View& view : frame.views) reach_.push_back(loss_reach(view.height, view.width, ssim_weight));
  const size_t shards = patches_.size();
  rgb_.assign(shards * views_, nullptr);
  accumulation_ = gradient_ = rgb_;
  for (size_t shard = 0; shard < shards; ++shard) {
    int64_t floats = 0;
    for (size_t v = 0; v < views_; ++v) {
      const View& view = frame.views[v];
      const ViewPatch& patch = patches_[shard][v];
      floats += kRgb * pixels_in(view, rows_held(view, patch, reach_[v]));
      floats += (1 + kRgb) * pixels_in(view, own_rows(view, patch));
    }
    memory_.emplace_back(floats, static_cast<int>(shard));
    float* next = memory_.back().data();
    const auto take = [&](const View& view, RowRange rows, int64_t channels) {
      float* const image = next - rows.begin * view.width * channels;  // of the first row of all
      next += pixels_in(view, rows) * channels;
      return image;
    };
    for (size_t v = 0; v < views_; ++v) {
      const View& view = frame.views[v];
      const ViewPatch& patch = patches_[shard][v];
      if (patch.empty()) continue;
      const size_t at = shard * views_ + v;
      rgb_[at] = take(view, rows_held(view, patch, reach_[v]), kRgb);
      accumulation_[at] = take(view, own_rows(view, patch), 1);
      gradient_[at] = take(view, own_rows(view, patch), kRgb);
    }
  }
}

std::vector<ImagePointers> ShardImages::images() const {
  std::vector<ImagePointers> all;
  for (size_t at = 0; at < rgb_.size(); ++at) all.push_back({rgb_[at], nullptr, accumulation_[at]});
  return all;
}

std::vector<ImageGradPointers> ShardImages::gradients() const {
  std::vector<ImageGradPointers> all;
  for (const float* gradient : gradient_) all.push_back({gradient, nullptr, nullptr});
  return all;
}

void ShardImages::share_halo(const Frame& frame) {
  owners_.assign(views_, {});
  for (size_t v = 0; v < views_; ++v) {
    if (reach_[v].side > 0) owners_[v] = TileOwners(frame.views[v], v, patches_);
  }
  halo_ = halo_pieces(frame, owners_, reach_);
  const size_t shards = patches_.size();
  std::vector<std::vector<CopyRect>> at_home(shards), on_arrival(shards);
  std::vector<Buffer<float>> sent, received;  // of a pair of shards
  std::vector<Shipment> shipments;
  bool writes_there = false;  // shards write into each other's images
  for (size_t i = 0; i < halo_.size();) {
    const int from = halo_[i].from, to = halo_[i].to;
    size_t end = i;
    int64_t floats = 0;
    for (; end < halo_.size() && halo_[end].from == from && halo_[end].to == to; ++end)
      floats += kRgb * halo_[end].pixels();
    const bool ships = !transport().reaches(from, to);
    float *packed = nullptr, *arrived = nullptr;
    if (ships) {
      sent.emplace_back(floats, from);
      received.emplace_back(floats, to);
      packed = sent.back().data(), arrived = received.back().data();
      shipments.push_back({from, to, packed, arrived, floats * static_cast<int64_t>(sizeof(float))});
    }
    for (; i < end; ++i) {
      const HaloPiece& piece = halo_[i];
      const auto v = static_cast<size_t>(piece.view);
      const int64_t row = kRgb * frame.views[v].width, first = piece.y0 * row + kRgb * piece.x0;
      const auto width = static_cast<int32_t>(kRgb * (piece.x1 - piece.x0));
      const int32_t height = piece.y1 - piece.y0;
      const float* const source = rgb_of(static_cast<size_t>(from), v) + first;
      float* const target = rgb_of(static_cast<size_t>(to), v) + first;
      if (!ships) {
        writes_there = true;
        at_home[static_cast<size_t>(from)].push_back({source, target, row, row, width, height});
        continue;
      }
      at_home[static_cast<size_t>(from)].push_back({source, packed, row, width, width, height});
      on_arrival[static_cast<size_t>(to)].push_back({arrived, target, width, row, width, height});
      packed += int64_t{width} * height;
      arrived += int64_t{width} * height;
    }
  }
  const auto copy = [](const char* stage, const std::vector<std::vector<CopyRect>>& rects, Access access) {
    const auto work = [&](const Shard& shard) {
      flavour::copy_rects(rects[static_cast<size_t>(shard.index)], shard.index);
    };
    for_each_shard(stage, work, access, Launch::kSideBySide);
  };
  copy("pack halo", at_home, writes_there ? Access::kExchange : Access::kLocal);
  transport().ship("halo", shipments);
  copy("unpack halo", on_arrival, Access::kLocal);
}

void ShardImages::put_together(const Frame& frame, const std::vector<float*>& gather) const {
  std::vector<std::vector<CopyRect>> rects(patches_.size());
  for (size_t shard = 0; shard < patches_.size(); ++shard) {
    for (size_t v = 0; v < views_; ++v) {
      const View& view = frame.views[v];
      const RowRange tiles = patches_[shard][v].tiles;
      for (int64_t position = tiles.begin; gather[v] && position < tiles.end; ++position) {
        const int tile = static_cast<int>(view.tile_at(position));
        const int y = tile / view.tiles_x * kTileSize, x = tile % view.tiles_x * kTileSize;
        const int64_t row = kRgb * view.width, first = y * row + kRgb * x;
        rects[shard].push_back({rgb_of(shard, v) + first, gather[v] + first, row, row,
                                static_cast<int32_t>(kRgb) * std::min(kTileSize, view.width - x),
                                std::min(kTileSize, view.height - y)});
      }
    }
  }
  const auto put = [&](const Shard& shard) {
    flavour::copy_rects(rects[static_cast<size_t>(shard.index)], shard.index);
  };
  for_each_shard("images", put, Access::kExchange, Launch::kSideBySide);
}

std::vector<LossPatch> ShardImages::loss_patches(const Frame& frame, size_t v) const {
  std::vector<LossPatch> all;
  for (size_t shard = 0; shard < patches_.size(); ++shard) {
    const View& view = frame.views[v];
    const ViewPatch& patch = patches_[shard][v];
    const int32_t* const curve = frame.constants.empty()
                                     ? view.position_from_tile
                                     : frame.constants[shard].curves[v]->position_from_tile.data();
    all.push_back({.patch = patch,
                   .tiles = {patch.tiles.begin - view.tile_begin, patch.tiles.end - view.tile_begin},
                   .position_from_tile = curve,
                   .rgb = rgb_of(shard, v),
                   .dL_drgb = gradient_[shard * views_ + v]});
    if (patch.empty()) all.back().tiles = {};
  }
  return all;
}

}  // namespace mgpu::splat
