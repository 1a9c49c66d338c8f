// SPDX-License-Identifier: Apache-2.0
// check_items.cpp: what blocks of loss.cu are dealt, without a GPU: images of many sizes, cut along the curve
// at random among up to 8 shards, several views in a step. What a block does with its item is played here;
// each pixel and each centre must come out once, with the sums of the right row of tiles, on the shard that
// owns it.
//
//     check_items [SEED [ROUNDS]]      or check_items time
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <queue>
#include <random>
#include <vector>

#include "splat/curve.h"
#include "splat/frame.h"
#include "splat/loss_items.h"
#include "splat/patches.h"

namespace mgpu {

void free_temporary(void*, int64_t, int) noexcept {}  // of a frame without any

}  // namespace mgpu

using namespace mgpu;
using namespace mgpu::splat;

namespace {

// As in loss.cu.
constexpr int kRadius = 5, kLag = 7;  // rows from a centre up to the row that comes out with it
constexpr StripWalk kWalk{.wide = 150, .warm_up = 22};
constexpr int kProcessors = 132;

int failures = 0;

void expect(bool good, const char* what, int width, int height, int shards) {
  if (good) return;
  ++failures;
  std::printf("BAD  %dx%d, %d shards: %s\n", width, height, shards, what);
}

struct Size {
  int width, height;
};

// Views of these sizes, whose tiles are cut at these places.
struct Scene {
  Frame frame;
  std::vector<std::vector<ViewPatch>> patches;

  Scene(const std::vector<Size>& sizes, std::vector<int64_t> cuts) {
    const float identity[16] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
    int64_t tiles = 0;
    for (const Size size : sizes) {
      View view = make_view(identity, 100, 100, 1, 1, size.width, size.height, tiles);
      frame.curves.push_back(tile_curve(view.tiles_x, view.tiles_y));
      view.position_from_tile = frame.curves.back()->position_from_tile.data();
      view.tile_from_position = frame.curves.back()->tile_from_position.data();
      tiles += view.tile_count();
      frame.views.push_back(view);
    }
    cuts.push_back(tiles);
    int64_t begin = 0;
    for (const int64_t cut : cuts) {
      frame.owners.emplace_back();
      frame.owners.back().tiles = {begin, cut};
      begin = cut;
    }
    patches = view_patches(frame);
  }
  int shards() const { return static_cast<int>(patches.size()); }
};

// The longest a processor is at work, in rows of pixels, if each takes the next item when it is free.
int64_t time_of(const std::vector<LossItem>& items, int height) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free;
  for (int i = 0; i < kProcessors; ++i) free.push(0);
  int64_t last = 0;
  for (const LossItem& item : items) {
    const int64_t rows = std::min(item.end * kTileSize, height) - item.begin * kTileSize;
    const int64_t done = free.top() + rows + kWalk.warm_up;
    free.pop();
    free.push(done);
    last = std::max(last, done);
  }
  return last;
}

void check_view(const Scene& scene, size_t v) {
  const View& view = scene.frame.views[v];
  const int width = view.width, height = view.height, shards = scene.shards();
  const TileOwners owners(view, v, scene.patches);
  const auto check = [&](bool good, const char* what) { expect(good, what, width, height, shards); };
  const auto runs = strip_runs(owners, shards, width, kWalk);
  const size_t pixels = static_cast<size_t>(width) * static_cast<size_t>(height);
  std::vector<uint8_t> out(pixels, 0), centre(pixels, 0);  // how often
  const int strips = (width + kWalk.wide - 1) / kWalk.wide;
  for (int shard = 0; shard < shards; ++shard) {
    const auto& of_shard = runs[static_cast<size_t>(shard)];
    const ViewPatch& patch = scene.patches[static_cast<size_t>(shard)][v];
    check(of_shard.empty() == patch.empty(), "a shard has runs, but no tiles, or the other way round");
    int64_t sum_rows = 0;
    for (const StripRun& run : of_shard) {
      sum_rows += run.end - run.begin;
      // Few rows without a tile of the shard's own: gaps of a row.
      for (int y = run.begin; y < run.end; ++y) {
        bool any = false;
        for (int near = std::max(y - 1, run.begin); near <= y; ++near) {
          for (int x = run.strip * kWalk.wide / kTileSize;
               x <= (std::min((run.strip + 1) * kWalk.wide, width) - 1) / kTileSize; ++x)
            any = any || owners.at(x, near) == shard;
        }
        check(any, "a run has two rows without a tile");
      }
    }
    std::vector<uint8_t> summed(static_cast<size_t>(sum_rows), 0);
    std::vector<uint8_t> walked(static_cast<size_t>(strips) * static_cast<size_t>(view.tiles_y), 0);
    const std::vector<LossItem> items = loss_items(of_shard, kProcessors, kWalk);
    for (size_t i = 1; i < items.size() && items.size() > kProcessors; ++i)
      check(items[i].end - items[i].begin <= items[i - 1].end - items[i - 1].begin, "not the longest first");
    for (const LossItem& item : items) {
      const bool inside = item.strip < strips && item.begin < item.end && item.begin >= patch.y0 &&
                          item.end <= patch.y1 && item.sum_row >= 0 &&
                          item.sum_row + item.end - item.begin <= sum_rows;
      check(inside, "an item is not inside the patch");
      if (!inside) continue;
      const int left = item.strip * kWalk.wide, right = std::min(left + kWalk.wide, width);
      for (int y = item.begin; y < item.end; ++y) {
        ++summed[static_cast<size_t>(item.sum_row + y - item.begin)];
        ++walked[static_cast<size_t>(item.strip * view.tiles_y + y)];
        const int first_centre = y == 0 ? 0 : y * kTileSize + kLag;
        const int last_centre = std::min((y + 1) * kTileSize, height) + kLag;
        for (int x = left - 1; x < right; ++x) {
          if (x >= left && owners.at(x / kTileSize, y) == shard) {
            for (int row = y * kTileSize; row < std::min((y + 1) * kTileSize, height); ++row)
              ++out[static_cast<size_t>(row) * static_cast<size_t>(width) + static_cast<size_t>(x)];
          }
          // Pairs of centres begin before a strip.
          if ((x - left + 1) % 2 != 0) continue;
          const bool own[2] = {x >= left && x < right, x + 1 >= left && x + 1 < right};
          if (owners.at((x + (own[1] ? 1 : 0)) / kTileSize, y) != shard) continue;
          for (int j = 0; j < 2; ++j) {
            if (!own[j] || x + j < kRadius || x + j >= width - kRadius) continue;
            for (int row = std::max(first_centre, kRadius); row < std::min(last_centre, height - kRadius);
                 ++row)
              ++centre[static_cast<size_t>(row) * static_cast<size_t>(width) + static_cast<size_t>(x + j)];
          }
        }
      }
    }
    check(std::all_of(summed.begin(), summed.end(), [](uint8_t n) { return n == 1; }),
          "a row of the sums is not written once");
    check(std::all_of(walked.begin(), walked.end(), [](uint8_t n) { return n <= 1; }),
          "a row is walked twice");
  }
  check(std::all_of(out.begin(), out.end(), [](uint8_t n) { return n == 1; }),
        "a pixel does not come out once");
  bool once = true;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      const bool counts = x >= kRadius && x < width - kRadius && y >= kRadius && y < height - kRadius;
      once = once && centre[static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x)] ==
                         (counts ? 1 : 0);
    }
  }
  check(once, "a centre does not count once");
}

// Steps that GPUs take for their items one after the other, against those of strips over each shard's whole
// rectangle, and what the host takes.
void time_shards(int width, int height, int shards) {
  const int64_t tiles = int64_t{(width + 15) / 16} * ((height + 15) / 16);
  std::vector<int64_t> cuts;
  for (int s = 1; s < shards; ++s) cuts.push_back(tiles * s / shards);
  const Scene scene({{width, height}}, cuts);
  const View& view = scene.frame.views[0];
  int64_t sum = 0, longest = 0, blocks = 0;
  const auto micro = [](const auto& work) {
    double best = 1e9;
    for (int round = 0; round < 200; ++round) {
      const auto start = std::chrono::steady_clock::now();
      work();
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return 1e6 * best;
  };
  const TileOwners owners(view, 0, scene.patches);
  const auto runs = strip_runs(owners, shards, width, kWalk);
  for (const auto& of_shard : runs) {
    const auto items = loss_items(of_shard, kProcessors, kWalk);
    const int64_t steps = time_of(items, height);
    blocks += static_cast<int64_t>(items.size());
    sum += steps, longest = std::max(longest, steps);
  }
  size_t sink = 0;
  const double map = micro([&] { sink += TileOwners(view, 0, scene.patches).at(0, 0); });
  const double run = micro([&] { sink += strip_runs(owners, shards, width, kWalk).size(); });
  const double deal = micro([&] {
    for (const auto& of_shard : runs) sink += loss_items(of_shard, kProcessors, kWalk).size();
  });
  const std::vector<TileOwners> all(1, owners);
  const double halo = micro([&] { sink += halo_pieces(scene.frame, all, {{10, 10, 12}}).size(); });
  std::printf(
      "%dx%d, %d shards: %lld steps in all, %lld at most, %lld items; host, us: map %.1f, halo %.1f, "
      "runs %.1f, items %.1f%s\n",
      width, height, shards, static_cast<long long>(sum), static_cast<long long>(longest),
      static_cast<long long>(blocks), map, halo, run, deal, sink == 0 ? " " : "");
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "time") == 0) {
    for (const Size size : {Size{648, 420}, Size{1920, 1244}, Size{3840, 2489}}) {
      for (const int shards : {1, 2, 3, 4, 8}) time_shards(size.width, size.height, shards);
    }
    return 0;
  }
  std::mt19937_64 random(count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1);
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 40;
  const auto up_to = [&](int64_t most) {  // 0..most
    return static_cast<int64_t>(random() % static_cast<uint64_t>(most + 1));
  };
  const auto check = [&](const std::vector<Size>& sizes, int shards) {
    int64_t tiles = 0;
    for (const Size size : sizes) tiles += int64_t{(size.width + 15) / 16} * ((size.height + 15) / 16);
    std::vector<int64_t> cuts;
    for (int s = 1; s < shards; ++s) cuts.push_back(up_to(tiles));
    std::sort(cuts.begin(), cuts.end());
    const Scene scene(sizes, cuts);
    for (size_t v = 0; v < sizes.size(); ++v) check_view(scene, v);
  };
  // The strip of columns 1050..1199 ends where a tile does: its last centre is a pair's first.
  for (const int64_t cut : {74, 75, 76}) check_view(Scene({{1300, 16}}, {cut}), 0);
  for (const Size size : {Size{1, 1}, Size{11, 11}, Size{1, 400}, Size{400, 1}, Size{150, 16}, Size{151, 33},
                          Size{700, 500}, Size{1301, 900}, Size{20000, 40}}) {
    for (const int shards : {1, 2, 3, 4, 7, 8}) check({size}, shards);
  }
  check({{3840, 2489}}, 8);
  check({{3840, 2160}, {61, 47}, {1920, 1244}}, 5);
  for (int round = 0; round < rounds; ++round) {
    std::vector<Size> sizes;
    for (int64_t views = 1 + up_to(3); views > 0; --views) {
      const int64_t most = round % 8 == 0 ? 2600 : 700;
      sizes.push_back({static_cast<int>(1 + up_to(most)), static_cast<int>(1 + up_to(most))});
    }
    check(sizes, static_cast<int>(1 + up_to(7)));
  }
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
