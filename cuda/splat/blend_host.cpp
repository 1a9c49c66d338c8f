// SPDX-License-Identifier: Apache-2.0
// blend_host.cpp: tiles of 16x16 pixels in strips of 8 (one AVX2 register), each record only over the strips
// that its ellipse's box meets. Formulas: math/tile.h, on eight pixels at once (math/lanes.h).
#include "splat/blend.h"

#include <algorithm>
#include <cmath>

#include "math/tile.h"
#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

using math::IntLanes;
using math::kLanes;
using math::Lanes;
using math::load_lanes;
using math::store_lanes;
using math::sum_lanes;

constexpr int kStripsAcross = kTileSize / kLanes;
constexpr int kStrips = kTilePixels / kLanes;
constexpr int kTilesPerPiece = 4;
constexpr int kCheckEvery = 16;  // entries between looks for finished strips

// Where a tile lies in its view. Pixel `i` of the tile is (x + i % 16, y + i / 16).
struct TilePlace {
  int view;
  int x, y;           // first pixel
  int columns, rows;  // pixels inside the image
};

TilePlace place_of(const Frame& frame, int64_t position) {
  const auto after =
      std::partition_point(frame.views.begin(), frame.views.end(),
                           [position](const View& view) { return view.tile_begin <= position; });
  const View& view = *(after - 1);
  const int64_t local = view.tile_at(position);
  TilePlace place;
  place.view = static_cast<int>(after - 1 - frame.views.begin());
  place.x = static_cast<int>(local % view.tiles_x) * kTileSize;
  place.y = static_cast<int>(local / view.tiles_x) * kTileSize;
  place.columns = std::min(kTileSize, view.width - place.x);
  place.rows = std::min(kTileSize, view.height - place.y);
  return place;
}

// Strips of the tile that the record's box meets: rows [row0, row1) and strips [strip0, strip1) of each row.
struct StripBox {
  int row0, row1, strip0, strip1;
};

StripBox strip_box(const TilePlace& place, const Record& record, const float half_extent[2]) {
  // pixel centres are at +0.5; a pixel more on each side covers the roundings
  const float x0 = record.mean2d[0] - half_extent[0] - static_cast<float>(place.x) - 1.f;
  const float x1 = record.mean2d[0] + half_extent[0] - static_cast<float>(place.x) + 0.5f;
  const float y0 = record.mean2d[1] - half_extent[1] - static_cast<float>(place.y) - 0.51f;
  const float y1 = record.mean2d[1] + half_extent[1] - static_cast<float>(place.y) + 0.51f;
  const float size = kTileSize;
  return {static_cast<int>(std::clamp(std::ceil(y0), 0.f, size)),
          std::min(place.rows, static_cast<int>(std::clamp(std::floor(y1), 0.f, size))),
          static_cast<int>(std::clamp(std::ceil(x0), 0.f, size)) / kLanes,
          (std::min(place.columns, static_cast<int>(std::clamp(std::floor(x1), 0.f, size))) + kLanes - 1) /
              kLanes};
}

constexpr Lanes kLaneNumbers = {0.f, 1.f, 2.f, 3.f, 4.f, 5.f, 6.f, 7.f};

// A tile while it is blended; [256] each, rows of 16.
struct alignas(64) TileState {
  float live[kTilePixels];  // transmittance, 0 once the pixel has ended or where it is outside the image
  float transmittance[kTilePixels];
  float red[kTilePixels], green[kTilePixels], blue[kTilePixels], depth[kTilePixels];
  int32_t contributors[kTilePixels];
};

void start(const TilePlace& place, TileState& tile) {
  std::fill_n(tile.transmittance, kTilePixels, 1.f);
  std::fill_n(tile.red, kTilePixels, 0.f);
  std::fill_n(tile.green, kTilePixels, 0.f);
  std::fill_n(tile.blue, kTilePixels, 0.f);
  std::fill_n(tile.depth, kTilePixels, 0.f);
  std::fill_n(tile.contributors, kTilePixels, 0);
  for (int i = 0; i < kTilePixels; ++i) {
    tile.live[i] = i % kTileSize < place.columns && i / kTileSize < place.rows ? 1.f : 0.f;
  }
}

// `position` is 1 + the entry's place in the list; `first` the strip's first pixel in the tile, `x` its
// centre.
template <bool kDepth>
[[gnu::always_inline]] inline void blend_strip(const math::BlendRow& g, const Record& record,
                                               int32_t position, int first, float x, TileState& tile) {
  const Lanes dx = kLaneNumbers + x - g.x;  // the sum is exact: pixel centres below 2^22
  Lanes live = load_lanes(tile.live + first), kept = load_lanes(tile.transmittance + first);
  IntLanes contributes;
  const Lanes weight = math::blend_step(math::uncapped_alpha(g, dx), live, kept, contributes);
  store_lanes(tile.live + first, live);
  store_lanes(tile.transmittance + first, kept);
  store_lanes(tile.red + first, weight * record.rgb[0] + load_lanes(tile.red + first));
  store_lanes(tile.green + first, weight * record.rgb[1] + load_lanes(tile.green + first));
  store_lanes(tile.blue + first, weight * record.rgb[2] + load_lanes(tile.blue + first));
  if constexpr (kDepth)
    store_lanes(tile.depth + first, weight * record.depth + load_lanes(tile.depth + first));
  store_lanes(tile.contributors + first,
              math::select(contributes, IntLanes{} + position, load_lanes(tile.contributors + first)));
}

// Bit s is set while a pixel of strip s is live.
uint32_t live_strips(const TileState& tile) {
  uint32_t mask = 0;
  for (int strip = 0; strip < kStrips; ++strip) {
    mask |= static_cast<uint32_t>(sum_lanes(load_lanes(tile.live + strip * kLanes)) > 0.f) << strip;
  }
  return mask;
}
static_assert(kStrips == 32);

template <bool kDepth>
void blend_tile(const TileOwner& owner, const TilePlace& place, const TileEntry* entries, int64_t count,
                TileState& tile) {
  start(place, tile);
  uint32_t live = live_strips(tile);
  for (int64_t i = 0; i < count && live; ++i) {
    const Record& record = owner.record[entries[i].record];
    const StripBox box = strip_box(place, record, &owner.half_extent[2 * entries[i].record]);
    for (int row = box.row0; row < box.row1; ++row) {
      const math::BlendRow g = math::make_blend_row(record.mean2d, record.conic, record.opacity,
                                                    static_cast<float>(place.y + row) + 0.5f);
      for (int s = box.strip0; s < box.strip1; ++s) {
        if (!(live >> (row * kStripsAcross + s) & 1u)) continue;
        blend_strip<kDepth>(g, record, static_cast<int32_t>(i + 1), row * kTileSize + s * kLanes,
                            static_cast<float>(place.x + s * kLanes) + 0.5f, tile);
      }
    }
    if (i % kCheckEvery == kCheckEvery - 1) live = live_strips(tile);
  }
}

template <bool kDepth>
void blend_owner(const Frame& frame, int self, TileOwner& owner) {
  const int64_t tiles = owner.tiles.size();
  owner.transmittance = Buffer<float>(tiles * kTilePixels, self);
  owner.contributors = Buffer<int32_t>(tiles * kTilePixels, self);
  owner.pixels = Buffer<float>(tiles * 4 * kTilePixels, self);
  parallel_for(tiles, kTilesPerPiece, [&](int64_t begin, int64_t end) {
    TileState tile;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = owner.tile_begin[t];
      blend_tile<kDepth>(owner, place_of(frame, owner.tiles.begin + t), owner.entry.data() + first,
                         owner.tile_begin[t + 1] - first, tile);
      std::copy_n(tile.transmittance, kTilePixels, owner.transmittance.data() + t * kTilePixels);
      std::copy_n(tile.contributors, kTilePixels, owner.contributors.data() + t * kTilePixels);
      float* planes = owner.pixels.data() + t * 4 * kTilePixels;
      std::copy_n(tile.red, kTilePixels, planes);
      std::copy_n(tile.green, kTilePixels, planes + kTilePixels);
      std::copy_n(tile.blue, kTilePixels, planes + 2 * kTilePixels);
      std::copy_n(tile.depth, kTilePixels, planes + 3 * kTilePixels);
    }
  });
}

// dL/d(image) of a tile, and the state of the walk back; [256] each.
struct alignas(64) TileGrad {
  float red[kTilePixels], green[kTilePixels], blue[kTilePixels], depth[kTilePixels];
  float transmittance[kTilePixels];
  float behind[kTilePixels];  // see math::blend_step_backward
  int32_t contributors[kTilePixels];
};

// Sums over the pixels of one (tile, record) pair, one per lane until the pair is done.
enum Sum { kOne, kX, kY, kXX, kXY, kYY, kRed, kGreen, kBlue, kDepthSum, kAbsX, kAbsY, kSums };

template <bool kDepth>
[[gnu::always_inline]] inline void blend_strip_backward(const math::BlendRow& g, const Record& record,
                                                        float dy, int32_t position, int first, float x,
                                                        TileGrad& tile, Lanes* sums) {
  const Lanes red = load_lanes(tile.red + first), green = load_lanes(tile.green + first);
  const Lanes blue = load_lanes(tile.blue + first), depth = load_lanes(tile.depth + first);
  const Lanes dx = kLaneNumbers + x - g.x;
  Lanes colour_dot = red * record.rgb[0] + (green * record.rgb[1] + blue * record.rgb[2]);
  if constexpr (kDepth) colour_dot += depth * record.depth;
  Lanes transmittance = load_lanes(tile.transmittance + first), behind = load_lanes(tile.behind + first),
        weight;
  const IntLanes contributed = load_lanes(tile.contributors + first) >= position;
  const Lanes dL_dsigma = math::blend_step_backward(math::uncapped_alpha(g, dx), colour_dot, contributed,
                                                    transmittance, behind, weight);
  store_lanes(tile.transmittance + first, transmittance);
  store_lanes(tile.behind + first, behind);
  const Lanes moment_x = dL_dsigma * dx, moment_y = dL_dsigma * dy;
  sums[kOne] += dL_dsigma;
  sums[kX] += moment_x;
  sums[kY] += moment_y;
  sums[kXX] += moment_x * dx;
  sums[kXY] += moment_x * dy;
  sums[kYY] += moment_y * dy;
  sums[kRed] += weight * red;
  sums[kGreen] += weight * green;
  sums[kBlue] += weight * blue;
  if constexpr (kDepth) sums[kDepthSum] += weight * depth;
  sums[kAbsX] += math::absolute(dL_dsigma * (dx * record.conic[0] + g.b_dy));
  sums[kAbsY] += math::absolute(dL_dsigma * (dx * record.conic[1] + record.conic[2] * dy));
}

RecordGrad grad_from_sums(const Record& record, const Lanes* sums) {
  RecordGrad grad;
  const math::SigmaMoments moments{sum_lanes(sums[kOne]), sum_lanes(sums[kX]),  sum_lanes(sums[kY]),
                                   sum_lanes(sums[kXX]),  sum_lanes(sums[kXY]), sum_lanes(sums[kYY])};
  math::moments_to_gradient(moments, record.conic, record.opacity, grad.mean2d, grad.conic, grad.opacity);
  for (int i = 0; i < 3; ++i) grad.rgb[i] = sum_lanes(sums[kRed + i]);
  grad.depth = sum_lanes(sums[kDepthSum]);
  for (int i = 0; i < 2; ++i) grad.abs_mean2d[i] = sum_lanes(sums[kAbsX + i]);
  return grad;
}

template <bool kDepth>
void blend_tile_backward(const TileOwner& owner, const TilePlace& place, const TileEntry* entries,
                         int64_t count, TileGrad& tile, RecordGrad* slot_grad) {
  int32_t last[kStrips], deepest = 0;  // contributors of each strip's deepest pixel
  for (int strip = 0; strip < kStrips; ++strip) {
    last[strip] =
        *std::max_element(tile.contributors + strip * kLanes, tile.contributors + (strip + 1) * kLanes);
    deepest = std::max(deepest, last[strip]);
  }
  for (int64_t i = count - 1; i >= 0; --i) {
    RecordGrad& out = slot_grad[owner.slot_begin[entries[i].record] + entries[i].ordinal];
    if (i >= deepest) {  // behind everything that was blended
      out = RecordGrad{};
      continue;
    }
    const int32_t position = static_cast<int32_t>(i + 1);
    const Record& record = owner.record[entries[i].record];
    const StripBox box = strip_box(place, record, &owner.half_extent[2 * entries[i].record]);
    Lanes sums[kSums] = {};
    for (int row = box.row0; row < box.row1; ++row) {
      const float y = static_cast<float>(place.y + row) + 0.5f, dy = y - record.mean2d[1];
      const math::BlendRow g = math::make_blend_row(record.mean2d, record.conic, record.opacity, y);
      for (int s = box.strip0; s < box.strip1; ++s) {
        if (position > last[row * kStripsAcross + s]) continue;
        blend_strip_backward<kDepth>(g, record, dy, position, row * kTileSize + s * kLanes,
                                     static_cast<float>(place.x + s * kLanes) + 0.5f, tile, sums);
      }
    }
    out = grad_from_sums(record, sums);
  }
}

// Planes of image_grad, the gradients of the images cut into tiles: red, green, blue, depth, accumulation.
constexpr int kGradPlanes = 5;

template <bool kDepth>
void blend_owner_backward(const Frame& frame, int self, TileOwner& owner, const Buffer<float>& image_grad) {
  const float* background = frame.settings.background;
  owner.slot_grad = Buffer<RecordGrad>(owner.entry.size(), self);
  parallel_for(owner.tiles.size(), kTilesPerPiece, [&](int64_t begin, int64_t end) {
    TileGrad tile;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = owner.tile_begin[t], count = owner.tile_begin[t + 1] - first;
      if (count == 0) continue;
      const float* planes = image_grad.data() + t * kGradPlanes * kTilePixels;
      std::copy_n(planes, kTilePixels, tile.red);
      std::copy_n(planes + kTilePixels, kTilePixels, tile.green);
      std::copy_n(planes + 2 * kTilePixels, kTilePixels, tile.blue);
      std::copy_n(planes + 3 * kTilePixels, kTilePixels, tile.depth);
      const float* accumulation = planes + 4 * kTilePixels;
      std::copy_n(owner.transmittance.data() + t * kTilePixels, kTilePixels, tile.transmittance);
      std::copy_n(owner.contributors.data() + t * kTilePixels, kTilePixels, tile.contributors);
      for (int i = 0; i < kTilePixels;
           ++i) {  // what is left passes on to the background, and out of accumulation
        const float dL_dtransmittance = background[0] * tile.red[i] + background[1] * tile.green[i] +
                                        background[2] * tile.blue[i] - accumulation[i];
        tile.behind[i] = tile.transmittance[i] * dL_dtransmittance;
      }
      blend_tile_backward<kDepth>(owner, place_of(frame, owner.tiles.begin + t), owner.entry.data() + first,
                                  count, tile, owner.slot_grad.data());
    }
  });
}

// What each received record has of its tiles, in list order; frees the slots.
void sum_slots(int self, TileOwner& owner) {
  constexpr int64_t kGrain = 4096;  // records a piece
  owner.record_grad = Buffer<RecordGrad>(owner.received(), self);
  parallel_for(owner.received(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      RecordGrad sum{};
      for (int64_t slot = owner.slot_begin[r]; slot < owner.slot_begin[r + 1]; ++slot)
        add_to(sum, owner.slot_grad[slot]);
      owner.record_grad[r] = sum;
    }
  });
  owner.slot_grad = Buffer<RecordGrad>();
}

// One plane of a tile from an image [H, W, channels]; zeros where there is no image or no pixel.
void cut_plane(const float* image, int channels, int channel, const View& view, const TilePlace& place,
               float* plane) {
  std::fill_n(plane, kTilePixels, 0.f);
  if (!image) return;
  for (int row = 0; row < place.rows; ++row) {
    const float* from = image + (int64_t{place.y + row} * view.width + place.x) * channels + channel;
    for (int x = 0; x < place.columns; ++x) plane[row * kTileSize + x] = from[x * channels];
  }
}

// Tiles to images, over the background; frees the owners' pixels.
void assemble_images(Frame& frame) {
  const auto assemble = [&](const Shard& shard) {
    TileOwner& owner = frame.owners[shard.index];
    parallel_for(owner.tiles.size(), kTilesPerPiece, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const TilePlace place = place_of(frame, owner.tiles.begin + t);
        const ImagePointers& image = frame.of_shard(frame.images, shard.index, place.view);
        const float* planes = owner.pixels.data() + t * 4 * kTilePixels;
        const float* transmittance = owner.transmittance.data() + t * kTilePixels;
        for (int row = 0; row < place.rows; ++row) {
          const int64_t pixel = int64_t{place.y + row} * frame.views[place.view].width + place.x;
          for (int x = 0; x < place.columns; ++x) {
            const int i = row * kTileSize + x;
            for (int c = 0; c < 3; ++c) {
              image.rgb[3 * (pixel + x) + c] =
                  math::mul_add(transmittance[i], frame.settings.background[c], planes[c * kTilePixels + i]);
            }
            image.accumulation[pixel + x] = 1.f - transmittance[i];
            if (image.depth) image.depth[pixel + x] = planes[3 * kTilePixels + i];
          }
        }
      }
    });
    owner.pixels = Buffer<float>();
  };
  for_each_shard("assemble", assemble, frame.images_are_local() ? Access::kLocal : Access::kExchange);
}

}  // namespace

void blend(Frame& frame) {
  for_each_shard("blend", [&](const Shard& shard) {
    if (frame.settings.wanted_depth)
      blend_owner<true>(frame, shard.index, frame.owners[shard.index]);
    else
      blend_owner<false>(frame, shard.index, frame.owners[shard.index]);
  });
  assemble_images(frame);
}

void blend_backward(Frame& frame, const std::vector<ImageGradPointers>& grads) {
  std::vector<Buffer<float>> image_grad(frame.owners.size());  // [tiles, 5, 256] each
  const bool depth =
      std::any_of(grads.begin(), grads.end(), [](const ImageGradPointers& g) { return g.depth; });
  const auto scatter = [&](const Shard& shard) {
    const TileOwner& owner = frame.owners[shard.index];
    Buffer<float>& cut = image_grad[shard.index];
    cut = Buffer<float>(owner.tiles.size() * kGradPlanes * kTilePixels, shard.index);
    parallel_for(owner.tiles.size(), kTilesPerPiece, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const TilePlace place = place_of(frame, owner.tiles.begin + t);
        const View& view = frame.views[place.view];
        const ImageGradPointers& grad = frame.of_shard(grads, shard.index, place.view);
        float* planes = cut.data() + t * kGradPlanes * kTilePixels;
        for (int c = 0; c < 3; ++c) cut_plane(grad.rgb, 3, c, view, place, planes + c * kTilePixels);
        cut_plane(grad.depth, 1, 0, view, place, planes + 3 * kTilePixels);
        cut_plane(grad.accumulation, 1, 0, view, place, planes + 4 * kTilePixels);
      }
    });
  };
  for_each_shard("scatter", scatter, frame.images_are_local() ? Access::kLocal : Access::kExchange);
  for_each_shard("blend_backward", [&](const Shard& shard) {
    TileOwner& owner = frame.owners[shard.index];
    if (depth)
      blend_owner_backward<true>(frame, shard.index, owner, image_grad[shard.index]);
    else
      blend_owner_backward<false>(frame, shard.index, owner, image_grad[shard.index]);
    sum_slots(shard.index, owner);
  });
}

}  // namespace mgpu::splat
