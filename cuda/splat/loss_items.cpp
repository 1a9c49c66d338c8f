// SPDX-License-Identifier: Apache-2.0
#include "splat/loss_items.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace mgpu::splat {

namespace {

int64_t over(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Calls visit(owner) for the owners of `count` tiles, each once.
template <typename Visit>
void for_each_owner(const uint8_t* tiles, int count, const Visit& visit) {
  constexpr int kWord = TileOwners::kAtOnce;
  if (count >= kWord && count <= 2 * kWord) {
    const uint64_t all_first = tiles[0] * uint64_t{0x0101010101010101};
    if (TileOwners::word(tiles) == all_first && TileOwners::word(tiles + count - kWord) == all_first) {
      visit(tiles[0]);
      return;
    }
  }
  for (int i = 0; i < count; ++i) {
    if (std::find(tiles, tiles + i, tiles[i]) == tiles + i) visit(tiles[i]);
  }
}

// How many pieces there are if none is higher.
int64_t pieces_of(const std::vector<StripRun>& runs, int64_t highest) {
  int64_t pieces = 0;
  for (const StripRun& run : runs) pieces += over(run.end - run.begin, highest);
  return pieces;
}

// Rows of tiles of a piece at most.
int64_t highest_piece(const std::vector<StripRun>& runs, int processors, const StripWalk& walk) {
  int64_t total = 0, longest = 1;
  for (const StripRun& run : runs) {
    total += run.end - run.begin;
    longest = std::max<int64_t>(longest, run.end - run.begin);
  }
  constexpr int kMoreRounds = 3;
  const int64_t rounds = std::max<int64_t>(over(static_cast<int64_t>(runs.size()), processors), 1);
  int64_t best = longest, least = std::numeric_limits<int64_t>::max();
  for (int64_t r = rounds; r <= rounds + kMoreRounds; ++r) {
    const auto steps = [&](int64_t high) { return r * (high * kTileSize + walk.warm_up); };
    int64_t low = std::max<int64_t>(over(total, r * processors), 1), high = longest;
    if (steps(low) >= least) continue;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (pieces_of(runs, middle) <= r * processors) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    if (steps(high) < least) least = steps(high), best = high;
  }
  return best;
}

}  // namespace

std::vector<std::vector<StripRun>> strip_runs(const TileOwners& owners, int shards, int width,
                                              const StripWalk& walk) {
  struct Strip {
    int first, count;  // its columns of tiles
  };
  std::vector<Strip> strips;
  for (int left = 0; left < width; left += walk.wide) {
    const int first = left / kTileSize, last = (std::min(left + walk.wide, width) - 1) / kTileSize;
    strips.push_back({first, last - first + 1});
  }
  const int gap = walk.warm_up / kTileSize;
  std::vector<std::vector<StripRun>> runs(static_cast<size_t>(shards));
  std::vector<int> latest(static_cast<size_t>(shards) * strips.size(), -1);  // places in `runs`
  for (int y = 0; y < owners.down(); ++y) {
    const uint8_t* const row = owners.row(y);
    for (size_t strip = 0; strip < strips.size(); ++strip) {
      for_each_owner(row + strips[strip].first, strips[strip].count, [&](uint8_t owner) {
        if (owner == TileOwners::kNobody) return;
        std::vector<StripRun>& of_owner = runs[owner];
        int& at = latest[owner * strips.size() + strip];
        if (at >= 0 && y - of_owner[static_cast<size_t>(at)].end <= gap) {
          of_owner[static_cast<size_t>(at)].end = y + 1;
          return;
        }
        at = static_cast<int>(of_owner.size());
        of_owner.push_back({static_cast<int>(strip), y, y + 1});
      });
    }
  }
  return runs;
}

std::vector<LossItem> loss_items(const std::vector<StripRun>& runs, int processors, const StripWalk& walk) {
  const int64_t highest = highest_piece(runs, processors, walk);
  std::vector<LossItem> items;
  items.reserve(static_cast<size_t>(pieces_of(runs, highest)));
  int32_t sum_row = 0;
  for (const StripRun& run : runs) {
    const int64_t rows = run.end - run.begin, pieces = over(rows, highest);
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = run.begin + rows * piece / pieces, end = run.begin + rows * (piece + 1) / pieces;
      items.push_back({static_cast<uint16_t>(run.strip), static_cast<uint16_t>(begin),
                       static_cast<uint16_t>(end), sum_row});
      sum_row += static_cast<int32_t>(end - begin);
    }
  }
  if (items.size() > static_cast<size_t>(processors)) {
    std::stable_sort(items.begin(), items.end(),
                     [](const LossItem& a, const LossItem& b) { return a.end - a.begin > b.end - b.begin; });
  }
  return items;
}

}  // namespace mgpu::splat
