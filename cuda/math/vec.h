// SPDX-License-Identifier: Apache-2.0
// vec.h: small vectors and matrices as plain arrays, for host and device. Matrices are row-major.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/host_device.h"

namespace mgpu::math {

// a * b + c in one rounding where the machine has it, so that the same bits come out wherever it is inlined.
HOST_DEVICE inline float mul_add(float a, float b, float c) {
#if defined(__CUDACC__) || defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Root, reciprocal root and quotient within 2 ulp on the GPU, where the exact ones take ten times as many
// instructions. Divisors lie in [2^-126, 2^126].
HOST_DEVICE inline float quick_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
#else
  return std::sqrt(x);
#endif
}
HOST_DEVICE inline float quick_inverse_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(x);
#else
  return 1.0f / std::sqrt(x);
#endif
}
HOST_DEVICE inline float quick_divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

HOST_DEVICE inline float quick_inverse(float x) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return 1.f / x;
#endif
}

HOST_DEVICE inline float dot3(const float a[3], const float b[3]) {
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
}

HOST_DEVICE inline void cross3(const float a[3], const float b[3], float out[3]) {
  out[0] = a[1] * b[2] - a[2] * b[1];
  out[1] = a[2] * b[0] - a[0] * b[2];
  out[2] = a[0] * b[1] - a[1] * b[0];
}

// out = M v
HOST_DEVICE inline void mat3_mul(const float m[9], const float v[3], float out[3]) {
  for (int i = 0; i < 3; ++i) out[i] = m[3 * i] * v[0] + m[3 * i + 1] * v[1] + m[3 * i + 2] * v[2];
}

// out = M^T v
HOST_DEVICE inline void mat3_transposed_mul(const float m[9], const float v[3], float out[3]) {
  for (int i = 0; i < 3; ++i) out[i] = m[i] * v[0] + m[3 + i] * v[1] + m[6 + i] * v[2];
}

// Rotation matrix of a unit quaternion (w, x, y, z).
HOST_DEVICE inline void rotation_from_unit_quat(const float q[4], float out[9]) {
  const float w = q[0], x = q[1], y = q[2], z = q[3];
  out[0] = 1.f - 2.f * (y * y + z * z);
  out[1] = 2.f * (x * y - w * z);
  out[2] = 2.f * (x * z + w * y);
  out[3] = 2.f * (x * y + w * z);
  out[4] = 1.f - 2.f * (x * x + z * z);
  out[5] = 2.f * (y * z - w * x);
  out[6] = 2.f * (x * z - w * y);
  out[7] = 2.f * (y * z + w * x);
  out[8] = 1.f - 2.f * (x * x + y * y);
}

// Adjoint of rotation_from_unit_quat: adds dL/dq (of the unit quaternion) to dL_dq.
HOST_DEVICE inline void rotation_from_unit_quat_backward(const float q[4], const float g[9], float dL_dq[4]) {
  const float w = q[0], x = q[1], y = q[2], z = q[3];
  dL_dq[0] += 2.f * (x * (g[7] - g[5]) + y * (g[2] - g[6]) + z * (g[3] - g[1]));
  dL_dq[1] += 2.f * (-2.f * x * (g[4] + g[8]) + y * (g[1] + g[3]) + z * (g[2] + g[6]) + w * (g[7] - g[5]));
  dL_dq[2] += 2.f * (x * (g[1] + g[3]) - 2.f * y * (g[0] + g[8]) + z * (g[5] + g[7]) + w * (g[2] - g[6]));
  dL_dq[3] += 2.f * (x * (g[2] + g[6]) + y * (g[5] + g[7]) - 2.f * z * (g[0] + g[4]) + w * (g[3] - g[1]));
}

// Adjoint of q / |q|, given unit = q / |q|: adds to dL_dquat.
HOST_DEVICE inline void normalize4_backward(const float unit[4], float inverse_norm, const float dL_dunit[4],
                                            float dL_dquat[4]) {
  const float along =
      unit[0] * dL_dunit[0] + unit[1] * dL_dunit[1] + unit[2] * dL_dunit[2] + unit[3] * dL_dunit[3];
  for (int i = 0; i < 4; ++i) dL_dquat[i] += (dL_dunit[i] - along * unit[i]) * inverse_norm;
}

}  // namespace mgpu::math
