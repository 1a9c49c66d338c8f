// SPDX-License-Identifier: Apache-2.0
// patch.h: blending by patches of 8x4 pixels, as the CUDA flavour does it: which patches of a tile a record
// can light, alpha with few instructions, one step front to back, and its adjoint in the same direction. Same
// formulas as tile.h.
#pragma once
#include "math/tile.h"

namespace mgpu::math {

constexpr int kPatchX = 8, kPatchY = 4;  // pixels
constexpr int kPatchesAcross = kTileSize / kPatchX, kPatchesDown = kTileSize / kPatchY;
constexpr int kTilePatches = kPatchesAcross * kPatchesDown;  // patch = row * 2 + column

// A record's exponent, to the base of 2: alpha = opacity 2^(dx (a dx + b dy) + c dy^2), capped.
struct Falloff {
  float a, b, c;
};

HOST_DEVICE inline Falloff make_falloff(const float conic[3]) {
  constexpr float kLog2e = 1.44269504088896341f;
  return {-0.5f * kLog2e * conic[0], -kLog2e * conic[1], -0.5f * kLog2e * conic[2]};
}

// The same the other way round; off by 2 roundings.
HOST_DEVICE inline void conic_of(const Falloff& g, float conic[3]) {
  constexpr float kLn2 = 0.693147180559945309f;
  conic[0] = -2.f * kLn2 * g.a;
  conic[1] = -kLn2 * g.b;
  conic[2] = -2.f * kLn2 * g.c;
}

// One instruction each on the GPU; of a NaN and a number they give the number there.
HOST_DEVICE inline float smaller(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}
HOST_DEVICE inline float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}
// Root of x, or of 0 where it is negative; below 1e-38 it may be 0.
HOST_DEVICE inline float root_or_zero(float x) {
#if defined(__CUDA_ARCH__)
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(larger(x, 0.f)));
  return root;
#else
  return std::sqrt(larger(x, 0.f));
#endif
}

HOST_DEVICE inline float quick_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

// A record on one column of pixels: what of alpha does not depend on the row.
struct AlphaColumn {
  float mean_y, square, slope, c, opacity;
  float cap;  // the smaller of opacity (roundings of a thin ellipse may give more) and kAlphaMax
};

HOST_DEVICE inline AlphaColumn alpha_column(const Falloff& g, float mean_x, float mean_y, float opacity,
                                            float x) {
  const float dx = x - mean_x;
  return {mean_y, g.a * dx * dx, g.b * dx, g.c, opacity, smaller(opacity, kAlphaMax)};
}

// Every rounding is spelled out: forward and backward must agree to the bit.
HOST_DEVICE inline float alpha_at(const AlphaColumn& column, float y) {
  const float dy = y - column.mean_y;
  const float power = mul_add(mul_add(column.c, dy, column.slope), dy, column.square);
  return smaller(column.opacity * quick_exp2(power), column.cap);
}

// A pixel while it is blended. A record contributes only if its alpha reaches `least`: kAlphaMin, and kNever
// once the pixel has ended.
struct PatchPixel {
  float transmittance, least;  // after the last contribution
};
constexpr float kNever = 2.f;

struct PatchStep {
  float weight;  // alpha T, as what the transmittance loses
  bool contributes;
};

// One step front to back; moves the pixel past the record.
HOST_DEVICE inline PatchStep patch_step(float alpha, PatchPixel& pixel) {
  const float before = pixel.transmittance, next = before * (1.f - alpha);
  const bool hit = alpha >= pixel.least, contributes = hit && next > kTransmittanceMin;
  pixel.least = hit && !contributes ? kNever : pixel.least;
  pixel.transmittance = contributes ? next : before;
  return {before - pixel.transmittance, contributes};
}

// Adjoint of a step that gave `weight` and left `transmittance`. `behind`: dL of all that the light meets
// from the record on, background and accumulation included; moved past the record. colour_dot: rgb . dL_drgb
// + depth dL_ddepth. Returns dL_dsigma, 0 if the record does not contribute. What lies behind is found by
// subtracting, so it is never divided by a small T.
HOST_DEVICE inline float patch_step_backward(float alpha, float weight, float transmittance, float colour_dot,
                                             float& behind) {
  const float lit = weight * colour_dot;
  behind -= lit;
  const float odds = weight * quick_inverse(transmittance);  // alpha / (1 - alpha)
  return alpha < kAlphaMax ? mul_add(odds, behind, -lit) : 0.f;
}

// Bit p is set if the record's ellipse (where alpha can reach 1/255; half_extent: of its box, rounded
// outwards) may reach a pixel centre of patch p of the tile whose first pixel is (tile_x, tile_y). A
// superset, by less than 0.02 px + 0.1 % of the box; never beyond the box by more than 0.02 px.
//
// On the line dy off the mean the ellipse spans -b/a dy -+ w sqrt(1 - (dy / half_height)^2), and it is widest
// to the right at dy = -b/c half_width; w = half_width sqrt(1 - b^2/ac). kRows: of patches, from the tile's
// first or from where `tile_y` says.
template <int kRows = kPatchesDown>
HOST_DEVICE inline uint32_t patches_met(const float mean2d[2], const float conic[3],
                                        const float half_extent[2], float tile_x, float tile_y) {
  constexpr float kMargin = 0.01f;
  const float half_width = half_extent[0], half_height = half_extent[1];
  const float slope = -conic[1] * quick_inverse(conic[0]), lean = -conic[1] * quick_inverse(conic[2]);
  const float width = half_width * root_or_zero(1.f - slope * lean);
  const float margin = mul_add(1e-3f, half_width, kMargin);  // 1 - b^2/ac is off by 2e-7, its root by 5e-4
  const float most = mul_add(1e-6f, half_width, half_width + kMargin);
  const float extreme = lean * half_width;
  const float inverse_height = quick_inverse(half_height);
  const float left_edge = tile_x + 0.5f - mean2d[0];  // centre of the first column, from the mean
  const float top_edge = tile_y + 0.5f - mean2d[1];
  uint32_t met = 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float top = top_edge + static_cast<float>(row * kPatchY), bottom = top + (kPatchY - 1);
    const float dy_right = smaller(larger(extreme, top), bottom),
                dy_left = smaller(larger(-extreme, top), bottom);
    const float up = dy_right * inverse_height, down = dy_left * inverse_height;
    const float right =
        smaller(most, mul_add(slope, dy_right, mul_add(width, root_or_zero(mul_add(-up, up, 1.f)), margin)));
    const float left = larger(
        -most, mul_add(slope, dy_left, -mul_add(width, root_or_zero(mul_add(-down, down, 1.f)), margin)));
    const bool rows = top <= half_height + kMargin && bottom >= -half_height - kMargin;
#pragma unroll
    for (int column = 0; column < kPatchesAcross; ++column) {
      const float first = left_edge + static_cast<float>(column * kPatchX), last = first + (kPatchX - 1);
      if (rows && right >= first && left <= last) met |= 1u << (row * kPatchesAcross + column);
    }
  }
  return met;
}

}  // namespace mgpu::math
