// SPDX-License-Identifier: Apache-2.0
// step_host.cpp: each shard walks its own rows that were seen, in pieces of the row range.
#pragma GCC optimize("no-trapping-math", "no-math-errno")  // else loops with selects and roots stay scalar
#include "splat/step.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "math/adam.h"
#include "mesh/fork_join.h"
#include "splat/cell_row.h"
#include "splat/project.h"
#include "splat/replay.h"
#include "splat/step_check.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kRowsPerPiece = 4096;
static_assert(kRowsPerPiece % kCellRows == 0);  // a cell is written by one thread
constexpr int kMaxRowFloats = 11 + 3 * math::kMaxShCount;

void load(const FloatArray& from, int64_t begin, int count, float* to) {
  if (from.is_float32()) {
    std::copy_n(from.float32() + begin, count, to);
  } else {
    for (int i = 0; i < count; ++i) to[i] = from[begin + i];
  }
}

// A row with its moments in registers (or nearly), from load to store: flat arrays over all columns, so that
// one vector loop serves them together.
class RowInHand {
 public:
  RowInHand(const SplatColumns& columns, const AdamState& state, const AdamHistory& history)
      : state_(state),
        history_(history),
        constants_(math::adam_constants(history.beta1, history.beta2, history.eps)) {
    const std::array<FloatArray, kColumns> data = {columns.means,     columns.quats, columns.scales,
                                                   columns.opacities, columns.sh0,   columns.shN};
    const std::array<int, kColumns> size = {3, 4, 3, 1, 3, 3 * columns.sh_rest};
    for (size_t i = 0; i < kColumns; ++i) {
      columns_[i] = {data[i], size[i], size_};
      size_ += size[i];
    }
  }

  // Read the row and take the steps that it missed.
  void load(int64_t row) {
    row_ = row;
    for (size_t i = 0; i < kColumns; ++i) {
      const auto& [data, size, begin] = columns_[i];
      mgpu::splat::load(data, row * size, size, parameter() + begin);
      mgpu::splat::load(state_.exp_avg[i], row * size, size, exp_avg_ + begin);
      std::copy_n(state_.exp_avg_sq[i] + row * size, size, exp_avg_sq_ + begin);
    }
    const int64_t last = state_.last_step[row];
    if (last < history_.now) replay(last);
  }

  // One step with the row's gradient, in the order of the columns; `step_size` is spread over the floats of a
  // row.
  void step(const History::Step& now, const float* step_size, const float* gradient) {
    float* value_of = parameter();
#pragma GCC ivdep
    for (int i = 0; i < size_; ++i) {
      math::adam_step(constants_, step_size[i], now.inv_sqrt_bc2, gradient[i], value_of[i], exp_avg_[i],
                      exp_avg_sq_[i]);
    }
    if (now.noise_scale > 0.0f) {
      const math::Random4 random = math::draw(history_.seed, math::Stream::kNoise, now.number, row_);
      math::add_mcmc_noise(random, now.noise_scale, value.quat, value.log_scale, value.opacity_logit,
                           value.mean);
    }
  }

  void store(int64_t last_step) {
    for (size_t i = 0; i < kColumns; ++i) {
      const auto& [data, size, begin] = columns_[i];
      std::copy_n(exp_avg_sq_ + begin, size, state_.exp_avg_sq[i] + row_ * size);
      if (data.is_float32() && state_.exp_avg[i].is_float32()) {
        std::copy_n(parameter() + begin, size, data.float32() + row_ * size);
        std::copy_n(exp_avg_ + begin, size, state_.exp_avg[i].float32() + row_ * size);
        continue;
      }
      for (int k = 0; k < size; ++k) {
        const uint32_t random = rounding_bits(history_.seed, last_step, row_, static_cast<int>(i), k);
        data.set(row_ * size + k, parameter()[begin + k], random);
        state_.exp_avg[i].set(row_ * size + k, exp_avg_[begin + k], random >> 16);
      }
    }
    state_.last_step[row_] = static_cast<int32_t>(last_step);
  }

  // Put one number per column to each of the column's floats.
  void spread(const float* by_column, float* by_float) const {
    for (size_t i = 0; i < kColumns; ++i)
      std::fill_n(by_float + columns_[i].begin, columns_[i].size, by_column[i]);
  }

  RowValues value;

 private:
  // RowValues lists its floats in the order of the columns.
  static_assert(sizeof(RowValues) == kMaxRowFloats * sizeof(float) &&
                offsetof(RowValues, sh) == 11 * sizeof(float));
  float* parameter() { return reinterpret_cast<float*>(&value); }

  void replay(int64_t last) {
    std::array<math::MissedSteps, kColumns> missed;
    float by_column[4][kColumns];
    for (size_t i = 0; i < kColumns; ++i) {
      missed[i] = missed_steps(history_, static_cast<int>(i), last);
      for (int q = 0; q < 2; ++q) {
        by_column[q][i] = missed[i].two.step[q];
        by_column[2 + q][i] = missed[i].two.eps[q];
      }
    }
    float* value_of = parameter();
    bool closed = true;
    for (int i = 0; i < size_; ++i) {
      closed &= math::closed_form_holds(missed[0].closed_from, exp_avg_[i], exp_avg_sq_[i]);
    }
    if (closed) {
      float two[4][kMaxRowFloats];
      for (int q = 0; q < 4; ++q) spread(by_column[q], two[q]);
#pragma GCC ivdep
      for (int i = 0; i < size_; ++i) {
        value_of[i] -=
            math::missed_drift({{two[0][i], two[1][i]}, {two[2][i], two[3][i]}}, exp_avg_[i], exp_avg_sq_[i]);
      }
    } else {
      for (size_t column = 0; column < kColumns; ++column) {
        const int begin = columns_[column].begin;
        for (int i = begin; i < begin + columns_[column].size; ++i) {
          value_of[i] =
              math::replay_missed(constants_, missed[column], value_of[i], exp_avg_[i], exp_avg_sq_[i]);
        }
      }
    }
    for (int i = 0; i < size_; ++i) exp_avg_[i] *= missed[0].beta1_power;
    for (int i = 0; i < size_; ++i) exp_avg_sq_[i] *= missed[0].beta2_power;
    replay_noise(history_, last, row_, value.quat, value.log_scale, value.opacity_logit, value.mean);
  }

  struct ColumnInHand {
    FloatArray data;  // of the whole column
    int size;         // floats of a row
    int begin;        // of them in the flat arrays
  };
  const AdamState& state_;
  const AdamHistory& history_;
  math::AdamConstants constants_;
  std::array<ColumnInHand, kColumns> columns_;
  int size_ = 0;
  int64_t row_ = 0;
  float exp_avg_[kMaxRowFloats], exp_avg_sq_[kMaxRowFloats];
};

// The records of one view of one frame on one shard: ascending by row.
struct RecordList {
  const Frame* frame;
  const View* view;
  const int64_t* row;  // [size]
  const RecordGrad* grad;
  int64_t size;
};

std::vector<RecordList> lists_of_shard(const std::vector<const Frame*>& frames, size_t shard) {
  std::vector<RecordList> lists;
  for (const Frame* frame : frames) {
    const ShardRecords& records = frame->shards[shard];
    for (size_t view = 0; view < frame->views.size(); ++view) {
      const int64_t begin = records.view_begin[view], end = records.view_begin[view + 1];
      if (begin == end) continue;
      lists.push_back(
          {frame, &frame->views[view], records.row.data() + begin, records.grad.data() + begin, end - begin});
    }
  }
  return lists;
}

// Walks the rows of `range` that are in any list, ascending: visit(row, entries), an entry being (list,
// position).
template <typename Visit>
void for_each_seen_row(const std::vector<RecordList>& lists, RowRange range, const Visit& visit) {
  std::vector<int64_t> next(lists.size()), end(lists.size());
  for (size_t list = 0; list < lists.size(); ++list) {
    const int64_t* rows = lists[list].row;
    next[list] = std::lower_bound(rows, rows + lists[list].size, range.begin) - rows;
    end[list] = std::lower_bound(rows + next[list], rows + lists[list].size, range.end) - rows;
  }
  std::vector<std::pair<size_t, int64_t>> entries;
  for (;;) {
    int64_t row = range.end;
    for (size_t list = 0; list < lists.size(); ++list) {
      if (next[list] < end[list]) row = std::min(row, lists[list].row[next[list]]);
    }
    if (row == range.end) return;
    entries.clear();
    for (size_t list = 0; list < lists.size(); ++list) {
      if (next[list] < end[list] && lists[list].row[next[list]] == row)
        entries.emplace_back(list, next[list]++);
    }
    visit(row, entries);
  }
}

void expand_cell(const ShardCells& cells, const SplatColumns& columns, const AdamState& state, int64_t row) {
  const math::CellRow stored = stored_cell_row(columns, state, row, cells.moment_ratio);
  if (stored.finite()) math::join(cells.of(row), {stored, cells.logit_drift});
}

}  // namespace

StepReport step(const std::vector<const Frame*>& frames, const SplatColumns& columns, const AdamState& state,
                const History& history, const StepSettings& settings) {
  check_frames(frames, columns, history);
  StepReport report;
  if (frames.empty() || columns.num_rows == 0) return report;
  add_statistics(frames, settings.statistics);
  const AdamHistory missed = history.view();
  const History::Step now = history.next(settings.lrs, settings.noise_scale);
  const std::vector<RowRange>& homes = frames[0]->homes;
  std::vector<std::vector<RecordList>> lists;
  for (size_t shard = 0; shard < homes.size(); ++shard) lists.push_back(lists_of_shard(frames, shard));

  // Runs work(shard, range, piece) on pieces of each shard's rows.
  auto for_each_piece = [&](const char* stage, const auto& work) {
    for_each_shard(stage, [&](const Shard& shard) {
      const size_t index = static_cast<size_t>(shard.index);
      const RowRange home = homes[index];
      if (lists[index].empty()) return;
      parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
        work(index, RowRange{home.begin + begin, home.begin + end},
             static_cast<size_t>(begin / kRowsPerPiece));
      });
    });
  };

  // The regularisers are means over the rows seen, so these are counted first.
  struct PieceSums {
    int64_t rows = 0;
    double opacity = 0.0, scale = 0.0;
  };
  std::vector<std::vector<PieceSums>> sums;
  for (const RowRange& home : homes) {
    sums.emplace_back(static_cast<size_t>((home.size() + kRowsPerPiece - 1) / kRowsPerPiece));
  }
  for_each_piece("step count", [&](size_t shard, RowRange range, size_t piece) {
    for_each_seen_row(lists[shard], range, [&](int64_t, const auto&) { ++sums[shard][piece].rows; });
  });
  for (const auto& pieces : sums) {
    for (const PieceSums& piece : pieces) report.rows_seen += piece.rows;
  }
  if (report.rows_seen == 0) return report;
  const double rows_seen = static_cast<double>(report.rows_seen);
  const float opacity_weight = static_cast<float>(settings.opacity_reg / rows_seen);
  const float scale_weight = static_cast<float>(settings.scale_reg / (3.0 * rows_seen));

  for_each_piece("step", [&](size_t shard, RowRange range, size_t piece) {
    RowInHand hand(columns, state, missed);
    const ShardCells cells = settings.cells ? settings.cells->of_shard(shard) : ShardCells{};
    PieceSums& sum = sums[shard][piece];
    float gradient[kMaxRowFloats], step_size[kMaxRowFloats];
    hand.spread(now.step_size, step_size);
    float* dL_dmean = gradient;
    float* dL_dquat = gradient + 3;
    float* dL_dlog_scale = gradient + 7;
    float* dL_dlogit = gradient + 10;
    float* dL_dsh = gradient + 11;
    float unused_dL_dviewmat[12] = {};  // the frame's backward has reduced it already
    for_each_seen_row(lists[shard], range, [&](int64_t row, const auto& entries) {
      hand.load(row);
      std::fill(std::begin(gradient), std::end(gradient), 0.0f);
      for (const auto& [list, position] : entries) {
        const RecordList& from = lists[shard][list];
        record_backward(*from.view, from.frame->settings, hand.value, from.grad[position], dL_dmean, dL_dquat,
                        dL_dlog_scale, *dL_dlogit, dL_dsh, unused_dL_dviewmat);
      }
      const float opacity = math::sigmoid(hand.value.opacity_logit);
      *dL_dlogit += opacity_weight * opacity * (1.0f - opacity);
      sum.opacity += opacity;
      for (int axis = 0; axis < 3; ++axis) {
        const float scale = std::exp(hand.value.log_scale[axis]);
        dL_dlog_scale[axis] += scale_weight * scale;
        sum.scale += scale;
      }
      hand.step(now, step_size, gradient);
      hand.store(now.number);
      if (cells.cell) expand_cell(cells, columns, state, row);
    });
  });
  for (const auto& pieces : sums) {
    for (const PieceSums& piece : pieces) {
      report.mean_opacity += piece.opacity / rows_seen;
      report.mean_scale += piece.scale / (3.0 * rows_seen);
    }
  }
  return report;
}

void flush(const SplatColumns& columns, const AdamState& state, const History& history) {
  const AdamHistory missed = history.view();
  const std::vector<RowRange> homes = homes_of(columns);
  for_each_shard("flush", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      RowInHand hand(columns, state, missed);
      for (int64_t row = home.begin + begin; row < home.begin + end; ++row) {
        if (state.last_step[row] >= missed.now) continue;
        hand.load(row);
        hand.store(missed.now);
      }
    });
  });
}

}  // namespace mgpu::splat
