// SPDX-License-Identifier: Apache-2.0
// view.h: one camera and its image: OpenCV axes (x right, y down, z forward), pixel centres at +0.5.
#pragma once
#include <cstdint>

#include "math/vec.h"

namespace mgpu {

constexpr int kTileSize = 16;  // pixels a side
constexpr int kTilePixels = kTileSize * kTileSize;
constexpr int kMaxTilesAcross = 65535;  // tile coordinates are uint16 in a record

struct View {
  float rotation[9];  // world to camera, row-major
  float translation[3];
  float inverse_rotation[9];
  float centre[3];                   // of the camera, in the world: -rotation^-1 translation
  float fx, fy, cx, cy;              // pixels
  float x_over_z_min, x_over_z_max;  // clamp of x/z and y/z in the Jacobian only, as gsplat does
  float y_over_z_min, y_over_z_max;
  int width, height;  // pixels
  int tiles_x, tiles_y;
  int64_t tile_begin;  // of this view's first tile among the tiles of all views
  // The order in which owners take ranges of tiles (splat/curve.h), memory of whoever reads the view; null:
  // row by row.
  const int32_t *position_from_tile, *tile_from_position;

  HOST_DEVICE int64_t tile_count() const { return int64_t{tiles_x} * tiles_y; }
  // Place of a tile among those of all views; `tile` is y * tiles_x + x.
  HOST_DEVICE int64_t position_of(int64_t tile) const {
    return tile_begin + (position_from_tile ? position_from_tile[tile] : tile);
  }
  HOST_DEVICE int64_t tile_at(int64_t position) const {
    const int64_t place = position - tile_begin;
    return tile_from_position ? tile_from_position[place] : place;
  }
};

// A view from a row-major 4x4 world-to-camera matrix (its last row is not read) and intrinsics in pixels.
// A matrix without inverse gives a view with non-finite entries: every Gaussian fails its gate.
inline View make_view(const float viewmat[16], double fx, double fy, double cx, double cy, int width,
                      int height, int64_t tile_begin) {
  View view{};
  double r[9], t[3];
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) {
      view.rotation[3 * i + j] = viewmat[4 * i + j];
      r[3 * i + j] = viewmat[4 * i + j];
    }
    view.translation[i] = viewmat[4 * i + 3];
    t[i] = viewmat[4 * i + 3];
  }
  const double det = r[0] * (r[4] * r[8] - r[5] * r[7]) - r[1] * (r[3] * r[8] - r[5] * r[6]) +
                     r[2] * (r[3] * r[7] - r[4] * r[6]);
  const double inverse[9] = {(r[4] * r[8] - r[5] * r[7]) / det, (r[2] * r[7] - r[1] * r[8]) / det,
                             (r[1] * r[5] - r[2] * r[4]) / det, (r[5] * r[6] - r[3] * r[8]) / det,
                             (r[0] * r[8] - r[2] * r[6]) / det, (r[2] * r[3] - r[0] * r[5]) / det,
                             (r[3] * r[7] - r[4] * r[6]) / det, (r[1] * r[6] - r[0] * r[7]) / det,
                             (r[0] * r[4] - r[1] * r[3]) / det};
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) view.inverse_rotation[3 * i + j] = static_cast<float>(inverse[3 * i + j]);
    view.centre[i] =
        static_cast<float>(-(inverse[3 * i] * t[0] + inverse[3 * i + 1] * t[1] + inverse[3 * i + 2] * t[2]));
  }
  view.fx = static_cast<float>(fx);
  view.fy = static_cast<float>(fy);
  view.cx = static_cast<float>(cx);
  view.cy = static_cast<float>(cy);
  view.x_over_z_min = static_cast<float>(-(cx / fx + 0.15 * width / fx));  // 0.3 t with t = W / 2fx
  view.x_over_z_max = static_cast<float>((width - cx) / fx + 0.15 * width / fx);
  view.y_over_z_min = static_cast<float>(-(cy / fy + 0.15 * height / fy));
  view.y_over_z_max = static_cast<float>((height - cy) / fy + 0.15 * height / fy);
  view.width = width;
  view.height = height;
  view.tiles_x = (width + kTileSize - 1) / kTileSize;
  view.tiles_y = (height + kTileSize - 1) / kTileSize;
  view.tile_begin = tile_begin;
  return view;
}

// Adjoint of the camera's centre: adds dL/d(rotation | translation), row-major 3x4, to dL_dviewmat.
// From dc = -R^-1 (dR c + dt).
HOST_DEVICE inline void centre_backward(const View& view, const float dL_dcentre[3], float dL_dviewmat[12]) {
  float h[3];
  math::mat3_transposed_mul(view.inverse_rotation, dL_dcentre, h);
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) dL_dviewmat[4 * i + j] -= h[i] * view.centre[j];
    dL_dviewmat[4 * i + 3] -= h[i];
  }
}

}  // namespace mgpu
