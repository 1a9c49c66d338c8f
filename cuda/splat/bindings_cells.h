// SPDX-License-Identifier: Apache-2.0
// bindings_cells.h: the cells of one table as Python holds them: they know whether anybody has written the
// columns since they were measured, by what autograd counts (at::Tensor::_version).
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "splat/bindings_columns.h"
#include "splat/cells.h"

namespace mgpu::splat {

class TableCells {
 public:
  // Cells of these columns for a frame, or null: without them all rows are walked. Measures them anew if
  // somebody wrote the columns; of columns that seem to be written before every render it does so only when
  // they are met a second time. `state` and `history`: of the frame's optimizer, or none.
  const Cells* for_frame(const Tensors& tensors, const SplatColumns& columns,
                         const std::optional<Tensors>& state_tensors, const AdamState* state,
                         const AdamHistory* history, const std::vector<RowRange>& homes);

  // Cells that a step of these tensors has to keep up to date; null if there are none that hold.
  const Cells* for_step(const Tensors& tensors, const Tensors& state_tensors,
                        const std::vector<RowRange>& homes);

  void forget();

  int64_t least_rows;  // of a shard; below, all rows are walked
  bool enabled = true;
  int64_t built = 0;  // how often they were measured

  TableCells();
  Cells& cells() { return cells_; }

 private:
  // What identifies the contents of a tensor.
  struct Stamp {
    const void* data = nullptr;
    int64_t rows = -1, version = -1;
    bool operator==(const Stamp&) const = default;
  };
  static constexpr size_t kColumnStamps = 3;            // means, scales, opacities
  using Stamps = std::array<Stamp, kColumnStamps + 2>;  // and the moments of opacities
  static std::optional<Stamps> stamps_of(const Tensors& tensors, const std::optional<Tensors>& state);
  static bool same_columns(const Stamps& a, const Stamps& b);

  std::mutex mutex_;
  Cells cells_;
  Stamps measured_;            // at the time of measuring
  std::optional<Stamps> met_;  // of the latest frame that had no cells
  bool pays_ = false;          // what was measured last served more than one frame
};

// The cells of the table whose columns these are, for `splat_forward` and all that steps; none: without.
using MaybeCells = std::shared_ptr<TableCells>;

}  // namespace mgpu::splat
