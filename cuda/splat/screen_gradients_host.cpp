// SPDX-License-Identifier: Apache-2.0
#include "mesh/fork_join.h"
#include "splat/screen_gradients.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kRecordsPerPiece = 4096;

}  // namespace

void add_screen_gradients(const Frame& frame, const ScreenGradients& to) {
  const int views = static_cast<int>(frame.views.size());
  for_each_shard("screen gradients", [&](const Shard& shard) {
    const ShardRecords& in = frame.shards[static_cast<size_t>(shard.index)];
    for (size_t v = 0; v < frame.views.size(); ++v) {  // a row is at most once among a view's records
      const int64_t first = in.view_begin[v], count = in.view_begin[v + 1] - first;
      parallel_for(count, kRecordsPerPiece, [&](int64_t begin, int64_t end) {
        for (int64_t r = first + begin; r < first + end; ++r) {
          to.sum[in.row[r]] += screen_gradient(in.grad[r], frame.views[v], views, to.absolute);
          ++to.seen[in.row[r]];
        }
      });
    }
  });
}

}  // namespace mgpu::splat
