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
#include "math/search.h"
#include "memory/buffer.h"
#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kSourcesPerExchange = int64_t{1} << 18;  // 62 MB at SH degree 3

int64_t pieces_of(const RowRange& range) { return (range.size() + kRowsPerPiece - 1) / kRowsPerPiece; }

// The positions of a list (ascending) whose rows are in `range`.
RowRange positions_in(const RowListView& list, RowRange range) {
  return {math::first_at_least(list, list.count, range.begin),
          math::first_at_least(list, list.count, range.end)};
}

// The columns of a row, and of its moments, as (pointer, floats a row).
struct ColumnView {
  FloatArray data;
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
    for (int i = 0; i < size; ++i) state->exp_avg[column].set(row * size + i, 0.0f, 0);
    std::fill_n(state->exp_avg_sq[column] + row * size, size, 0.0f);
  }
  state->last_step[row] = static_cast<int32_t>(now);
}

}  // namespace

RowList dead_rows(const SplatColumns& columns, float min_opacity) {
  const std::vector<RowRange> homes = homes_of(columns);
  std::vector<std::vector<std::vector<int64_t>>> found;
  for (const RowRange& home : homes) found.emplace_back(static_cast<size_t>(pieces_of(home)));
  for_each_shard("dead rows", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      auto& rows = found[static_cast<size_t>(shard.index)][static_cast<size_t>(begin / kRowsPerPiece)];
      for (int64_t row = home.begin + begin; row < home.begin + end; ++row) {
        if (!is_alive(columns, row, min_opacity)) rows.push_back(row);
      }
    });
  });
  std::vector<int64_t> all;
  for (const auto& pieces : found) {
    for (const auto& rows : pieces) all.insert(all.end(), rows.begin(), rows.end());
  }
  return row_list(all, columns.num_rows, "dead rows");
}

RowList sample_rows(const SplatColumns& columns, float min_opacity, int64_t count, uint64_t seed,
                    int64_t step) {
  RowList sampled;
  if (count <= 0) return sampled;
  sampled.count = count;
  sampled.row = Buffer<int64_t>(count, kExchange);
  std::fill(sampled.row.begin(), sampled.row.end(), -1);
  const std::vector<RowRange> homes = homes_of(columns);
  std::vector<std::vector<uint64_t>> weight_before;  // by shard and piece: the sum of all pieces before
  for (const RowRange& home : homes) weight_before.emplace_back(static_cast<size_t>(pieces_of(home)));
  for_each_shard("sample sums", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      uint64_t sum = 0;
      for (int64_t row = home.begin + begin; row < home.begin + end; ++row)
        sum += sample_weight(columns, row, min_opacity);
      weight_before[static_cast<size_t>(shard.index)][static_cast<size_t>(begin / kRowsPerPiece)] = sum;
    });
  });
  uint64_t total = 0;
  for (auto& pieces : weight_before) {
    for (uint64_t& piece : pieces) total += std::exchange(piece, total);
  }
  if (total == 0) return sampled;

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

  for_each_shard("sample pick", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    parallel_for(home.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
      uint64_t sum =
          weight_before[static_cast<size_t>(shard.index)][static_cast<size_t>(begin / kRowsPerPiece)];
      size_t next = static_cast<size_t>(std::lower_bound(target.begin(), target.end(), sum) - target.begin());
      for (int64_t row = home.begin + begin; row < home.begin + end && next < target.size(); ++row) {
        sum += sample_weight(columns, row, min_opacity);
        for (; next < target.size() && target[next] < sum; ++next)
          sampled.row[static_cast<int64_t>(next)] = row;
      }
    });
  });
  return sampled;
}

void relocate(const SplatColumns& columns, const AdamState* state, const RowList& sources,
              const RowList& destinations, float min_opacity, int64_t now) {
  check_pairs(sources, destinations);
  const RowListView source = sources.view(), destination = destinations.view();
  if (source.count == 0 || source[0] < 0) return;
  // by distinct source: the row, and the position of its first copy
  std::vector<int64_t> distinct, first_copy;
  for (int64_t i = 0; i < source.count; ++i) {
    if (i == 0 || source[i] != source[i - 1]) {
      distinct.push_back(source[i]);
      first_copy.push_back(i);
    }
  }
  first_copy.push_back(source.count);

  const auto views = column_views(columns);
  const int64_t row_floats =
      std::accumulate(views.begin(), views.end(), int64_t{0},
                      [](int64_t sum, const ColumnView& view) { return sum + view.size; });
  const std::vector<RowRange> homes = homes_of(columns);
  const int64_t num_sources = static_cast<int64_t>(distinct.size());
  Buffer<float> parcel(0, kExchange);
  for (int64_t chunk = 0; chunk < num_sources; chunk += kSourcesPerExchange) {
    const RowRange part{chunk, std::min(num_sources, chunk + kSourcesPerExchange)};
    parcel.resize_discard(part.size() * row_floats);

    for_each_shard("relocate sources", [&](const Shard& shard) {
      const RowListView rows{distinct.data(), 0, num_sources};
      RowRange mine = positions_in(rows, homes[static_cast<size_t>(shard.index)]);
      mine = {std::max(mine.begin, part.begin), std::min(mine.end, part.end)};
      parallel_for(mine.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
        for (int64_t position = mine.begin + begin; position < mine.begin + end; ++position) {
          const size_t index = static_cast<size_t>(position);
          const int64_t row = distinct[index];
          const math::Relocated split = math::relocate(math::sigmoid(columns.opacities[row]),
                                                       first_copy[index + 1] - first_copy[index] + 1);
          columns.opacities[row] = math::relocated_logit(split.opacity, min_opacity);
          for (int axis = 0; axis < 3; ++axis) columns.scales[3 * row + axis] += std::log(split.scale_ratio);
          reset_moments(columns, state, row, now);
          float* out = parcel.data() + (position - part.begin) * row_floats;
          for (const ColumnView& view : views) {
            for (int i = 0; i < view.size; ++i) *out++ = view.data[row * view.size + i];
          }
        }
      });
    });

    for_each_shard("relocate copies", [&](const Shard& shard) {
      RowRange mine = positions_in(destination, homes[static_cast<size_t>(shard.index)]);
      mine = {std::max(mine.begin, first_copy[static_cast<size_t>(part.begin)]),
              std::min(mine.end, first_copy[static_cast<size_t>(part.end)])};
      parallel_for(mine.size(), kRowsPerPiece, [&](int64_t begin, int64_t end) {
        for (int64_t copy = mine.begin + begin; copy < mine.begin + end; ++copy) {
          const int64_t row = destination[copy];
          const int64_t position =
              std::upper_bound(first_copy.begin(), first_copy.end(), copy) - first_copy.begin() - 1;
          const float* in = parcel.data() + (position - part.begin) * row_floats;
          for (const ColumnView& view : views) {
            for (int i = 0; i < view.size; ++i) view.data.set(row * view.size + i, *in++, 0);  // exact
          }
          reset_moments(columns, state, row, now);
        }
      });
    });
  }
}

void reset_rows(const SplatColumns& columns, const AdamState& state, const RowList& rows, int64_t now) {
  const RowListView list = rows.view();
  const std::vector<RowRange> homes = homes_of(columns);
  for_each_shard("reset rows", [&](const Shard& shard) {
    const RowRange mine = positions_in(list, homes[static_cast<size_t>(shard.index)]);
    for (int64_t i = mine.begin; i < mine.end; ++i) reset_moments(columns, &state, list[i], now);
  });
}

}  // namespace mgpu::splat
