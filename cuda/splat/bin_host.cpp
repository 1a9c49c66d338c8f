// SPDX-License-Identifier: Apache-2.0
// bin_host.cpp: records by depth (radix sort), then a stable split by tile with keys as wide as the tiles
// need. About 26 bytes an intersection: key 2 (or 4), entry 8 written twice over by the scattered store, slot
// 8 a record.
#include "splat/bin.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "math/tile.h"
#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kGrain = 2048;  // records a piece

// Calls visit(tile) for every tile of the owner's range that the record touches, row by row; tile is counted
// from the range's begin.
template <typename Visit>
void for_each_tile(const View& view, const Record& record, const math::TileEllipse& ellipse, RowRange tiles,
                   const Visit& visit) {
  for (int y = record.tile_rect[1]; y < record.tile_rect[3]; ++y) {
    const math::TileSpan span = math::tile_span_of(ellipse, view, record.tile_rect, y);
    for (int x = span.begin; x < span.end; ++x) {
      const int64_t position = view.position_of(int64_t{y} * view.tiles_x + x);
      if (position >= tiles.begin && position < tiles.end) visit(position - tiles.begin);
    }
  }
}

// Record indices, nearest first; stable. Depths are positive, so their bits order as they do.
Buffer<int32_t> order_by_depth(const Buffer<Record>& records, int owner) {
  constexpr int kBits = 11, kBuckets = 1 << kBits;
  const int64_t count = records.size();
  Buffer<uint32_t> key(count, owner), next_key(count, owner);
  Buffer<int32_t> order(count, owner), next_order(count, owner);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(&key[i], &records[i].depth, sizeof(uint32_t));
    order[i] = static_cast<int32_t>(i);
  }
  std::vector<int64_t> position(kBuckets);
  for (int shift = 0; shift < 32; shift += kBits) {
    std::fill(position.begin(), position.end(), 0);
    for (int64_t i = 0; i < count; ++i) ++position[key[i] >> shift & (kBuckets - 1)];
    std::exclusive_scan(position.begin(), position.end(), position.begin(), int64_t{0});
    for (int64_t i = 0; i < count; ++i) {
      const int64_t to = position[key[i] >> shift & (kBuckets - 1)]++;
      next_key[to] = key[i];
      next_order[to] = order[i];
    }
    std::swap(key, next_key);
    std::swap(order, next_order);
  }
  return order;
}

// Tile keys of all pairs in record order, then the stable split: a histogram and one scattered store.
template <typename Key>
void split_by_tile(const Frame& frame, const Buffer<math::TileEllipse>& ellipse, int self, TileOwner& owner) {
  const int64_t records = owner.record.size(), tiles = owner.tiles.size();
  const int64_t pairs = records ? owner.slot_begin[records] : 0;
  owner.pairs = pairs;
  Buffer<Key> tile_of_slot(pairs, self);
  parallel_for(records, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      Key* key = tile_of_slot.data() + owner.slot_begin[r];
      for_each_tile(frame.views[owner.view[r]], owner.record[r], ellipse[r], owner.tiles,
                    [&](int64_t tile) { *key++ = static_cast<Key>(tile); });
    }
  });

  owner.tile_begin = Buffer<int64_t>(tiles + 1, self);
  std::fill(owner.tile_begin.begin(), owner.tile_begin.end(), 0);
  for (int64_t slot = 0; slot < pairs; ++slot) ++owner.tile_begin[tile_of_slot[slot] + 1];
  std::partial_sum(owner.tile_begin.begin(), owner.tile_begin.end(), owner.tile_begin.begin());

  const Buffer<int32_t> order = order_by_depth(owner.record, self);
  Buffer<int64_t> next(tiles, self);
  std::copy_n(owner.tile_begin.data(), tiles, next.data());
  owner.entry = Buffer<TileEntry>(pairs, self);
  for (const int32_t r : order) {
    const int64_t first = owner.slot_begin[r], count = owner.slot_begin[r + 1] - first;
    for (int64_t i = 0; i < count; ++i) {
      owner.entry[next[tile_of_slot[first + i]]++] = {r, static_cast<int32_t>(i)};
    }
  }
}

void bin_owner(const Frame& frame, int self, TileOwner& owner) {
  const int64_t records = owner.record.size();
  Buffer<math::TileEllipse> ellipse(records, self);
  owner.half_extent = Buffer<float>(2 * records, self);
  owner.slot_begin = Buffer<int64_t>(records + 1, self);
  owner.slot_begin[0] = 0;
  parallel_for(records, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Record& record = owner.record[r];
      int64_t count = 0;
      math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse[r]);
      for_each_tile(frame.views[owner.view[r]], record, ellipse[r], owner.tiles, [&](int64_t) { ++count; });
      owner.slot_begin[r + 1] = count;
      owner.half_extent[2 * r] =
          static_cast<float>(ellipse[r].half_width * (1.0 + 1e-6));  // rounded outwards
      owner.half_extent[2 * r + 1] = static_cast<float>(ellipse[r].half_height * (1.0 + 1e-6));
    }
  });
  std::partial_sum(owner.slot_begin.begin(), owner.slot_begin.end(), owner.slot_begin.begin());
  if (owner.tiles.size() <= int64_t{1} << 16)
    split_by_tile<uint16_t>(frame, ellipse, self, owner);
  else
    split_by_tile<uint32_t>(frame, ellipse, self, owner);
}

}  // namespace

void bin_records(Frame& frame) {
  for_each_shard("bin",
                 [&](const Shard& shard) { bin_owner(frame, shard.index, frame.owners[shard.index]); });
}

int64_t intersection_count(const Frame& frame) {
  int64_t count = 0;
  for (const TileOwner& owner : frame.owners) count += owner.entry.size();
  return count;
}

}  // namespace mgpu::splat
