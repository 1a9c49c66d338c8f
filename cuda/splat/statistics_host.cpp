// SPDX-License-Identifier: Apache-2.0
#include "splat/statistics.h"

#include <algorithm>

#include "mesh/fork_join.h"

namespace mgpu::splat {

void add_statistics(const std::vector<const Frame*>& frames, const RowStatistics& statistics) {
  if (!statistics.gradient) return;
  for_each_shard("statistics", [&](const Shard& shard) {
    for (const Frame* frame : frames) {
      const ShardRecords& records = frame->shards[static_cast<size_t>(shard.index)];
      for (size_t view = 0; view < frame->views.size(); ++view) {
        for (int64_t i = records.view_begin[view]; i < records.view_begin[view + 1]; ++i) {
          const RecordStatistics mine =
              record_statistics(frame->views[view], records.record[i], records.grad[i], statistics.absgrad,
                                static_cast<int64_t>(frame->views.size()));
          const int64_t row = records.row[i];
          statistics.gradient[row] += mine.gradient;
          statistics.views[row] += 1;
          if (statistics.radius) statistics.radius[row] = std::max(statistics.radius[row], mine.radius);
        }
      }
    }
  });
}

}  // namespace mgpu::splat
