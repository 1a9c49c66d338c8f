// SPDX-License-Identifier: Apache-2.0
// check_stages.cpp: every stage of the CUDA flavour against a plain evaluation on the host from the same
// cuda/math headers, without torch. Prints a table and fails on the first column that is out of its
// tolerance. Each stage is fed with what the GPU's stage before it gave, so that an error shows where it is
// made.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "math/cull.h"
#include "math/gaussian.h"
#include "math/patch.h"
#include "math/relocation.h"
#include "math/sh.h"
#include "math/ssim.h"
#include "memory/tally.h"
#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "mesh/late.h"
#include "mesh/launch.h"
#include "splat/assign.h"
#include "splat/bin.h"
#include "splat/cell_row.h"
#include "splat/cells.h"
#include "splat/densify.h"
#include "splat/exchange.h"
#include "splat/history.h"
#include "splat/loss.h"
#include "splat/pipeline.h"
#include "splat/pixels.h"
#include "splat/project.h"
#include "splat/relocate.h"
#include "splat/reorder.h"
#include "splat/replay.h"
#include "splat/step.h"

using namespace mgpu;
using namespace mgpu::splat;

namespace {

int failures = 0;

bool apart = false;  // shards of one GPU count as GPUs of their own
void use_mesh(const std::vector<std::string>& names) { set_mesh(names, apart); }

void report(const std::string& what, const char* measure, double value, double tolerance) {
  const bool good = value <= tolerance;  // NaN fails
  if (!good) ++failures;
  std::printf("%-4s %-52s %-22s %.3e (<= %.0e)\n", good ? "ok" : "BAD", what.c_str(), measure, value,
              tolerance);
  std::fflush(stdout);
}

// ---- differences

struct Difference {
  double squared = 0, norm = 0, largest = 0, scale = 0;
  void add(double got, double want) {
    const double d = std::isnan(got) && std::isnan(want) ? 0.0 : got - want;
    squared += d * d;
    norm += std::isnan(want) ? 0.0 : want * want;
    largest = std::isnan(d) ? d : std::max(largest, std::fabs(d));
    scale = std::max(scale, std::isnan(want) ? 0.0 : std::fabs(want));
  }
  double relative() const { return squared == 0 ? 0.0 : std::sqrt(squared / std::max(norm, 1e-30)); }
  double of_largest() const { return largest == 0 ? 0.0 : largest / std::max(scale, 1e-30); }
};

// ---- scenes

constexpr int kFloats[kColumns] = {3, 4, 3, 1, 3, 45};

struct Table {  // on the host and on the GPU of shard 0
  int64_t rows;
  std::vector<float> column[kColumns], exp_avg[kColumns], exp_avg_sq[kColumns];
  std::vector<int32_t> last_step;
  Buffer<float> device_column[kColumns], device_exp_avg[kColumns], device_exp_avg_sq[kColumns];
  Buffer<int32_t> device_last_step;

  SplatColumns host() { return columns(column); }
  SplatColumns device() {
    return {device_column[0].data(),
            device_column[1].data(),
            device_column[2].data(),
            device_column[3].data(),
            device_column[4].data(),
            device_column[5].data(),
            rows,
            15};
  }
  AdamState host_state() {
    AdamState state{};
    for (int i = 0; i < kColumns; ++i) {
      state.exp_avg[i] = exp_avg[i].data();
      state.exp_avg_sq[i] = exp_avg_sq[i].data();
    }
    state.last_step = last_step.data();
    return state;
  }
  AdamState device_state() {
    AdamState state{};
    for (int i = 0; i < kColumns; ++i) {
      state.exp_avg[i] = device_exp_avg[i].data();
      state.exp_avg_sq[i] = device_exp_avg_sq[i].data();
    }
    state.last_step = device_last_step.data();
    return state;
  }
  void send() {
    for (int i = 0; i < kColumns; ++i) {
      device_column[i] = to_buffer(column[i], 0);
      device_exp_avg[i] = to_buffer(exp_avg[i], 0);
      device_exp_avg_sq[i] = to_buffer(exp_avg_sq[i], 0);
    }
    device_last_step = to_buffer(last_step, 0);
    synchronise_shards();
  }
  SplatColumns columns(std::vector<float>* from) {
    return {from[0].data(), from[1].data(), from[2].data(), from[3].data(),
            from[4].data(), from[5].data(), rows,           15};
  }
};

// Numbers of one row: the same on any number of threads.
class RowRandom {
 public:
  RowRandom(uint64_t seed, int64_t row)
      : state_(seed * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(row) * 0xD1B54A32D192ED03ull) {}
  float unit() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (static_cast<float>((z ^ (z >> 31)) >> 40) + 0.5f) * 0x1p-24f;
  }
  float normal() { return std::sqrt(-2.f * std::log(unit())) * std::cos(6.2831853f * unit()); }

 private:
  uint64_t state_;
};

void fill_row(Table& table, int64_t row, uint64_t seed, float log_scale, bool odd_rows, int64_t base,
              int64_t now) {
  RowRandom random(seed, row);
  float* mean = &table.column[0][3 * row];
  mean[0] = 6.f * random.unit() - 3.f;
  mean[1] = 4.f * random.unit() - 2.f;
  mean[2] = 8.f * random.unit() - 2.f;
  for (int i = 0; i < 4; ++i) table.column[1][4 * row + i] = random.normal();
  for (int i = 0; i < 3; ++i) table.column[2][3 * row + i] = log_scale + random.normal();
  table.column[3][row] = 2.f * random.normal();
  for (int i = 0; i < 3; ++i) table.column[4][3 * row + i] = random.normal();
  for (int i = 0; i < 45; ++i) table.column[5][45 * row + i] = 0.2f * random.normal();
  const int64_t last = base + static_cast<int64_t>(random.unit() * static_cast<float>(now - base + 1));
  table.last_step[row] = static_cast<int32_t>(std::min(last, now));
  const bool silent = row % 5 == 0;
  for (int c = 0; c < kColumns; ++c) {
    for (int i = 0; i < kFloats[c]; ++i) {
      const size_t at = static_cast<size_t>(row * kFloats[c] + i);
      // |exp_avg| is at most 6.3 roots of exp_avg_sq: Adam's own moments reach 7.3 (math/cull.h)
      table.exp_avg[c][at] = silent ? 0.f : 1e-4f * std::clamp(random.normal(), -2.f, 2.f);
      table.exp_avg_sq[c][at] = silent ? 0.f : 1e-8f * (0.1f + random.unit());
    }
  }
  if (odd_rows && row % 1009 == 3) mean[1] = NAN;
  if (odd_rows && row % 1013 == 5) table.column[5][45 * row + 7] = NAN;
  if (odd_rows && row % 1019 == 7) table.column[2][3 * row] = INFINITY;
}

Table make_table(int64_t rows, uint64_t seed, float log_scale, bool odd_rows, int64_t base, int64_t now) {
  Table table;
  table.rows = rows;
  for (int i = 0; i < kColumns; ++i) {
    table.column[i].resize(static_cast<size_t>(rows * kFloats[i]));
    table.exp_avg[i].resize(table.column[i].size());
    table.exp_avg_sq[i].resize(table.column[i].size());
  }
  table.last_step.resize(static_cast<size_t>(rows));
  parallel_for(rows, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) fill_row(table, row, seed, log_scale, odd_rows, base, now);
  });
  table.send();
  return table;
}

std::vector<View> make_views(int count, int width, int height) {
  std::vector<View> views;
  int64_t tile_begin = 0;
  for (int v = 0; v < count; ++v) {
    const double angle = 0.25 * v;
    const float c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
    const float viewmat[16] = {c, 0, s, 0.1f * v, 0, 1, 0, -0.05f * v, -s, 0, c, 4.f, 0, 0, 0, 1};
    const int w = std::max(1, width - 37 * v), h = std::max(1, height - 21 * v);
    views.push_back(make_view(viewmat, 0.9 * w, 0.95 * w, 0.5 * w + 3, 0.48 * h, w, h, tile_begin));
    tile_begin += views.back().tile_count();
  }
  return views;
}

Frame make_frame(Table& table, const std::vector<View>& views, const History* history, int degree,
                 bool antialiased, bool deterministic) {
  Frame frame;
  frame.views = views;
  frame.settings.sh_degree = degree;
  frame.settings.antialiased = antialiased;
  frame.settings.deterministic = deterministic;
  frame.settings.background[0] = 0.2f;
  frame.settings.background[1] = 0.5f;
  frame.settings.background[2] = 0.9f;
  frame.columns = table.device();
  if (history) {
    frame.state = table.device_state();
    frame.history = history->view();
    frame.replays = true;
  }
  for (int s = 0; s < mesh().size(); ++s) frame.homes.push_back(equal_chunk(table.rows, s, mesh().size()));
  return frame;
}

struct Images {
  std::vector<Buffer<float>> rgb, depth, accumulation;
  explicit Images(const std::vector<View>& views) {
    for (const View& view : views) {
      const int64_t pixels = int64_t{view.width} * view.height;
      rgb.emplace_back(3 * pixels, 0);
      depth.emplace_back(pixels, 0);
      accumulation.emplace_back(pixels, 0);
    }
  }
  std::vector<ImagePointers> pointers() {
    std::vector<ImagePointers> out;
    for (size_t v = 0; v < rgb.size(); ++v)
      out.push_back({rgb[v].data(), depth[v].data(), accumulation[v].data()});
    return out;
  }
  std::vector<ImageGradPointers> grads(bool with_depth) {
    std::vector<ImageGradPointers> out;
    for (size_t v = 0; v < rgb.size(); ++v)
      out.push_back({rgb[v].data(), with_depth ? depth[v].data() : nullptr, accumulation[v].data()});
    return out;
  }
  void fill(uint64_t seed) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<float> normal;
    for (auto* list : {&rgb, &depth, &accumulation}) {
      for (Buffer<float>& buffer : *list) {
        std::vector<float> values(static_cast<size_t>(buffer.size()));
        for (float& value : values) value = normal(engine);
        upload(buffer.data(), values.data(), buffer.size(), 0);
      }
    }
  }
};

// ---- what the GPU has, by stage

struct HomeRecords {
  std::vector<int64_t> row;
  std::vector<int32_t> view;
  std::vector<Record> record;
};

HomeRecords home_records(const Frame& frame, size_t shard) {
  const ShardRecords& in = frame.shards[shard];
  return {to_vector(in.row, in.count), to_vector(in.view, in.count), to_vector(in.record, in.count)};
}

std::vector<Record> received(const Frame& frame, size_t owner) {
  return frame.homes.size() == 1 ? to_vector(frame.shards[0].record, frame.shards[0].count)
                                 : to_vector(frame.owners[owner].record);
}
std::vector<int32_t> received_view(const Frame& frame, size_t owner) {
  if (frame.homes.size() == 1) return to_vector(frame.shards[0].view, frame.shards[0].count);
  if (frame.views.size() == 1)
    return std::vector<int32_t>(static_cast<size_t>(frame.owners[owner].received()), 0);
  return to_vector(frame.owners[owner].view);
}
std::vector<int32_t> entries(const Frame& frame, size_t owner) {
  return to_vector(frame.owners[owner].entry_record);
}

template <typename Visit>
void for_each_tile(const View& view, const Record& record, const Visit& visit) {
  math::TileEllipse ellipse;
  if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) return;
  for (int y = record.tile_rect[1]; y < record.tile_rect[3]; ++y) {
    const math::TileSpan span = math::tile_span_of(ellipse, view, record.tile_rect, y);
    for (int x = span.begin; x < span.end; ++x) visit(view.position_of(int64_t{y} * view.tiles_x + x));
  }
}

// ---- stages

void check_project(const std::string& name, const Frame& frame, Table& table, const AdamHistory* history) {
  const SplatColumns columns = table.host();
  const AdamState state = table.host_state();
  Difference mean2d, conic, opacity, rgb, depth;
  int64_t total = 0, missing = 0, rects = 0;
  for (size_t shard = 0; shard < frame.shards.size(); ++shard) {
    const HomeRecords got = home_records(frame, shard);
    size_t next = 0;
    for (size_t v = 0; v < frame.views.size(); ++v) {
      if (frame.shards[shard].view_begin[v] != static_cast<int64_t>(next)) ++missing;
      for (int64_t row = frame.homes[shard].begin; row < frame.homes[shard].end; ++row) {
        RowValues values;
        math::Projected p;
        float colour[3], direction[3];
        replay_geometry(columns, history ? &state : nullptr, history, row, values.mean, values.quat,
                        values.log_scale, values.opacity_logit);
        bool visible = math::project_gaussian(frame.views[v], values.mean, values.quat, values.log_scale,
                                              values.opacity_logit, frame.settings.antialiased, p);
        if (visible) {
          replay_sh(columns, history ? &state : nullptr, history, row, frame.settings.sh_count(), values.sh);
          for (int i = 0; i < 3; ++i) direction[i] = values.mean[i] - frame.views[v].centre[i];
          visible = math::eval_sh(frame.settings.sh_degree, direction, values.sh, colour);
        }
        const bool has =
            next < got.row.size() && got.row[next] == row && got.view[next] == static_cast<int32_t>(v);
        if (visible != has) ++missing;
        total += visible;
        if (!has) continue;
        const Record& record = got.record[next++];
        if (!visible) continue;
        for (int i = 0; i < 2; ++i) mean2d.add(record.mean2d[i], p.mean2d[i]);
        for (int i = 0; i < 3; ++i) conic.add(record.conic[i], p.conic[i]);
        for (int i = 0; i < 3; ++i) rgb.add(record.rgb[i], colour[i]);
        opacity.add(record.opacity, p.opacity);
        depth.add(record.depth, p.depth);
        rects += std::memcmp(record.tile_rect, p.tile_rect, sizeof p.tile_rect) != 0;
      }
    }
    if (next != got.row.size()) ++missing;
  }
  std::printf("     %-52s %lld records\n", (name + " project").c_str(), static_cast<long long>(total));
  report(name + " project", "visibility differs", static_cast<double>(missing),
         2 + 1e-5 * static_cast<double>(total));
  report(name + " project", "tile_rect differs", static_cast<double>(rects),
         2 + 1e-4 * static_cast<double>(total));
  report(name + " project", "mean2d rel L2", mean2d.relative(), 1e-5);
  report(name + " project", "conic rel L2", conic.relative(), 1e-4);
  report(name + " project", "opacity rel L2", opacity.relative(), 1e-5);
  report(name + " project", "rgb rel L2", rgb.relative(), 1e-5);
  report(name + " project", "depth rel L2", depth.relative(), 1e-5);
}

// Half extents, and the bound of the patches that blend's cull can meet (frame.h), counted one by one.
void check_extents(const std::string& name, const Frame& frame, const TileOwner& owner,
                   const std::vector<Record>& records, const std::vector<int32_t>& record_view,
                   const std::vector<std::vector<std::pair<float, int32_t>>>& lists) {
  const std::vector<float> half = to_vector(owner.half_extent);
  double short_by = 0, long_by = 0;
  for (size_t i = 0; i < records.size(); ++i) {
    math::TileEllipse ellipse;
    if (!math::make_tile_ellipse(records[i].mean2d, records[i].conic, records[i].opacity, ellipse)) continue;
    for (const auto& [got, want] :
         {std::pair{half[2 * i], ellipse.half_width}, {half[2 * i + 1], ellipse.half_height}}) {
      short_by = std::max(short_by, want - static_cast<double>(got));
      long_by = std::max(long_by, static_cast<double>(got) / want - 1.0);
    }
  }
  int64_t patches = 0;
  for (size_t t = 0; t < lists.size(); ++t) {
    for (const auto& [depth, r] : lists[t]) {
      const View& view = frame.views[static_cast<size_t>(record_view[r])];
      const int64_t local = view.tile_at(owner.tiles.begin + static_cast<int64_t>(t));
      const float x0 = static_cast<float>(local % view.tiles_x * kTileSize),
                  y0 = static_cast<float>(local / view.tiles_x * kTileSize);
      for (int patch = 0; patch < 8; ++patch) {  // the cull of blend.cu
        const float x = x0 + static_cast<float>(patch % 2 * 8 + 4),
                    y = y0 + static_cast<float>(patch / 2 * 4 + 2);
        patches += std::fabs(records[r].mean2d[0] - x) <= half[2 * r] * 1.000001f + 3.5f + 0.01f &&
                   std::fabs(records[r].mean2d[1] - y) <= half[2 * r + 1] * 1.000001f + 1.5f + 0.01f;
      }
    }
  }
  const double bound = static_cast<double>(owner.patch_pairs), met = static_cast<double>(patches);
  report(name + " bin", "half extents short by", short_by, 0);
  report(name + " bin", "half extents too long", long_by, 1e-5);
  report(name + " bin", "patches above bound", met - bound, 0);
  report(name + " bin", "bound above patches", bound - met, 20 + 0.05 * met);
}

void check_exchange_and_bin(const std::string& name, const Frame& frame) {
  int64_t wrong_records = 0, wrong_pairs = 0, pairs = 0, order = 0;
  for (size_t o = 0; o < frame.owners.size(); ++o) {
    const TileOwner& owner = frame.owners[o];
    // what the owner should have received
    std::vector<Record> want;
    std::vector<int32_t> want_view;
    for (size_t home = 0; home < frame.homes.size(); ++home) {
      const HomeRecords in = home_records(frame, home);
      for (size_t i = 0; i < in.row.size(); ++i) {
        bool touches = frame.homes.size() == 1;
        for_each_tile(frame.views[in.view[i]], in.record[i],
                      [&](int64_t tile) { touches |= tile >= owner.tiles.begin && tile < owner.tiles.end; });
        if (!touches) continue;
        want.push_back(in.record[i]);
        want_view.push_back(in.view[i]);
      }
    }
    const std::vector<Record> got = received(frame, o);
    const std::vector<int32_t> got_view = received_view(frame, o);
    wrong_records += got.size() != want.size();
    for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
      wrong_records += std::memcmp(&got[i], &want[i], sizeof(Record)) != 0 || got_view[i] != want_view[i];
    }
    // lists of its tiles
    std::vector<std::vector<std::pair<float, int32_t>>> lists(static_cast<size_t>(owner.tiles.size()));
    for (size_t i = 0; i < got.size(); ++i) {
      for_each_tile(frame.views[got_view[i]], got[i], [&](int64_t tile) {
        if (tile >= owner.tiles.begin && tile < owner.tiles.end)
          lists[tile - owner.tiles.begin].emplace_back(got[i].depth, static_cast<int32_t>(i));
      });
    }
    const std::vector<int32_t> entry = entries(frame, o);
    const std::vector<int64_t> begin = to_vector(owner.tile_begin);
    if (begin.front() != 0 || begin.back() != static_cast<int64_t>(entry.size()) ||
        owner.pairs != static_cast<int64_t>(entry.size()))
      ++wrong_pairs;
    check_extents(name, frame, owner, got, got_view, lists);
    for (size_t tile = 0; tile < lists.size(); ++tile) {
      auto& list = lists[tile];
      std::stable_sort(list.begin(), list.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      const std::vector<int32_t> have(entry.begin() + begin[tile], entry.begin() + begin[tile + 1]);
      pairs += static_cast<int64_t>(list.size());
      for (size_t i = 0; i + 1 < have.size(); ++i) {
        const float a = got[have[i]].depth, b = got[have[i + 1]].depth;
        order += !(a < b || (a == b && have[i] < have[i + 1]));
      }
      std::vector<int32_t> expected;
      for (const auto& [depth, record] : list) expected.push_back(record);
      if (have == expected) continue;
      std::vector<int32_t> a = have, b = expected, difference;
      std::sort(a.begin(), a.end());
      std::sort(b.begin(), b.end());
      std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(difference));
      wrong_pairs += std::max<int64_t>(1, static_cast<int64_t>(difference.size()));
    }
  }
  std::printf("     %-52s %lld pairs\n", (name + " bin").c_str(), static_cast<long long>(pairs));
  report(name + " exchange", "records differ", static_cast<double>(wrong_records), 0);
  report(name + " bin", "pairs differ", static_cast<double>(wrong_pairs), 1e-6 * static_cast<double>(pairs));
  report(name + " bin", "order broken", static_cast<double>(order), 0);
}

// Blends the GPU's lists again, and walks them back with the adjoint of tile.h.
void check_blend(const std::string& name, const Frame& frame, const Images& images, const Images* grads,
                 bool with_depth) {
  Difference rgb, depth, light;
  int64_t far = 0, pixels = 0;
  std::vector<std::vector<std::array<double, 12>>> sums(frame.owners.size());
  struct HostImage {
    std::vector<float> rgb, depth, accumulation;
  };
  std::vector<HostImage> image, grad;
  for (size_t v = 0; v < frame.views.size(); ++v) {
    image.push_back(
        {to_vector(images.rgb[v]), to_vector(images.depth[v]), to_vector(images.accumulation[v])});
    if (grads)
      grad.push_back(
          {to_vector(grads->rgb[v]), to_vector(grads->depth[v]), to_vector(grads->accumulation[v])});
  }
  const float* background = frame.settings.background;
  for (size_t o = 0; o < frame.owners.size(); ++o) {
    const TileOwner& owner = frame.owners[o];
    const std::vector<Record> record = received(frame, o);
    const std::vector<int32_t> entry = entries(frame, o);
    const std::vector<int64_t> begin = to_vector(owner.tile_begin);
    sums[o].assign(record.size(), {});
    for (int64_t tile = 0; tile < owner.tiles.size(); ++tile) {
      size_t v = frame.views.size() - 1;
      while (frame.views[v].tile_begin > owner.tiles.begin + tile) --v;
      const View& view = frame.views[v];
      const int64_t local = view.tile_at(owner.tiles.begin + tile);
      const int x0 = static_cast<int>(local % view.tiles_x) * kTileSize,
                y0 = static_cast<int>(local / view.tiles_x) * kTileSize;
      for (int i = 0; i < kTilePixels; ++i) {
        const int x = x0 + i % kTileSize, y = y0 + i / kTileSize;
        if (x >= view.width || y >= view.height) continue;
        float live = 1.f, kept = 1.f, colour[3] = {}, z = 0.f;
        int64_t last = -1;
        for (int64_t e = begin[tile]; e < begin[tile + 1] && live > 0.f; ++e) {
          const Record& r = record[entry[e]];
          const math::BlendRow row =
              math::make_blend_row(r.mean2d, r.conic, r.opacity, static_cast<float>(y) + 0.5f);
          bool contributes;
          const float weight = math::blend_step(
              math::uncapped_alpha(row, static_cast<float>(x) + 0.5f - row.x), live, kept, contributes);
          for (int c = 0; c < 3; ++c) colour[c] += weight * r.rgb[c];
          z += weight * r.depth;
          if (contributes) last = e;
        }
        const size_t at = static_cast<size_t>(y) * view.width + x;
        bool off = false;
        for (int c = 0; c < 3; ++c) {
          const float want = colour[c] + kept * background[c];
          off |= !(std::fabs(image[v].rgb[3 * at + c] - want) <= 1e-4f * std::max(1.f, std::fabs(want)));
          rgb.add(image[v].rgb[3 * at + c], want);
        }
        depth.add(image[v].depth[at], z);
        light.add(image[v].accumulation[at], 1.0 - kept);
        far += off;
        ++pixels;
        if (!grads) continue;
        const float* g = &grad[v].rgb[3 * at];
        const float gz = with_depth ? grad[v].depth[at] : 0.f;
        float transmittance = kept;
        float behind = kept * (background[0] * g[0] + background[1] * g[1] + background[2] * g[2] -
                               grad[v].accumulation[at]);
        for (int64_t e = last; e >= begin[tile]; --e) {
          const Record& r = record[entry[e]];
          const float dx = static_cast<float>(x) + 0.5f - r.mean2d[0],
                      dy = static_cast<float>(y) + 0.5f - r.mean2d[1];
          const math::BlendRow row =
              math::make_blend_row(r.mean2d, r.conic, r.opacity, static_cast<float>(y) + 0.5f);
          const float dot = g[0] * r.rgb[0] + g[1] * r.rgb[1] + g[2] * r.rgb[2] + gz * r.depth;
          float weight;
          const float s = math::blend_step_backward(math::uncapped_alpha(row, dx), dot, true, transmittance,
                                                    behind, weight);
          auto& sum = sums[o][entry[e]];
          const double along_x = r.conic[0] * dx + r.conic[1] * dy,
                       along_y = r.conic[1] * dx + r.conic[2] * dy;
          sum[0] -= s * along_x;
          sum[1] -= s * along_y;
          sum[2] += 0.5 * s * dx * dx;
          sum[3] += double{s} * dx * dy;
          sum[4] += 0.5 * s * dy * dy;
          sum[5] -= s / r.opacity;
          for (int c = 0; c < 3; ++c) sum[6 + c] += double{weight} * g[c];
          sum[9] += double{weight} * gz;
          if (!frame.settings.wanted_absgrad) continue;
          sum[10] += std::fabs(s * along_x);
          sum[11] += std::fabs(s * along_y);
        }
      }
    }
  }
  report(name + " blend", "rgb rel L2", rgb.relative(), 1e-4);
  report(name + " blend", "pixels off by 1e-4", static_cast<double>(far), 1e-3 * static_cast<double>(pixels));
  report(name + " blend", "depth rel L2", depth.relative(), 1e-4);
  report(name + " blend", "accumulation rel L2", light.relative(), 1e-4);
  if (!grads) return;

  // at home: the owners' sums
  Difference field[6];
  const int of_field[12] = {0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5};
  for (size_t home = 0; home < frame.homes.size(); ++home) {
    std::vector<std::array<double, 12>> want(static_cast<size_t>(frame.shards[home].count));
    for (size_t o = 0; o < frame.owners.size(); ++o) {
      const std::vector<int64_t> to = records_of_parcel(frame, home, o);
      for (size_t i = 0; i < to.size(); ++i) {
        const auto& part = sums[o][static_cast<size_t>(frame.owners[o].peer_begin[home]) + i];
        for (int k = 0; k < 12; ++k) want[static_cast<size_t>(to[i])][k] += part[k];
      }
    }
    const std::vector<RecordGrad> got = to_vector(frame.shards[home].grad);
    if (got.size() != want.size()) report(name + " return", "gradients missing", 1, 0);
    for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
      const float* values = reinterpret_cast<const float*>(&got[i]);
      for (int k = 0; k < 12; ++k) field[of_field[k]].add(values[k], want[i][k]);
    }
  }
  if (!frame.settings.wanted_absgrad) report(name + " blend_backward", "absgrad not 0", field[5].largest, 0);
  const char* names[6] = {"mean2d rel L2", "conic rel L2", "opacity rel L2",
                          "rgb rel L2",    "depth rel L2", "absgrad rel L2"};
  for (int k = 0; k < 6; ++k) report(name + " blend_backward", names[k], field[k].relative(), 1e-3);
}

// Without the way back, and without depth: the same images to the bit.
void check_plain_images(const std::string& name, Frame& frame, const Images& images) {
  const RenderSettings settings = frame.settings;
  for (const bool backward : {true, false}) {
    Images again(frame.views);
    std::vector<ImagePointers> pointers = again.pointers();
    for (ImagePointers& image : pointers) image.depth = nullptr;
    frame.images = pointers;
    frame.settings.wanted_depth = false;
    frame.settings.wanted_backward = backward;
    blend(frame);
    int64_t differ = 0;
    for (size_t v = 0; v < frame.views.size(); ++v) {
      differ += to_vector(images.rgb[v]) != to_vector(again.rgb[v]);
      differ += to_vector(images.accumulation[v]) != to_vector(again.accumulation[v]);
    }
    report(name + (backward ? " blend without depth" : " blend for show"), "images differ",
           static_cast<double>(differ), 0);
  }
  frame.settings = settings;
}

// Which patches a record meets, against alpha at each of their pixels: none too few, and not many too many.
void check_patches(int64_t records) {
  int64_t missed = 0, met = 0, lit = 0, beyond_box = 0;
  double alpha_off = 0;
  for (int64_t i = 0; i < records; ++i) {
    RowRandom random(31, i);
    // axes from under a pixel to thousands, any direction, thin ones too; the mean in or around the tile
    const double angle = 6.2831853 * random.unit(), major = std::exp(9.0 * random.unit() - 0.5),
                 minor = std::max(0.55, major * std::exp(-7.0 * random.unit() * random.unit()));
    const double c = std::cos(angle), s = std::sin(angle);
    const double p = 1 / (major * major), q = 1 / (minor * minor);
    Record record{};
    record.conic[0] = static_cast<float>(c * c * p + s * s * q);
    record.conic[1] = static_cast<float>(c * s * (p - q));
    record.conic[2] = static_cast<float>(s * s * p + c * c * q);
    record.opacity = i % 3 ? random.unit() : (1.f + 0.2f * random.unit()) / 255.f;
    const double along = (random.unit() - 0.5) * 6 * major, across = (random.unit() - 0.5) * 6 * minor;
    const int x0 = kTileSize * (i % 2 ? 3 : 500), y0 = kTileSize * (i % 2 ? 2 : 400);
    record.mean2d[0] = static_cast<float>(x0 + 16 * random.unit() + c * along - s * across);
    record.mean2d[1] = static_cast<float>(y0 + 16 * random.unit() + s * along + c * across);
    math::TileEllipse ellipse;
    if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) continue;
    const float half[2] = {static_cast<float>(ellipse.half_width * (1 + 1e-6)),
                           static_cast<float>(ellipse.half_height * (1 + 1e-6))};
    const uint32_t bits =
        math::patches_met(record.mean2d, record.conic, half, static_cast<float>(x0), static_cast<float>(y0));
    const math::Falloff falloff = math::make_falloff(record.conic);
    const double ac = static_cast<double>(record.conic[0]) * record.conic[2];
    const bool thick = ac - static_cast<double>(record.conic[1]) * record.conic[1] > 1e-2 * ac;
    for (int patch = 0; patch < math::kTilePatches; ++patch) {
      const int left = x0 + patch % math::kPatchesAcross * math::kPatchX,
                top = y0 + patch / math::kPatchesAcross * math::kPatchY;
      bool any = false;
      for (int k = 0; k < math::kPatchX * math::kPatchY; ++k) {
        const float x = static_cast<float>(left + k % math::kPatchX) + 0.5f,
                    y = static_cast<float>(top + k / math::kPatchX) + 0.5f;
        const float alpha = math::alpha_at(
            math::alpha_column(falloff, record.mean2d[0], record.mean2d[1], record.opacity, x), y);
        any |= alpha >= math::kAlphaMin;
        const math::BlendRow row = math::make_blend_row(record.mean2d, record.conic, record.opacity, y);
        const float plain = std::min(math::kAlphaMax, math::uncapped_alpha(row, x - row.x));
        if (thick && plain >= math::kAlphaMin)
          alpha_off = std::max(alpha_off, std::fabs(alpha / plain - 1.0));
      }
      const bool meets = bits >> patch & 1;
      missed += any && !meets;
      met += meets;
      lit += any;
      const double far_x = std::fabs(record.mean2d[0] - (left + 0.5 * math::kPatchX)) - half[0] * 1.000002 -
                           0.5 * (math::kPatchX - 1) - 0.03;
      const double far_y = std::fabs(record.mean2d[1] - (top + 0.5 * math::kPatchY)) - half[1] * 1.000002 -
                           0.5 * (math::kPatchY - 1) - 0.03;
      beyond_box += meets && (far_x > 0 || far_y > 0);
    }
  }
  report("patches", "missed", static_cast<double>(missed), 0);
  report("patches", "beyond what is counted", static_cast<double>(beyond_box), 0);
  report("patches", "met but dark, share", 1.0 - static_cast<double>(lit) / static_cast<double>(met), 0.1);
  // sigma's terms cancel to 1 part in 100 of at most 2 ln 255 at the most: a few ulp of 1,100
  report("patches", "alpha differs, relative", alpha_off, 5e-4);
}

void check_project_backward(const std::string& name, const Frame& frame, Table& table,
                            const AdamHistory* history) {
  const SplatColumns columns = table.host();
  const AdamState state = table.host_state();
  Buffer<float> grad[kColumns];
  std::vector<std::vector<double>> want(kColumns);
  for (int c = 0; c < kColumns; ++c) {
    grad[c] = Buffer<float>(table.rows * kFloats[c], 0);
    zero(grad[c]);
    want[c].assign(static_cast<size_t>(table.rows * kFloats[c]), 0.0);
  }
  const ColumnGrads pointers{grad[0].data(), grad[1].data(), grad[2].data(),
                             grad[3].data(), grad[4].data(), grad[5].data()};
  std::vector<double> got_view(12 * frame.views.size()), want_view(got_view.size(), 0.0),
      noise_view(got_view.size(), 0.0);
  std::vector<std::vector<double>> noise =
      want;  // the same of rows that are off by half an ulp: what rounding alone does
  project_backward(frame, &pointers, got_view.data());
  for (size_t shard = 0; shard < frame.shards.size(); ++shard) {
    const HomeRecords in = home_records(frame, shard);
    const std::vector<RecordGrad> g = to_vector(frame.shards[shard].grad);
    for (size_t i = 0; i < in.row.size(); ++i) {
      RowValues values;
      const int64_t row = in.row[i];
      replay_geometry(columns, history ? &state : nullptr, history, row, values.mean, values.quat,
                      values.log_scale, values.opacity_logit);
      replay_sh(columns, history ? &state : nullptr, history, row, frame.settings.sh_count(), values.sh);
      float out[11] = {}, sh[48] = {}, view[12] = {};
      record_backward(frame.views[in.view[i]], frame.settings, values, g[i], out, out + 3, out + 7, out[10],
                      sh, view);
      for (int k = 0; k < 3; ++k) want[0][3 * row + k] += out[k];
      for (int k = 0; k < 4; ++k) want[1][4 * row + k] += out[3 + k];
      for (int k = 0; k < 3; ++k) want[2][3 * row + k] += out[7 + k];
      want[3][row] += out[10];
      for (int k = 0; k < 3; ++k) want[4][3 * row + k] += sh[k];
      for (int k = 3; k < 3 * frame.settings.sh_count(); ++k) want[5][45 * row + k - 3] += sh[k];
      for (int k = 0; k < 12; ++k) want_view[12 * in.view[i] + k] += view[k];
      for (int k = 0; k < 3; ++k) values.mean[k] *= 1.f + (k % 2 ? 1 : -1) * 6e-8f;
      for (int k = 0; k < 4; ++k) values.quat[k] *= 1.f + (k % 2 ? 1 : -1) * 6e-8f;
      for (int k = 0; k < 3; ++k) values.log_scale[k] *= 1.f + (k % 2 ? 1 : -1) * 6e-8f;
      std::fill(std::begin(out), std::end(out), 0.f);
      std::fill(std::begin(sh), std::end(sh), 0.f);
      std::fill(std::begin(view), std::end(view), 0.f);
      record_backward(frame.views[in.view[i]], frame.settings, values, g[i], out, out + 3, out + 7, out[10],
                      sh, view);
      for (int k = 0; k < 3; ++k) noise[0][3 * row + k] += out[k];
      for (int k = 0; k < 4; ++k) noise[1][4 * row + k] += out[3 + k];
      for (int k = 0; k < 3; ++k) noise[2][3 * row + k] += out[7 + k];
      noise[3][row] += out[10];
      for (int k = 0; k < 3; ++k) noise[4][3 * row + k] += sh[k];
      for (int k = 3; k < 3 * frame.settings.sh_count(); ++k) noise[5][45 * row + k - 3] += sh[k];
      for (int k = 0; k < 12; ++k) noise_view[12 * in.view[i] + k] += view[k];
    }
  }
  const char* names[kColumns] = {"means", "quats", "scales", "opacities", "sh0", "shN"};
  for (int c = 0; c < kColumns; ++c) {
    Difference difference, rounding;
    const std::vector<float> got = to_vector(grad[c]);
    for (size_t i = 0; i < got.size(); ++i) difference.add(got[i], want[c][i]);
    for (size_t i = 0; i < got.size(); ++i) rounding.add(noise[c][i], want[c][i]);
    report(name + " project_backward " + names[c], "rel L2", difference.relative(),
           std::max(1e-4, 10 * rounding.relative()));
  }
  Difference view, rounding;
  for (size_t i = 0; i < got_view.size(); ++i) view.add(got_view[i], want_view[i]);
  for (size_t i = 0; i < got_view.size(); ++i) rounding.add(noise_view[i], want_view[i]);
  report(name + " project_backward viewmat", "rel L2", view.relative(),
         std::max(1e-4, 10 * rounding.relative()));
}

// A step over `frames` and a flush, on copies of the table.
void check_step(const std::string& name, const std::vector<const Frame*>& frames, Table& table,
                History& history) {
  StepSettings settings;
  settings.lrs = {1e-3, 2e-3, 3e-3, 4e-2, 5e-3, 6e-4};
  settings.noise_scale = 0.05;
  settings.opacity_reg = 0.01;
  settings.scale_reg = 0.02;
  // the host's
  Table want = make_table(0, 0, 0, false, 0, 0);
  want.rows = table.rows;
  for (int c = 0; c < kColumns; ++c) {
    want.column[c] = table.column[c];
    want.exp_avg[c] = table.exp_avg[c];
    want.exp_avg_sq[c] = table.exp_avg_sq[c];
  }
  want.last_step = table.last_step;
  const AdamHistory past = history.view();
  const History::Step now = history.next(settings.lrs, settings.noise_scale);
  const math::AdamConstants constants = math::adam_constants(past.beta1, past.beta2, past.eps);
  std::map<int64_t, std::vector<std::pair<size_t, std::pair<int32_t, RecordGrad>>>> seen;
  for (size_t f = 0; f < frames.size(); ++f) {
    for (size_t shard = 0; shard < frames[f]->shards.size(); ++shard) {
      const HomeRecords in = home_records(*frames[f], shard);
      const std::vector<RecordGrad> g = to_vector(frames[f]->shards[shard].grad);
      for (size_t i = 0; i < in.row.size(); ++i) seen[in.row[i]].push_back({f, {in.view[i], g[i]}});
    }
  }
  const SplatColumns columns = want.host();
  const AdamState state = want.host_state();
  float* data[kColumns] = {columns.means,     columns.quats, columns.scales,
                           columns.opacities, columns.sh0,   columns.shN.float32()};
  const auto catch_up = [&](int64_t row) {  // parameters and moments of a row to now
    RowValues values;
    const int64_t last = state.last_step[row];
    replay_geometry(columns, &state, &past, row, values.mean, values.quat, values.log_scale,
                    values.opacity_logit);
    replay_sh(columns, &state, &past, row, 16, values.sh);
    const float* from[kColumns] = {values.mean,           values.quat, values.log_scale,
                                   &values.opacity_logit, values.sh,   values.sh + 3};
    for (int c = 0; c < kColumns; ++c) {
      for (int i = 0; i < kFloats[c]; ++i) {
        data[c][row * kFloats[c] + i] = from[c][i];
        state.exp_avg[c].float32()[row * kFloats[c] + i] *= past.beta1_power[past.now - last];
        state.exp_avg_sq[c][row * kFloats[c] + i] *= past.beta2_power[past.now - last];
      }
    }
    state.last_step[row] = static_cast<int32_t>(past.now);
    return values;
  };
  double mean_opacity = 0, mean_scale = 0;
  const double rows_seen = static_cast<double>(seen.size());
  // what the same step does to rows that are off by half an ulp: the first moments, second moments,
  // parameters
  Difference m_rounding, v_rounding, moved_rounding[kColumns];
  for (const auto& [row, list] : seen) {
    const RowValues values = catch_up(row);
    const auto gradient = [&, row = row, &list = list](const RowValues& at, float g[59]) {
      float view[12] = {};
      for (const auto& [f, record] : list) {
        record_backward(frames[f]->views[record.first], frames[f]->settings, at, record.second, g, g + 3,
                        g + 7, g[10], g + 11, view);
      }
      const float opacity = math::sigmoid(at.opacity_logit);
      g[10] += static_cast<float>(settings.opacity_reg / rows_seen) * opacity * (1 - opacity);
      for (int i = 0; i < 3; ++i)
        g[7 + i] += static_cast<float>(settings.scale_reg / (3 * rows_seen)) * std::exp(at.log_scale[i]);
    };
    float g[59] = {}, g_off[59] = {};
    RowValues off = values;
    for (int k = 0; k < 3; ++k) off.mean[k] *= 1.f + (k % 2 ? 1 : -1) * 6e-8f;
    for (int k = 0; k < 4; ++k) off.quat[k] *= 1.f + (k % 2 ? 1 : -1) * 6e-8f;
    for (int k = 0; k < 3; ++k) off.log_scale[k] *= 1.f + (k % 2 ? 1 : -1) * 6e-8f;
    gradient(values, g);
    gradient(off, g_off);
    mean_opacity += math::sigmoid(values.opacity_logit) / rows_seen;
    for (int i = 0; i < 3; ++i) mean_scale += std::exp(values.log_scale[i]) / (3 * rows_seen);
    int k = 0;
    for (int c = 0; c < kColumns; ++c) {
      for (int i = 0; i < kFloats[c]; ++i, ++k) {
        const int64_t at = row * kFloats[c] + i;
        float p_off = data[c][at], m_off = state.exp_avg[c][at], v_off = state.exp_avg_sq[c][at];
        math::adam_step(constants, now.step_size[c], now.inv_sqrt_bc2, g_off[k], p_off, m_off, v_off);
        const float before = table.column[c][at];
        math::adam_step(constants, now.step_size[c], now.inv_sqrt_bc2, g[k], data[c][at],
                        state.exp_avg[c].float32()[at], state.exp_avg_sq[c][at]);
        moved_rounding[c].add(double{p_off} - before, double{data[c][at]} - before);
        m_rounding.add(m_off, state.exp_avg[c][at]);
        v_rounding.add(v_off, state.exp_avg_sq[c][at]);
      }
    }
    math::add_mcmc_noise(math::draw(past.seed, math::Stream::kNoise, now.number, row), now.noise_scale,
                         columns.quats + 4 * row, columns.scales + 3 * row, columns.opacities[row],
                         columns.means + 3 * row);
    state.last_step[row] = static_cast<int32_t>(now.number);
  }
  const StepReport got_report = step(frames, table.device(), table.device_state(), history, settings);
  report(name + " step", "rows seen differ", std::fabs(static_cast<double>(got_report.rows_seen) - rows_seen),
         0);
  if (rows_seen > 0) {
    report(name + " step", "mean opacity differs", std::fabs(got_report.mean_opacity - mean_opacity), 1e-5);
    report(name + " step", "mean scale differs", std::fabs(got_report.mean_scale - mean_scale) / mean_scale,
           1e-5);
  }
  const auto compare = [&](const std::string& stage) {
    Difference moved[kColumns], m, v;
    int64_t steps = 0;
    for (int c = 0; c < kColumns; ++c) {
      const std::vector<float> got = to_vector(table.device_column[c]),
                               got_m = to_vector(table.device_exp_avg[c]),
                               got_v = to_vector(table.device_exp_avg_sq[c]);
      for (size_t i = 0; i < got.size(); ++i) {  // how far the row moved, so that small steps count
        if (!std::isfinite(want.column[c][i]) || !std::isfinite(table.column[c][i])) continue;
        moved[c].add(double{got[i]} - table.column[c][i], double{want.column[c][i]} - table.column[c][i]);
        m.add(got_m[i], want.exp_avg[c][i]);
        v.add(got_v[i], want.exp_avg_sq[c][i]);
      }
    }
    const std::vector<int32_t> last = to_vector(table.device_last_step);
    for (size_t i = 0; i < last.size(); ++i) steps += last[i] != want.last_step[i];
    const char* names[kColumns] = {"means", "quats", "scales", "opacities", "sh0", "shN"};
    for (int c = 0; c < kColumns; ++c)
      report(name + " " + stage + " " + names[c], "moved, rel L2", moved[c].relative(),
             std::max(2e-3, 10 * moved_rounding[c].relative()));
    report(name + " " + stage, "exp_avg rel L2", m.relative(), std::max(1e-3, 10 * m_rounding.relative()));
    report(name + " " + stage, "exp_avg_sq rel L2", v.relative(), std::max(1e-3, 10 * v_rounding.relative()));
    report(name + " " + stage, "last_step differs", static_cast<double>(steps), 0);
  };
  compare("step");
  history.push(settings.lrs, settings.noise_scale);
  flush(table.device(), table.device_state(), history);
  const AdamHistory after = history.view();
  for (int64_t row = 0; row < want.rows; ++row) {
    if (state.last_step[row] >= after.now) continue;
    const int64_t last = state.last_step[row];
    float mean[3], quat[4], log_scale[3], logit, sh[48];
    replay_geometry(columns, &state, &after, row, mean, quat, log_scale, logit);
    replay_sh(columns, &state, &after, row, 16, sh);
    const float* from[kColumns] = {mean, quat, log_scale, &logit, sh, sh + 3};
    for (int c = 0; c < kColumns; ++c) {
      for (int i = 0; i < kFloats[c]; ++i) {
        data[c][row * kFloats[c] + i] = from[c][i];
        state.exp_avg[c].float32()[row * kFloats[c] + i] *= after.beta1_power[after.now - last];
        state.exp_avg_sq[c][row * kFloats[c] + i] *= after.beta2_power[after.now - last];
      }
    }
    state.last_step[row] = static_cast<int32_t>(after.now);
  }
  compare("flush");
}

History make_history(int64_t steps) {
  History history(40, 0.9, 0.999, 1e-15, 1234);
  for (int64_t i = 0; i < steps; ++i)
    history.push({1e-3, 1e-3, 5e-3, 5e-2, 2.5e-3, 1.25e-4}, i % 2 ? 0.1 : 0.0);
  return history;
}

// dL_ddepth comes with absgrad, unless the order is fixed.
void check_scene(int64_t rows, int views, int width, int height, bool replay, bool antialiased,
                 bool deterministic, int degree, bool absgrad = true) {
  char name[160];
  std::snprintf(name, sizeof name, "[%d shards, %lld rows, %d x %dx%d%s%s%s, sh%d]", mesh().size(),
                static_cast<long long>(rows), views, width, height, replay ? ", replay" : "",
                antialiased ? ", aa" : "", deterministic ? ", fixed order" : "", degree);
  History history = make_history(replay ? 12 : 0);
  const AdamHistory past = history.view();
  Table table = make_table(rows, 7 + rows, -3.2f, true, past.base, past.now);
  if (!replay) {  // state that is up to date, so that a step can follow
    std::fill(table.last_step.begin(), table.last_step.end(), static_cast<int32_t>(past.now));
    table.send();
  }
  const std::vector<View> cameras = make_views(views, width, height);
  Frame frame = make_frame(table, cameras, &history, degree, antialiased, deterministic);
  frame.settings.wanted_absgrad = absgrad;
  Images images(cameras), grads(cameras);
  grads.fill(99);
  run_forward(frame, images.pointers());
  check_project(name, frame, table, &past);
  check_exchange_and_bin(name, frame);
  const bool with_depth = !deterministic && absgrad;
  run_backward(frame, grads.grads(with_depth));
  check_blend(name, frame, images, &grads, with_depth);
  check_plain_images(name, frame, images);
  check_project_backward(name, frame, table, &past);
  check_step(name, {&frame}, table, history);
}

// Projection and lists alone, where sizes take other ways: sorts of many items, tiles that need wide keys,
// records of thousands of tiles, columns that are not aligned to 16 bytes. Few rows of `fresh` in 16 are up
// to date.
void check_lists(int64_t rows, int views, int width, int height, float log_scale, bool shifted, int fresh,
                 int degree) {
  char name[160];
  std::snprintf(name, sizeof name, "[%d shards, %lld rows, %d x %dx%d, lists%s, sh%d]", mesh().size(),
                static_cast<long long>(rows), views, width, height, shifted ? ", shifted" : "", degree);
  History history = make_history(12);
  const AdamHistory past = history.view();
  Table table = make_table(rows, 3 + rows, log_scale, true, past.base, past.now);
  for (int64_t row = 0; row < rows; ++row) {
    if (row % 16 < fresh) table.last_step[row] = static_cast<int32_t>(past.now);
  }
  table.send();
  Frame frame = make_frame(table, make_views(views, width, height), &history, degree, false, false);
  std::vector<Buffer<float>> moved;
  if (shifted) {
    float* columns[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      moved.emplace_back(static_cast<int64_t>(table.column[c].size()) + 1 + c % 3, 0);
      columns[c] = moved.back().data() + 1 + c % 3;
      upload(columns[c], table.column[c].data(), static_cast<int64_t>(table.column[c].size()), 0);
    }
    frame.columns = {columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], rows, 15};
  }
  order_tiles(frame);
  run_project(frame);
  assign_tiles(frame);
  exchange_records(frame);
  bin_records(frame);
  check_project(name, frame, table, &past);
  check_exchange_and_bin(name, frame);
}

struct CullCase {
  const char* name;
  CameraModel model;
  double rows_kept, cells_kept;  // the largest share of what is hidden that the tests may keep
};
// Of a fisheye the image's circle is tested, which holds more than the image; and drawn are rectangles of all
// shapes, whose circles are larger still.
constexpr CullCase kCullCases[] = {{"cull", CameraModel::kPinhole, 0.3, 0.6},
                                   {"fisheye cull", CameraModel::kFisheye, 0.65, 0.9},
                                   {"ortho cull", CameraModel::kOrtho, 0.3, 0.6}};

// A lens of the model: fisheyes fold somewhere, or do not.
CameraLens drawn_lens(CameraModel model, std::mt19937_64& engine, int scene) {
  std::uniform_real_distribution<double> unit(-1, 1);
  CameraLens lens{model};
  if (model == CameraModel::kFisheye && scene % 3) {
    double size = 0.1;
    for (double& k : lens.distortion) k = size * unit(engine), size /= 4;
  }
  return lens;
}

// math/cull.h on the host: nothing that project_gaussian sees is rejected, wherever within its margin the row
// was.
void check_cull(const CullCase& test) {
  std::mt19937_64 engine(17);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> unit(0.f, 1.f);
  int64_t lost = 0, seen = 0, rejected = 0, total = 0;
  for (int scene = 0; scene < 400; ++scene) {
    float quat[4], rotation[9], norm = 0;
    for (float& q : quat) q = normal(engine), norm += q * q;
    for (float& q : quat) q /= std::sqrt(norm);
    math::rotation_from_unit_quat(quat, rotation);
    const float far = std::pow(10.f, 3 * unit(engine) - 1.5f);
    float viewmat[16] = {};
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) viewmat[4 * i + j] = rotation[3 * i + j];
      viewmat[4 * i + 3] = far * normal(engine) * (i < 2 ? 0.3f : 1.f);
    }
    const int width = 1 + static_cast<int>(std::pow(2.f, 13 * unit(engine))),
              height = 1 + static_cast<int>(std::pow(2.f, 13 * unit(engine)));
    const double unit_away = test.model == CameraModel::kOrtho ? far : 1.0;
    const double focal = std::max(width, height) * (0.3 + 2 * unit(engine)) / unit_away;
    const View view = make_view(viewmat, focal, focal * (0.8 + 0.4 * unit(engine)),
                                width * (scene % 5 ? 0.5 : 2.0 * unit(engine) - 0.5),
                                height * (scene % 7 ? 0.5 : 2.0 * unit(engine) - 0.5), width, height, 0,
                                drawn_lens(test.model, engine, scene));
    const math::CullView cull = math::make_cull_view(view);
    const float log_scale = std::log(far) - 1 - 6 * unit(engine);
    for (int i = 0; i < 2000; ++i, ++total) {
      float mean[3], stored[3], log_scales[3], q[4];
      const float margin = i % 3 ? far * 0.02f * unit(engine) : 0.f;
      for (int k = 0; k < 3; ++k) {
        mean[k] = far * normal(engine);
        stored[k] = mean[k] + margin * (2 * unit(engine) - 1) * 0.999f;
        log_scales[k] = log_scale + 2 * normal(engine);
      }
      for (float& value : q) value = normal(engine);
      const float largest = std::max({log_scales[0], log_scales[1], log_scales[2]});
      const float share = i % 2 ? 0.3f : 0.f;  // of the margin that is noise
      math::Projected p;
      const bool unseen = math::surely_unseen(cull, stored, largest, (1 - share) * margin,
                                              share * margin / std::exp(2 * largest));
      const bool visible = math::project_gaussian(view, mean, q, log_scales, 6 * normal(engine), false, p);
      lost += visible && unseen;
      seen += visible;
      rejected += unseen;
    }
  }
  report(test.name, "visible rows rejected", static_cast<double>(lost), 0);
  report(test.name, "few rows are seen", static_cast<double>(total) / std::max<double>(1, seen), 50);
  report(test.name, "invisible rows kept", static_cast<double>(total - seen - rejected),
         test.rows_kept * static_cast<double>(total - seen));
}

// The same of boxes: rows are stored in one, and seen where drift and noise may have taken them; at an
// opacity that moments may have brought about.
void check_cell_cull(const CullCase& test) {
  std::mt19937_64 engine(23);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> unit(0.f, 1.f);
  int64_t lost = 0, seen = 0, rejected = 0, cells = 0, empty = 0;
  constexpr int kRows = 24;
  constexpr float kRatio = 9.f, kLogitDrift = 0.2f;
  for (int scene = 0; scene < 400; ++scene) {
    const float far = std::pow(10.f, 3 * unit(engine) - 1.5f);
    const std::vector<View> views = make_views(8, 1 + static_cast<int>(std::pow(2.f, 12 * unit(engine))),
                                               1 + static_cast<int>(std::pow(2.f, 12 * unit(engine))));
    View view = views[static_cast<size_t>(scene) % views.size()];
    for (float& shift : view.translation) shift *= far;
    if (test.model == CameraModel::kOrtho) view.fx /= far, view.fy /= far;
    set_lens(view, drawn_lens(test.model, engine, scene));
    const math::CullView cull = math::make_cull_view(view);
    for (int i = 0; i < 400; ++i, ++cells) {
      math::CellMargins margins{};
      if (i % 4 > 1) margins.mean = far * 0.02f * unit(engine), margins.log_scale = 0.3f * unit(engine);
      const float log_scale = std::log(far) - 1 - 6 * unit(engine), width = 0.3f * far * unit(engine);
      if (i % 2) margins.noise = 0.05f * far * unit(engine) * std::exp(-2 * log_scale);
      math::Cell cell = math::empty_cell();
      math::CellRow rows[kRows];
      float middle[3];
      for (float& x : middle) x = 5 * far * normal(engine);
      for (math::CellRow& row : rows) {
        for (int k = 0; k < 3; ++k) {
          row.mean[k] = middle[k] + width * normal(engine);
          row.log_scale[k] = log_scale + normal(engine);
        }
        row.logit = 3 * normal(engine) - 2;
        row.drift_ratio = kRatio * unit(engine);
        const math::CellDemand demand(row, kLogitDrift);
        math::join(cell, demand);
        if (!demand.met_by(cell)) ++lost;
      }
      const bool unseen = math::surely_unseen(cull, cell, margins);
      bool any = false;
      for (const math::CellRow& row : rows) {
        float mean[3], quat[4], scales[3], largest = -INFINITY, drawn[3], length = 0;
        for (int k = 0; k < 3; ++k) {
          scales[k] = row.log_scale[k] + 0.999f * margins.log_scale * (2 * unit(engine) - 1);
          largest = std::max(largest, scales[k]);
          drawn[k] = normal(engine);
          length += drawn[k] * drawn[k];
        }
        const float logit = row.logit - row.drift_ratio * kLogitDrift * unit(engine);
        const float opacity = 1 / (1 + std::exp(-logit)),
                    gate = 1 / (1 + std::exp(100 * (opacity - 0.005f)));  // of add_mcmc_noise
        const float reach = 0.999f * margins.noise * std::exp(2 * largest) * gate / std::sqrt(length);
        for (int k = 0; k < 3; ++k)
          mean[k] =
              row.mean[k] + 0.999f * margins.mean * (2 * unit(engine) - 1) + (i % 2 ? reach * drawn[k] : 0);
        for (float& value : quat) value = normal(engine);
        math::Projected p;
        any |= math::project_gaussian(view, mean, quat, scales, 6 * normal(engine), false, p);
      }
      lost += any && unseen;
      seen += any;
      if (i % 4 == 0) {  // of boxes without margins
        empty += !any;
        rejected += unseen;
      }
    }
  }
  const std::string name = std::string(test.name) + " of cells";
  report(name, "cells of visible rows rejected", static_cast<double>(lost), 0);
  report(name, "few cells are seen", static_cast<double>(cells) / std::max<double>(1, seen), 20);
  report(name, "cells of hidden rows kept", static_cast<double>(empty - rejected), test.cells_kept * empty);
}

// Rows along a Z curve of their means.
void sort_rows(Table& table) {
  const auto key = [&](int64_t row) {
    uint64_t bits = 0;
    for (int axis = 0; axis < 3; ++axis) {
      const float x = table.column[0][static_cast<size_t>(3 * row + axis)];
      const auto cell = static_cast<uint64_t>(x > -16.f && x < 15.9f ? 32.f * (x + 16.f) : 1023.f);
      for (int b = 0; b < 10; ++b) bits |= (cell >> b & 1) << (3 * b + axis);
    }
    return bits;
  };
  std::vector<std::pair<uint64_t, int64_t>> order;
  for (int64_t row = 0; row < table.rows; ++row) order.emplace_back(key(row), row);
  std::sort(order.begin(), order.end());
  for (int c = 0; c < kColumns; ++c) {
    for (auto* column : {&table.column[c], &table.exp_avg[c], &table.exp_avg_sq[c]}) {
      const std::vector<float> from = *column;
      for (int64_t row = 0; row < table.rows; ++row)
        std::copy_n(from.data() + order[static_cast<size_t>(row)].second * kFloats[c], kFloats[c],
                    column->data() + row * kFloats[c]);
    }
  }
  const std::vector<int32_t> last_step = table.last_step;
  for (int64_t row = 0; row < table.rows; ++row)
    table.last_step[static_cast<size_t>(row)] =
        last_step[static_cast<size_t>(order[static_cast<size_t>(row)].second)];
  table.send();
}

// Rows outside of their boxes, and the largest difference from boxes that are measured on the host.
void check_boxes(const std::string& name, const Cells& cells, Table& table, bool exact) {
  const std::vector<math::Cell> got = cells.to_host();
  const SplatColumns columns = table.host();
  const AdamState state = table.host_state();
  int64_t outside = 0, differ = 0;
  double reach = 0;
  size_t next = 0;
  for (size_t shard = 0; shard < cells.homes().size(); ++shard) {
    const ShardCells of_shard = cells.of_shard(shard);
    const RowRange home = cells.homes()[shard];
    for (int64_t first = home.begin; first < home.end; first += kCellRows, ++next) {
      math::Cell want = math::empty_cell();
      for (int64_t row = first; row < std::min(home.end, first + kCellRows); ++row) {
        const math::CellRow stored = stored_cell_row(columns, state, row, of_shard.moment_ratio);
        if (!stored.finite()) continue;
        const math::CellDemand demand(stored, of_shard.logit_drift);
        math::join(want, demand);
        math::CellDemand rounded = demand;  // roots and exponentials are not the host's
        rounded.log_reach -= 1e-3f;
        outside += !rounded.met_by(got[next]);
      }
      for (int i = 0; i < 3; ++i) {
        differ += got[next].low[i] != want.low[i];
        differ += got[next].high[i] != want.high[i];
      }
      differ += got[next].log_scale != want.log_scale;
      if (want.log_reach != got[next].log_reach)
        reach = std::max<double>(reach, std::fabs(want.log_reach - got[next].log_reach));
    }
  }
  report(name, "rows outside of boxes", static_cast<double>(outside), 0);
  if (!exact) return;
  report(name, "numbers of boxes", static_cast<double>(differ), 0);
  report(name, "log reach", reach, 1e-3);
}

int64_t records_that_differ(const Frame& a, const Frame& b) {
  int64_t count = 0;
  for (size_t shard = 0; shard < a.shards.size(); ++shard) {
    const HomeRecords x = home_records(a, shard), y = home_records(b, shard);
    if (x.row != y.row || x.view != y.view) return -1;
    for (size_t i = 0; i < x.record.size(); ++i)
      count += std::memcmp(&x.record[i], &y.record[i], sizeof(Record)) != 0;
  }
  return count;
}

// Frames by cells are those without; a step keeps the boxes right, and what its rows miss later is covered.
void check_cells(int64_t rows, int views, bool sorted, bool several_steps) {
  char label[120];
  std::snprintf(label, sizeof label, "[%d shards, %lld rows, %d views, %s cells]", mesh().size(),
                static_cast<long long>(rows), views, sorted ? "sorted" : "unsorted");
  const std::string name = label;
  History history = make_history(12);
  const bool calm = views == 1;  // rows are small and move little, so that many cells are left out
  Table table = make_table(rows, 5 + rows, calm ? -5.2f : -3.2f, true, history.base(), history.now());
  if (sorted) sort_rows(table);
  std::vector<View> cameras;
  // Of eight cameras, those from `turn` on, so that other rows miss steps.
  const auto choose_cameras = [&](size_t turn) {
    cameras = make_views(8, 300, 200);
    std::rotate(cameras.begin(), cameras.begin() + static_cast<std::ptrdiff_t>(turn % 8), cameras.end());
    cameras.resize(static_cast<size_t>(views));
    int64_t tile_begin = 0;
    for (View& view : cameras) {
      if (calm) view.fx *= 3, view.fy *= 3;
      view.tile_begin = tile_begin;
      tile_begin += view.tile_count();
    }
  };
  choose_cameras(0);
  const AdamState state = table.device_state();
  Cells cells;
  const auto frame_with = [&](const Cells* used) {
    Frame frame = make_frame(table, cameras, &history, 3, false, false);
    frame.cells = used;
    order_tiles(frame);
    run_project(frame);
    return frame;
  };
  const auto measure = [&] {
    const DriftBounds bounds = drift_bounds(history.view(), false);
    if (!cells.any() || !cells.hold(make_frame(table, cameras, &history, 3, false, false).homes, &bounds))
      cells.build(table.device(), &state, &bounds,
                  make_frame(table, cameras, &history, 3, false, false).homes);
  };
  measure();
  check_boxes(name, cells, table, true);
  for (int step_number = 0; step_number < (several_steps ? 6 : 1); ++step_number) {
    measure();
    const Frame plain = frame_with(nullptr), culled = frame_with(&cells);
    const double differ = static_cast<double>(records_that_differ(plain, culled));
    report(name + " records", "differ", std::fabs(differ), 0);
    int64_t kept = 0, all = 0, candidates = 0, plain_candidates = 0;
    for (const ShardRecords& shard : culled.shards) {
      kept += shard.culled.cells_kept;
      all += shard.culled.cells;
      candidates += shard.culled.candidates;
    }
    for (const ShardRecords& shard : plain.shards) plain_candidates += shard.culled.candidates;
    report(name + " candidates", "more than without cells",
           static_cast<double>(std::max<int64_t>(0, candidates - plain_candidates)), 0);
    if (sorted && rows > 20000 && views == 1) report(name, "cells kept of all", 1.0 * kept / all, 0.95);
    Frame frame = make_frame(table, cameras, &history, 3, false, false);
    frame.cells = &cells;
    Images images(cameras), grads(cameras);
    grads.fill(17 + static_cast<uint64_t>(step_number));
    run_forward(frame, images.pointers());
    run_backward(frame, grads.grads(false));
    StepSettings settings;
    settings.lrs = {calm ? 5e-4 : 2e-2, 2e-3, calm ? 1e-3 : 1e-2, 4e-2, 5e-3, 6e-4};
    settings.noise_scale = calm ? 0.02 : 0.5;
    settings.cells = &cells;
    step({&frame}, table.device(), table.device_state(), history, settings);
    history.push(settings.lrs, settings.noise_scale);
    for (int c = 0; c < kColumns; ++c) {
      table.column[c] = to_vector(table.device_column[c]);
      table.exp_avg[c] = to_vector(table.device_exp_avg[c]);
      table.exp_avg_sq[c] = to_vector(table.device_exp_avg_sq[c]);
    }
    table.last_step = to_vector(table.device_last_step);
    check_boxes(name + " after a step", cells, table, false);
    choose_cameras(static_cast<size_t>(step_number + 1));
  }
  if (rows < 1000) return;
  std::vector<math::Cell> broken = cells.to_host();  // what the comparison is worth
  for (math::Cell& cell : broken)
    for (int i = 0; i < 3; ++i) cell.low[i] = cell.high[i] = 1e5f;
  cells.from_host(broken);
  const Frame plain = frame_with(nullptr), culled = frame_with(&cells);
  report(name + " broken boxes", "are not noticed", records_that_differ(plain, culled) == 0, 0);
}

// Two frames in one step.
void check_two_frames(int64_t rows) {
  History history = make_history(5);
  const AdamHistory past = history.view();
  Table table = make_table(rows, 5, -3.f, false, past.base, past.now);
  const std::vector<View> one = make_views(1, 200, 150), three = make_views(3, 130, 170);
  Frame first = make_frame(table, one, &history, 3, false, false),
        second = make_frame(table, three, &history, 3, false, false);
  Images first_images(one), second_images(three);
  run_forward(first, first_images.pointers());
  run_forward(second, second_images.pointers());
  first_images.fill(1);
  second_images.fill(2);
  run_backward(first, first_images.grads(true));
  run_backward(second, second_images.grads(false));
  check_step("[two frames, " + std::to_string(mesh().size()) + " shards]", {&first, &second}, table, history);
}

struct Rendering {
  std::vector<float> rgb, depth, accumulation, grad;
};

Rendering render_once(bool deterministic) {
  Table table = make_table(20000, 3, -3.f, true, 0, 0);
  const std::vector<View> cameras = make_views(2, 333, 222);
  Frame frame = make_frame(table, cameras, nullptr, 3, false, deterministic);
  Images images(cameras), grads(cameras);
  grads.fill(4);
  run_forward(frame, images.pointers());
  run_backward(frame, grads.grads(true));
  Rendering out;
  for (size_t v = 0; v < cameras.size(); ++v) {
    for (const auto& [list, to] : {std::pair{&images.rgb, &out.rgb}, std::pair{&images.depth, &out.depth},
                                   std::pair{&images.accumulation, &out.accumulation}}) {
      const std::vector<float> part = to_vector((*list)[v]);
      to->insert(to->end(), part.begin(), part.end());
    }
  }
  // by (view, row): homes ascend, so the records of a view come shard by shard
  for (size_t v = 0; v < cameras.size(); ++v) {
    for (const ShardRecords& shard : frame.shards) {
      const std::vector<RecordGrad> part = to_vector(shard.grad);
      const float* begin = reinterpret_cast<const float*>(part.data() + shard.view_begin[v]);
      out.grad.insert(out.grad.end(), begin, begin + 12 * (shard.view_begin[v + 1] - shard.view_begin[v]));
    }
  }
  return out;
}

int64_t bits_that_differ(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return -1;
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += std::memcmp(&a[i], &b[i], sizeof(float)) != 0;
  return count;
}

void check_meshes() {
  use_mesh({"cuda:0"});
  const Rendering one = render_once(false), fixed = render_once(true);
  for (const int shards : {1, 2, 3, 4, 7}) {
    use_mesh(std::vector<std::string>(static_cast<size_t>(shards), "cuda:0"));
    const Rendering other = render_once(false), again = render_once(true), twice = render_once(true);
    const std::string name = "[1 against " + std::to_string(shards) + " shards]";
    report(name + " rgb", "floats differ",
           std::fabs(static_cast<double>(bits_that_differ(one.rgb, other.rgb))), 0);
    report(name + " depth", "floats differ",
           std::fabs(static_cast<double>(bits_that_differ(one.depth, other.depth))), 0);
    report(name + " accumulation", "floats differ",
           std::fabs(static_cast<double>(bits_that_differ(one.accumulation, other.accumulation))), 0);
    report(name + " grad, fixed order, twice", "floats differ",
           std::fabs(static_cast<double>(bits_that_differ(again.grad, twice.grad))), 0);
    Difference grad, grad_fixed;
    for (size_t i = 0; i < one.grad.size(); ++i) grad.add(other.grad[i], fixed.grad[i]);
    for (size_t i = 0; i < one.grad.size(); ++i) grad_fixed.add(again.grad[i], fixed.grad[i]);
    report(name + " grad", "of largest", grad.of_largest(), 1e-4);
    report(name + " grad, fixed order", "of largest", grad_fixed.of_largest(), 1e-4);
  }
}

// ---- loss: windows of 121 products in double

// The gradient and, behind it, loss, L1 and SSIM.
std::vector<float> loss_once(int64_t height, int64_t width, float ssim_weight) {
  std::mt19937_64 engine(12);
  std::uniform_real_distribution<float> unit(0.f, 1.f);
  std::vector<float> x(static_cast<size_t>(height * width * 3)), y(x.size());
  for (float& value : x) value = unit(engine);
  for (float& value : y) value = unit(engine);
  const Buffer<float> dx = to_buffer(x, 0), dy = to_buffer(y, 0);
  Buffer<float> gradient(dx.size(), 0), value(3, 0);
  LossImages images;
  images.rgb = dx.data();
  images.target = dy.data();
  images.height = height;
  images.width = width;
  l1_ssim_into(images, ssim_weight, gradient.data(), value.data());
  std::vector<float> out = to_vector(gradient);
  for (const float part : to_vector(value)) out.push_back(part);
  return out;
}

void check_loss_meshes() {
  for (const float weight : {0.2f, 0.f}) {
    use_mesh({"cuda:0"});
    const std::vector<float> one = loss_once(333, 400, weight);
    for (const int shards : {2, 3, 4, 7}) {
      use_mesh(std::vector<std::string>(static_cast<size_t>(shards), "cuda:0"));
      const int64_t differ = bits_that_differ(one, loss_once(333, 400, weight));
      report("[1 against " + std::to_string(shards) + " shards] loss", "floats differ",
             static_cast<double>(differ), 0);
    }
  }
}

// As after stage "assign": one view, whose tiles along the curve are dealt to the shards in runs that end at
// these places, the last one where the tiles do.
Frame patches_frame(int width, int height, std::vector<int64_t> cut) {
  Frame frame;
  const float identity[16] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  frame.views.push_back(make_view(identity, 100, 100, width / 2., height / 2., width, height, 0));
  View& view = frame.views[0];
  frame.curves.push_back(tile_curve(view.tiles_x, view.tiles_y));
  const TileCurve& curve = *frame.curves[0];
  view.position_from_tile = curve.position_from_tile.data();
  view.tile_from_position = curve.tile_from_position.data();
  cut.push_back(view.tile_count());
  int64_t begin = 0;
  for (const int64_t end : cut) {
    frame.homes.emplace_back();
    frame.owners.emplace_back();
    frame.owners.back().tiles = {begin, end};
    begin = end;
    auto on_shard = std::make_shared<DeviceCurve>();
    on_shard->position_from_tile =
        to_buffer(curve.position_from_tile, static_cast<int>(frame.constants.size()));
    frame.constants.emplace_back();
    frame.constants.back().curves.push_back(std::move(on_shard));
  }
  return frame;
}

// Loss where the tiles are, each shard with a random run of tiles along the curve (one of them with none; or
// cut at `only_cut`, and all but two with none), its own pixels, their halo, and not-a-number everywhere
// else, against the loss of the whole image on the mesh.
void check_loss_patches(int width, int height, bool bytes, bool masked, float ssim_weight,
                        int64_t only_cut = -1) {
  const int shards = mesh().size();
  std::mt19937_64 engine(13);
  std::uniform_real_distribution<float> unit(0.f, 1.f);
  const size_t pixels = static_cast<size_t>(height) * static_cast<size_t>(width);
  std::vector<float> x(3 * pixels), y(3 * pixels);
  std::vector<uint8_t> y_bytes(3 * pixels), mask(pixels);
  for (float& value : x) value = unit(engine);
  for (float& value : y) value = unit(engine);
  for (uint8_t& value : y_bytes) value = static_cast<uint8_t>(unit(engine) * 255.f);
  for (uint8_t& keep : mask) keep = unit(engine) < 0.8f;
  const Buffer<float> dx = to_buffer(x, 0), dy = to_buffer(y, 0);
  const Buffer<uint8_t> dy_bytes = to_buffer(y_bytes, 0), dmask = to_buffer(mask, 0);
  LossImages images;
  images.target = bytes ? nullptr : dy.data();
  images.target_bytes = bytes ? dy_bytes.data() : nullptr;
  images.mask = masked ? dmask.data() : nullptr;
  images.height = height;
  images.width = width;
  LossImages whole = images;
  whole.rgb = dx.data();
  Buffer<float> want(dx.size(), 0), want_value(3, 0), got(dx.size(), 0), got_value(3, 0);
  l1_ssim_into(whole, ssim_weight, want.data(), want_value.data(), 0.5f);

  const int64_t tiles = int64_t{(width + kTileSize - 1) / kTileSize} * ((height + kTileSize - 1) / kTileSize);
  std::vector<int64_t> cut;
  for (int s = 1; s < shards; ++s)
    cut.push_back(only_cut >= 0 ? only_cut : static_cast<int64_t>(unit(engine) * static_cast<float>(tiles)));
  std::sort(cut.begin(), cut.end());
  if (shards > 2) cut[1] = cut[0];
  const Frame frame = patches_frame(width, height, cut);
  const View& view = frame.views[0];
  ShardImages own(frame, ssim_weight);
  const auto patches = view_patches(frame);
  const LossReach reach = loss_reach(height, width, ssim_weight);
  const int64_t row = 3 * int64_t{width};
  // Calls visit(offset of the first float, floats a row, rows) for the tiles of a shard.
  const auto for_each_own_tile = [&](int s, const auto& visit) {
    const RowRange tiles = patches[static_cast<size_t>(s)][0].tiles;
    for (int64_t position = tiles.begin; position < tiles.end; ++position) {
      const int tile = static_cast<int>(view.tile_at(position));
      const int top = tile / view.tiles_x * kTileSize, left = tile % view.tiles_x * kTileSize;
      visit(top * row + 3 * left, 3 * std::min(kTileSize, width - left), std::min(kTileSize, height - top));
    }
  };
  synchronise_shards();
  for_each_shard("check", [&](const Shard& shard) {
    const RowRange rows = rows_held(view, patches[static_cast<size_t>(shard.index)][0], reach);
    float* const mine = own.images()[static_cast<size_t>(shard.index)].rgb;
    if (rows.empty()) return;
    const std::vector<float> nothing(static_cast<size_t>(rows.size() * row), NAN);
    upload(mine + rows.begin * row, nothing.data(), rows.size() * row, shard.index);
    std::vector<CopyRect> rects;
    for_each_own_tile(shard.index, [&](int64_t at, int32_t wide, int32_t high) {
      rects.push_back({dx.data() + at, mine + at, row, row, wide, high});
    });
    flavour::copy_rects(rects, shard.index);
  });
  own.share_halo(frame);
  patch_losses_into({{images, own.loss_patches(frame, 0), own.owners(0)}}, ssim_weight, got_value.data(),
                    0.5f);
  synchronise_shards();
  for_each_shard("check", [&](const Shard& shard) {
    const float* const mine = own.gradients()[static_cast<size_t>(shard.index)].rgb;
    std::vector<CopyRect> rects;
    for_each_own_tile(shard.index, [&](int64_t at, int32_t wide, int32_t high) {
      rects.push_back({mine + at, got.data() + at, row, row, wide, high});
    });
    flavour::copy_rects(rects, shard.index);
  });
  synchronise_shards();
  char name[120];
  std::snprintf(name, sizeof name, "[%d shards] loss of patches %dx%d%s%s w%.1f", shards, width, height,
                bytes ? " uint8" : "", masked ? " mask" : "", ssim_weight);
  report(name, "gradients differ", static_cast<double>(bits_that_differ(to_vector(want), to_vector(got))), 0);
  const std::vector<float> a = to_vector(want_value), b = to_vector(got_value);
  for (size_t k = 0; k < 3; ++k)
    report(name, "value differs", std::fabs(double{a[k]} - b[k]), ssim_weight != 0.f ? 0. : 1e-6);
}

void check_loss(int64_t height, int64_t width, bool bytes, bool masked, float ssim_weight) {
  char name[120];
  std::snprintf(name, sizeof name, "[%d shards] loss %lldx%lld%s%s w%.1f", mesh().size(),
                static_cast<long long>(width), static_cast<long long>(height), bytes ? " uint8" : "",
                masked ? " mask" : "", ssim_weight);
  std::mt19937_64 engine(11);
  std::uniform_real_distribution<float> unit(0.f, 1.f);
  const size_t count = static_cast<size_t>(height * width * 3);
  std::vector<float> x(count), y(count);
  std::vector<uint8_t> y_bytes(count), mask(static_cast<size_t>(height * width));
  for (size_t i = 0; i < count; ++i) {
    x[i] = unit(engine);
    y_bytes[i] = static_cast<uint8_t>(unit(engine) * 255.f);
    y[i] = bytes ? static_cast<float>(y_bytes[i]) / 255.f : unit(engine);
  }
  for (uint8_t& keep : mask) keep = unit(engine) < 0.8f;
  if (masked) {
    for (size_t p = 0; p < mask.size(); ++p) {
      if (!mask[p]) x[3 * p] = NAN;
    }
  }
  double tap[11], total = 0;
  for (int k = 0; k < 11; ++k) total += tap[k] = std::exp(-(k - 5) * (k - 5) / 4.5);
  for (double& t : tap) t /= total;
  const auto kept = [&](int64_t r, int64_t c) {
    return r >= 0 && c >= 0 && r < height && c < width && (!masked || mask[r * width + c]);
  };
  std::vector<double> by_mean(count, 0), by_square(count, 0), by_product(count, 0), want(count, 0);
  double l1 = 0, similarity = 0;
  int64_t pixels = 0, centres = 0;
  for (int64_t r = 0; r < height; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      if (!kept(r, c)) continue;
      ++pixels;
      for (int k = 0; k < 3; ++k)
        l1 += std::fabs(double{x[3 * (r * width + c) + k]} - y[3 * (r * width + c) + k]);
      if (ssim_weight == 0 || r < 5 || c < 5 || r >= height - 5 || c >= width - 5) continue;
      ++centres;
      for (int k = 0; k < 3; ++k) {
        double w = 0, mx = 0, my = 0, xx = 0, yy = 0, xy = 0;
        for (int i = -5; i <= 5; ++i) {
          for (int j = -5; j <= 5; ++j) {
            if (!kept(r + i, c + j)) continue;
            const double t = tap[i + 5] * tap[j + 5], a = x[3 * ((r + i) * width + c + j) + k],
                         b = y[3 * ((r + i) * width + c + j) + k];
            w += t, mx += t * a, my += t * b, xx += t * a * a, yy += t * b * b, xy += t * a * b;
          }
        }
        mx /= w, my /= w, xx /= w, yy /= w, xy /= w;
        const double vx = xx - mx * mx, vy = yy - my * my, cov = xy - mx * my, c1 = 1e-4, c2 = 9e-4;
        const double a1 = 2 * mx * my + c1, a2 = 2 * cov + c2, b1 = mx * mx + my * my + c1, b2 = vx + vy + c2;
        const double s = a1 * a2 / (b1 * b2);
        similarity += s;
        const size_t at = 3 * (r * width + c) + k;
        by_square[at] = -s / b2 / w;
        by_product[at] = 2 * a1 / (b1 * b2) / w;
        by_mean[at] =
            (2 * my * a2 / (b1 * b2) - 2 * mx * s / b1 + 2 * mx * s / b2 - 2 * my * a1 / (b1 * b2)) / w;
      }
    }
  }
  const double share = centres ? 1.0 - ssim_weight : 1.0;
  for (int64_t r = 0; r < height; ++r) {
    for (int64_t c = 0; c < width; ++c) {
      if (!kept(r, c)) continue;
      for (int k = 0; k < 3; ++k) {
        const size_t at = 3 * (r * width + c) + k;
        want[at] = share / (3.0 * pixels) * ((x[at] > y[at]) - (x[at] < y[at]));
        for (int i = -5; i <= 5 && centres; ++i) {
          for (int j = -5; j <= 5; ++j) {
            if (!kept(r + i, c + j)) continue;
            const size_t from = 3 * ((r + i) * width + c + j) + k;
            want[at] -= ssim_weight / (3.0 * centres) * tap[i + 5] * tap[j + 5] *
                        (by_mean[from] + 2 * x[at] * by_square[from] + y[at] * by_product[from]);
          }
        }
      }
    }
  }
  const double l1_mean = pixels ? l1 / (3.0 * pixels) : 0,
               ssim_mean = centres ? similarity / (3.0 * centres) : 1;
  const double loss = share * l1_mean + (centres ? ssim_weight * (1 - ssim_mean) : 0);
  const Buffer<float> dx = to_buffer(x, 0), dy = to_buffer(y, 0);
  const Buffer<uint8_t> dy_bytes = to_buffer(y_bytes, 0), dmask = to_buffer(mask, 0);
  Buffer<float> gradient(static_cast<int64_t>(count), 0), value(3, 0);
  LossImages images;
  images.rgb = dx.data();
  images.target = bytes ? nullptr : dy.data();
  images.target_bytes = bytes ? dy_bytes.data() : nullptr;
  images.mask = masked ? dmask.data() : nullptr;
  images.height = height;
  images.width = width;
  const LossValue got = l1_ssim(images, ssim_weight, gradient.data());
  l1_ssim_into(images, ssim_weight, gradient.data(), value.data());
  report(name, "loss differs", std::fabs(got.loss - loss), 1e-5);
  report(name, "L1 differs", std::fabs(got.l1 - l1_mean), 1e-6);
  report(name, "SSIM differs", std::fabs(got.ssim - ssim_mean), 1e-5);
  report(name, "loss on device differs", std::fabs(to_vector(value)[0] - loss), 1e-5);
  Difference difference;
  const std::vector<float> host = to_vector(gradient);
  for (size_t i = 0; i < count; ++i) difference.add(host[i], want[i]);
  report(name, "gradient rel L2", difference.relative(), 1e-4);
}

// ---- densification

void check_relocation(int64_t rows) {
  const std::string name =
      "[" + std::to_string(mesh().size()) + " shards, " + std::to_string(rows) + " rows]";
  Table table = make_table(rows, 21, -3.f, true, 0, 0);
  const SplatColumns columns = table.host();
  const float least = 0.3f;
  std::vector<int64_t> dead;
  for (int64_t row = 0; row < rows; ++row) {
    bool finite = true;
    for (int i = 0; i < 3; ++i)
      finite &= std::isfinite(columns.means[3 * row + i]) && std::isfinite(columns.scales[3 * row + i]);
    for (int i = 0; i < 4; ++i) finite &= std::isfinite(columns.quats[4 * row + i]);
    if (!finite || !(math::sigmoid(columns.opacities[row]) > least)) dead.push_back(row);
  }
  const std::vector<int64_t> got_dead = to_vector(dead_rows(table.device(), least));
  std::vector<int64_t> difference;
  std::set_symmetric_difference(dead.begin(), dead.end(), got_dead.begin(), got_dead.end(),
                                std::back_inserter(difference));
  report(name + " dead rows", "rows differ", static_cast<double>(difference.size()),
         1e-5 * static_cast<double>(rows));
  const int64_t wanted = std::min<int64_t>(static_cast<int64_t>(got_dead.size()), rows / 10);
  const RowList source = sample_rows(table.device(), least, wanted, 77, 3);
  const std::vector<int64_t> sampled = to_vector(source);
  if (static_cast<int64_t>(got_dead.size()) == rows) {
    report(name + " sample", "draws of none",
           static_cast<double>(
               std::count_if(sampled.begin(), sampled.end(), [](int64_t row) { return row >= 0; })),
           0);
    return;
  }
  bool fine = std::is_sorted(sampled.begin(), sampled.end());
  double expected = 0, seen = 0, squares = 0;
  double weights = 0;
  for (int64_t row = 0, d = 0; row < rows; ++row) {
    if (d < static_cast<int64_t>(got_dead.size()) && got_dead[d] == row) {
      ++d;
      continue;
    }
    const double o = math::sigmoid(columns.opacities[row]);
    weights += o, squares += o * o;
  }
  for (const int64_t row : sampled) {
    fine &= !std::binary_search(got_dead.begin(), got_dead.end(), row);
    seen += math::sigmoid(columns.opacities[row]);
  }
  expected = weights > 0 ? squares / weights : 0;
  report(name + " sample", "rule broken", fine ? 0 : 1, 0);
  if (sampled.size() > 1000)
    report(name + " sample", "mean opacity differs", std::fabs(seen / sampled.size() - expected), 0.01);
  if (sampled.empty()) return;
  const std::vector<int64_t> destination(got_dead.begin(),
                                         got_dead.begin() + static_cast<int64_t>(sampled.size()));
  const AdamState state = table.device_state();
  relocate(table.device(), &state, source, row_list(destination, rows, "destination"), 0.005f, 9);
  std::map<int64_t, int64_t> copies;
  for (const int64_t row : sampled) ++copies[row];
  std::vector<float> want[kColumns];
  for (int c = 0; c < kColumns; ++c) want[c] = table.column[c];
  for (const auto& [row, times] : copies) {
    const math::Relocated split = math::relocate(math::sigmoid(columns.opacities[row]), times + 1);
    want[3][row] = math::relocated_logit(split.opacity, 0.005f);
    for (int i = 0; i < 3; ++i) want[2][3 * row + i] += std::log(split.scale_ratio);
  }
  for (size_t i = 0; i < sampled.size(); ++i) {
    for (int c = 0; c < kColumns; ++c)
      std::copy_n(&want[c][sampled[i] * kFloats[c]], kFloats[c], &want[c][destination[i] * kFloats[c]]);
  }
  Difference all;
  int64_t moments = 0;
  const std::vector<int32_t> last = to_vector(table.device_last_step);
  for (int c = 0; c < kColumns; ++c) {
    const std::vector<float> got = to_vector(table.device_column[c]), m = to_vector(table.device_exp_avg[c]);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isfinite(want[c][i])) all.add(got[i], want[c][i]);
    }
    for (const auto* list : {&sampled, &destination}) {
      for (const int64_t row : *list) {
        for (int i = 0; i < kFloats[c]; ++i) moments += m[row * kFloats[c] + i] != 0.f || last[row] != 9;
      }
    }
  }
  report(name + " relocate", "rel L2", all.relative(), 1e-6);
  report(name + " relocate", "moments not reset", static_cast<double>(moments), 0);
}

// ---- rows that move

// All columns and moments of a table after the rows `from` of it have been put one after the other.
int64_t rows_differ(const Table& table, const std::vector<int64_t>& from,
                    const std::vector<char>& may_differ) {
  int64_t differ = 0;
  for (int c = 0; c < kColumns; ++c) {
    const std::array<std::pair<const std::vector<float>*, std::vector<float>>, 3> pairs = {
        {{&table.column[c], to_vector(table.device_column[c])},
         {&table.exp_avg[c], to_vector(table.device_exp_avg[c])},
         {&table.exp_avg_sq[c], to_vector(table.device_exp_avg_sq[c])}}};
    for (const auto& [want, got] : pairs) {
      for (size_t i = 0; i < from.size(); ++i) {
        if (may_differ.empty() || !may_differ[i])
          differ += std::memcmp(got.data() + i * kFloats[c], want->data() + from[i] * kFloats[c],
                                kFloats[c] * sizeof(float)) != 0;
      }
    }
  }
  const std::vector<int32_t> last = to_vector(table.device_last_step);
  for (size_t i = 0; i < from.size(); ++i)
    differ += (may_differ.empty() || !may_differ[i]) && last[i] != table.last_step[from[i]];
  return differ;
}

// With `stripe`, dealt to three ranges of rows, the second of half the size, in stretches of that many.
void check_reorder(int64_t rows, int64_t scratch_bytes, int64_t stripe = 0) {
  const std::string name = "[" + std::to_string(mesh().size()) + " shards, " + std::to_string(rows) +
                           " rows, scratch " + std::to_string(scratch_bytes) + ", stripe " +
                           std::to_string(stripe) + "] reorder";
  Table table = make_table(rows, 31, -3.f, true, 0, 5);
  for (int64_t row = 0; row + 7 < rows; row += 7)  // equal keys keep their order
    std::copy_n(&table.column[0][0], 3, &table.column[0][3 * row]);
  table.send();
  const RowCube cube = to_vector(row_cube(table.device()))[0];
  std::vector<std::pair<uint64_t, int64_t>> order;
  for (int64_t row = 0; row < rows; ++row) order.emplace_back(row_key(cube, &table.column[0][3 * row]), row);
  std::sort(order.begin(), order.end());
  std::vector<int64_t> from;
  for (const auto& [key, row] : order) from.push_back(row);
  RowDeal deal;
  if (stripe > 0) {
    const int64_t first = rows * 2 / 5 / RowDeal::kUnit * RowDeal::kUnit, second = first + first / 512 * 256;
    const std::vector<RowRange> ranges = {{0, first}, {first, second}, {second, rows}};
    deal = row_deal(ranges, stripe, rows);
    auto next = from.begin();  // round by round, a stretch a range
    std::vector<int64_t> dealt(from.size());
    for (int64_t round = 0; round < deal.rounds; ++round) {
      for (const RowRange& range : ranges) {
        const int64_t begin = deal.taken(range.size(), round), end = deal.taken(range.size(), round + 1);
        std::copy_n(next, end - begin, dealt.begin() + range.begin + begin);
        next += end - begin;
      }
    }
    from = dealt;
  }
  const AdamState state = table.device_state();
  gather_rows(all_columns(table.device(), &state),
              hilbert_order(table.device(), stripe > 0 ? &deal : nullptr), scratch_bytes);
  report(name, "rows differ", static_cast<double>(rows_differ(table, from, {})), 0);
}

void check_densify(int64_t rows, int64_t room) {
  const std::string name = "[" + std::to_string(mesh().size()) + " shards, " + std::to_string(rows) +
                           " rows, room " + std::to_string(room) + "] densify";
  const int64_t most = 2 * rows;
  Table table = make_table(most, 33, -3.f, true, 0, 5);  // rows beyond `rows` are room to grow
  std::vector<float> gradient(static_cast<size_t>(rows)), radius(gradient.size());
  std::vector<int32_t> views(gradient.size());
  for (int64_t row = 0; row < rows; ++row) {
    RowRandom random(77, row);
    gradient[row] = random.unit();
    views[row] = row % 4;
    radius[row] = random.unit() * random.unit();
  }
  const Buffer<float> device_gradient = to_buffer(gradient, 0), device_radius = to_buffer(radius, 0);
  const Buffer<int32_t> device_views = to_buffer(views, 0);
  const auto mutable_floats = [](const Buffer<float>& buffer) { return const_cast<float*>(buffer.data()); };
  const RowStatistics host{gradient.data(), views.data(), radius.data()};
  const RowStatistics device{mutable_floats(device_gradient), const_cast<int32_t*>(device_views.data()),
                             mutable_floats(device_radius)};
  const DensifyRules rules{0.3f, 0.05f, 0.8f, 0.2f, 0.2f, 0.9f, rows + room};
  SplatColumns before = table.device(), before_host = table.host();
  before.num_rows = before_host.num_rows = rows;
  const DensifyPlan plan = plan_densification(before, device, rules);

  // The fates, apart from rows at a threshold; of those to be doubled the first in order.
  std::vector<uint8_t> fate;
  for (const Buffer<uint8_t>& part : plan.fates)
    for (const uint8_t value : to_vector(part)) fate.push_back(value);
  int64_t differ = 0, gone = 0, doubled = 0;
  std::vector<std::pair<uint32_t, int64_t>> wanted;
  std::vector<uint8_t> expected;
  for (int64_t row = 0; row < rows; ++row) {
    expected.push_back(fate_of(before_host, host, rules, row));
    if (expected.back() >= kCloned) wanted.emplace_back(doubling_key(host, row), row);
  }
  for (const uint8_t value : expected) gone += value == kGone;
  std::sort(wanted.begin(), wanted.end());
  for (size_t i = static_cast<size_t>(std::min<int64_t>(rules.max_rows - rows + gone, wanted.size()));
       i < wanted.size(); ++i)
    expected[wanted[i].second] = kKept;
  gone = 0;
  for (int64_t row = 0; row < rows; ++row) {
    differ += fate[row] != expected[row];
    gone += fate[row] == kGone;
    doubled += fate[row] >= kCloned;
  }
  report(name, "fates differ", static_cast<double>(differ), 1e-4 * static_cast<double>(rows));
  report(name, "counts differ",
         static_cast<double>(std::abs(gone - plan.pruned) + std::abs(doubled - plan.doubled) +
                             std::abs(rows - gone + doubled - plan.rows_after)),
         0);
  report(name, "rows above the cap",
         static_cast<double>(std::max<int64_t>(0, plan.rows_after - rules.max_rows)), 0);

  SplatColumns during = before;
  during.num_rows = std::max(rows, plan.rows_after);
  const AdamState state = table.device_state();
  densify(during, &state, plan, 5, 600, 9);
  std::vector<int64_t> from;
  std::vector<char> is_new;
  std::vector<int> child;
  for (int64_t row = 0; row < rows; ++row) {
    const int outcomes = fate[row] == kGone ? 0 : fate[row] == kKept ? 1 : 2;
    for (int i = 0; i < outcomes; ++i) {
      from.push_back(row);
      is_new.push_back(fate[row] == kSplit || i == 1);
      child.push_back(fate[row] == kSplit ? i : -1);
    }
  }
  if (plan.pruned == 0 && plan.doubled == 0) return;
  report(name, "old rows differ", static_cast<double>(rows_differ(table, from, is_new)), 0);
  Difference means, scales;
  int64_t moments = 0, others = 0;
  std::vector<float> got[kColumns];
  for (int c = 0; c < kColumns; ++c) got[c] = to_vector(table.device_column[c]);
  const std::vector<int32_t> last = to_vector(table.device_last_step);
  for (int c = 0; c < kColumns; ++c) {
    const std::vector<float> m = to_vector(table.device_exp_avg[c]),
                             v = to_vector(table.device_exp_avg_sq[c]);
    for (size_t i = 0; i < from.size(); ++i) {
      if (!is_new[i]) continue;
      for (int k = 0; k < kFloats[c]; ++k)
        moments += m[i * kFloats[c] + k] != 0.f || v[i * kFloats[c] + k] != 0.f || last[i] != 9;
      if (c == 0 || c == 2) continue;
      others += std::memcmp(&got[c][i * kFloats[c]], &table.column[c][from[i] * kFloats[c]],
                            kFloats[c] * sizeof(float)) != 0;
    }
  }
  for (size_t i = 0; i < from.size(); ++i) {
    float mean[3], log_scale[3];
    std::copy_n(&table.column[0][3 * from[i]], 3, mean);
    std::copy_n(&table.column[2][3 * from[i]], 3, log_scale);
    if (child[i] >= 0) draw_child(5, 600, from[i], child[i], &table.column[1][4 * from[i]], mean, log_scale);
    for (int axis = 0; axis < 3; ++axis) {
      means.add(got[0][3 * i + axis], mean[axis]);
      scales.add(got[2][3 * i + axis], log_scale[axis]);
    }
  }
  report(name, "moments of new rows", static_cast<double>(moments), 0);
  report(name, "other columns differ", static_cast<double>(others), 0);
  report(name, "means rel L2", means.relative(), 1e-5);
  report(name, "scales rel L2", scales.relative(), 1e-6);
}

// ---- times

void time_scene(int64_t rows, int width, int height, float log_scale) {
  History history = make_history(12);
  Table table = make_table(rows, 1, log_scale, false, history.base(), history.now());
  const std::vector<View> cameras = make_views(1, width, height);
  Images images(cameras), grads(cameras);
  grads.fill(1);
  Buffer<uint8_t> target(3 * int64_t{width} * height, 0);
  zero(target);
  Buffer<float> value(3, 0);
  std::map<std::string, double> sums;
  std::vector<std::string> order;
  int64_t visible = 0, pairs = 0, rounds = 0;
  double whole = 0;
  const char* const timing = std::getenv("MGPU_STAGE_TIMES");
  const bool stages = timing && std::strcmp(timing, "1") == 0;
  for (int round = 0; round < 13; ++round) {
    synchronise_shards();
    const auto start = std::chrono::steady_clock::now();
    Frame frame = make_frame(table, cameras, &history, 3, false, false);
    run_forward(frame, images.pointers());
    LossImages loss;
    loss.rgb = images.rgb[0].data();
    loss.target_bytes = target.data();
    loss.height = height;
    loss.width = width;
    if (stages) synchronise_shards();
    const auto before_loss = std::chrono::steady_clock::now();
    l1_ssim_into(loss, 0.2f, grads.rgb[0].data(), value.data());
    if (stages) synchronise_shards();
    const auto after_loss = std::chrono::steady_clock::now();
    std::vector<ImageGradPointers> pointers = {{grads.rgb[0].data(), nullptr, nullptr}};
    run_backward(frame, pointers);
    const auto before_step = std::chrono::steady_clock::now();
    StepSettings settings;
    settings.lrs = {1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6};
    settings.noise_scale = 1e-7;
    settings.wanted_means = false;
    const StepReport seen = step({&frame}, table.device(), table.device_state(), history, settings);
    synchronise_shards();
    const auto stop = std::chrono::steady_clock::now();
    history.push(settings.lrs, settings.noise_scale);
    if (round < 3) continue;
    ++rounds;
    whole += std::chrono::duration<double>(stop - start).count();
    const auto add = [&](const std::string& stage, double seconds) {
      if (!sums.count(stage)) order.push_back(stage);
      sums[stage] += seconds;
    };
    for (const StageTime& time : frame.times) add(time.stage, time.seconds);
    add("loss", std::chrono::duration<double>(after_loss - before_loss).count());
    add("step", std::chrono::duration<double>(stop - before_step).count());
    visible = seen.rows_seen;
    pairs = intersection_count(frame);
  }
  std::printf(
      "time %d shards, %lld rows (%lld visible, %lld pairs), %dx%d: %.3f ms a step, peak of temporaries %.0f "
      "MB;",
      mesh().size(), static_cast<long long>(rows), static_cast<long long>(visible),
      static_cast<long long>(pairs), width, height, 1e3 * whole / static_cast<double>(rounds),
      static_cast<double>(tally_of_all().peak) / 1e6);
  for (const std::string& stage : order)
    std::printf(" %s %.3f", stage.c_str(), 1e3 * sums[stage] / static_cast<double>(rounds));
  std::printf("\n");
  std::fflush(stdout);
  reset_tally_peaks();
}

// Microseconds of the loss alone.
void time_loss(int64_t height, int64_t width) {
  std::vector<float> x(static_cast<size_t>(height * width * 3));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 2654435761u % 1024u) / 1023.f;
  const std::vector<uint8_t> bytes(x.size(), 99), mask(static_cast<size_t>(height * width), 1);
  const Buffer<float> dx = to_buffer(x, 0), dy = to_buffer(x, 0);
  const Buffer<uint8_t> dy_bytes = to_buffer(bytes, 0), dmask = to_buffer(mask, 0);
  Buffer<float> gradient(dx.size(), 0), value(3, 0);
  std::printf("loss %lldx%lld, us:", static_cast<long long>(width), static_cast<long long>(height));
  for (const bool masked : {false, true}) {
    for (const bool as_bytes : {true, false}) {
      for (const float weight : {0.f, 0.2f}) {
        LossImages images;
        images.rgb = dx.data();
        images.target = as_bytes ? nullptr : dy.data();
        images.target_bytes = as_bytes ? dy_bytes.data() : nullptr;
        images.mask = masked ? dmask.data() : nullptr;
        images.height = height;
        images.width = width;
        std::chrono::steady_clock::time_point start;
        const int rounds = 40;
        for (int round = -5; round < rounds; ++round) {
          if (round == 0) {
            synchronise_shards();
            start = std::chrono::steady_clock::now();
          }
          l1_ssim_into(images, weight, gradient.data(), value.data());
        }
        synchronise_shards();
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        std::printf(" %s%s%s %.1f", weight > 0.f ? "SSIM" : "L1", as_bytes ? " uint8" : "",
                    masked ? " mask" : "", 1e6 * seconds / rounds);
      }
    }
  }
  std::printf("\n");
}

// Of the mesh's shards, each with an equal run of tiles, one after the other where they are virtual: the loss
// of their patches, and the halo before it; and, of both, until the host has launched all.
void time_loss_patches(int64_t height, int64_t width) {
  const int shards = mesh().size();
  std::vector<uint8_t> bytes(static_cast<size_t>(height * width * 3), 99);
  const Buffer<uint8_t> target = to_buffer(bytes, 0);
  Buffer<float> value(3, 0);
  std::vector<int64_t> cut;
  const int64_t tiles = ((height + kTileSize - 1) / kTileSize) * ((width + kTileSize - 1) / kTileSize);
  for (int s = 1; s < shards; ++s) cut.push_back(tiles * s / shards);
  const Frame frame = patches_frame(static_cast<int>(width), static_cast<int>(height), cut);
  std::printf("loss of patches %lldx%lld, %d shards, us:", static_cast<long long>(width),
              static_cast<long long>(height), shards);
  for (const float weight : {0.f, 0.2f}) {
    ShardImages own(frame, weight);
    for_each_shard("check", [&](const Shard& shard) {
      const RowRange rows =
          rows_held(frame.views[0], view_patches(frame)[static_cast<size_t>(shard.index)][0],
                    loss_reach(height, width, weight));
      float* const first = own.images()[static_cast<size_t>(shard.index)].rgb + rows.begin * width * 3;
      zero_bytes(first, rows.size() * width * 3 * static_cast<int64_t>(sizeof(float)), shard.index);
    });
    LossImages images;
    images.target_bytes = target.data();
    images.height = height;
    images.width = width;
    const auto time = [&](const auto& work) {
      constexpr int kRounds = 40;
      double host = 0.0;
      std::chrono::steady_clock::time_point start;
      for (int round = -5; round < kRounds; ++round) {
        if (round == 0) {
          synchronise_shards();
          host = 0.0;
          start = std::chrono::steady_clock::now();
        }
        const auto begin = std::chrono::steady_clock::now();
        work();
        host += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      }
      synchronise_shards();
      const double whole = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      std::printf(" %.1f (host %.1f)", 1e6 * whole / kRounds, 1e6 * host / kRounds);
    };
    std::printf("%s", weight > 0.f ? "; SSIM uint8: halo" : " L1 uint8: halo");
    time([&] { own.share_halo(frame); });
    std::printf(", loss");
    time([&] {
      patch_losses_into({{images, own.loss_patches(frame, 0), own.owners(0)}}, weight, value.data());
    });
  }
  std::printf("\n");
}

std::vector<std::string> virtual_shards(int count) {
  return std::vector<std::string>(static_cast<size_t>(count), "cuda:0");
}

void time_losses() {
  time_loss(420, 648);
  time_loss(1244, 1920);
  time_loss(2489, 3840);
}

// Of 1, 2, 4 and 8 shards that follow each other on one GPU.
void time_virtual_patches() {
  for (const int shards : {1, 2, 4, 8}) {
    use_mesh(virtual_shards(shards));
    time_loss_patches(1244, 1920);
    time_loss_patches(2489, 3840);
  }
}

// For compute-sanitizer, under which everything takes fifty times as long.
void check_small(const std::vector<std::string>& names) {
  use_mesh(names);
  check_scene(17, 1, 61, 47, false, true, true, 3);
  check_scene(700, 2, 70, 50, true, false, false, 3);
  check_lists(800, 2, 300, 200, -0.5f, true, 4, 3);
  check_two_frames(300);
  check_loss(40, 50, true, true, 0.2f);
  check_loss(33, 160, false, false, 0.2f);
  check_loss(20, 30, false, false, 0.f);
  check_loss_patches(170, 47, true, true, 0.2f);
  check_loss_patches(61, 47, false, false, 0.f);
  check_relocation(2000);
  check_reorder(2000, kGatherScratch);
  check_reorder(2000, kGatherScratch, 256);
  check_densify(2000, 100);
}

void check_patch_losses() {
  check_loss_patches(61, 47, true, true, 0.2f);
  check_loss_patches(333, 200, false, false, 0.2f);  // several strips
  check_loss_patches(331, 200, true, false, 0.2f);
  check_loss_patches(333, 120, true, true, 0.f);  // rows that are not packs
  check_loss_patches(320, 120, false, false, 0.f);
  check_loss_patches(30, 9, false, false, 0.2f);     // no centre
  check_loss_patches(700, 500, false, false, 0.2f);  // several runs in a strip
  check_loss_patches(699, 501, true, true, 0.2f);
  check_loss_patches(1333, 700, true, false, 0.2f);
  for (const int64_t cut : {74, 75, 76}) {  // where a strip ends: its last centre is a pair's first
    check_loss_patches(1300, 16, true, false, 0.2f, cut);
    check_loss_patches(1300, 16, false, true, 1.f, cut);
  }
}

void check_losses() {
  check_patch_losses();
  check_loss(40, 50, false, false, 0.2f);
  check_loss(77, 91, true, true, 0.2f);
  check_loss(9, 30, false, true, 0.2f);
  check_loss(33, 70, true, false, 0.f);
  check_loss(50, 37, false, true, 0.f);
  check_loss(11, 11, true, false, 1.f);
  check_loss(170, 310, true, false, 0.2f);  // several strips and bands
  check_loss(150, 151, false, true, 0.2f);
}

void check_all_cells() {
  for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{17}, int64_t{257}})
    check_cells(rows, 2, false, false);
  check_cells(40000, 1, true, true);
  check_cells(40000, 3, true, true);
  check_cells(20000, 1, false, false);
  if (mesh().size() == 1) check_cells(1000000, 2, true, false);
}

void check_all(const std::vector<std::string>& names) {
  use_mesh(names);
  check_scene(0, 1, 100, 60, false, false, false, 3);
  check_scene(1, 2, 10, 9, true, false, false, 3);
  check_scene(17, 1, 61, 47, false, true, true, 3);
  check_scene(1500, 9, 150, 130, true, false, true, 3);
  check_scene(3000, 3, 100, 80, true, true, false, 1);
  check_scene(50000, 1, 400, 300, true, false, false, 3, false);
  check_scene(20000, 1, 40, 30, false, false, false, 3);  // thousands of records a tile
  check_scene(50000, 2, 320, 240, false, true, true, 2);
  check_lists(17, 3, 70, 50, -3.f, true, 8, 3);
  check_lists(600, 2, 1300, 1100, -0.5f, true, 0, 2);
  check_lists(20000, 1, 4300, 4300, -4.f, false, 16, 1);
  if (mesh().size() == 1) check_lists(900000, 1, 1000, 700, -4.5f, false, 12, 0);
  check_all_cells();
  check_two_frames(4000);
  check_losses();
  check_relocation(17);
  check_relocation(30000);
  for (const int64_t rows : {int64_t{1}, int64_t{17}, int64_t{30000}}) {
    check_reorder(rows, kGatherScratch);
    check_reorder(rows, kGatherScratch, 300);
    check_reorder(rows, 100000);
    for (const int64_t room : {int64_t{0}, rows / 20, rows}) check_densify(rows, room);
  }
}

}  // namespace

// check_stages [check|small|cells|loss|time|all] [shard names, default: meshes of 1, 3 and 4 on GPU 0]
int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "all";
  set_num_threads(16);
  try {
    if (what == "small") {
      check_small(count > 2 ? std::vector<std::string>(arguments + 2, arguments + count) : virtual_shards(3));
    } else if (what == "cells") {
      for (const CullCase& test : kCullCases) check_cull(test);
      for (const CullCase& test : kCullCases) check_cell_cull(test);
      for (const int shards : {1, 3, 4}) {
        use_mesh(virtual_shards(shards));
        check_all_cells();
      }
    } else if (what == "loss") {
      for (const int shards : {2, 4, 7, 8}) {
        use_mesh(virtual_shards(shards));
        check_patch_losses();
      }
      for (const int shards : {1, 3}) {
        use_mesh(virtual_shards(shards));
        check_losses();
      }
      check_loss_meshes();
      time_virtual_patches();
      use_mesh(virtual_shards(1));
      time_losses();
    } else if (what == "apart") {
      apart = true;
      if (count > 3) set_late_gpu(std::atoi(arguments[2]), std::atoi(arguments[3]));
      for (const int shards : {3, 4}) check_all(virtual_shards(shards));
      check_meshes();
      check_loss_meshes();
    } else if (what != "time") {
      if (count > 2) {
        check_all(std::vector<std::string>(arguments + 2, arguments + count));
      } else {
        check_patches(200000);
        for (const CullCase& test : kCullCases) check_cull(test);
        for (const CullCase& test : kCullCases) check_cell_cull(test);
        for (const int shards : {1, 3, 4}) check_all(virtual_shards(shards));
        check_meshes();
        check_loss_meshes();
      }
    }
    if (what == "time" || what == "all") {
      use_mesh(count > 2 ? std::vector<std::string>(arguments + 2, arguments + count) : virtual_shards(1));
      std::printf("%d shards\n", mesh().size());
      time_losses();
      time_scene(112000, 1920, 1244, -4.5f);
      time_scene(2800000, 1920, 1244, -5.3f);
      time_scene(9000000, 3840, 2489, -6.f);
      if (count <= 2) {
        use_mesh(virtual_shards(4));
        time_scene(2800000, 1920, 1244, -5.3f);
      }
    }
  } catch (const std::exception& error) {
    std::printf("BAD  %s\n", error.what());
    return 2;
  }
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
