// SPDX-License-Identifier: Apache-2.0
#include "splat/links.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "splat/culled.h"
#include "splat/exchange.h"
#include "splat/frame.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kPixelBytes = 3 * sizeof(float);

std::mutex& totals_mutex() {
  static std::mutex instance;
  return instance;
}

LinkTotals& totals() {
  static LinkTotals instance;
  return instance;
}

CullCounts& culled() {
  static CullCounts instance;
  return instance;
}

}  // namespace

LinkBytes& LinkBytes::operator+=(const LinkBytes& other) {
  if (shards_ < other.shards_) *this = LinkBytes(other.shards_);
  for (size_t i = 0; i < other.bytes_.size(); ++i) bytes_[i] += other.bytes_[i];
  return *this;
}

int64_t LinkBytes::total() const { return std::accumulate(bytes_.begin(), bytes_.end(), int64_t{0}); }

double FrameLinks::imbalance() const {
  const int64_t sum = std::accumulate(load.begin(), load.end(), int64_t{0});
  if (sum == 0) return 1.0;
  return static_cast<double>(*std::max_element(load.begin(), load.end())) * static_cast<double>(load.size()) /
         static_cast<double>(sum);
}

void count_links(Frame& frame) {
  const int shards = static_cast<int>(frame.homes.size());
  FrameLinks& links = frame.links;
  links = FrameLinks{LinkBytes(shards), LinkBytes(shards), LinkBytes(shards)};
  for (int home = 0; home < shards; ++home) {
    links.visible_rows += frame.shards[static_cast<size_t>(home)].count;
    links.remote_rows += frame.shards[static_cast<size_t>(home)].remote;
    for (int owner = 0; owner < shards; ++owner) {
      if (home == owner) continue;
      const int64_t count = frame.parcels[static_cast<size_t>(home)][static_cast<size_t>(owner)].count;
      links.records.add(home, owner, count * bytes_of_record(frame, home, owner));
      links.records_sent += count;
    }
  }
  for (const TileOwner& owner : frame.owners)
    links.load.push_back(blending_cost(owner.pairs, owner.tiles.size()));

  std::lock_guard<std::mutex> lock(totals_mutex());
  LinkTotals& all = totals();
  ++all.frames;
  for (const ShardRecords& home : frame.shards) {
    culled().cells += home.culled.cells;
    culled().cells_kept += home.culled.cells_kept;
    culled().candidates += home.culled.candidates;
  }
  all.sum.records += links.records;
  all.sum.gradients += links.gradients;  // zeros, but the size is known from now on
  all.sum.pixels += links.pixels;
  all.sum.records_sent += links.records_sent;
  all.sum.remote_rows += links.remote_rows;
  all.sum.visible_rows += links.visible_rows;
  all.sum.load.resize(static_cast<size_t>(shards), 0);
  for (size_t owner = 0; owner < links.load.size(); ++owner) all.sum.load[owner] += links.load[owner];
  const double imbalance = links.imbalance();
  all.imbalance_sum += imbalance;
  all.imbalance_max = std::max(all.imbalance_max, imbalance);
}

void count_returned(Frame& frame) {
  const int shards = static_cast<int>(frame.homes.size());
  if (shards == 1) return;
  LinkBytes returned(shards);
  for (int home = 0; home < shards; ++home) {
    for (int owner = 0; owner < shards; ++owner) {
      const int64_t count = frame.parcels[static_cast<size_t>(home)][static_cast<size_t>(owner)].count;
      returned.add(owner, home, count * static_cast<int64_t>(sizeof(RecordGrad)));
    }
  }
  frame.links.gradients = returned;
  std::lock_guard<std::mutex> lock(totals_mutex());
  totals().sum.gradients += returned;
}

void count_pixels(Frame& frame, const std::vector<HaloPiece>& halo) {
  LinkBytes pixels(static_cast<int>(frame.homes.size()));
  for (const HaloPiece& piece : halo) pixels.add(piece.from, piece.to, piece.pixels() * kPixelBytes);
  frame.links.pixels += pixels;
  std::lock_guard<std::mutex> lock(totals_mutex());
  totals().sum.pixels += pixels;
}

LinkTotals link_totals() {
  std::lock_guard<std::mutex> lock(totals_mutex());
  return totals();
}

CullCounts cull_totals() {
  std::lock_guard<std::mutex> lock(totals_mutex());
  return culled();
}

void reset_link_totals() {
  std::lock_guard<std::mutex> lock(totals_mutex());
  totals() = LinkTotals{};
  culled() = CullCounts{};
}

}  // namespace mgpu::splat
