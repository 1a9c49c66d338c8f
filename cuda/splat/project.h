// SPDX-License-Identifier: Apache-2.0
// project.h: stage 2 and its adjoint: each shard turns its own rows into records of the visible ones.
#pragma once
#include "math/gaussian.h"
#include "math/sh.h"
#include "splat/frame.h"
#include "splat/replay.h"

namespace mgpu::splat {

// A row in registers, after replay.
struct RowValues {
  float mean[3], quat[4], log_scale[3], opacity_logit;
  float sh[3 * math::kMaxShCount];  // the active coefficients only
};

// Fills frame.shards[*].{row, view, record, count, view_begin} from frame.columns. Stage "project".
void project(Frame& frame);

// Adjoint of projection and SH for one visible row and view: adds to the dL_d... ; dL_dsh is [sh_count, 3]
// with the active coefficients; dL_dviewmat is row-major 3x4.
template <bool kAnyModel = true>
HOST_DEVICE inline void record_backward(const View& view, const RenderSettings& settings,
                                        const RowValues& row, const RecordGrad& grad, float dL_dmean[3],
                                        float dL_dquat[4], float dL_dlog_scale[3], float& dL_dlogit,
                                        float* dL_dsh, float dL_dviewmat[12]) {
  math::project_gaussian_backward<kAnyModel>(
      view, row.mean, row.quat, row.log_scale, row.opacity_logit, settings.antialiased, grad.mean2d,
      grad.conic, grad.opacity, grad.depth, dL_dmean, dL_dquat, dL_dlog_scale, dL_dlogit, dL_dviewmat);
  float direction[3], dL_ddirection[3] = {0.f, 0.f, 0.f};
  direction_to<kAnyModel>(view, row.mean, direction);
  math::eval_sh_backward(settings.sh_degree, direction, row.sh, grad.rgb, dL_dsh, dL_ddirection);
  direction_backward<kAnyModel>(view, dL_ddirection, dL_dmean, dL_dviewmat);
}

// Dense gradients of the six columns, all zero on entry; only visible rows are touched. A null pointer is
// skipped.
struct ColumnGrads {
  float *means, *quats, *scales, *opacities, *sh0, *shN;
};

// Adjoint of stage "project" from frame.shards[*].grad. `columns` may be null (no column wants a gradient).
// dL_dviewmat: [views, 12] doubles, row-major 3x4, overwritten; may be null. Sums are in a fixed order.
void project_backward(const Frame& frame, const ColumnGrads* columns, double* dL_dviewmat);

}  // namespace mgpu::splat
