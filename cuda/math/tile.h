// SPDX-License-Identifier: Apache-2.0
// tile.h: one projected Gaussian over pixels and tiles: where alpha can reach 1/255, alpha at a pixel, one
// step of blending, and their adjoints.
//
// alpha(p) = min(0.99, opacity exp(-sigma)), sigma = (a dx^2 + c dy^2) / 2 + b dx dy with (dx, dy) = p -
// mean2d. alpha >= 1/255 holds inside the ellipse 2 sigma <= k = 2 ln(255 opacity). The tile test is that of
// AccuTile (Speedy-Splat, arXiv 2412.00578): in each row of tiles the ellipse covers one interval of tiles.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/lanes.h"
#include "math/vec.h"
#include "math/view.h"

namespace mgpu::math {

constexpr float kAlphaMin = 1.f / 255.f;        // below: skipped
constexpr float kAlphaMax = 0.99f;              // cap
constexpr float kTransmittanceMin = 1e-4f;      // a record that would bring T to this or below ends the pixel
constexpr double kFloatEpsilon = 5.9604645e-8;  // half an ulp of 1, the error of one rounding

// exp(x) for x in [-80, 0] within 2 ulp (tests/splats/test_blend.py); exp(-80) below, far from subnormals.
// x = n ln2 + r with |r| <= ln2 / 2; n by adding 1.5 * 2^23, which leaves the rounded integer in the low
// bits. Written as sums of one product and one addend, so that there is one way only to fuse them.
template <typename F>
HOST_DEVICE inline F exp_negative(F x) {
  constexpr float kRound = 12582912.f;
  const F clamped = select(x > -80.f, x, F{} - 80.f);
  const F shifted = clamped * 1.44269504088896341f + kRound;
  const F n = shifted - kRound;
  F r = n * -0.693359375f + clamped;  // exact: this part of ln2 has few bits
  r = n * 2.12194440e-4f + r;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;  // Cephes' expf
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const F r2 = r * r;
  p = p * r2 + r;
  return scale_by_exponent(p + 1.f, shifted);
}

#if defined(__CUDA_ARCH__)
// One instruction of the GPU instead of twelve: within 2 ulp of 2^y, and y is off by at most half an ulp, so
// for the alphas that count (x above -5.6) the result is within 5e-7.
__device__ inline float exp_negative(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504088896341f));
  return result;
}
#endif

// A record on one row of pixels: sigma = dx (half_a dx + b_dy) + half_c_dy2, for dx = pixel centre - x.
struct BlendRow {
  float x, half_a, b_dy, half_c_dy2, opacity;
};

HOST_DEVICE inline BlendRow make_blend_row(const float mean2d[2], const float conic[3], float opacity,
                                           float y_centre) {
  const float dy = y_centre - mean2d[1];
  return {mean2d[0], 0.5f * conic[0], conic[1] * dy, 0.5f * conic[2] * dy * dy, opacity};
}

// opacity exp(-sigma), not capped. Sigma is at least 0; the roundings of a thin ellipse may say otherwise.
template <typename F>
HOST_DEVICE inline F uncapped_alpha(const BlendRow& row, F dx) {
  const F inner = dx * row.half_a + row.b_dy;
  const F sigma = dx * inner + row.half_c_dy2;
  return row.opacity * exp_negative(select(sigma > 0.f, F{} - sigma, F{}));
}

// One step front to back. `live` is the transmittance, or 0 once the pixel has ended; `kept` is the
// transmittance after the last contribution. Returns alpha T, 0 if the record does not contribute;
// `contributes` is a bool or a mask.
template <typename F, typename Mask>
HOST_DEVICE inline F blend_step(F raw_alpha, F& live, F& kept, Mask& contributes) {
  const F alpha = select(raw_alpha < kAlphaMax, raw_alpha, F{} + kAlphaMax);
  const F next = live * (1.f - alpha);
  const Mask hit = alpha >= kAlphaMin;
  contributes = hit & (next > kTransmittanceMin);
  const F weight = select(contributes, alpha * live, F{});
  kept = select(contributes, next, kept);
  live = select(contributes, next, select(hit, F{}, live));
  return weight;
}

// Adjoint of one step, back to front over the records that contributed (`contributed`: not behind the pixel's
// last). colour_dot: rgb . dL_drgb + depth dL_ddepth at this pixel. On entry `transmittance` is that after
// the record, and `behind` is dL of all that this light meets later on, background and accumulation included;
// both are moved to before the record. Returns dL_dsigma and sets weight = alpha T; both 0 if the record did
// not contribute.
template <typename F, typename Mask>
HOST_DEVICE inline F blend_step_backward(F raw_alpha, F colour_dot, Mask contributed, F& transmittance,
                                         F& behind, F& weight) {
  const F alpha = select(raw_alpha < kAlphaMax, raw_alpha, F{} + kAlphaMax);
  const Mask hit = contributed & (alpha >= kAlphaMin);
  const F inverse = 1.f / (1.f - alpha);
  const F before = transmittance * inverse;
  const F dL_dalpha = before * colour_dot - behind * inverse;
  weight = select(hit, alpha * before, F{});
  behind += weight * colour_dot;
  transmittance = select(hit, before, transmittance);
  const Mask free = hit & (raw_alpha < kAlphaMax);
  return select(free, F{} - raw_alpha * dL_dalpha, F{});
}

// Sums over pixels of dL_dsigma times the monomials of (dx, dy), and what they say about the record.
struct SigmaMoments {
  float one, x, y, xx, xy, yy;
};

HOST_DEVICE inline void moments_to_gradient(const SigmaMoments& m, const float conic[3], float opacity,
                                            float dL_dmean2d[2], float dL_dconic[3], float& dL_dopacity) {
  dL_dmean2d[0] = -(conic[0] * m.x + conic[1] * m.y);
  dL_dmean2d[1] = -(conic[1] * m.x + conic[2] * m.y);
  dL_dconic[0] = 0.5f * m.xx;
  dL_dconic[1] = m.xy;
  dL_dconic[2] = 0.5f * m.yy;
  dL_dopacity = -quick_divide(m.one, opacity);
}

// The ellipse where alpha can reach 1/255, grown by what rounding in uncapped_alpha may add.
struct TileEllipse {
  double x, y, a, b, c, det, k;
  double half_width, half_height;  // of its bounding box, px
};

// False if it is empty or not finite. In double: products of floats are exact there, so det has no
// cancellation.
HOST_DEVICE inline bool make_tile_ellipse(const float mean2d[2], const float conic[3], float opacity,
                                          TileEllipse& out) {
  out.x = mean2d[0];
  out.y = mean2d[1];
  out.a = conic[0];
  out.b = conic[1];
  out.c = conic[2];
  out.det = out.a * out.c - out.b * out.b;
  const double k = 2.0 * std::log(255.0 * static_cast<double>(opacity));
  // thinner than 1 : 3000 (in 4K a splat across the image and under a pixel wide): floats cannot hold its
  // conic
  if (!(out.det > 1e-7 * out.a * out.c && k > -1e-6)) return false;
  // sigma of a pixel is off by at most 16 roundings of its terms, which cancel to 1 part in ac / det
  out.k = (k > 0 ? k : 0) * (1.0 + 32.0 * kFloatEpsilon * out.a * out.c / out.det) + 1e-5;
  const double scale = out.k / out.det;
  out.half_width = std::sqrt(scale * out.c);
  out.half_height = std::sqrt(scale * out.a);
  return out.half_width < 1e9 && out.half_height < 1e9 && std::fabs(out.x) < 1e9 && std::fabs(out.y) < 1e9;
}

// Tiles that hold a pixel centre inside the ellipse's bounding box: x0, y0, x1, y1 (exclusive). False if
// there are none.
HOST_DEVICE inline bool tile_rect_of(const TileEllipse& e, const View& view, uint16_t rect[4]) {
  const double x0 = std::fmax(std::ceil(e.x - e.half_width - 0.5), 0.0);
  const double x1 = std::fmin(std::floor(e.x + e.half_width - 0.5), view.width - 1.0);
  const double y0 = std::fmax(std::ceil(e.y - e.half_height - 0.5), 0.0);
  const double y1 = std::fmin(std::floor(e.y + e.half_height - 0.5), view.height - 1.0);
  if (!(x0 <= x1 && y0 <= y1)) return false;
  rect[0] = static_cast<uint16_t>(static_cast<int>(x0) / kTileSize);
  rect[1] = static_cast<uint16_t>(static_cast<int>(y0) / kTileSize);
  rect[2] = static_cast<uint16_t>(static_cast<int>(x1) / kTileSize + 1);
  rect[3] = static_cast<uint16_t>(static_cast<int>(y1) / kTileSize + 1);
  return true;
}

struct TileSpan {
  int begin, end;  // tiles of one row of tiles, end exclusive; begin == end: none
};

// Tiles in row `tile_y` whose pixel centres' columns meet the ellipse, within the record's rectangle. No tile
// with a pixel of alpha >= 1/255 is left out; a kept tile meets the ellipse in the convex hull of its pixel
// centres' rows.
HOST_DEVICE inline TileSpan tile_span_of(const TileEllipse& e, const View& view, const uint16_t rect[4],
                                         int tile_y) {
  const int last_row = tile_y * kTileSize + kTileSize - 1;
  const double top = tile_y * kTileSize + 0.5 - e.y;
  const double bottom = (last_row < view.height ? last_row : view.height - 1) + 0.5 - e.y;
  // the ellipse's rightmost point is at dy = -b / c half_width, its leftmost one at the opposite
  const double extreme = -e.b / e.c * e.half_width;
  const double dy_right = std::fmin(std::fmax(extreme, top), bottom);
  const double dy_left = std::fmin(std::fmax(-extreme, top), bottom);
  const double right2 = e.k * e.a - e.det * dy_right * dy_right;
  const double left2 = e.k * e.a - e.det * dy_left * dy_left;
  if (!(right2 >= 0.0 && left2 >= 0.0)) return {0, 0};
  const double right = e.x + (-e.b * dy_right + std::sqrt(right2)) / e.a;
  const double left = e.x + (-e.b * dy_left - std::sqrt(left2)) / e.a;
  const double first = std::fmax(std::ceil(left - 0.5), rect[0] * static_cast<double>(kTileSize));
  const double last = std::fmin(std::floor(right - 0.5), rect[2] * static_cast<double>(kTileSize) - 1.0);
  if (!(first <= last)) return {0, 0};
  const TileSpan span{static_cast<int>(first) / kTileSize, static_cast<int>(last) / kTileSize + 1};
  return span;
}

}  // namespace mgpu::math
