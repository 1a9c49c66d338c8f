// SPDX-License-Identifier: Apache-2.0
// fisheye.h: OpenCV's fisheye (equidistant, k1..k4): where a point of the camera meets the image, the
// Jacobian of that, and the Jacobian's adjoint.
//
// With q = x^2 + y^2, r = sqrt(q), the angle t = atan2(r, z) and its image d(t) (math/view.h), all in focal
// lengths:
//   image = g (x, y),  g = d / r,   J = [ g + x^2 h   x y h       -x m ]
//                                       [ x y h       g + y^2 h   -y m ]
//   m = d' / (q + z^2),  h = (z m - g) / q,
// and, as d'' enters through w = d'' / r, the derivatives that J's adjoint needs are
//   g_q = h / 2,  g_z = -m,  h_q = (z m_q - 3 h / 2) / q,  h_z = -2 m_q,
//   m_q = (z w / 2 - d') / (q + z^2)^2,  m_z = -(q w + 2 z d') / (q + z^2)^2.
// Near the axis g, h and h_q are series in q / z^2: the differences above would be of nearly equal numbers.
#pragma once
#include <cmath>

#include "math/vec.h"
#include "math/view.h"

namespace mgpu::math {

constexpr float kNearPlane = 0.01f;  // scene units, of the depth: z, or a fisheye's distance
constexpr float kFarPlane = 1e10f;   // as gsplat; mostly a gate against Inf
constexpr float kHuge = 1e18f;       // gate for sizes whose square must stay finite

constexpr float kNearAxis = 1e-3f;  // of q / z^2: what the series leave out is below 1e-8 of J

struct FisheyeTerms {
  float distance;  // to the camera's centre: a fisheye's depth
  float q, g, h, m;
  float slope, w, inverse_rho2;  // d', d'' / r, 1 / (q + z^2)
  bool near_axis;
};

HOST_DEVICE inline float fisheye_radius(const float k[4], float angle) {
  const float t2 = angle * angle;
  return angle * (1.f + t2 * (k[0] + t2 * (k[1] + t2 * (k[2] + t2 * k[3]))));
}

// False if the point is nearer than the near plane, too far off the axis, or not finite.
HOST_DEVICE inline bool fisheye_terms(const View& view, const float mean_camera[3], FisheyeTerms& f) {
  const float x = mean_camera[0], y = mean_camera[1], z = mean_camera[2];
  if (!(std::fabs(x) < kHuge && std::fabs(y) < kHuge && std::fabs(z) < kHuge)) return false;
  f.q = x * x + y * y;
  const float rho2 = f.q + z * z, r = std::sqrt(f.q);
  f.distance = std::sqrt(rho2);
  if (!(f.distance > kNearPlane && f.distance < kFarPlane)) return false;
  const float angle = std::atan2(r, z);
  if (!(angle <= view.max_angle)) return false;

  const float* k = view.distortion;
  const float t2 = angle * angle;
  f.slope = 1.f + t2 * (3.f * k[0] + t2 * (5.f * k[1] + t2 * (7.f * k[2] + t2 * (9.f * k[3]))));
  f.inverse_rho2 = quick_inverse(rho2);
  f.m = f.slope * f.inverse_rho2;
  f.near_axis = z > 0.f && f.q < kNearAxis * z * z;
  float angle_over_r;
  if (f.near_axis) {
    const float inverse_z = quick_inverse(z), s = f.q * inverse_z * inverse_z;
    angle_over_r = inverse_z * (1.f + s * (-1.f / 3.f + 0.2f * s));
    f.h = inverse_z * inverse_z * inverse_z * (2.f * (k[0] - 1.f / 3.f) + 4.f * (0.2f - k[0] + k[1]) * s);
  } else {
    angle_over_r = angle * quick_inverse(r);
  }
  f.g = angle_over_r * (1.f + t2 * (k[0] + t2 * (k[1] + t2 * (k[2] + t2 * k[3]))));
  f.w = angle_over_r * (6.f * k[0] + t2 * (20.f * k[1] + t2 * (42.f * k[2] + t2 * (72.f * k[3]))));
  if (!f.near_axis) f.h = (z * f.m - f.g) * quick_inverse(f.q);
  return true;
}

// d(image) / d(x, y, z), pixels a unit.
HOST_DEVICE inline void fisheye_jacobian(const View& view, const float mean_camera[3], const FisheyeTerms& f,
                                         float jacobian[2][3]) {
  const float x = mean_camera[0], y = mean_camera[1];
  jacobian[0][0] = view.fx * (f.g + x * x * f.h);
  jacobian[0][1] = view.fx * (x * y * f.h);
  jacobian[0][2] = view.fx * (-x * f.m);
  jacobian[1][0] = view.fy * (x * y * f.h);
  jacobian[1][1] = view.fy * (f.g + y * y * f.h);
  jacobian[1][2] = view.fy * (-y * f.m);
}

// Adjoint of fisheye_jacobian: adds to dL_dcamera.
HOST_DEVICE inline void fisheye_jacobian_backward(const View& view, const float mean_camera[3],
                                                  const FisheyeTerms& f, const float dL_djacobian[2][3],
                                                  float dL_dcamera[3]) {
  const float x = mean_camera[0], y = mean_camera[1], z = mean_camera[2];
  float d[2][3];
  for (int c = 0; c < 3; ++c) {
    d[0][c] = view.fx * dL_djacobian[0][c];
    d[1][c] = view.fy * dL_djacobian[1][c];
  }
  const float cross = d[0][1] + d[1][0];
  const float dL_dg = d[0][0] + d[1][1];
  const float dL_dh = x * x * d[0][0] + x * y * cross + y * y * d[1][1];
  const float dL_dm = -(x * d[0][2] + y * d[1][2]);

  const float inverse_rho4 = f.inverse_rho2 * f.inverse_rho2;
  const float m_q = (0.5f * z * f.w - f.slope) * inverse_rho4;
  const float m_z = -(f.q * f.w + 2.f * z * f.slope) * inverse_rho4;
  float h_q;
  if (f.near_axis) {
    const float inverse_z = quick_inverse(z), inverse_z2 = inverse_z * inverse_z;
    h_q = 4.f * (0.2f - view.distortion[0] + view.distortion[1]) * inverse_z2 * inverse_z2 * inverse_z;
  } else {
    h_q = (z * m_q - 1.5f * f.h) * quick_inverse(f.q);
  }
  const float dL_dq = 0.5f * f.h * dL_dg + h_q * dL_dh + m_q * dL_dm;
  dL_dcamera[0] += 2.f * x * (f.h * d[0][0] + dL_dq) + y * f.h * cross - f.m * d[0][2];
  dL_dcamera[1] += 2.f * y * (f.h * d[1][1] + dL_dq) + x * f.h * cross - f.m * d[1][2];
  dL_dcamera[2] += -f.m * dL_dg - 2.f * m_q * dL_dh + m_z * dL_dm;
}

}  // namespace mgpu::math
