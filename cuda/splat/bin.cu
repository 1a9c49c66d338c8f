// SPDX-License-Identifier: Apache-2.0
// bin.cu: records by depth, then a stable split of their tiles by tile: radix sorts of our own (radix.h),
// three passes of 9 bits over depths that differ by less than a factor of 65,536, two of 8 over tiles. A
// record's tiles are listed from the 16 bytes that were kept of it where it was measured (cover.h): by stage
// "project". On several shards the owner has a mask of them from the record's home, and walks the tiles of a
// record without one. Floor: 76 bytes a record, on several shards 80 more, 24 an intersection with 16-bit
// keys. All sizes are known from the read-back of stage "project".
#include "splat/bin.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "memory/transfer.h"
#include "splat/cover.h"
#include "splat/kernels.h"
#include "splat/radix.h"

namespace mgpu::splat {

namespace {

constexpr int kTileBins = 256;
constexpr int kManyRecords = 4;  // a thread lists, where there are many
constexpr int64_t kManyFrom = int64_t{2 * 132} * kThreads * kManyRecords;

struct BinInput {
  const Record* record;
  const int32_t* view;
  const View* views;
  int num_views;
  int64_t records;
  RowRange tiles;
  bool several;  // owners: tiles are along a curve, and those of a record may be others'
  OwnTiles own;  // of several
  // With several owners and a single view its places along the curve, in the arguments: what a loop reads for
  // each pair; else null.
  const int32_t* only_positions;

  __device__ __forceinline__ const View& view_of(int64_t r) const {
    return views[num_views > 1 ? view[r] : 0];
  }
  // Place in the owner's range of a record's tile, which is counted row by row: from the range's begin, or,
  // if there are several owners, from the first one of its view.
  __device__ __forceinline__ int64_t place_of(int64_t tile, int64_t r) const {
    if (!several) return tile;
    return (only_positions ? only_positions[tile] : view_of(r).position_of(tile)) - tiles.begin;
  }
};

// ---- records that came from other shards

// By all lanes of a warp: covers of those records whose lanes want it. Not inlined: few records need it, and
// the others do without its registers.
__device__ __noinline__ void walk_received(const BinInput& in, int64_t r, bool wanted, TileWalk& shared,
                                           TileCover* cover) {
  TileWalk walk{};  // but for the box: patches were counted at home
  bool met = false;
  if (wanted) {
    const Record record = load48(in.record + r);
    for (int i = 0; i < 4; ++i) walk.rect[i] = record.tile_rect[i];
    met = math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, walk.ellipse);
  }
  const int v = met && in.num_views > 1 ? in.view[r] : 0;
  const CoverPart<true> part = walk_tiles(walk, met, in.views, v, CoverPart<true>{in.own, 0, 0, 0}, shared);
  if (wanted) cover[r] = cover_of(walk.rect, part);
}

__global__ void __launch_bounds__(kThreads, 5)
    measure_kernel(const __grid_constant__ BinInput in, const uint32_t* tile_mask, float2* half_extent,
                   TileCover* cover, uint32_t* depth_key, unsigned long long* depth_histogram) {
  __shared__ TileWalk s_walk[kWarps];
  __shared__ unsigned s_histogram[kDepthBins];
  for (int bin = threadIdx.x; bin < kDepthBins; bin += kThreads) s_histogram[bin] = 0;
  __syncthreads();
  for (int64_t block = blockIdx.x; block * kThreads < in.records; block += gridDim.x) {
    const int64_t r = block * kThreads + threadIdx.x;
    bool walked = false;
    if (r < in.records) {
      const uint32_t mask = tile_mask[r];
      const Record record = load48(in.record + r);
      math::TileEllipse ellipse;
      const bool met = math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse);
      const uint32_t key = depth_key_of(record.depth);
      half_extent[r] = met ? half_extent_of(ellipse) : float2{};
      depth_key[r] = key;
      atomicAdd(s_histogram + key % kDepthBins, 1u);
      walked = mask == 0;
      if (!walked) cover[r] = cover_of(record.tile_rect, CoverPart<true>{in.own, __popc(mask), 0, mask});
    }
    if (__any_sync(kAllLanes, walked)) walk_received(in, r, walked, s_walk[threadIdx.x / kWarp], cover);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kDepthBins; bin += kThreads) {
    if (s_histogram[bin]) atomicAdd(depth_histogram + bin, static_cast<unsigned long long>(s_histogram[bin]));
  }
}

// depth_histogram: [kDepthBins], zero before.
void measure(const BinInput& in, int self, TileOwner& owner, SumState* depth_histogram) {
  owner.half_extent = Buffer<float>(2 * in.records, self);
  owner.cover = Buffer<TileCover>(in.records, self);
  owner.depth_key = Buffer<uint32_t>(in.records, self);
  const unsigned blocks = static_cast<unsigned>(
      std::min<int64_t>(blocks_for(in.records, kThreads),
                        prepare_kernel(reinterpret_cast<const void*>(measure_kernel), kThreads, 0, self)));
  measure_kernel<<<blocks, kThreads, 0, shard_stream(self)>>>(
      in, owner.tile_mask.data(), reinterpret_cast<float2*>(owner.half_extent.data()), owner.cover.data(),
      owner.depth_key.data(), depth_histogram);
  KERNEL_CHECK("bin", self, in.records);
  owner.tile_mask = Buffer<uint32_t>();
}

// ---- tiles of the records, nearest record first

// Rows of a large record whose tiles are to be listed.
struct LargePart {
  int64_t place;  // of the record's first tile
  int32_t record;
  int32_t part;  // kPartRows of its rows
};
constexpr int kPartRows = 16;
constexpr int kRecordsALargePart = 8;  // for as many records there is room for a part

template <typename Key>
struct EmitTarget {
  const TileCover* cover;
  const int32_t* order;
  int64_t pairs;  // places there are
  Key* key;
  int32_t* entry;
  SumState* histogram;  // [kTileBins] of the key's lowest digit, zero before
  SumState* state;      // [blocks], zero before
  // Where there are many records; else all are listed where they are met.
  LargePart* large;
  SumState* large_count;  // [1], zero before; may be more than there is room for
  int64_t large_room;

  // histogram: the block's, of kTileBins.
  __device__ __forceinline__ void put(int64_t place, int64_t tile, int32_t record, unsigned* of_block) const {
    if (place >= pairs) return;
    key[place] = static_cast<Key>(tile);
    entry[place] = record;
    atomicAdd(of_block + tile % kTileBins, 1u);
  }
  __device__ __forceinline__ void add(const unsigned* of_block) const {
    if (threadIdx.x < kTileBins && of_block[threadIdx.x])
      atomicAdd(histogram + threadIdx.x, static_cast<SumState>(of_block[threadIdx.x]));
  }
};

// The place of the n-th set bit.
__device__ __forceinline__ int nth_bit(uint32_t mask, int n) {
  int at = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const int below = __popc(mask & ((1u << width) - 1u));
    if (n >= below) {
      n -= below;
      at += width;
      mask >>= width;
    }
  }
  return at;
}

// By all lanes, the lane's `before` ascending with it: the last lane whose `before` is at most `at`.
__device__ __forceinline__ int last_lane_at(int before, int at) {
  int source = 0;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (__shfl_sync(kAllLanes, before, source + step) <= at) source += step;
  }
  return source;
}

__device__ __forceinline__ int sum_of_lanes_to(int value) {  // inclusive
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// By all lanes of a warp: the tiles of a large record in its rows [first, end), its first tile having the
// place `place`; 32 rows at a time, and on several shards a stretch of own tiles of each at a time.
template <typename Key>
__device__ __noinline__ void list_rows(const BinInput& in, const EmitTarget<Key>& out, int32_t r,
                                       int64_t place, int first, int end, unsigned* histogram) {
  const int lane = threadIdx.x % kWarp;
  const Record large = load48(in.record + r);
  const View& view = in.view_of(r);
  const int32_t count = out.cover[r].count;
  math::TileEllipse ellipse;
  int32_t listed = 0;
  if (math::make_tile_ellipse(large.mean2d, large.conic, large.opacity, ellipse)) {
    const auto row_of = [&](int y) { return int64_t{y} * view.tiles_x; };
    const auto next = [&](int y, int x, int span_end) -> math::TileSpan {
      if (!in.several) return {x, span_end};
      return in.own.next(in.own.runs + view.tile_begin + row_of(y), x, span_end);
    };
    for (int y = large.tile_rect[1] + lane; y < first; y += kWarp) {
      const math::TileSpan span = math::tile_span_of(ellipse, view, large.tile_rect, y);
      for (int x = span.begin; x < span.end;) {
        const math::TileSpan mine = next(y, x, span.end);
        listed += mine.end - mine.begin;
        x = mine.end;
      }
    }
    listed = __reduce_add_sync(kAllLanes, listed);
    for (int top = first; top < end; top += kWarp) {
      const int y = top + lane;
      math::TileSpan span{0, 0};
      if (y < end) span = math::tile_span_of(ellipse, view, large.tile_rect, y);
      for (int x = span.begin; __any_sync(kAllLanes, x < span.end);) {
        math::TileSpan mine{0, 0};
        if (x < span.end) {
          mine = next(y, x, span.end);
          x = mine.end;
        }
        const int64_t row_first =
            row_of(y) + mine.begin + (in.several ? 0 : view.tile_begin - in.tiles.begin);
        const int width = mine.end - mine.begin;
        const int width_to = sum_of_lanes_to(width), width_before = width_to - width;
        const int rows_total = __shfl_sync(kAllLanes, width_to, kWarp - 1);
        for (int start = 0; start < rows_total; start += kWarp) {
          const int pair = start + lane, source = last_lane_at(width_before, pair);
          const int64_t tile =
              __shfl_sync(kAllLanes, row_first, source) + pair - __shfl_sync(kAllLanes, width_before, source);
          if (pair < rows_total && listed + pair < count)
            out.put(place + listed + pair, in.place_of(tile, r), r, histogram);
        }
        listed += rows_total;
      }
    }
  }
  if (end < large.tile_rect[3]) return;
  for (int32_t ordinal = listed + lane; ordinal < count; ordinal += kWarp)
    out.put(place + ordinal, in.tiles.size(), r, histogram);
}

// Keys and entries of all pairs, in the order of the records. Small records' pairs are dealt to the lanes of
// a warp one by one. Large records come first, as near ones, and few blocks have them all: they are listed
// for the next kernel, or if there is no room each by a warp of the block. Places that stay empty get the key
// `tiles`, which sorts behind all: there are none unless home and owner counted differently.
template <typename Key, int kRecords>
__global__ void __launch_bounds__(kThreads)
    emit_kernel(const __grid_constant__ BinInput in, const __grid_constant__ EmitTarget<Key> out) {
  constexpr int kBlockRecords = kThreads * kRecords;
  struct Large {
    int32_t record, begin, first_row;
  };
  __shared__ Large s_large[kBlockRecords];
  __shared__ int s_large_count;
  __shared__ unsigned s_histogram[kTileBins];
  __shared__ int32_t s_warp_count[kWarps];
  __shared__ int64_t s_base;
  static_assert(kTileBins <= kThreads);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x < kTileBins) s_histogram[threadIdx.x] = 0;
  if (threadIdx.x == 0) s_large_count = 0;

  // where each record's pairs go; a warp has neighbours, 32 at a time
  const int64_t first = int64_t{blockIdx.x} * kBlockRecords + warp * kWarp * kRecords + lane;
  int32_t record[kRecords], begin[kRecords];
  TileCover cover[kRecords];
#pragma unroll
  for (int k = 0; k < kRecords; ++k)
    record[k] = first + k * kWarp < in.records ? out.order[first + k * kWarp] : -1;
#pragma unroll
  for (int k = 0; k < kRecords; ++k) {
    const uint4 words = record[k] >= 0 ? *reinterpret_cast<const uint4*>(out.cover + record[k]) : uint4{};
    cover[k] = std::bit_cast<TileCover>(words);
  }
  int32_t total = 0;  // of the warp
#pragma unroll
  for (int k = 0; k < kRecords; ++k) {
    const int32_t inclusive = sum_of_lanes_to(cover[k].count);
    begin[k] = total + inclusive - cover[k].count;
    total += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
  }
  if (lane == 0) s_warp_count[warp] = total;
  __syncthreads();
  int32_t before = 0, block_total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? s_warp_count[w] : 0;
    block_total += s_warp_count[w];
  }
  if (warp == 0) {
    const int64_t base = sum_of_blocks_before(out.state, blockIdx.x, block_total);
    if (lane == 0) s_base = base;
  }
  __syncthreads();
  const int64_t base = s_base;

  // large records leave
#pragma unroll
  for (int k = 0; k < kRecords; ++k) {
    begin[k] += before;
    const int columns = cover[k].tile_rect[2] - cover[k].tile_rect[0];
    const int rows = cover[k].tile_rect[3] - cover[k].tile_rect[1];
    const bool large = columns * rows > kSmallTiles && cover[k].count > 0;
    if (!__any_sync(kAllLanes, large)) continue;
    const int parts = large ? (rows + kPartRows - 1) / kPartRows : 0;
    int64_t at = 0;
    int32_t listed = 0;
    if (out.large) {
      const int parts_to = sum_of_lanes_to(parts);
      if (lane == kWarp - 1)
        at = static_cast<int64_t>(atomicAdd(out.large_count, static_cast<SumState>(parts_to)));
      at = __shfl_sync(kAllLanes, at, kWarp - 1) + parts_to - parts;
      for (; listed < parts && at + listed < out.large_room; ++listed)
        out.large[at + listed] = {base + begin[k], record[k], listed};
    }
    if (listed < parts) s_large[atomicAdd(&s_large_count, 1)] = {record[k], begin[k], listed * kPartRows};
    if (large) cover[k].count = 0;
  }

  // small records
#pragma unroll
  for (int k = 0; k < kRecords; ++k) {
    const int columns = cover[k].tile_rect[2] - cover[k].tile_rect[0];
    int64_t corner = 0;
    int tiles_x = 0;
    if (cover[k].count > 0) {
      const View& view = in.view_of(record[k]);
      tiles_x = view.tiles_x;
      corner = int64_t{cover[k].tile_rect[1]} * tiles_x + cover[k].tile_rect[0];
      if (!in.several) corner += view.tile_begin - in.tiles.begin;
    }
    // ceil(65536 / columns) divides places in the mask, which are below 32
    const int packed = columns > 1 ? ((65535 + columns) / columns << 8 | columns) : 1;
    const int count_to = sum_of_lanes_to(cover[k].count), small_before = count_to - cover[k].count;
    const int small_total = __shfl_sync(kAllLanes, count_to, kWarp - 1);
    for (int start = 0; start < small_total; start += kWarp) {
      const int pair = start + lane, source = last_lane_at(small_before, pair);
      const int ordinal = pair - __shfl_sync(kAllLanes, small_before, source);
      const int shape = __shfl_sync(kAllLanes, packed, source);
      const int bit = nth_bit(__shfl_sync(kAllLanes, cover[k].mask, source), ordinal);
      const int width = shape & 255, row = width == 1 ? bit : bit * (shape >> 8) >> 16;
      const int row_tiles = __shfl_sync(kAllLanes, tiles_x, source);
      const int64_t tile = __shfl_sync(kAllLanes, corner, source) + row * row_tiles + bit - row * width;
      const int64_t place = base + __shfl_sync(kAllLanes, begin[k], source) + ordinal;
      const int32_t of = __shfl_sync(kAllLanes, record[k], source);
      if (pair < small_total) out.put(place, in.place_of(tile, of), of, s_histogram);
    }
  }

  // large ones for which there is no room elsewhere
  __syncthreads();
  for (int k = warp; k < s_large_count; k += kWarps) {
    const Large of = s_large[k];
    const uint16_t* const rect = out.cover[of.record].tile_rect;
    list_rows(in, out, of.record, base + of.begin, rect[1] + of.first_row, rect[3], s_histogram);
  }

  if (blockIdx.x + 1 == gridDim.x) {
    for (int64_t place = base + block_total + threadIdx.x; place < out.pairs; place += kThreads)
      out.put(place, in.tiles.size(), 0, s_histogram);
  }
  __syncthreads();
  out.add(s_histogram);
}

// The large records that emit_kernel has listed: a warp a part.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    emit_large_kernel(const __grid_constant__ BinInput in, const __grid_constant__ EmitTarget<Key> out) {
  __shared__ unsigned s_histogram[kTileBins];
  for (int bin = threadIdx.x; bin < kTileBins; bin += kThreads) s_histogram[bin] = 0;
  __syncthreads();
  const int64_t found = static_cast<int64_t>(*out.large_count);
  const int64_t parts = found < out.large_room ? found : out.large_room;
  for (int64_t i = warp_of_launch(); i < parts; i += warps_of_launch()) {
    const LargePart of = out.large[i];
    const uint16_t* const rect = out.cover[of.record].tile_rect;
    const int first = rect[1] + of.part * kPartRows;
    list_rows(in, out, of.record, of.place, first, min(first + kPartRows, static_cast<int>(rect[3])),
              s_histogram);
  }
  __syncthreads();
  out.add(s_histogram);
}

// tile_begin[t]: the first place with a key of at least t. A warp a tile cuts the range into 32 at a time.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    begins_kernel(const Key* key, int64_t pairs, int64_t tiles, int64_t* tile_begin) {
  const int64_t tile = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (tile > tiles) return;
  int64_t begin = 0, end = pairs;  // the answer is one of [begin, end]
  while (begin < end) {
    const int64_t step = (end - begin + kWarp - 1) / kWarp, at = begin + lane * step;
    const bool less = at < end && static_cast<int64_t>(key[at]) < tile;
    const int smaller = __popc(__ballot_sync(kAllLanes, less));  // keys ascend: the first ones
    if (smaller < kWarp && begin + smaller * step < end) end = begin + smaller * step;
    if (smaller > 0) begin += (smaller - 1) * step + 1;
  }
  if (lane == 0) tile_begin[tile] = begin;
}

// ---- one owner

// Fills owner.entry_record and owner.tile_begin.
template <typename Key>
void list_tiles(const BinInput& in, int self, TileOwner& owner) {
  const int64_t records = in.records, pairs = owner.pairs, tiles = owner.tiles.size();
  const cudaStream_t stream = shard_stream(self);
  owner.tile_begin = Buffer<int64_t>(tiles + 1, self);
  owner.entry_record = Buffer<int32_t>(pairs, self);
  Buffer<Key> key(pairs, self), other_key;
  int sorted = 0;
  if (records > 0 && pairs > 0) {
    const int tile_bits = std::bit_width(static_cast<uint64_t>(tiles));  // the key `tiles` means none
    const SortPlan by_depth = sort_plan(records, std::bit_width(owner.largest_depth_key), kDepthBins);
    const SortPlan by_tile = sort_plan(pairs, tile_bits, kTileBins);
    const bool many = records >= kManyFrom;
    const int a_thread = many ? kManyRecords : 1;
    const int64_t emit_blocks = blocks_for(records, kThreads * a_thread);
    // zeros: how many large parts there are, states of the listing, histograms of tiles and depths, what the
    // sorts need
    Buffer<SumState> zeros(
        1 + emit_blocks + kTileBins + kDepthBins + by_depth.words(kDepthBins) + by_tile.words(kTileBins),
        self);
    zero(zeros);
    SumState* const states = zeros.data() + 1;
    SumState* const histogram = states + emit_blocks;
    SumState* const depth_words = histogram + kTileBins + kDepthBins;
    SumState* const tile_words = depth_words + by_depth.words(kDepthBins);
    SumState* depth_histogram = owner.depth_histogram.data();
    if (in.several) {
      depth_histogram = histogram + kTileBins;
      measure(in, self, owner, depth_histogram);
    }

    Buffer<int32_t> order(2 * records, self);
    Buffer<uint32_t> other_depth_key(by_depth.passes > 1 ? records : 0, self);
    uint32_t* const depth_keys[2] = {owner.depth_key.data(), other_depth_key.data()};
    int32_t* const orders[2] = {order.data(), order.data() + records};
    const int ordered = sort_by_digits<kDepthBins>(by_depth, depth_keys, nullptr, orders, records,
                                                   depth_histogram, depth_words, false, self);

    Buffer<LargePart> large(many ? records / kRecordsALargePart : 0, self);
    const EmitTarget<Key> target{
        owner.cover.data(), orders[ordered], pairs,        key.data(),   owner.entry_record.data(),
        histogram,          states,          large.data(), zeros.data(), large.size()};
    const auto emit = a_thread == 1 ? emit_kernel<Key, 1> : emit_kernel<Key, kManyRecords>;
    emit<<<static_cast<unsigned>(emit_blocks), kThreads, 0, stream>>>(in, target);
    KERNEL_CHECK("bin", self, records);
    if (many) {
      const int64_t resident =
          prepare_kernel(reinterpret_cast<const void*>(emit_large_kernel<Key>), kThreads, 0, self);
      emit_large_kernel<Key><<<static_cast<unsigned>(resident), kThreads, 0, stream>>>(in, target);
      KERNEL_CHECK("bin", self, records);
    }
    large = Buffer<LargePart>();
    order = Buffer<int32_t>();
    owner.depth_key = Buffer<uint32_t>();
    other_depth_key = Buffer<uint32_t>();

    other_key = Buffer<Key>(pairs, self);
    Buffer<int32_t> other_entry(pairs, self);
    Key* const keys[2] = {key.data(), other_key.data()};
    int32_t* const entries[2] = {owner.entry_record.data(), other_entry.data()};
    sorted = sort_by_digits<kTileBins>(by_tile, keys, entries[0], entries, pairs, histogram, tile_words, true,
                                       self);
    if (sorted == 1) std::swap(owner.entry_record, other_entry);
  }
  begins_kernel<<<blocks_for(tiles + 1, kWarps), kThreads, 0, stream>>>(
      sorted == 1 ? other_key.data() : key.data(), records > 0 ? pairs : 0, tiles, owner.tile_begin.data());
  KERNEL_CHECK("bin", self, tiles);
}

// From the table that the shard made as a home.
OwnTiles own_tiles(const Frame& frame, int self) {
  const std::vector<int>& owners = frame.ranges.owner;
  const auto range = std::find(owners.begin(), owners.end(), self) - owners.begin();
  return {parcel_words(frame, self).range_runs(frame.shards[static_cast<size_t>(self)].parcel_words.data()),
          static_cast<int>(range)};
}

void bin_owner(const Frame& frame, int self, TileOwner& owner) {
  const ShardConstants& constants = frame.constants[static_cast<size_t>(self)];
  const bool several = frame.homes.size() > 1;
  const BinInput in{
      received_records(frame, self),
      received_views(frame, self),
      constants.views,
      static_cast<int>(frame.views.size()),
      owner.received(),
      owner.tiles,
      several,
      several ? own_tiles(frame, self) : OwnTiles{},
      several && frame.views.size() == 1 ? constants.curves[0]->position_from_tile.data() : nullptr};
  if (owner.tiles.size() < int64_t{1} << 16)
    list_tiles<uint16_t>(in, self, owner);
  else
    list_tiles<uint32_t>(in, self, owner);
  owner.cover = Buffer<TileCover>();
  owner.depth_key = Buffer<uint32_t>();
  owner.depth_histogram = Buffer<SumState>();
}

}  // namespace

void bin_records(Frame& frame) {
  const auto work = [&](const Shard& shard) {
    bin_owner(frame, shard.index, frame.owners[static_cast<size_t>(shard.index)]);
  };
  for_each_shard("bin", work, Access::kLocal, Launch::kSideBySide);
}

int64_t intersection_count(const Frame& frame) {
  int64_t count = 0;
  for (const TileOwner& owner : frame.owners) count += owner.pairs;
  return count;
}

}  // namespace mgpu::splat
