// SPDX-License-Identifier: Apache-2.0
// project_host.cpp: rows to records and back, in blocks of rows. Formulas: math/gaussian.h, math/sh.h,
// math/cull.h.
#include "splat/project.h"

#include <algorithm>
#include <vector>

#include "math/cull.h"
#include "mesh/fork_join.h"
#include "splat/cells.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kBlockRows = 1024;  // fixed: the order of sums must not depend on the number of threads
static_assert(kBlockRows % kCellRows == 0);

// Visible records of one block of rows in one view.
struct BlockRecords {
  Buffer<int64_t> row;
  Buffer<Record> record;
};

void load_geometry(const Frame& frame, int64_t row, RowValues& values) {
  replay_geometry(frame.columns, frame.state_or_null(), frame.history_or_null(), row, values.mean,
                  values.quat, values.log_scale, values.opacity_logit);
}

void load_sh(const Frame& frame, int64_t row, RowValues& values) {
  replay_sh(frame.columns, frame.state_or_null(), frame.history_or_null(), row, frame.settings.sh_count(),
            values.sh);
}

bool make_record(const Frame& frame, const View& view, int64_t row, RowValues& values, bool& has_sh,
                 Record& out) {
  math::Projected p;
  if (!math::project_gaussian(view, values.mean, values.quat, values.log_scale, values.opacity_logit,
                              frame.settings.antialiased, p)) {
    return false;
  }
  if (!has_sh) load_sh(frame, row, values);
  has_sh = true;
  float direction[3];
  direction_to(view, values.mean, direction);
  if (!math::eval_sh(frame.settings.sh_degree, direction, values.sh, out.rgb)) return false;
  std::copy_n(p.mean2d, 2, out.mean2d);
  std::copy_n(p.conic, 3, out.conic);
  std::copy_n(p.tile_rect, 4, out.tile_rect);
  out.opacity = p.opacity;
  out.depth = p.depth;
  return true;
}

// Which views may see a cell.
class CellTest {
 public:
  CellTest(const Frame& frame, int owner) : views_(frame.views.size()) {
    if (!frame.cells) return;
    cells_ = frame.cells->of_shard(static_cast<size_t>(owner));
    for (const View& view : frame.views) culls_.push_back(math::make_cull_view(view));
    if (frame.replays) margins_ = drift_bounds(frame.history, !frame.state.exp_avg[0].is_float32()).margins();
  }
  int64_t cells() const { return cells_.count; }
  // Fills `seen` [views] for the cell of `row` and returns how many of the views may see it.
  int64_t operator()(int64_t row, std::vector<char>& seen) const {
    seen.assign(views_, 1);
    if (!cells_.cell) return static_cast<int64_t>(views_);
    int64_t count = 0;
    for (size_t v = 0; v < views_; ++v) {
      seen[v] = !math::surely_unseen(culls_[v], cells_.of(row), margins_);
      count += seen[v];
    }
    return count;
  }

 private:
  size_t views_;
  ShardCells cells_;
  std::vector<math::CullView> culls_;
  math::CellMargins margins_{};
};

// One block: its rows once, each in all views (a row is replayed once whatever the number of views).
void project_block(const Frame& frame, const CellTest& test, RowRange rows, int owner, BlockRecords* per_view,
                   Buffer<Record>& scratch, Buffer<int64_t>& scratch_row, CullCounts& culled) {
  const int64_t views = static_cast<int64_t>(frame.views.size());
  std::vector<int64_t> counts(frame.views.size(), 0);
  std::vector<char> seen;
  RowValues values;
  for (int64_t first = rows.begin; first < rows.end; first += kCellRows) {
    const int64_t seeing = test(first, seen), end = std::min(rows.end, first + kCellRows);
    if (seeing == 0) continue;
    if (test.cells() > 0) ++culled.cells_kept;
    culled.candidates += seeing * (end - first);
    for (int64_t row = first; row < end; ++row) {
      load_geometry(frame, row, values);
      bool has_sh = false;
      for (int64_t v = 0; v < views; ++v) {
        const int64_t slot = v * kBlockRows + counts[v];
        if (seen[v] && make_record(frame, frame.views[v], row, values, has_sh, scratch[slot])) {
          scratch_row[slot] = row;
          ++counts[v];
        }
      }
    }
  }
  for (int64_t v = 0; v < views; ++v) {
    if (counts[v] == 0) continue;
    per_view[v].row = Buffer<int64_t>(counts[v], owner);
    per_view[v].record = Buffer<Record>(counts[v], owner);
    std::copy_n(scratch_row.data() + v * kBlockRows, counts[v], per_view[v].row.data());
    std::copy_n(scratch.data() + v * kBlockRows, counts[v], per_view[v].record.data());
  }
}

int64_t block_count(RowRange rows) { return (rows.size() + kBlockRows - 1) / kBlockRows; }

RowRange block_rows(RowRange rows, int64_t block) {
  const int64_t begin = rows.begin + block * kBlockRows;
  return {begin, std::min(rows.end, begin + kBlockRows)};
}

void project_shard(const Frame& frame, RowRange rows, int owner, ShardRecords& out) {
  const int64_t views = static_cast<int64_t>(frame.views.size());
  const int64_t blocks = rows.empty() ? 0 : block_count(rows);
  std::vector<BlockRecords> found(static_cast<size_t>(blocks * views));
  std::vector<CullCounts> culled(static_cast<size_t>(blocks));
  const CellTest test(frame, owner);
  parallel_for(blocks, 4, [&](int64_t begin, int64_t end) {
    Buffer<Record> scratch(views * kBlockRows, owner);
    Buffer<int64_t> scratch_row(views * kBlockRows, owner);
    for (int64_t block = begin; block < end; ++block) {
      project_block(frame, test, block_rows(rows, block), owner, &found[block * views], scratch, scratch_row,
                    culled[block]);
    }
  });
  out.culled = {test.cells(), 0, 0};
  for (const CullCounts& part : culled) {
    out.culled.cells_kept += part.cells_kept;
    out.culled.candidates += part.candidates;
  }

  // Blocks in order of (view, row).
  std::vector<int64_t> target(static_cast<size_t>(blocks * views));
  out.view_begin.assign(views + 1, 0);
  out.count = 0;
  for (int64_t v = 0; v < views; ++v) {
    out.view_begin[v] = out.count;
    for (int64_t block = 0; block < blocks; ++block) {
      target[block * views + v] = out.count;
      out.count += found[block * views + v].record.size();
    }
  }
  out.view_begin[views] = out.count;
  out.row = Buffer<int64_t>(out.count, owner);
  out.view = Buffer<int32_t>(out.count, owner);
  out.record = Buffer<Record>(out.count, owner);
  out.grad = Buffer<RecordGrad>();
  parallel_for(blocks * views, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::copy(found[i].row.begin(), found[i].row.end(), out.row.data() + target[i]);
      std::copy(found[i].record.begin(), found[i].record.end(), out.record.data() + target[i]);
      std::fill_n(out.view.data() + target[i], found[i].record.size(), static_cast<int32_t>(i % views));
    }
  });
}

void add_to(float* column, int64_t row, int width, const float* values) {
  if (!column) return;
  for (int i = 0; i < width; ++i) column[row * width + i] += values[i];
}

// Records of one block of rows in one view: the adjoint of make_record, added to the columns' gradients.
void project_block_backward(const Frame& frame, const ShardRecords& in, RowRange records,
                            const ColumnGrads* columns, double* dL_dviewmat) {
  const int sh_count = frame.settings.sh_count();
  const int sh_rest = frame.columns.sh_rest;
  RowValues values;
  for (int64_t r = records.begin; r < records.end; ++r) {
    const int64_t row = in.row[r];
    load_geometry(frame, row, values);
    load_sh(frame, row, values);
    float dL_dmean[3] = {}, dL_dquat[4] = {}, dL_dlog_scale[3] = {}, dL_dlogit = 0.f;
    float dL_dsh[3 * math::kMaxShCount] = {}, dL_dview[12] = {};
    record_backward(frame.views[in.view[r]], frame.settings, values, in.grad[r], dL_dmean, dL_dquat,
                    dL_dlog_scale, dL_dlogit, dL_dsh, dL_dview);
    if (columns) {
      add_to(columns->means, row, 3, dL_dmean);
      add_to(columns->quats, row, 4, dL_dquat);
      add_to(columns->scales, row, 3, dL_dlog_scale);
      add_to(columns->opacities, row, 1, &dL_dlogit);
      add_to(columns->sh0, row, 3, dL_dsh);
      if (columns->shN) {
        float* rest = columns->shN + row * sh_rest * 3;
        for (int i = 3; i < 3 * sh_count; ++i) rest[i - 3] += dL_dsh[i];
      }
    }
    if (dL_dviewmat) {
      for (int i = 0; i < 12; ++i) dL_dviewmat[i] += static_cast<double>(dL_dview[i]);
    }
  }
}

}  // namespace

void project(Frame& frame) {
  frame.shards.clear();
  frame.shards.resize(frame.homes.size());
  for_each_shard("project", [&](const Shard& shard) {
    project_shard(frame, frame.homes[shard.index], shard.index, frame.shards[shard.index]);
  });
}

void project_backward(const Frame& frame, const ColumnGrads* columns, double* dL_dviewmat) {
  const int64_t views = static_cast<int64_t>(frame.views.size());
  const int64_t shards = static_cast<int64_t>(frame.homes.size());
  Buffer<double> shard_sums(dL_dviewmat ? shards * views * 12 : 0, kExchange);
  for_each_shard("project_backward", [&](const Shard& shard) {
    const ShardRecords& in = frame.shards[shard.index];
    const RowRange rows = frame.homes[shard.index];
    const int64_t blocks = rows.empty() || in.grad.size() == 0 ? 0 : block_count(rows);
    Buffer<double> block_sums(dL_dviewmat ? blocks * views * 12 : 0, shard.index);
    std::fill(block_sums.begin(), block_sums.end(), 0.0);
    parallel_for(blocks, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * views; i < end * views; ++i) {
        const RowRange block = block_rows(rows, i / views);
        const int64_t v = i % views;
        const int64_t* first = in.row.data() + in.view_begin[v];
        const int64_t* last = in.row.data() + in.view_begin[v + 1];
        const RowRange records{std::lower_bound(first, last, block.begin) - in.row.data(),
                               std::lower_bound(first, last, block.end) - in.row.data()};
        project_block_backward(frame, in, records, columns,
                               dL_dviewmat ? block_sums.data() + i * 12 : nullptr);
      }
    });
    if (!dL_dviewmat) return;
    double* sums = shard_sums.data() + shard.index * views * 12;
    std::fill_n(sums, views * 12, 0.0);
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t i = 0; i < views * 12; ++i) sums[i] += block_sums[block * views * 12 + i];
    }
  });
  if (!dL_dviewmat) return;
  std::fill_n(dL_dviewmat, views * 12, 0.0);
  for (int64_t shard = 0; shard < shards; ++shard) {
    for (int64_t i = 0; i < views * 12; ++i) dL_dviewmat[i] += shard_sums[shard * views * 12 + i];
  }
}

}  // namespace mgpu::splat
