// SPDX-License-Identifier: Apache-2.0
// statistics.cu: a thread a record. Floor: 104 bytes of record, gradient and row, and a row's statistics
// twice.
#include "splat/statistics.h"

#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

// The records of one view: every row is there once.
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const View* view, const int64_t* row, const Record* record, const RecordGrad* grad,
                      int64_t count, int64_t views, RowStatistics statistics) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const RecordStatistics mine = record_statistics(*view, record[i], grad[i], statistics.absgrad, views);
  const int64_t to = row[i];
  statistics.gradient[to] += mine.gradient;
  statistics.views[to] += 1;
  if (statistics.radius) statistics.radius[to] = fmaxf(statistics.radius[to], mine.radius);
}

}  // namespace

void add_statistics(const std::vector<const Frame*>& frames, const RowStatistics& statistics) {
  if (!statistics.gradient) return;
  for_each_shard("statistics", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    for (const Frame* frame : frames) {
      const ShardRecords& records = frame->shards[index];
      for (size_t view = 0; view < frame->views.size(); ++view) {
        const int64_t begin = records.view_begin[view], count = records.view_begin[view + 1] - begin;
        if (count == 0) continue;
        statistics_kernel<<<blocks_for(count, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
            frame->constants[index].views + view, records.row.data() + begin, records.record.data() + begin,
            records.grad.data() + begin, count, static_cast<int64_t>(frame->views.size()), statistics);
        KERNEL_CHECK("statistics", shard.index, count);
      }
    }
  });
}

}  // namespace mgpu::splat
