// SPDX-License-Identifier: Apache-2.0
// cells.h: boxes of fixed runs of rows, so that a view finds the rows that it may see without walking all of
// them. Rows in the order of space (splat/reorder.h) make small boxes; in any other order boxes are large,
// and right.
//
// A box holds what is stored. Rows that missed steps are where their missed steps start; how far these may
// have taken them is the same bound for all cells (CellMargins), for stage "project" to add. The step writes
// the rows that it saw, and expands their boxes where they leave them; whoever else writes means, scales or
// opacities calls forget() (bindings_cells.h knows who did).
#pragma once
#include <cstdint>
#include <vector>

#include "math/cull.h"
#include "memory/buffer.h"
#include "mesh/mesh.h"
#include "splat/columns.h"

namespace mgpu::splat {

constexpr int kCellRows = 256;  // of a shard's rows, from its first on: no cell has rows of two shards

inline int64_t cell_count(int64_t rows) { return (rows + kCellRows - 1) / kCellRows; }

// One shard's cells, as kernels take them. No cells: cell is null.
struct ShardCells {
  math::Cell* cell = nullptr;
  int64_t count = 0;
  int64_t first_row = 0;
  float logit_drift = 0.f;   // of math::noise_log_reach
  float moment_ratio = 0.f;  // the largest |exp_avg| / sqrt(exp_avg_sq)

  HOST_DEVICE math::Cell& of(int64_t row) const { return cell[(row - first_row) / kCellRows]; }
};

// How far steps of the history may have moved a row that missed them.
struct DriftBounds {
  float moment_ratio = 0.f;   // math::moment_ratio_bound
  float mean = 0.f;           // the farthest that drift takes a mean
  float log_scale = 0.f;      // and a log scale
  float logit = 0.f;          // largest_drift of an opacity, not yet times a ratio
  float logit_to_come = 0.f;  // what that will hardly exceed while learning rates do not rise
  float noise = 0.f;          // longest draw times sigma of all steps held
  math::CellMargins margins() const { return {mean, log_scale, noise}; }
};

// `history` on the host. Moments that are stored in 16 bits reach a little further.
DriftBounds drift_bounds(const AdamHistory& history, bool half);

class Cells {
 public:
  // Whether there are cells of these rows whose boxes still bound them, for a frame with these bounds (null:
  // without optimizer).
  bool hold(const std::vector<RowRange>& homes, const DriftBounds* bounds) const;

  // Measures all rows; with `state`, noise is bounded, too.
  void build(const SplatColumns& columns, const AdamState* state, const DriftBounds* bounds,
             const std::vector<RowRange>& homes);
  void forget() { homes_.clear(); }

  bool any() const { return !homes_.empty(); }
  int64_t count() const;
  ShardCells of_shard(size_t shard) const;
  const std::vector<RowRange>& homes() const { return homes_; }

  // Copies on the host, and back: for tests. `cells` has count() entries, shard by shard.
  std::vector<math::Cell> to_host() const;
  void from_host(const std::vector<math::Cell>& cells);

 private:
  std::vector<RowRange> homes_;            // empty: no cells
  std::vector<Buffer<math::Cell>> boxes_;  // by shard, on it
  bool bounds_noise_ = false;
  float logit_drift_ = 0.f, moment_ratio_ = 0.f;
};

// Boxes of all rows, from scratch. Of each flavour; `state` may be all null.
void measure_cells(const SplatColumns& columns, const AdamState& state, const Cells& cells);

// A shard with fewer rows is faster without cells.
int64_t least_rows_for_cells();

}  // namespace mgpu::splat
