// SPDX-License-Identifier: Apache-2.0
// view.h: one camera and its image: OpenCV axes (x right, y down, z forward), pixel centres at +0.5.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/vec.h"

namespace mgpu {

constexpr int kTileSize = 16;  // pixels a side
constexpr int kTilePixels = kTileSize * kTileSize;
constexpr int kMaxTilesAcross = 65535;  // tile coordinates are uint16 in a record

// How a point (x, y, z) of the camera meets the image, in focal lengths from the principal point:
// pinhole: (x, y) / z. Ortho: (x, y), so that the focal lengths are pixels a scene unit.
// Fisheye (OpenCV's): d(angle) in the direction of (x, y), with the angle to the axis and
//   d(t) = t (1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8).
enum class CameraModel : int32_t { kPinhole = 0, kFisheye = 1, kOrtho = 2 };

struct CameraLens {
  CameraModel model = CameraModel::kPinhole;
  double distortion[4] = {0, 0, 0, 0};  // k1..k4 of a fisheye
};

constexpr double kFisheyeLimit = 2.967;  // 170 degrees off the axis: straight behind, a point becomes a ring

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
  CameraModel model;
  float distortion[4];  // of a fisheye, as the next three
  float max_angle;  // to the axis; what lies farther off is not seen: there the lens folds, or kFisheyeLimit
  float stretch;    // at an angle t, |d image / d direction| is at most this times t / sin t
  float image_radius;  // of the farthest corner, focal lengths
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

// d of a fisheye at an angle, and its derivative.
inline double fisheye_radius(const double k[4], double t) {
  const double t2 = t * t;
  return t * (1 + t2 * (k[0] + t2 * (k[1] + t2 * (k[2] + t2 * k[3]))));
}
inline double fisheye_slope(const double k[4], double t) {
  const double t2 = t * t;
  return 1 + t2 * (3 * k[0] + t2 * (5 * k[1] + t2 * (7 * k[2] + t2 * 9 * k[3])));
}

// The angle up to which a fisheye's image grows with it, at most kFisheyeLimit.
inline double fisheye_max_angle(const double k[4]) {
  constexpr double kStep = 1.0 / 256;
  double low = 0;
  while (low < kFisheyeLimit && fisheye_slope(k, low + kStep) > 0) low += kStep;
  if (low >= kFisheyeLimit) return kFisheyeLimit;
  double high = low + kStep;
  for (int i = 0; i < 40; ++i) {
    const double middle = 0.5 * (low + high);
    (fisheye_slope(k, middle) > 0 ? low : high) = middle;
  }
  return low < kFisheyeLimit ? low : kFisheyeLimit;
}

inline void set_lens(View& view, const CameraLens& lens) {
  view.model = lens.model;
  if (lens.model != CameraModel::kFisheye) return;
  const double* k = lens.distortion;
  for (int i = 0; i < 4; ++i) view.distortion[i] = static_cast<float>(k[i]);
  const double limit = fisheye_max_angle(k);
  view.max_angle = static_cast<float>(limit);
  double steepest = 1;
  for (double t = 1.0 / 256; t <= limit; t += 1.0 / 256) {
    steepest = std::fmax(steepest, std::fmax(fisheye_slope(k, t), fisheye_radius(k, t) / t));
  }
  view.stretch = static_cast<float>(1.02 * steepest);
  double farthest = 0;
  for (int corner = 0; corner < 4; ++corner) {
    const double x = ((corner & 1 ? view.width : 0) - double{view.cx}) / view.fx;
    const double y = ((corner & 2 ? view.height : 0) - double{view.cy}) / view.fy;
    farthest = std::fmax(farthest, std::sqrt(x * x + y * y));
  }
  view.image_radius = static_cast<float>(farthest);
}

// A view from a row-major 4x4 world-to-camera matrix (its last row is not read) and intrinsics in pixels.
// A matrix without inverse gives a view with non-finite entries: every Gaussian fails its gate.
inline View make_view(const float viewmat[16], double fx, double fy, double cx, double cy, int width,
                      int height, int64_t tile_begin, const CameraLens& lens = {}) {
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
  set_lens(view, lens);
  return view;
}

// In what follows and in math/gaussian.h and math/cull.h, kAnyModel = false takes the view for a pinhole's:
// kernels come twice, so that pinholes do not pay for the others.

// Where a Gaussian is seen from: towards it from the camera's centre; of ortho, along the axis. Any length.
template <bool kAnyModel = true>
HOST_DEVICE inline void direction_to(const View& view, const float mean[3], float direction[3]) {
  if (kAnyModel && view.model == CameraModel::kOrtho) {
    for (int i = 0; i < 3; ++i) direction[i] = view.inverse_rotation[3 * i + 2];
    return;
  }
  for (int i = 0; i < 3; ++i) direction[i] = mean[i] - view.centre[i];
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

// Adjoint of direction_to: adds to dL_dmean and dL_dviewmat. From d(R^-1 e) = -R^-1 dR (R^-1 e) for ortho.
template <bool kAnyModel = true>
HOST_DEVICE inline void direction_backward(const View& view, const float dL_ddirection[3], float dL_dmean[3],
                                           float dL_dviewmat[12]) {
  if (kAnyModel && view.model == CameraModel::kOrtho) {
    float h[3];
    math::mat3_transposed_mul(view.inverse_rotation, dL_ddirection, h);
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) dL_dviewmat[4 * i + j] -= h[i] * view.inverse_rotation[3 * j + 2];
    }
    return;
  }
  float dL_dcentre[3];
  for (int i = 0; i < 3; ++i) {
    dL_dmean[i] += dL_ddirection[i];
    dL_dcentre[i] = -dL_ddirection[i];
  }
  centre_backward(view, dL_dcentre, dL_dviewmat);
}

}  // namespace mgpu
