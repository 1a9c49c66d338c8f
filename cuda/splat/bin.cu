// SPDX-License-Identifier: Apache-2.0
// bin.cu: records by depth (32-bit radix sort), then a stable split by tile with keys as wide as the tiles
// need. Floor: 68 bytes a record, about 24 an intersection with 16-bit keys. All sizes are known from stage
// "project".
#include "splat/bin.h"

#include <bit>
#include <utility>

#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int kManyTiles = 32;  // a record with more is spread over its warp

struct BinInput {
  const Record* record;
  const int32_t* view;
  const View* views;
  int64_t records;
  RowRange tiles;
};

// The part [begin, end) of a row of tiles that is the owner's, counted from its first tile.
__device__ __forceinline__ RowRange own_part(RowRange tiles, int64_t begin, int64_t end) {
  return {(begin > tiles.begin ? begin : tiles.begin) - tiles.begin,
          (end < tiles.end ? end : tiles.end) - tiles.begin};
}

__global__ void __launch_bounds__(kThreads)
    measure_kernel(const __grid_constant__ BinInput in, float* half_extent, int32_t* tile_count,
                   uint32_t* depth_key, int32_t* order) {
  const int64_t r = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (r >= in.records) return;
  const Record record = load48(in.record + r);
  math::TileEllipse ellipse;
  int32_t count = 0;
  float width = 0.f, height = 0.f;
  if (math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) {
    width = static_cast<float>(ellipse.half_width * (1.0 + 1e-6));  // rounded outwards
    height = static_cast<float>(ellipse.half_height * (1.0 + 1e-6));
    for_each_span(in.views[in.view[r]], record, ellipse, [&](int64_t begin, int64_t end) {
      const RowRange part = own_part(in.tiles, begin, end);
      if (!(part.begin >= part.end)) count += static_cast<int32_t>(part.end - part.begin);
    });
  }
  half_extent[2 * r] = width;
  half_extent[2 * r + 1] = height;
  tile_count[r] = count;
  depth_key[r] = __float_as_uint(record.depth);  // positive, so its bits order as it does
  order[r] = static_cast<int32_t>(r);
}

// to[i] = from[order[i]], and 0 after the last, where the scan puts the total.
__global__ void __launch_bounds__(kThreads)
    gather_counts_kernel(const int32_t* from, const int32_t* order, int64_t records, int32_t* to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i <= records) to[i] = i < records ? from[order[i]] : 0;
}

__device__ __forceinline__ void set_entry(int32_t& entry, int64_t record, int64_t) {
  entry = static_cast<int32_t>(record);
}

// Where one record's pairs go: never outside [first, last), whatever the roundings of a second evaluation
// say.
template <typename Key, typename Entry>
struct PairWriter {
  Key* key;
  Entry* entry;
  int64_t record, first, last;

  __device__ __forceinline__ void put(int64_t position, int64_t tile) const {
    if (position >= last) return;
    key[position] = static_cast<Key>(tile);
    set_entry(entry[position], record, position - first);
  }
};

// Keys and entries of all pairs, nearest record first. Unfilled places get the key `tiles`, which sorts
// behind all.
template <typename Key, typename Entry>
__global__ void __launch_bounds__(kThreads)
    emit_kernel(const __grid_constant__ BinInput in, const int32_t* order, const int64_t* offset,
                int64_t pairs, Key* key, Entry* entry) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = threadIdx.x % kWarp;
  PairWriter<Key, Entry> mine{key, entry, 0, 0, 0};
  if (i < in.records) {
    mine.record = order[i];
    mine.first = offset[i];
    mine.last = offset[i + 1] < pairs ? offset[i + 1] : pairs;
  }
  const bool many = mine.last - mine.first > kManyTiles;
  if (mine.last > mine.first && !many) {
    const Record record = load48(in.record + mine.record);
    math::TileEllipse ellipse;
    int64_t position = mine.first;
    if (math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) {
      for_each_span(in.views[in.view[mine.record]], record, ellipse, [&](int64_t begin, int64_t end) {
        const RowRange part = own_part(in.tiles, begin, end);
        for (int64_t tile = part.begin; tile < part.end; ++tile) mine.put(position++, tile);
      });
    }
    for (; position < mine.last; ++position) mine.put(position, in.tiles.size());
  }
  for (unsigned left = __ballot_sync(kAllLanes, many); left; left &= left - 1) {
    const int source = __ffs(left) - 1;
    const PairWriter<Key, Entry> shared{key, entry, __shfl_sync(kAllLanes, mine.record, source),
                                        __shfl_sync(kAllLanes, mine.first, source),
                                        __shfl_sync(kAllLanes, mine.last, source)};
    const Record record = load48(in.record + shared.record);
    const View& view = in.views[in.view[shared.record]];
    math::TileEllipse ellipse;
    int64_t position = shared.first;
    if (math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) {
      for (int top = record.tile_rect[1]; top < record.tile_rect[3]; top += kWarp) {  // a row of tiles a lane
        const int y = top + lane;
        RowRange part{0, 0};
        if (y < record.tile_rect[3]) {
          const math::TileSpan span = math::tile_span_of(ellipse, view, record.tile_rect, y);
          const int64_t row = view.tile_begin + int64_t{y} * view.tiles_x;
          if (span.begin < span.end) part = own_part(in.tiles, row + span.begin, row + span.end);
        }
        const int width = part.empty() ? 0 : static_cast<int>(part.size());
        int before = width;  // becomes the inclusive sum
        for (int step = 1; step < kWarp; step *= 2) {
          const int other = __shfl_up_sync(kAllLanes, before, step);
          if (lane >= step) before += other;
        }
        const int total = __shfl_sync(kAllLanes, before, kWarp - 1);
        for (int k = 0; k < width; ++k) shared.put(position + before - width + k, part.begin + k);
        position += total;
      }
    }
    for (position += lane; position < shared.last; position += kWarp) shared.put(position, in.tiles.size());
  }
}

// Places behind the last record's pairs; none, unless home and owner counted differently.
template <typename Key, typename Entry>
__global__ void __launch_bounds__(kThreads)
    fill_rest_kernel(const int64_t* total, int64_t pairs, int64_t tiles, Key* key, Entry* entry) {
  for (int64_t i = *total + threadIdx.x; i < pairs; i += kThreads) {
    key[i] = static_cast<Key>(tiles);
    set_entry(entry[i], 0, 0);
  }
}

// tile_begin[t] = first place with a key of at least t.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    begins_kernel(const Key* key, int64_t pairs, int64_t tiles, int64_t* tile_begin) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i > pairs) return;
  const int64_t before = i == 0 ? -1 : static_cast<int64_t>(key[i - 1]);
  const int64_t here = i == pairs ? tiles : static_cast<int64_t>(key[i]);
  for (int64_t tile = before + 1; tile <= here; ++tile) tile_begin[tile] = i;
}

template <typename Key, typename Entry>
void split_by_tile(const BinInput& in, const Buffer<int32_t>& order, const Buffer<int64_t>& offset, int self,
                   TileOwner& owner, Buffer<Entry>& entry) {
  const int64_t pairs = owner.pairs, tiles = owner.tiles.size();
  const cudaStream_t stream = shard_stream(self);
  Buffer<Key> key(pairs, self);
  entry = Buffer<Entry>(pairs, self);
  if (in.records > 0 && pairs > 0) {
    emit_kernel<<<blocks_for(in.records, kThreads), kThreads, 0, stream>>>(in, order.data(), offset.data(),
                                                                           pairs, key.data(), entry.data());
    KERNEL_CHECK("bin", self, in.records);
    fill_rest_kernel<<<1, kThreads, 0, stream>>>(offset.data() + in.records, pairs, tiles, key.data(),
                                                 entry.data());
    KERNEL_CHECK("bin", self, in.records);
    sort_pairs(key, entry, std::bit_width(static_cast<uint64_t>(tiles)), self);
  }
  owner.tile_begin = Buffer<int64_t>(tiles + 1, self);
  begins_kernel<<<blocks_for(pairs + 1, kThreads), kThreads, 0, stream>>>(key.data(), pairs, tiles,
                                                                          owner.tile_begin.data());
  KERNEL_CHECK("bin", self, pairs);
}

template <typename Entry>
void split_by_tile_of_any_width(const BinInput& in, const Buffer<int32_t>& order,
                                const Buffer<int64_t>& offset, int self, TileOwner& owner,
                                Buffer<Entry>& entry) {
  if (owner.tiles.size() < int64_t{1} << 16)
    split_by_tile<uint16_t>(in, order, offset, self, owner, entry);
  else
    split_by_tile<uint32_t>(in, order, offset, self, owner, entry);
}

void bin_owner(const Frame& frame, int self, TileOwner& owner) {
  const int64_t records = owner.received();
  const BinInput in{received_records(frame, self), received_views(frame, self),
                    frame.constants[static_cast<size_t>(self)].views.data(), records, owner.tiles};
  Buffer<int32_t> tile_count(records + 1, self), order(records, self), ordered_count(records + 1, self);
  Buffer<uint32_t> depth_key(records, self);
  Buffer<int64_t> offset(records + 1, self);
  owner.half_extent = Buffer<float>(2 * records, self);
  if (records > 0) {
    const cudaStream_t stream = shard_stream(self);
    measure_kernel<<<blocks_for(records, kThreads), kThreads, 0, stream>>>(
        in, owner.half_extent.data(), tile_count.data(), depth_key.data(), order.data());
    KERNEL_CHECK("bin", self, records);
    sort_pairs(depth_key, order, 32, self);
    gather_counts_kernel<<<blocks_for(records + 1, kThreads), kThreads, 0, stream>>>(
        tile_count.data(), order.data(), records, ordered_count.data());
    KERNEL_CHECK("bin", self, records);
    exclusive_sum(ordered_count.data(), offset.data(), records + 1, self);
  }
  split_by_tile_of_any_width(in, order, offset, self, owner, owner.entry_record);
}

}  // namespace

void bin_records(Frame& frame) {
  for_each_shard("bin", [&](const Shard& shard) {
    bin_owner(frame, shard.index, frame.owners[static_cast<size_t>(shard.index)]);
  });
}

int64_t intersection_count(const Frame& frame) {
  int64_t count = 0;
  for (const TileOwner& owner : frame.owners) count += owner.pairs;
  return count;
}

}  // namespace mgpu::splat
