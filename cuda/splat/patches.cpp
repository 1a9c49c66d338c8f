// SPDX-License-Identifier: Apache-2.0
#include "splat/patches.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "splat/frame.h"
#include "splat/tile_owners.h"

namespace mgpu::splat {

namespace {

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

// By (from, to), else in their order. There are thousands, and few pairs of shards.
std::vector<HaloPiece> by_pair(const std::vector<HaloPiece>& pieces, size_t shards) {
  const auto pair_of = [&](const HaloPiece& piece) {
    return static_cast<size_t>(piece.from) * shards + static_cast<size_t>(piece.to);
  };
  std::vector<size_t> next(shards * shards + 1, 0);  // place of a pair's next piece
  for (const HaloPiece& piece : pieces) ++next[pair_of(piece) + 1];
  for (size_t pair = 1; pair < next.size(); ++pair) next[pair] += next[pair - 1];
  std::vector<HaloPiece> sorted(pieces.size());
  for (const HaloPiece& piece : pieces) sorted[next[pair_of(piece)]++] = piece;
  return sorted;
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

std::vector<HaloPiece> halo_pieces(const Frame& frame, const std::vector<TileOwners>& all_owners,
                                   const std::vector<LossReach>& reach) {
  std::vector<HaloPiece> all;
  for (size_t v = 0; v < frame.views.size(); ++v) {
    const LossReach& around = reach[v];
    if (around.side == 0) continue;
    const View& view = frame.views[v];
    const TileOwners& owners = all_owners[v];
    owners.for_border_tiles([&](int x, int y) {
      const uint8_t mine = owners.at(x, y);
      Wanted wanted;
      for (int dy = -1; dy <= 1; ++dy) {
        for (int dx = -1; dx <= 1; ++dx) {
          const uint8_t other = owners.at(x + dx, y + dy);
          if (other == mine || other == TileOwners::kNobody) continue;
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
  return by_pair(all, frame.owners.size());
}

RowRange rows_held(const View& view, const ViewPatch& patch, const LossReach& reach) {
  if (patch.empty()) return {};
  const int fetched = reach.below > 0 ? reach.below + 1 : 0;
  return {std::max(patch.y0 * kTileSize - reach.above, 0),
          std::min(patch.y1 * kTileSize + fetched, view.height)};
}

}  // namespace mgpu::splat
