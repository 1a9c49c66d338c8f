// SPDX-License-Identifier: Apache-2.0
#include "splat/curve.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace mgpu::splat {

namespace {

constexpr size_t kCachedSizes = 256;

struct Step {
  int x, y;
  Step operator+(Step o) const { return {x + o.x, y + o.y}; }
  Step operator-(Step o) const { return {x - o.x, y - o.y}; }
  Step operator-() const { return {-x, -y}; }
  int length() const { return std::abs(x + y); }  // one of the two is 0
  Step half() const { return {x / 2, y / 2}; }
  Step unit() const { return {(x > 0) - (x < 0), (y > 0) - (y < 0)}; }
};

// Visits the rectangle that `along` and `across` span from `from`, and ends beside from + along. A long one
// is cut in two; else it goes up half of `across`, over, and down again: Hilbert's step. Halves are made even
// where they can be, so that the parts end where the next ones begin (J. Cerveny's generalisation,
// https://github.com/jakubcerveny/gilbert).
template <typename Visit>
void walk(Step from, Step along, Step across, const Visit& visit) {
  const int length = along.length(), width = across.length();
  if (width == 1 || length == 1) {
    const Step step = width == 1 ? along.unit() : across.unit();
    for (int i = 0; i < length * width; ++i, from = from + step) visit(from.x, from.y);
    return;
  }
  const auto even_half = [](Step side) {
    const Step half = side.half();
    return half.length() % 2 == 1 && side.length() > 2 ? half + side.unit() : half;
  };
  if (2 * length > 3 * width) {
    const Step half = even_half(along);
    walk(from, half, across, visit);
    walk(from + half, along - half, across, visit);
    return;
  }
  const Step half = along.half(), up = even_half(across);
  walk(from, up, half, visit);
  walk(from + up, along, across - up, visit);
  walk(from + (along - along.unit()) + (up - up.unit()), -up, -(along - half), visit);
}

}  // namespace

std::shared_ptr<const TileCurve> tile_curve(int tiles_x, int tiles_y) {
  static std::mutex mutex;
  static auto* const cache = new std::map<std::pair<int, int>, std::shared_ptr<const TileCurve>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const TileCurve>& known = (*cache)[{tiles_x, tiles_y}];
  if (known) return known;
  auto made = std::make_shared<TileCurve>();
  const size_t tiles = static_cast<size_t>(tiles_x) * static_cast<size_t>(tiles_y);
  made->position_from_tile.resize(tiles);
  made->tile_from_position.reserve(tiles);
  const Step right{tiles_x, 0}, down{0, tiles_y};
  if (tiles > 0) {
    walk({0, 0}, tiles_x >= tiles_y ? right : down, tiles_x >= tiles_y ? down : right, [&](int x, int y) {
      const size_t tile = static_cast<size_t>(y) * static_cast<size_t>(tiles_x) + static_cast<size_t>(x);
      made->position_from_tile[tile] = static_cast<int32_t>(made->tile_from_position.size());
      if (made->tile_from_position.size() % TileCurve::kBoxTiles == 0)
        made->box.push_back({x, y, x + 1, y + 1});
      TileCurve::Box& box = made->box.back();
      box.x0 = std::min(box.x0, x), box.x1 = std::max(box.x1, x + 1);
      box.y0 = std::min(box.y0, y), box.y1 = std::max(box.y1, y + 1);
      made->tile_from_position.push_back(static_cast<int32_t>(tile));
    });
  }
  std::shared_ptr<const TileCurve> out = made;
  if (cache->size() > kCachedSizes) cache->clear();  // frames keep what they use
  (*cache)[{tiles_x, tiles_y}] = out;
  return out;
}

}  // namespace mgpu::splat
