// SPDX-License-Identifier: Apache-2.0
// screen_gradients.cu: one thread a record, view by view. Floor: 72 bytes a record.
#include "splat/screen_gradients.h"

#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

__global__ void __launch_bounds__(kThreads)
    add_kernel(const int64_t* row, const RecordGrad* grad, int64_t count, const View* view, int views,
               ScreenGradients to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  to.sum[row[i]] += screen_gradient(grad[i], *view, views, to.absolute);
  ++to.seen[row[i]];
}

}  // namespace

void add_screen_gradients(const Frame& frame, const ScreenGradients& to) {
  for_each_shard("screen gradients", [&](const Shard& shard) {
    const auto s = static_cast<size_t>(shard.index);
    const ShardRecords& in = frame.shards[s];
    for (size_t v = 0; v < frame.views.size(); ++v) {  // a row is at most once among a view's records
      const int64_t first = in.view_begin[v], count = in.view_begin[v + 1] - first;
      if (count == 0) continue;
      add_kernel<<<blocks_for(count, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
          in.row.data() + first, in.grad.data() + first, count, frame.constants[s].views.data() + v,
          static_cast<int>(frame.views.size()), to);
      KERNEL_CHECK("screen gradients", shard.index, count);
    }
  });
}

}  // namespace mgpu::splat
