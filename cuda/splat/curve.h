// SPDX-License-Identifier: Apache-2.0
// curve.h: the order of an image's tiles in which owners take ranges: a space-filling curve, so that a range
// is a compact patch of the image with a short border.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace mgpu::splat {

// Places along the curve of an image of tiles_x by tiles_y tiles. Tiles are numbered row by row.
struct TileCurve {
  std::vector<int32_t> position_from_tile;
  std::vector<int32_t> tile_from_position;

  // The rectangle around kBoxTiles places, from each multiple of that on.
  static constexpr int64_t kBoxTiles = 64;
  struct Box {
    int x0, y0, x1, y1;
  };
  std::vector<Box> box;
};

// Hilbert's curve, generalised to rectangles: neighbours along it are neighbours in the image, but for a
// diagonal step where a side is odd. Cached by size.
std::shared_ptr<const TileCurve> tile_curve(int tiles_x, int tiles_y);

}  // namespace mgpu::splat
