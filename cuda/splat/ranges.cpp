// SPDX-License-Identifier: Apache-2.0
#include "splat/ranges.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace mgpu::splat {

namespace {

constexpr int64_t kCandidates = 32;  // places looked at for a cut, and the even one
constexpr int kRounds = 8;

// The cost of what lies before each position: [positions + 1].
class Costs {
 public:
  Costs(const TileCount* counts, int shards, int64_t positions, int64_t tiles, int64_t run)
      : before_(static_cast<size_t>(positions) + 1, 0) {
    for (int shard = 0; shard < shards; ++shard) {
      const TileCount* count = counts + shard * positions;
      for (int64_t p = 0; p < positions; ++p) before_[static_cast<size_t>(p) + 1] += pairs_of(count[p]);
    }
    for (int64_t p = 0; p < positions; ++p) {
      before_[static_cast<size_t>(p) + 1] +=
          before_[static_cast<size_t>(p)] + blending_cost(0, std::min(run, tiles - p * run));
    }
  }

  int64_t positions() const { return static_cast<int64_t>(before_.size()) - 1; }
  int64_t total() const { return before_.back(); }
  int64_t of(int64_t begin, int64_t end) const {
    return before_[static_cast<size_t>(end)] - before_[static_cast<size_t>(begin)];
  }
  // The last end such that [begin, end) costs at most `most`.
  int64_t last_end(int64_t begin, int64_t most) const {
    const int64_t limit = before_[static_cast<size_t>(begin)] + most;
    return std::upper_bound(before_.begin() + begin, before_.end(), limit) - before_.begin() - 1;
  }
  // The first begin such that [begin, end) costs at most `most`.
  int64_t first_begin(int64_t end, int64_t most) const {
    const int64_t limit = before_[static_cast<size_t>(end)] - most;
    return std::lower_bound(before_.begin(), before_.begin() + end, limit) - before_.begin();
  }
  // The position with nearest to `cost` before it.
  int64_t nearest(int64_t cost) const {
    const int64_t after = std::lower_bound(before_.begin(), before_.end(), cost) - before_.begin();
    if (after > positions()) return positions();
    if (after > 0 && cost - of(0, after - 1) < of(0, after) - cost) return after - 1;
    return after;
  }

  bool fits(int ranges, int64_t most) const {
    int64_t end = 0;
    for (int i = 0; i < ranges; ++i) end = last_end(end, most);
    return end == positions();
  }
  // The largest cost that a range may have.
  int64_t bound(int ranges) const {
    const int64_t wanted = total() * 11 / (10 * int64_t{ranges});
    if (fits(ranges, wanted)) return wanted;
    int64_t too_little = wanted, enough = total();
    while (enough - too_little > 1) {
      const int64_t middle = too_little + (enough - too_little) / 2;
      (fits(ranges, middle) ? enough : too_little) = middle;
    }
    return enough;
  }

 private:
  std::vector<int64_t> before_;
};

// Places for cut k = 0 .. ranges, ascending; the first cut is 0, the last one the end. However the others are
// chosen, the latest ones that the bound allows are among them, so a choice within the bound exists.
std::vector<std::vector<int64_t>> places_for_cuts(const Costs& costs, int ranges, int64_t most) {
  const size_t cuts = static_cast<size_t>(ranges) + 1;
  std::vector<std::vector<int64_t>> places(cuts);
  std::vector<int64_t> earliest(cuts, costs.positions());
  for (size_t k = cuts - 1; k > 0; --k) earliest[k - 1] = costs.first_begin(earliest[k], most);
  int64_t latest = 0;
  for (size_t k = 0; k < cuts; ++k) {
    if (k > 0) latest = costs.last_end(latest, most);
    if (k == 0 || k + 1 == cuts) {
      places[k] = {k == 0 ? 0 : costs.positions()};
      continue;
    }
    const int64_t first = earliest[k], width = latest - first;
    const int64_t steps = std::min(width, kCandidates - 1);
    for (int64_t i = 0; i <= steps; ++i) places[k].push_back(steps > 0 ? first + width * i / steps : first);
    const int64_t even = costs.nearest(costs.total() * static_cast<int64_t>(k) / ranges);
    places[k].push_back(std::clamp(even, first, latest));
    std::sort(places[k].begin(), places[k].end());
    places[k].erase(std::unique(places[k].begin(), places[k].end()), places[k].end());
  }
  return places;
}

// Shares of each home before the places that cuts may take.
class Shares {
 public:
  Shares(const TileCount* counts, int shards, int64_t positions,
         const std::vector<std::vector<int64_t>>& places) {
    for (const auto& of_cut : places) place_.insert(place_.end(), of_cut.begin(), of_cut.end());
    std::sort(place_.begin(), place_.end());
    place_.erase(std::unique(place_.begin(), place_.end()), place_.end());
    before_.assign(static_cast<size_t>(shards) * place_.size(), 0);
    for (int shard = 0; shard < shards; ++shard) {
      const TileCount* count = counts + shard * positions;
      int64_t* before = &before_[static_cast<size_t>(shard) * place_.size()];
      for (size_t i = 1; i < place_.size(); ++i) {
        int64_t sum = 0;
        for (int64_t p = place_[i - 1]; p < place_[i]; ++p) sum += share_of(count[p]);
        before[i] = before[i - 1] + sum;
      }
    }
  }
  size_t index_of(int64_t place) const {
    return static_cast<size_t>(std::lower_bound(place_.begin(), place_.end(), place) - place_.begin());
  }
  // Of what `shard` holds, in the range between two places by their index.
  int64_t of(int shard, size_t begin, size_t end) const {
    const int64_t* before = &before_[static_cast<size_t>(shard) * place_.size()];
    return before[end] - before[begin];
  }

 private:
  std::vector<int64_t> place_, before_;
};

// What stays at home, and of two choices that keep as much, the more even one.
struct Gain {
  int64_t kept = -1, largest = 0;
  bool beats(const Gain& other) const {
    return kept != other.kept ? kept > other.kept : largest < other.largest;
  }
};

// Cuts [ranges + 1] that keep most for these owners, within the bound.
std::vector<int64_t> best_cuts(const Costs& costs, const Shares& shares,
                               const std::vector<std::vector<int64_t>>& places, const std::vector<int>& owner,
                               int64_t most, Gain& gain) {
  const size_t cuts = places.size();
  std::vector<std::vector<size_t>> index(cuts), from(cuts);
  for (size_t k = 0; k < cuts; ++k) {
    for (const int64_t place : places[k]) index[k].push_back(shares.index_of(place));
  }
  std::vector<Gain> before{{0, 0}}, here;
  for (size_t k = 1; k < cuts; ++k) {
    here.assign(places[k].size(), Gain{});
    from[k].assign(places[k].size(), 0);
    for (size_t j = 0; j < places[k].size(); ++j) {
      for (size_t i = 0; i < before.size() && places[k - 1][i] <= places[k][j]; ++i) {
        const int64_t cost = costs.of(places[k - 1][i], places[k][j]);
        if (before[i].kept < 0 || cost > most) continue;
        const Gain reached{before[i].kept + shares.of(owner[k - 1], index[k - 1][i], index[k][j]),
                           std::max(before[i].largest, cost)};
        if (!reached.beats(here[j])) continue;
        here[j] = reached;
        from[k][j] = i;
      }
    }
    std::swap(before, here);
  }
  gain = before[0];
  std::vector<int64_t> cut(cuts);
  size_t at = 0;
  for (size_t k = cuts - 1; k > 0; --k) {
    cut[k] = places[k][at];
    at = from[k][at];
  }
  cut[0] = 0;
  return cut;
}

std::vector<int> best_owners(const Shares& shares, const std::vector<int64_t>& cut) {
  const size_t ranges = cut.size() - 1;
  std::vector<int64_t> kept(ranges * ranges);
  for (size_t range = 0; range < ranges; ++range) {
    const size_t begin = shares.index_of(cut[range]), end = shares.index_of(cut[range + 1]);
    for (size_t shard = 0; shard < ranges; ++shard)
      kept[shard * ranges + range] = shares.of(static_cast<int>(shard), begin, end);
  }
  return match_ranges(kept, static_cast<int>(ranges));
}

}  // namespace

int TileRanges::range_of(int64_t position) const {
  return static_cast<int>(std::upper_bound(end.begin(), end.end(), position) - end.begin());
}

TileRanges choose_ranges(const TileCount* counts, int shards, int64_t tiles, int64_t run) {
  const int64_t positions = (tiles + run - 1) / run;
  const Costs costs(counts, shards, positions, tiles, run);
  const int64_t most = costs.bound(shards);
  const std::vector<std::vector<int64_t>> places = places_for_cuts(costs, shards, most);
  const Shares shares(counts, shards, positions, places);
  std::vector<int64_t> cut;
  for (size_t k = 0; k < places.size(); ++k) {
    const int64_t even = costs.nearest(costs.total() * static_cast<int64_t>(k) / shards);
    const auto after = std::lower_bound(places[k].begin(), places[k].end(), even);
    cut.push_back(after == places[k].end() ? places[k].back() : *after);
  }
  TileRanges best;
  Gain best_gain;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<int> owner = best_owners(shares, cut);
    Gain gain;
    cut = best_cuts(costs, shares, places, owner, most, gain);
    if (!gain.beats(best_gain)) break;
    best_gain = gain;
    best.end.assign(cut.begin() + 1, cut.end());
    best.owner = std::move(owner);
  }
  for (int64_t& end : best.end) end = std::min(end * run, tiles);
  return best;
}

// Rows (shards) are taken in one by one; each time the cheapest way to change the matching so that one more
// row has a column is found by Dijkstra's method on reduced costs.
std::vector<int> match_ranges(const std::vector<int64_t>& kept, int shards) {
  constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 4;
  const size_t n = static_cast<size_t>(shards), none = n;
  std::vector<int64_t> row_price(n, 0), column_price(n + 1, 0);
  std::vector<size_t> row_of(n + 1, none);  // of each column; column n holds the row that comes in
  for (size_t entering = 0; entering < n; ++entering) {
    std::vector<int64_t> distance(n, kFar);
    std::vector<size_t> before(n, n);
    std::vector<char> done(n + 1, 0);
    row_of[n] = entering;
    size_t column = n;
    while (row_of[column] != none) {
      done[column] = 1;
      const size_t row = row_of[column];
      int64_t least = kFar;
      size_t next = n;
      for (size_t c = 0; c < n; ++c) {
        if (done[c]) continue;
        const int64_t reduced = -kept[row * n + c] - row_price[row] - column_price[c];
        if (reduced < distance[c]) {
          distance[c] = reduced;
          before[c] = column;
        }
        if (distance[c] < least) {
          least = distance[c];
          next = c;
        }
      }
      for (size_t c = 0; c <= n; ++c) {
        if (done[c]) {
          row_price[row_of[c]] += least;
          column_price[c] -= least;
        } else if (c < n) {
          distance[c] -= least;
        }
      }
      column = next;
    }
    while (column != n) {
      row_of[column] = row_of[before[column]];
      column = before[column];
    }
  }
  std::vector<int> owner(n);
  for (size_t range = 0; range < n; ++range) owner[range] = static_cast<int>(row_of[range]);
  return owner;
}

}  // namespace mgpu::splat
