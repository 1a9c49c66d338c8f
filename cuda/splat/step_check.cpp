// SPDX-License-Identifier: Apache-2.0
#include "splat/step_check.h"

#include <stdexcept>
#include <string>

namespace mgpu::splat {

void check_frames(const std::vector<const Frame*>& frames, const SplatColumns& columns,
                  const History& history) {
  for (size_t i = 0; i < frames.size(); ++i) {
    const Frame& frame = *frames[i];
    const std::string name = "Frame " + std::to_string(i) + " of the step ";
    if (frame.columns.num_rows != columns.num_rows ||
        (columns.num_rows > 0 && frame.columns.means != columns.means)) {
      throw std::invalid_argument(name + "was rendered from another table, or from this one before it had " +
                                  std::to_string(columns.num_rows) +
                                  " rows. Call step() or zero_pending() before the table grows.");
    }
    if (!frame.replays || frame.history.now != history.now()) {
      throw std::invalid_argument(name + "was not rendered with this optimizer at its step " +
                                  std::to_string(history.now()) +
                                  ". Render with render(..., optimizer=...) after the latest step().");
    }
    for (size_t shard = 0; shard < frame.shards.size(); ++shard) {
      if (frame.shards[shard].grad.size() < frame.shards[shard].count) {
        throw std::invalid_argument(name + "has no gradient yet: call backward() on its loss first.");
      }
      if (frame.homes[shard].begin != frames[0]->homes[shard].begin ||
          frame.homes[shard].end != frames[0]->homes[shard].end) {
        throw std::invalid_argument(name + "was rendered with other homes than frame 0.");
      }
    }
  }
}

}  // namespace mgpu::splat
