// SPDX-License-Identifier: Apache-2.0
#include "splat/bands.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace mgpu::splat {

namespace {

constexpr double kMostOverShare = 1.1;

// What each shard has of a view.
struct Part {
  double pixels = 0.0;
  double height = 0.0;  // sum over the pixels of their rows of tiles
};

}  // namespace

std::vector<int64_t> owned_columns(const Frame& frame, const View& view) {
  std::vector<int64_t> columns(frame.owners.size() * static_cast<size_t>(view.tiles_y), 0);
  for (size_t owner = 0; owner < frame.owners.size(); ++owner) {
    const RowRange tiles = frame.owners[owner].tiles;
    const int64_t end = std::min(tiles.end, view.tile_begin + view.tile_count());
    for (int64_t position = std::max(tiles.begin, view.tile_begin); position < end; ++position) {
      const int64_t tile = view.tile_at(position), y = tile / view.tiles_x, x = tile - y * view.tiles_x;
      columns[owner * static_cast<size_t>(view.tiles_y) + static_cast<size_t>(y)] +=
          std::min<int64_t>(kTileSize, view.width - x * kTileSize);
    }
  }
  return columns;
}

std::vector<std::vector<RowRange>> bands_of_owners(const Frame& frame) {
  const size_t shards = frame.owners.size(), views = frame.views.size();
  std::vector<std::vector<Part>> parts(views, std::vector<Part>(shards));
  std::vector<double> wanted(shards, 0.0);
  double all = 0.0;
  for (size_t v = 0; v < views; ++v) {
    const View& view = frame.views[v];
    const std::vector<int64_t> columns = owned_columns(frame, view);
    for (size_t shard = 0; shard < shards; ++shard) {
      Part& part = parts[v][shard];
      for (int y = 0; y < view.tiles_y; ++y) {
        const int rows = std::min(kTileSize, view.height - y * kTileSize);
        const double pixels =
            static_cast<double>(columns[shard * static_cast<size_t>(view.tiles_y) + y] * rows);
        part.pixels += pixels;
        part.height += pixels * y;
      }
      wanted[shard] += part.pixels;
      all += part.pixels;
    }
  }

  // Who has too much gives some of it away, to whoever has room.
  const double most = kMostOverShare * all / static_cast<double>(shards);
  std::vector<double> kept(shards, 1.0), room(shards, 0.0);
  for (size_t shard = 0; shard < shards; ++shard) {
    if (wanted[shard] > most) kept[shard] = most / wanted[shard];
    room[shard] = most - wanted[shard] * kept[shard];
  }
  const double all_room = std::accumulate(room.begin(), room.end(), 0.0);
  std::vector<std::vector<RowRange>> bands(views, std::vector<RowRange>(shards));
  for (size_t v = 0; v < views; ++v) {
    const View& view = frame.views[v];
    const double pixels = static_cast<double>(view.width) * view.height;
    std::vector<double> taken(shards), middle(shards);
    double given = pixels;
    for (size_t shard = 0; shard < shards; ++shard) {
      const Part& part = parts[v][shard];
      taken[shard] = part.pixels * kept[shard];
      given -= taken[shard];
      middle[shard] = part.pixels > 0.0 ? part.height / part.pixels : static_cast<double>(view.tiles_y);
    }
    for (size_t shard = 0; shard < shards && all_room > 0.0; ++shard)
      taken[shard] += given * room[shard] / all_room;
    std::vector<size_t> order(shards);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return middle[a] < middle[b]; });
    double sum = 0.0;
    int64_t begin = 0;
    for (const size_t shard : order) {
      sum += taken[shard];
      const int64_t tile_row =
          shard == order.back() ? view.tiles_y : std::lround(sum / pixels * view.tiles_y);
      const int64_t end = std::max(begin, std::min<int64_t>(view.height, tile_row * kTileSize));
      bands[v][shard] = {begin, end};
      begin = end;
    }
  }
  return bands;
}

}  // namespace mgpu::splat
