// SPDX-License-Identifier: Apache-2.0
// gaussian.h: one 3D Gaussian seen by one camera (EWA splatting, Zwicker et al. 2001), and the adjoint.
//
// With W, t the view, m, q, s the Gaussian, J the Jacobian of the projection at its mean:
//   A = J W R(q) diag(s)   [2,3],   cov2d = A A^T,   conic = (cov2d + 0.3 I)^-1.
// det(cov2d) is |a0 x a1|^2 (Cauchy-Binet) and never a difference of large products, so thin splats stay
// exact. Cameras: math/view.h; of a fisheye math/fisheye.h.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/fisheye.h"
#include "math/tile.h"
#include "math/vec.h"
#include "math/view.h"

namespace mgpu::math {

constexpr float kDilation = 0.3f;        // px^2, added to both variances
constexpr float kMinQuatNorm2 = 1e-24f;  // below: no direction; the row is culled

struct Projected {
  float mean2d[2];
  float conic[3];
  float opacity;
  float depth;
  uint16_t tile_rect[4];
};

HOST_DEVICE inline float sigmoid(float x) { return quick_inverse(1.f + std::exp(-x)); }

// Terms that the forward pass and its adjoint share.
struct ProjectionTerms {
  float inverse_norm, unit_quat[4], rotation[9], scale[3];
  float mean_camera[3], depth;
  float inverse_z;      // focal lengths from the axis, a unit of x or y: also of a fisheye; 1 of ortho
  float u, v;           // x/z and y/z, clamped; of a pinhole, as the next two
  bool u_free, v_free;  // not clamped
  float t[2][3];        // J W
  float n[2][3];        // J W R
  float a[2][3];        // J W R diag(s)
  float cov_xx, cov_xy, cov_yy;  // before dilation
  float det, dilated_det;
};

// d(image) / d(x, y, z) of a fisheye or of ortho, in pixels a unit; `lens` is read of a fisheye alone.
HOST_DEVICE inline void other_jacobian(const View& view, const float mean_camera[3], const FisheyeTerms& lens,
                                       float jacobian[2][3]) {
  if (view.model == CameraModel::kFisheye) return fisheye_jacobian(view, mean_camera, lens, jacobian);
  for (int c = 0; c < 3; ++c) {
    jacobian[0][c] = c == 0 ? view.fx : 0.f;
    jacobian[1][c] = c == 1 ? view.fy : 0.f;
  }
}

// False if the Gaussian fails the gate: nearer than the near plane, outside of what a fisheye shows, or
// anything not finite.
template <bool kAnyModel>
HOST_DEVICE inline bool projection_terms(const View& view, const float mean[3], const float quat[4],
                                         const float log_scale[3], ProjectionTerms& p) {
  mat3_mul(view.rotation, mean, p.mean_camera);
  for (int i = 0; i < 3; ++i) p.mean_camera[i] += view.translation[i];
  const float x = p.mean_camera[0], y = p.mean_camera[1], z = p.mean_camera[2];
  const bool is_fisheye = kAnyModel && view.model == CameraModel::kFisheye;
  FisheyeTerms lens;
  if (is_fisheye) {
    if (!fisheye_terms(view, p.mean_camera, lens)) return false;
  } else if (!(z > kNearPlane && z < kFarPlane && std::fabs(x) < kHuge && std::fabs(y) < kHuge)) {
    return false;
  }
  p.depth = is_fisheye ? lens.distance : z;

  const float norm2 = quat[0] * quat[0] + quat[1] * quat[1] + quat[2] * quat[2] + quat[3] * quat[3];
  if (!(norm2 > kMinQuatNorm2 && norm2 < kHuge)) return false;
  p.inverse_norm = quick_inverse_sqrt(norm2);
  for (int i = 0; i < 4; ++i) p.unit_quat[i] = quat[i] * p.inverse_norm;
  rotation_from_unit_quat(p.unit_quat, p.rotation);
  if (!(std::fabs(log_scale[0]) + std::fabs(log_scale[1]) + std::fabs(log_scale[2]) < kHuge)) return false;
  for (int i = 0; i < 3; ++i) p.scale[i] = std::exp(log_scale[i]);

  const float* w = view.rotation;
  if (kAnyModel && view.model != CameraModel::kPinhole) {
    p.inverse_z = is_fisheye ? lens.g : 1.f;
    float jacobian[2][3];
    other_jacobian(view, p.mean_camera, lens, jacobian);
    for (int i = 0; i < 2; ++i) {
      for (int k = 0; k < 3; ++k) {
        p.t[i][k] = jacobian[i][0] * w[k] + jacobian[i][1] * w[3 + k] + jacobian[i][2] * w[6 + k];
      }
    }
  } else {
    p.inverse_z = quick_inverse(z);
    const float u = x * p.inverse_z, v = y * p.inverse_z;
    p.u_free = u >= view.x_over_z_min && u <= view.x_over_z_max;
    p.v_free = v >= view.y_over_z_min && v <= view.y_over_z_max;
    p.u = std::fmin(std::fmax(u, view.x_over_z_min), view.x_over_z_max);
    p.v = std::fmin(std::fmax(v, view.y_over_z_min), view.y_over_z_max);
    const float j00 = view.fx * p.inverse_z, j02 = -j00 * p.u;
    const float j11 = view.fy * p.inverse_z, j12 = -j11 * p.v;
    for (int k = 0; k < 3; ++k) {
      p.t[0][k] = j00 * w[k] + j02 * w[6 + k];
      p.t[1][k] = j11 * w[3 + k] + j12 * w[6 + k];
    }
  }
  const float* r = p.rotation;
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 3; ++k) {
      p.n[i][k] = p.t[i][0] * r[k] + p.t[i][1] * r[3 + k] + p.t[i][2] * r[6 + k];
      p.a[i][k] = p.n[i][k] * p.scale[k];
    }
  }
  p.cov_xx = dot3(p.a[0], p.a[0]);
  p.cov_xy = dot3(p.a[0], p.a[1]);
  p.cov_yy = dot3(p.a[1], p.a[1]);
  float area[3];
  cross3(p.a[0], p.a[1], area);
  p.det = dot3(area, area);
  p.dilated_det = p.det + kDilation * (p.cov_xx + p.cov_yy) + kDilation * kDilation;
  return p.cov_xx < kHuge && p.cov_yy < kHuge && p.dilated_det > 0.f && p.dilated_det < kHuge * kHuge;
}

// sqrt(det / dilated det): how much of a small splat's light the dilation adds (Mip-Splatting, arXiv
// 2311.16493).
HOST_DEVICE inline float antialias_compensation(const ProjectionTerms& p) {
  return std::sqrt(p.det / p.dilated_det);
}

// Project one Gaussian. False if no pixel centre of the image can get alpha >= 1/255, or anything is not
// finite. `ellipse` is where its alpha can reach 1/255.
template <bool kAnyModel = true>
HOST_DEVICE inline bool project_gaussian(const View& view, const float mean[3], const float quat[4],
                                         const float log_scale[3], float opacity_logit, bool antialiased,
                                         Projected& out, TileEllipse& ellipse) {
  ProjectionTerms p;
  if (!projection_terms<kAnyModel>(view, mean, quat, log_scale, p)) return false;
  out.opacity = sigmoid(opacity_logit) * (antialiased ? antialias_compensation(p) : 1.f);
  if (!(out.opacity >= kAlphaMin && opacity_logit < kHuge)) return false;
  out.depth = p.depth;
  out.mean2d[0] = view.fx * p.mean_camera[0] * p.inverse_z + view.cx;
  out.mean2d[1] = view.fy * p.mean_camera[1] * p.inverse_z + view.cy;
  const float inverse_det = quick_inverse(p.dilated_det);
  out.conic[0] = (p.cov_yy + kDilation) * inverse_det;
  out.conic[1] = -p.cov_xy * inverse_det;
  out.conic[2] = (p.cov_xx + kDilation) * inverse_det;
  if (!make_tile_ellipse(out.mean2d, out.conic, out.opacity, ellipse)) return false;
  return tile_rect_of(ellipse, view, out.tile_rect);
}

HOST_DEVICE inline bool project_gaussian(const View& view, const float mean[3], const float quat[4],
                                         const float log_scale[3], float opacity_logit, bool antialiased,
                                         Projected& out) {
  TileEllipse ellipse;
  return project_gaussian(view, mean, quat, log_scale, opacity_logit, antialiased, out, ellipse);
}

// Adjoint of R mean + t: adds to dL_dmean and dL_dviewmat.
HOST_DEVICE inline void add_camera_gradient(const float rotation[9], const float mean[3],
                                            const float dL_dcamera[3], float dL_dmean[3],
                                            float dL_dviewmat[12]) {
  float dL_dworld[3];
  mat3_transposed_mul(rotation, dL_dcamera, dL_dworld);
  for (int i = 0; i < 3; ++i) {
    dL_dmean[i] += dL_dworld[i];
    for (int k = 0; k < 3; ++k) dL_dviewmat[4 * i + k] += dL_dcamera[i] * mean[k];
    dL_dviewmat[4 * i + 3] += dL_dcamera[i];
  }
}

// Adjoint of project_gaussian at a visible Gaussian: adds to the dL_d... of mean, quat, log_scale, logit and
// of the view's [R | t], row-major 3x4.
template <bool kAnyModel = true>
HOST_DEVICE inline void project_gaussian_backward(
    const View& view, const float mean[3], const float quat[4], const float log_scale[3], float opacity_logit,
    bool antialiased, const float dL_dmean2d[2], const float dL_dconic[3], float dL_dopacity, float dL_ddepth,
    float dL_dmean[3], float dL_dquat[4], float dL_dlog_scale[3], float& dL_dlogit, float dL_dviewmat[12]) {
  ProjectionTerms p;
  if (!projection_terms<kAnyModel>(view, mean, quat, log_scale, p)) return;
  const float inverse_det = quick_inverse(p.dilated_det);
  const float a = (p.cov_yy + kDilation) * inverse_det;
  const float b = -p.cov_xy * inverse_det;
  const float c = (p.cov_xx + kDilation) * inverse_det;

  // conic = cov^-1: dL_dcov = -conic G conic, with G the symmetric matrix of dL_dconic
  const float g_xx = dL_dconic[0], g_xy = 0.5f * dL_dconic[1], g_yy = dL_dconic[2];
  const float m00 = g_xx * a + g_xy * b, m01 = g_xx * b + g_xy * c;
  const float m10 = g_xy * a + g_yy * b, m11 = g_xy * b + g_yy * c;
  float dL_dcov_xx = -(a * m00 + b * m10);
  float dL_dcov_xy = -(a * m01 + b * m11);  // of one of the two off-diagonal entries
  float dL_dcov_yy = -(b * m01 + c * m11);

  const float opacity = sigmoid(opacity_logit);
  float compensation = 1.f;
  if (antialiased) {
    compensation = antialias_compensation(p);
    const float squared = p.det * inverse_det;
    const float f = compensation > 0.f ? dL_dopacity * opacity * 0.5f / compensation : 0.f;
    dL_dcov_xx += f * (p.cov_yy * inverse_det - squared * a);
    dL_dcov_xy += f * (-p.cov_xy * inverse_det - squared * b);
    dL_dcov_yy += f * (p.cov_xx * inverse_det - squared * c);
  }
  dL_dlogit += dL_dopacity * compensation * opacity * (1.f - opacity);

  // cov = A A^T, A = N diag(s), N = T R, T = J W
  float dL_dt[2][3], dL_dn[2][3];
  for (int k = 0; k < 3; ++k) {
    const float dL_da0 = 2.f * (dL_dcov_xx * p.a[0][k] + dL_dcov_xy * p.a[1][k]);
    const float dL_da1 = 2.f * (dL_dcov_xy * p.a[0][k] + dL_dcov_yy * p.a[1][k]);
    dL_dlog_scale[k] += dL_da0 * p.a[0][k] + dL_da1 * p.a[1][k];
    dL_dn[0][k] = dL_da0 * p.scale[k];
    dL_dn[1][k] = dL_da1 * p.scale[k];
  }
  const float* r = p.rotation;
  float dL_drotation[9];
  for (int j = 0; j < 3; ++j) {
    for (int i = 0; i < 2; ++i) dL_dt[i][j] = dot3(dL_dn[i], r + 3 * j);
    for (int k = 0; k < 3; ++k) dL_drotation[3 * j + k] = p.t[0][j] * dL_dn[0][k] + p.t[1][j] * dL_dn[1][k];
  }
  float dL_dunit[4] = {0.f, 0.f, 0.f, 0.f};
  rotation_from_unit_quat_backward(p.unit_quat, dL_drotation, dL_dunit);
  normalize4_backward(p.unit_quat, p.inverse_norm, dL_dunit, dL_dquat);

  const float* w = view.rotation;
  float dL_dcamera[3];
  if (kAnyModel && view.model != CameraModel::kPinhole) {
    FisheyeTerms lens;
    if (view.model == CameraModel::kFisheye) fisheye_terms(view, p.mean_camera, lens);
    float jacobian[2][3], dL_djacobian[2][3];
    other_jacobian(view, p.mean_camera, lens, jacobian);
    for (int i = 0; i < 2; ++i) {
      for (int c = 0; c < 3; ++c) {
        dL_djacobian[i][c] = dot3(dL_dt[i], w + 3 * c);
        for (int k = 0; k < 3; ++k) dL_dviewmat[4 * c + k] += jacobian[i][c] * dL_dt[i][k];
      }
    }
    for (int c = 0; c < 3; ++c) {
      dL_dcamera[c] = jacobian[0][c] * dL_dmean2d[0] + jacobian[1][c] * dL_dmean2d[1];
    }
    if (view.model == CameraModel::kFisheye) {
      for (int c = 0; c < 3; ++c) dL_dcamera[c] += dL_ddepth * p.mean_camera[c] / lens.distance;
      fisheye_jacobian_backward(view, p.mean_camera, lens, dL_djacobian, dL_dcamera);
    } else {
      dL_dcamera[2] += dL_ddepth;
    }
    add_camera_gradient(w, mean, dL_dcamera, dL_dmean, dL_dviewmat);
    return;
  }
  const float j00 = view.fx * p.inverse_z, j11 = view.fy * p.inverse_z;
  const float j02 = -j00 * p.u, j12 = -j11 * p.v;
  const float dL_dj00 = dot3(dL_dt[0], w), dL_dj02 = dot3(dL_dt[0], w + 6);
  const float dL_dj11 = dot3(dL_dt[1], w + 3), dL_dj12 = dot3(dL_dt[1], w + 6);

  // j00 = fx / z, j02 = -fx u / z; where u is free it is x / z
  dL_dcamera[0] = j00 * (dL_dmean2d[0] - (p.u_free ? dL_dj02 * p.inverse_z : 0.f));
  dL_dcamera[1] = j11 * (dL_dmean2d[1] - (p.v_free ? dL_dj12 * p.inverse_z : 0.f));
  const float x_over_z = p.mean_camera[0] * p.inverse_z, y_over_z = p.mean_camera[1] * p.inverse_z;
  dL_dcamera[2] = dL_ddepth - j00 * x_over_z * dL_dmean2d[0] - j11 * y_over_z * dL_dmean2d[1] -
                  p.inverse_z * (j00 * dL_dj00 + j11 * dL_dj11 + (p.u_free ? 2.f : 1.f) * j02 * dL_dj02 +
                                 (p.v_free ? 2.f : 1.f) * j12 * dL_dj12);

  float dL_dworld[3];
  mat3_transposed_mul(w, dL_dcamera, dL_dworld);
  for (int i = 0; i < 3; ++i) dL_dmean[i] += dL_dworld[i];
  for (int k = 0; k < 3; ++k) {
    dL_dviewmat[k] += dL_dcamera[0] * mean[k] + j00 * dL_dt[0][k];
    dL_dviewmat[4 + k] += dL_dcamera[1] * mean[k] + j11 * dL_dt[1][k];
    dL_dviewmat[8 + k] += dL_dcamera[2] * mean[k] + j02 * dL_dt[0][k] + j12 * dL_dt[1][k];
  }
  for (int i = 0; i < 3; ++i) dL_dviewmat[4 * i + 3] += dL_dcamera[i];
}

}  // namespace mgpu::math
