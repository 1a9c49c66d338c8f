// SPDX-License-Identifier: Apache-2.0
// project_backward.cu: the adjoint of projection and SH into dense column gradients and those of the viewmats
// (plain autograd; training goes through step.cu). Formulas: math/gaussian.h, math/sh.h.
#include <algorithm>
#include <vector>

#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/row_source.h"

namespace mgpu::splat {

namespace {

struct GradTarget {
  const int64_t* row;
  const RecordGrad* grad;
  RowRange records;
  ColumnGrads columns;
  bool with_columns;
  double* view_sums;  // [blocks, 12]; null: not wanted
};

__device__ __forceinline__ void add_to(float* column, int64_t row, int width, const float* values) {
  if (!column) return;
  for (int i = 0; i < width; ++i) column[row * width + i] += values[i];
}

template <int kDegree, bool kAnyModel>
__global__ void __launch_bounds__(kThreads)
    project_backward_kernel(const __grid_constant__ RowSource in, const __grid_constant__ GradTarget out,
                            int v) {
  constexpr int kCount = (kDegree + 1) * (kDegree + 1);
  const int64_t r = out.records.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float dL_dview[12] = {};
  if (r < out.records.end) {
    const int64_t row = out.row[r];
    RowValues values;
    replay_geometry(in.columns, in.state_or_null(), in.history_or_null(), row, values.mean, values.quat,
                    values.log_scale, values.opacity_logit);
    replay_sh(in.columns, in.state_or_null(), in.history_or_null(), row, kCount, values.sh);
    RenderSettings settings = in.settings;
    settings.sh_degree = kDegree;  // a constant, so that the arrays stay in registers
    float dL_dmean[3] = {}, dL_dquat[4] = {}, dL_dlog_scale[3] = {}, dL_dlogit = 0.f, dL_dsh[3 * kCount] = {};
    const RecordGrad grad = load48(out.grad + r);
    record_backward<kAnyModel>(in.views[v], settings, values, grad, dL_dmean, dL_dquat, dL_dlog_scale,
                               dL_dlogit, dL_dsh, dL_dview);
    if (out.with_columns) {
      add_to(out.columns.means, row, 3, dL_dmean);
      add_to(out.columns.quats, row, 4, dL_dquat);
      add_to(out.columns.scales, row, 3, dL_dlog_scale);
      add_to(out.columns.opacities, row, 1, &dL_dlogit);
      add_to(out.columns.sh0, row, 3, dL_dsh);
      if (out.columns.shN) {
        float* rest = out.columns.shN + row * in.columns.sh_rest * 3;
        for (int i = 3; i < 3 * kCount; ++i) rest[i - 3] += dL_dsh[i];
      }
    }
  }
  if (!out.view_sums) return;
  double sum[12];
  for (int i = 0; i < 12; ++i) sum[i] = static_cast<double>(dL_dview[i]);
  store_block_sums<kWarps>(sum, out.view_sums + int64_t{blockIdx.x} * 12);
}

}  // namespace

void project_backward(const Frame& frame, const ColumnGrads* columns, double* dL_dviewmat) {
  JoinedOperator joined;
  const int64_t views = static_cast<int64_t>(frame.views.size());
  const size_t shards = frame.homes.size();
  std::vector<Buffer<double>> sums(shards);
  for_each_shard("project_backward", [&](const Shard& shard) {
    const ShardRecords& in = frame.shards[static_cast<size_t>(shard.index)];
    if (in.count == 0 || in.grad.size() == 0) return;
    const cudaStream_t stream = shard_stream(shard.index);
    Buffer<double>& view_sums = sums[static_cast<size_t>(shard.index)];
    if (dL_dviewmat) {
      view_sums = Buffer<double>(views * 12, shard.index);
      zero(view_sums);
    }
    for (int64_t v = 0; v < views; ++v) {  // in turn: a row seen twice gets its sums in the order of views
      const RowRange records{in.view_begin[static_cast<size_t>(v)],
                             in.view_begin[static_cast<size_t>(v + 1)]};
      if (records.empty()) continue;
      const unsigned blocks = blocks_for(records.size(), kThreads);
      Buffer<double> part(dL_dviewmat ? int64_t{blocks} * 12 : 0, shard.index);
      const GradTarget target{in.row.data(),      in.grad.data(), records, columns ? *columns : ColumnGrads{},
                              columns != nullptr, part.data()};
      with_sh_degree(frame.settings.sh_degree, [&](auto degree) {
        const auto kernel = frame.views[static_cast<size_t>(v)].model == CameraModel::kPinhole
                                ? project_backward_kernel<degree.value, false>
                                : project_backward_kernel<degree.value, true>;
        kernel<<<blocks, kThreads, 0, stream>>>(row_source(frame, shard.index), target, static_cast<int>(v));
      });
      KERNEL_CHECK("project_backward", shard.index, records.size());
      if (!dL_dviewmat) continue;
      sum_parts_kernel<12><<<1, kThreads, 0, stream>>>(part.data(), blocks, view_sums.data() + v * 12);
      KERNEL_CHECK("project_backward", shard.index, records.size());
    }
  });
  if (!dL_dviewmat) return;
  std::fill_n(dL_dviewmat, views * 12, 0.0);
  std::vector<std::vector<double>> host(shards, std::vector<double>(static_cast<size_t>(views * 12), 0.0));
  ReadBack read_back;
  for (size_t shard = 0; shard < shards; ++shard) {
    read_back.add(host[shard].data(), sums[shard].data(), sums[shard].size(), static_cast<int>(shard));
  }
  read_back.wait();
  for (size_t shard = 0; shard < shards; ++shard) {
    for (int64_t i = 0; i < views * 12; ++i) dL_dviewmat[i] += host[shard][static_cast<size_t>(i)];
  }
}

}  // namespace mgpu::splat
