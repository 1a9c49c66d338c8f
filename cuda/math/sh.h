// SPDX-License-Identifier: Apache-2.0
// sh.h: view-dependent colour from real spherical harmonics up to degree 3, in the basis order and signs of
// 3DGS (Kerbl et al. 2023); colour = sum + 0.5, clamped at 0.
#pragma once
#include <cmath>

#include "math/vec.h"

namespace mgpu::math {

constexpr int kMaxShDegree = 3;
constexpr int kMaxShCount = 16;

// Basis values at the unit direction (x, y, z); basis has (degree + 1)^2 entries.
HOST_DEVICE inline void sh_basis(int degree, float x, float y, float z, float* basis) {
  basis[0] = 0.2820947917738781f;
  if (degree < 1) return;
  basis[1] = -0.4886025119029199f * y;
  basis[2] = 0.4886025119029199f * z;
  basis[3] = -0.4886025119029199f * x;
  if (degree < 2) return;
  const float xx = x * x, yy = y * y, zz = z * z;
  basis[4] = 1.0925484305920792f * x * y;
  basis[5] = -1.0925484305920792f * y * z;
  basis[6] = 0.9461746957575601f * zz - 0.3153915652525201f;
  basis[7] = -1.0925484305920792f * x * z;
  basis[8] = 0.5462742152960396f * (xx - yy);
  if (degree < 3) return;
  const float c = 0.4570457994644658f - 2.285228997322329f * zz;
  basis[9] = -0.5900435899266435f * y * (3.f * xx - yy);
  basis[10] = 2.890611442640554f * x * y * z;
  basis[11] = c * y;
  basis[12] = z * (1.865881662950577f * zz - 1.119528997770346f);
  basis[13] = c * x;
  basis[14] = 1.445305721320277f * z * (xx - yy);
  basis[15] = -0.5900435899266435f * x * (xx - 3.f * yy);
}

// Adds sum_k weight[k] * d basis[k] / d(x, y, z) to grad (of the polynomials above, x, y, z taken as
// independent).
HOST_DEVICE inline void sh_basis_backward(int degree, float x, float y, float z, const float* weight,
                                          float grad[3]) {
  if (degree < 1) return;
  grad[0] -= 0.4886025119029199f * weight[3];
  grad[1] -= 0.4886025119029199f * weight[1];
  grad[2] += 0.4886025119029199f * weight[2];
  if (degree < 2) return;
  grad[0] += 1.0925484305920792f * (y * weight[4] - z * weight[7] + x * weight[8]);
  grad[1] += 1.0925484305920792f * (x * weight[4] - z * weight[5] - y * weight[8]);
  grad[2] += 1.8923493915151202f * z * weight[6] - 1.0925484305920792f * (y * weight[5] + x * weight[7]);
  if (degree < 3) return;
  const float xx = x * x, yy = y * y, zz = z * z;
  const float c = 0.4570457994644658f - 2.285228997322329f * zz, dc_dz = -4.570457994644658f * z;
  const float k9 = 0.5900435899266435f, k10 = 2.890611442640554f;
  grad[0] += -6.f * k9 * x * y * weight[9] + k10 * y * z * weight[10] + c * weight[13] +
             k10 * x * z * weight[14] - 3.f * k9 * (xx - yy) * weight[15];
  grad[1] += -3.f * k9 * (xx - yy) * weight[9] + k10 * x * z * weight[10] + c * weight[11] -
             k10 * y * z * weight[14] + 6.f * k9 * x * y * weight[15];
  grad[2] += k10 * x * y * weight[10] + dc_dz * (y * weight[11] + x * weight[13]) +
             (5.597644988851731f * zz - 1.119528997770346f) * weight[12] +
             0.5f * k10 * (xx - yy) * weight[14];
}

// Unit direction and 1 / length of `direction`; a zero direction gives zeros.
HOST_DEVICE inline float normalize3(const float direction[3], float unit[3]) {
  const float norm2 = dot3(direction, direction);
  const float inverse = norm2 > 0.f ? quick_inverse_sqrt(norm2) : 0.f;
  for (int i = 0; i < 3; ++i) unit[i] = direction[i] * inverse;
  return inverse;
}

// Colour of coefficients sh [(degree + 1)^2, 3] seen along `direction` (from the camera to the Gaussian, any
// length). False if the colour is not finite; rgb is then not to be used.
HOST_DEVICE inline bool eval_sh(int degree, const float direction[3], const float* sh, float rgb[3]) {
  float unit[3], basis[kMaxShCount];
  normalize3(direction, unit);
  sh_basis(degree, unit[0], unit[1], unit[2], basis);
  const int count = (degree + 1) * (degree + 1);
  float sum[3] = {0.5f, 0.5f, 0.5f};
  for (int k = 0; k < count; ++k) {
    for (int i = 0; i < 3; ++i) sum[i] += basis[k] * sh[3 * k + i];
  }
  for (int i = 0; i < 3; ++i) rgb[i] = sum[i] > 0.f ? sum[i] : 0.f;
  return std::fabs(sum[0]) + std::fabs(sum[1]) + std::fabs(sum[2]) < 1e18f;
}

// Adjoint of the direction's part in eval_sh: adds to dL_ddirection. weight[k] = sh[k] . dL/d(colour before
// its clamp); `unit` and `inverse` come from normalize3.
HOST_DEVICE inline void sh_direction_backward(int degree, const float unit[3], float inverse,
                                              const float* weight, float dL_ddirection[3]) {
  float dL_dunit[3] = {0.f, 0.f, 0.f};
  sh_basis_backward(degree, unit[0], unit[1], unit[2], weight, dL_dunit);
  const float along = dot3(unit, dL_dunit);
  for (int i = 0; i < 3; ++i) dL_ddirection[i] += (dL_dunit[i] - along * unit[i]) * inverse;
}

// Adjoint of eval_sh: adds to dL_dsh [(degree + 1)^2, 3] and dL_ddirection.
HOST_DEVICE inline void eval_sh_backward(int degree, const float direction[3], const float* sh,
                                         const float dL_drgb[3], float* dL_dsh, float dL_ddirection[3]) {
  float unit[3], basis[kMaxShCount], weight[kMaxShCount];
  const float inverse = normalize3(direction, unit);
  sh_basis(degree, unit[0], unit[1], unit[2], basis);
  const int count = (degree + 1) * (degree + 1);
  float sum[3] = {0.5f, 0.5f, 0.5f};
  for (int k = 0; k < count; ++k) {
    for (int i = 0; i < 3; ++i) sum[i] += basis[k] * sh[3 * k + i];
  }
  float g[3];
  for (int i = 0; i < 3; ++i) g[i] = sum[i] > 0.f ? dL_drgb[i] : 0.f;
  for (int k = 0; k < count; ++k) {
    for (int i = 0; i < 3; ++i) dL_dsh[3 * k + i] += basis[k] * g[i];
    weight[k] = dot3(sh + 3 * k, g);
  }
  sh_direction_backward(degree, unit, inverse, weight, dL_ddirection);
}

}  // namespace mgpu::math
