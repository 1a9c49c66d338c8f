// SPDX-License-Identifier: Apache-2.0
// tile_owners.h: whose each tile of an image is, row by row, for those who look at neighbours. Host.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "math/view.h"
#include "splat/patches.h"

namespace mgpu::splat {

// A byte a tile, with a row of nobody's above and below.
class TileOwners {
 public:
  static constexpr uint8_t kNobody = 255;
  static constexpr int kAtOnce = 8;  // tiles in a word

  TileOwners() = default;
  // patches: [shards][views].
  TileOwners(const View& view, size_t v, const std::vector<std::vector<ViewPatch>>& patches);

  int across() const { return across_; }
  int down() const { return down_; }
  uint8_t at(int x, int y) const { return x < 0 || x >= across_ ? kNobody : row(y)[x]; }
  // From -1 to down().
  const uint8_t* row(int y) const {
    return owner_.data() + static_cast<std::ptrdiff_t>(y + 1) * static_cast<std::ptrdiff_t>(across_);
  }
  // kAtOnce tiles from here on, the first one in the lowest byte.
  static uint64_t word(const uint8_t* from) {
    static_assert(std::endian::native == std::endian::little);
    uint64_t tiles;
    std::memcpy(&tiles, from, sizeof tiles);
    return tiles;
  }

  // Calls visit(x, y) for all tiles but most of those whose neighbours are all of their own shard, row by
  // row. These are found eight at a time.
  template <typename Visit>
  void for_border_tiles(const Visit& visit) const {
    for (int y = 0; y < down_; ++y) {
      const uint8_t* const rows[] = {row(y - 1), row(y), row(y + 1)};
      for (int x = 0; x < across_;) {
        if (x > 0 && x + kAtOnce < across_) {
          const uint64_t own = word(rows[1] + x);
          uint64_t other = 0;
          for (const uint8_t* const of : rows)
            other |= (word(of + x - 1) ^ own) | (word(of + x) ^ own) | (word(of + x + 1) ^ own);
          while (other != 0) {
            const int tile = std::countr_zero(other) / 8;
            visit(x + tile, y);
            other &= ~(uint64_t{0xff} << 8 * tile);
          }
          x += kAtOnce;
          continue;
        }
        visit(x, y);
        ++x;
      }
    }
  }

 private:
  int across_ = 0, down_ = 0;
  std::vector<uint8_t> owner_;
};

}  // namespace mgpu::splat
