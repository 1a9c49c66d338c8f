// SPDX-License-Identifier: Apache-2.0
// relocate_host.cpp: sums and picks in pieces of the row range; copies go through one exchange buffer, source
// by source.
#include "splat/relocate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "math/gaussian.h"
#include "math/random.h"
#include "math/relocation.h"
#include "memory/buffer.h"
#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kRowsPerPiece = 4096;
constexpr int64_t kSourcesPerExchange = int64_t{1} << 18;  // 62 MB at SH degree 3
constexpr float kWeightScale = 16777216.0f;                // 2^24

int64_t pieces_of(const RowRange& range) { return (range.size() + kRowsPerPiece - 1) / kRowsPerPiece; }

bool finite(const float* values, int count) {
  for (int i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return false;
  }
  return true;
}

bool alive(const SplatColumns& columns, int64_t row, float min_opacity) {
  return math::sigmoid(columns.opacities[row]) > min_opacity && finite(columns.means + 3 * row, 3) &&
         finite(columns.quats + 4 * row, 4) && finite(columns.scales + 3 * row, 3);
}

uint64_t weight(const SplatColumns& columns, int64_t row, float min_opacity) {
  if (!alive(columns, row, min_opacity)) return 0;
  return static_cast<uint64_t>(math::sigmoid(columns.opacities[row]) * kWeightScale);
}

std::vector<RowRange> homes_of(int64_t rows) {
  std::vector<RowRange> homes;
  for (int shard = 0; shard < mesh().size(); ++shard)
    homes.push_back(equal_chunk(rows, shard, mesh().size()));
  return homes;
}

// The positions of `list` (ascending) whose values are in `range`.
RowRange positions_in(const std::vector<int64_t>& list, RowRange range) {
  const auto begin = std::lower_bound(list.begin(), list.end(), range.begin);
  const auto end = std::lower_bound(begin, list.end(), range.end);
  return {begin - list.begin(), end - list.begin()};
}

void check_rows(const char* name, const std::vector<int64_t>& rows, int64_t num_rows) {
  const bool ascending = std::is_sorted(rows.begin(), rows.end());
  if (!ascending || (!rows.empty() && (rows.front() < 0 || rows.back() >= num_rows))) {
    throw std::invalid_argument(std::string(name) + " must ascend and lie in [0, " +
                                std::to_string(num_rows) + ").");
  }
}

// The columns of a row, and of its moments, as (pointer, floats a row).
struct ColumnView {
  float* data;
  int size;
};

std::array<ColumnView, kColumns> column_views(const SplatColumns& columns) {
  return {{{columns.means, 3},
           {columns.quats, 4},
           {columns.scales, 3},
           {columns.opacities, 1},
           {columns.sh0, 3},
           {columns.shN, 3 * columns.sh_rest}}};
}

void reset_moments(const SplatColumns& columns, const AdamState* state, int64_t row, int64_t now) {
  if (!state) return;
  const auto views = column_views(columns);
  for (size_t column = 0; column < kColumns; ++column) {
    const int size = views[column].size;
    std::fill_n(state->exp_avg[column] + row * size, size, 0.0f);
    std::fill_n(state->exp_avg_sq[column] + row * size, size, 0.0f);
  }
  state->last_step[row] = static_cast<int32_t>(now);
}

}  // namespace

std::vector<int64_t> dead_rows(const SplatColumns& columns, float min_opacity) {
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
  std::vector<std::vector<std::vector<int64_t>>> found;
  for (const RowRange& home : homes) found.emplace_back(static_cast<size_t>(pieces_of(home)));
  for_each_shard("dead rows", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      auto& rows = found[static_cast<size_t>(shard.index)][static_cast<size_t>(begin / kRowsPerPiece)];
      for (int64_t row = home.begin + begin; row < home.begin + end; ++row) {
        if (!alive(columns, row, min_opacity)) rows.push_back(row);
      }
    });
  });
  std::vector<int64_t> all;
  for (const auto& pieces : found) {
    for (const auto& rows : pieces) all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

std::vector<int64_t> sample_rows(const SplatColumns& columns, float min_opacity, int64_t count, uint64_t seed,
                                 int64_t step) {
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
  std::vector<std::vector<uint64_t>> weight_before;  // by shard and piece: the sum of all pieces before
  for (const RowRange& home : homes) weight_before.emplace_back(static_cast<size_t>(pieces_of(home)));
  for_each_shard("sample sums", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      uint64_t sum = 0;
      for (int64_t row = home.begin + begin; row < home.begin + end; ++row)
        sum += weight(columns, row, min_opacity);
      weight_before[static_cast<size_t>(shard.index)][static_cast<size_t>(begin / kRowsPerPiece)] = sum;
    });
  });
  uint64_t total = 0;
  for (auto& pieces : weight_before) {
    for (uint64_t& piece : pieces) total += std::exchange(piece, total);
  }
  if (total == 0 || count <= 0) return {};

  std::vector<uint64_t> target(static_cast<size_t>(count));
  parallel_for(count, kRowsPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const math::Random4 random = math::draw(seed, math::Stream::kSample, step, i);
      const uint64_t bits = uint64_t{random.x[0]} << 32 | random.x[1];
      target[static_cast<size_t>(i)] =
          static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * total) >> 64);
    }
  });
  std::sort(target.begin(), target.end());

  std::vector<int64_t> sampled(static_cast<size_t>(count));
  for_each_shard("sample pick", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      uint64_t sum =
          weight_before[static_cast<size_t>(shard.index)][static_cast<size_t>(begin / kRowsPerPiece)];
      size_t next = static_cast<size_t>(std::lower_bound(target.begin(), target.end(), sum) - target.begin());
      for (int64_t row = home.begin + begin; row < home.begin + end && next < target.size(); ++row) {
        sum += weight(columns, row, min_opacity);
        for (; next < target.size() && target[next] < sum; ++next) sampled[next] = row;
      }
    });
  });
  return sampled;
}

void relocate(const SplatColumns& columns, const AdamState* state, const std::vector<int64_t>& source,
              const std::vector<int64_t>& destination, float min_opacity, int64_t now) {
  check_rows("source rows", source, columns.num_rows);
  check_rows("destination rows", destination, columns.num_rows);
  if (source.size() != destination.size()) {
    throw std::invalid_argument("relocate got " + std::to_string(source.size()) + " source rows for " +
                                std::to_string(destination.size()) + " destination rows.");
  }
  if (source.empty()) return;
  std::vector<int64_t> distinct,
      first_copy;  // by distinct source: the row, and the position of its first copy
  for (size_t i = 0; i < source.size(); ++i) {
    if (i == 0 || source[i] != source[i - 1]) {
      distinct.push_back(source[i]);
      first_copy.push_back(static_cast<int64_t>(i));
    }
  }
  first_copy.push_back(static_cast<int64_t>(source.size()));

  const auto views = column_views(columns);
  const int64_t row_floats =
      std::accumulate(views.begin(), views.end(), int64_t{0},
                      [](int64_t sum, const ColumnView& view) { return sum + view.size; });
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
  const int64_t sources = static_cast<int64_t>(distinct.size());
  Buffer<float> parcel;
  for (int64_t chunk = 0; chunk < sources; chunk += kSourcesPerExchange) {
    const RowRange part{chunk, std::min(sources, chunk + kSourcesPerExchange)};
    parcel.resize_discard(part.size() * row_floats);

    for_each_shard("relocate sources", [&](const Shard& shard) {
      RowRange mine = positions_in(distinct, homes[static_cast<size_t>(shard.index)]);
      mine = {std::max(mine.begin, part.begin), std::min(mine.end, part.end)};
      parallel_for(mine.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
        for (int64_t position = mine.begin + begin; position < mine.begin + end; ++position) {
          const size_t index = static_cast<size_t>(position);
          const int64_t row = distinct[index];
          const math::Relocated split = math::relocate(math::sigmoid(columns.opacities[row]),
                                                       first_copy[index + 1] - first_copy[index] + 1);
          const float opacity = std::clamp(split.opacity, min_opacity, 1.0f - 0x1p-23f);
          columns.opacities[row] = std::log(opacity / (1.0f - opacity));
          for (int axis = 0; axis < 3; ++axis) columns.scales[3 * row + axis] += std::log(split.scale_ratio);
          reset_moments(columns, state, row, now);
          float* out = parcel.data() + (position - part.begin) * row_floats;
          for (const ColumnView& view : views) out = std::copy_n(view.data + row * view.size, view.size, out);
        }
      });
    });

    for_each_shard("relocate copies", [&](const Shard& shard) {
      RowRange mine = positions_in(destination, homes[static_cast<size_t>(shard.index)]);
      mine = {std::max(mine.begin, first_copy[static_cast<size_t>(part.begin)]),
              std::min(mine.end, first_copy[static_cast<size_t>(part.end)])};
      parallel_for(mine.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
        for (int64_t copy = mine.begin + begin; copy < mine.begin + end; ++copy) {
          const int64_t row = destination[static_cast<size_t>(copy)];
          const int64_t position =
              std::upper_bound(first_copy.begin(), first_copy.end(), copy) - first_copy.begin() - 1;
          const float* in = parcel.data() + (position - part.begin) * row_floats;
          for (const ColumnView& view : views) {
            std::copy_n(in, view.size, view.data + row * view.size);
            in += view.size;
          }
          reset_moments(columns, state, row, now);
        }
      });
    });
  }
}

void reset_rows(const SplatColumns& columns, const AdamState& state, const std::vector<int64_t>& rows,
                int64_t now) {
  check_rows("rows", rows, columns.num_rows);
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
  for_each_shard("reset rows", [&](const Shard& shard) {
    const RowRange mine = positions_in(rows, homes[static_cast<size_t>(shard.index)]);
    for (int64_t i = mine.begin; i < mine.end; ++i)
      reset_moments(columns, &state, rows[static_cast<size_t>(i)], now);
  });
}

}  // namespace mgpu::splat
