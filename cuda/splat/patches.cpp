// SPDX-License-Identifier: Apache-2.0
#include "splat/patches.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include "splat/frame.h"

namespace mgpu::splat {

namespace {

constexpr uint8_t kNobody = 255;
static_assert(kMaxShards < kNobody);

// Owners of the tiles of a view, with a row of nobody's above and below.
class OwnerMap {
 public:
  OwnerMap(const View& view, size_t v, const std::vector<std::vector<ViewPatch>>& patches)
      : across_(view.tiles_x),
        down_(view.tiles_y),
        owner_(static_cast<size_t>(view.tile_count()) + 2 * static_cast<size_t>(across_), kNobody) {
    for (size_t shard = 0; shard < patches.size(); ++shard) {
      const RowRange tiles = patches[shard][v].tiles;
      for (int64_t position = tiles.begin; position < tiles.end; ++position)
        owner_[static_cast<size_t>(across_ + view.tile_at(position))] = static_cast<uint8_t>(shard);
    }
  }
  uint8_t at(int x, int y) const { return x < 0 || x >= across_ ? kNobody : row(y)[x]; }

  // Calls visit(x, y) for all tiles but some whose neighbours are all of their own shard, row by row. Most of
  // these are found eight at a time.
  template <typename Visit>
  void for_border_tiles(const Visit& visit) const {
    constexpr int kAtOnce = 8;
    const auto eight = [](const uint8_t* from) {
      uint64_t word;
      std::memcpy(&word, from, sizeof word);
      return word;
    };
    for (int y = 0; y < down_; ++y) {
      const uint8_t* const rows[] = {row(y - 1), row(y), row(y + 1)};
      for (int x = 0; x < across_;) {
        if (x > 0 && x + kAtOnce < across_) {
          const uint64_t own = eight(rows[1] + x);
          uint64_t other = 0;
          for (const uint8_t* const of : rows)
            other |= (eight(of + x - 1) ^ own) | (eight(of + x) ^ own) | (eight(of + x + 1) ^ own);
          if (other == 0) {
            x += kAtOnce;
            continue;
          }
        }
        visit(x, y);
        ++x;
      }
    }
  }

 private:
  const uint8_t* row(int y) const {
    return owner_.data() + static_cast<std::ptrdiff_t>(y + 1) * static_cast<std::ptrdiff_t>(across_);
  }
  int across_, down_;
  std::vector<uint8_t> owner_;
};

void widen(ViewPatch& patch, int x0, int y0, int x1, int y1) {
  patch.x0 = std::min(patch.x0, x0), patch.x1 = std::max(patch.x1, x1);
  patch.y0 = std::min(patch.y0, y0), patch.y1 = std::max(patch.y1, y1);
}

// What the neighbours of a tile want of it.
class Wanted {
 public:
  void add(int shard, HaloPiece part) {
    for (int i = 0; i < count_; ++i) {
      if (piece_[i].to != shard) continue;
      piece_[i].x0 = std::min(piece_[i].x0, part.x0), piece_[i].x1 = std::max(piece_[i].x1, part.x1);
      piece_[i].y0 = std::min(piece_[i].y0, part.y0), piece_[i].y1 = std::max(piece_[i].y1, part.y1);
      return;
    }
    part.to = shard;
    piece_[count_++] = part;
  }
  const HaloPiece* begin() const { return piece_.data(); }
  const HaloPiece* end() const { return piece_.data() + count_; }

 private:
  static constexpr int kNeighbours = 8;
  std::array<HaloPiece, kNeighbours> piece_;
  int count_ = 0;
};

// The part of a tile's side [0, size) that a neighbour `step` tiles further on reads, which reads so far
// before and after itself.
RowRange part_read(int step, int size, int before, int after) {
  if (step > 0) return {std::max(kTileSize - before, 0), size};
  return {0, step < 0 ? std::min(after, size) : size};
}

}  // namespace

std::vector<std::vector<ViewPatch>> view_patches(const Frame& frame) {
  std::vector<std::vector<ViewPatch>> patches(frame.owners.size(),
                                              std::vector<ViewPatch>(frame.views.size()));
  for (size_t shard = 0; shard < frame.owners.size(); ++shard) {
    const RowRange tiles = frame.owners[shard].tiles;
    for (size_t v = 0; v < frame.views.size(); ++v) {
      const View& view = frame.views[v];
      ViewPatch& patch = patches[shard][v];
      patch.tiles.begin = std::max(tiles.begin, view.tile_begin);
      patch.tiles.end = std::min(tiles.end, view.tile_begin + view.tile_count());
      if (patch.tiles.end <= patch.tiles.begin) {
        patch.tiles = {};
        continue;
      }
      patch.x0 = view.tiles_x, patch.y0 = view.tiles_y;
      const TileCurve* const curve = v < frame.curves.size() ? frame.curves[v].get() : nullptr;
      for (int64_t position = patch.tiles.begin; position < patch.tiles.end;) {
        const int64_t place = position - view.tile_begin;
        if (curve && place % TileCurve::kBoxTiles == 0 &&
            position + TileCurve::kBoxTiles <= patch.tiles.end) {
          const TileCurve::Box& box = curve->box[static_cast<size_t>(place / TileCurve::kBoxTiles)];
          widen(patch, box.x0, box.y0, box.x1, box.y1);
          position += TileCurve::kBoxTiles;
          continue;
        }
        const int tile = static_cast<int>(view.tile_at(position++));
        const int y = tile / view.tiles_x, x = tile - y * view.tiles_x;
        widen(patch, x, y, x + 1, y + 1);
      }
    }
  }
  return patches;
}

std::vector<HaloPiece> halo_pieces(const Frame& frame, const std::vector<std::vector<ViewPatch>>& patches,
                                   const std::vector<LossReach>& reach) {
  std::vector<HaloPiece> all;
  for (size_t v = 0; v < frame.views.size(); ++v) {
    const LossReach& around = reach[v];
    if (around.side == 0) continue;
    const View& view = frame.views[v];
    const OwnerMap owners(view, v, patches);
    owners.for_border_tiles([&](int x, int y) {
      const uint8_t mine = owners.at(x, y);
      Wanted wanted;
      for (int dy = -1; dy <= 1; ++dy) {
        for (int dx = -1; dx <= 1; ++dx) {
          const uint8_t other = owners.at(x + dx, y + dy);
          if (other == mine || other == kNobody) continue;
          const int left = x * kTileSize, top = y * kTileSize;
          const RowRange columns =
              part_read(dx, std::min(kTileSize, view.width - left), around.side, around.side);
          const RowRange rows =
              part_read(dy, std::min(kTileSize, view.height - top), around.above, around.below);
          wanted.add(other, {mine, other, static_cast<int>(v), left + static_cast<int>(columns.begin),
                             top + static_cast<int>(rows.begin), left + static_cast<int>(columns.end),
                             top + static_cast<int>(rows.end)});
        }
      }
      all.insert(all.end(), wanted.begin(), wanted.end());
    });
  }
  std::stable_sort(all.begin(), all.end(), [](const HaloPiece& a, const HaloPiece& b) {
    return a.from != b.from ? a.from < b.from : a.to < b.to;
  });
  return all;
}

RowRange rows_held(const View& view, const ViewPatch& patch, const LossReach& reach) {
  if (patch.empty()) return {};
  const int fetched = reach.below > 0 ? reach.below + 1 : 0;
  return {std::max(patch.y0 * kTileSize - reach.above, 0),
          std::min(patch.y1 * kTileSize + fetched, view.height)};
}

}  // namespace mgpu::splat
