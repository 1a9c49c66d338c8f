// SPDX-License-Identifier: Apache-2.0
// assign.cu: who blends what, on several shards. From the 16 bytes that stage "project" keeps of a record's
// tiles (cover.h): first what each home has in each run of tiles, for the host to choose ranges by, from a
// sample of the records where there are many; then, of each record, which ranges it meets, from a table of
// the tiles' ranges, and what the ranges come to, exactly; a small record's mask of tiles is kept for its
// owners. Floor: 20 bytes a record and 8 more. Two read-backs: that of stage "project", with 8 bytes a run
// more, and one here of some numbers.
#include "splat/assign.h"
#include "splat/assign_kernels.h"
#include "splat/cover.h"
#include "splat/kernels.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

struct MeasuredRecords {
  const Record* record;
  const int32_t* view;
  const int32_t* patches;
  const TileCover* cover;
  const View* views;
  int num_views;

  __device__ __forceinline__ int view_of(int64_t r) const { return num_views > 1 ? view[r] : 0; }
};

MeasuredRecords measured_records(const Frame& frame, int home) {
  const ShardRecords& in = frame.shards[static_cast<size_t>(home)];
  return {in.record.data(),
          in.view.data(),
          in.patches.data(),
          in.cover.data(),
          frame.constants[static_cast<size_t>(home)].views,
          static_cast<int>(frame.views.size())};
}

// What a record's cover says, in registers.
struct RecordTiles {
  TileCover cover;
  int columns;
  bool small, large;  // it has a mask of its tiles, or it is walked

  __device__ __forceinline__ RecordTiles(const MeasuredRecords& in, int64_t r, bool held) {
    uint4 words{};
    if (held) words = *reinterpret_cast<const uint4*>(in.cover + r);
    cover = std::bit_cast<TileCover>(words);
    columns = cover.tile_rect[2] - cover.tile_rect[0];
    const int in_rectangle = columns * (cover.tile_rect[3] - cover.tile_rect[1]);
    small = cover.count > 0 && in_rectangle <= kSmallTiles;
    large = cover.count > 0 && !small;
  }
  // Calls visit(x, y) for the tiles of a small one.
  template <typename Visit>
  __device__ __forceinline__ void for_tiles(const Visit& visit) const {
    const MaskPlaces places(columns);
    for (uint32_t left = cover.mask; left; left &= left - 1) {
      const int bit = __ffs(left) - 1, row = places.row_of(bit);
      visit(cover.tile_rect[0] + bit - row * columns, cover.tile_rect[1] + row);
    }
  }
};

// By all lanes of a warp: calls visit(y, span) for the rows of tiles that a record meets, a lane a row.
template <typename Visit>
__device__ __forceinline__ void for_rows(const Record& record, const View& view,
                                         const math::TileEllipse& ellipse, const Visit& visit) {
  for (int y = record.tile_rect[1] + static_cast<int>(threadIdx.x % kWarp); y < record.tile_rect[3];
       y += kWarp)
    visit(y, math::tile_span_of(ellipse, view, record.tile_rect, y));
}

// ---- what each home has in each run of tiles

// Many records are counted by every kSample-th, which says where ranges may end as well: there, a range's
// share of the cost is known to a per mille or so.
constexpr int64_t kSampledFrom = int64_t{1} << 17;
constexpr int64_t kSample = 8;

// What a block has counted. Neighbouring rows meet the same runs, so that sums in memory would have blocks
// wait for each other at a few addresses.
struct RunSums {
  uint32_t pairs[kMostRuns], shares[kMostRuns];
};

// Tiles of a record come in rows, and neighbours are mostly of one run: these are added at once.
struct AddToRuns {
  RunSums* sums;
  int shift;  // of a position: its run
  uint32_t share;
  int32_t run;
  uint32_t pairs;

  __device__ __forceinline__ void add(const View& view, int x, int y) {
    const auto at = static_cast<int32_t>(view.position_of(int64_t{y} * view.tiles_x + x) >> shift);
    if (at != run) {
      done();
      run = at;
    }
    ++pairs;
  }
  __device__ __forceinline__ void done() {
    if (pairs) {
      atomicAdd(sums->pairs + run, pairs);
      atomicAdd(sums->shares + run, pairs * share);
    }
    pairs = 0;
  }
};

// count: [runs] TileCount; added to.
__global__ void __launch_bounds__(kThreads)
    count_tiles_kernel(const __grid_constant__ MeasuredRecords in, const SumState* records, int64_t room,
                       int shift, uint32_t share, int runs, unsigned long long* count) {
  __shared__ RunSums sums;
  for (int run = threadIdx.x; run < runs; run += kThreads) sums.pairs[run] = sums.shares[run] = 0;
  __syncthreads();
  int64_t held = 0;
  for (int v = 0; v < in.num_views; ++v) held += static_cast<int64_t>(records[v]);
  held = held < room ? held : room;
  const int64_t step = held < kSampledFrom ? 1 : kSample;
  // In turn: neighbours have as many tiles as each other, and blocks of neighbours would be long and short.
  for (int64_t block = blockIdx.x; block * kThreads * step < held; block += gridDim.x) {
    const int64_t r = (block * kThreads + threadIdx.x) * step;
    const RecordTiles tiles(in, r, r < held);
    const TileCount one =
        tiles.cover.count > 0 ? tile_count_of(static_cast<uint32_t>(tiles.cover.count), share) : 0;
    AddToRuns sum{&sums, shift, static_cast<uint32_t>(share_of(one)), 0, 0};
    if (tiles.small) {
      const View& view = in.views[in.view_of(r)];
      tiles.for_tiles([&](int x, int y) { sum.add(view, x, y); });
      sum.done();
    }
    for (unsigned left = __ballot_sync(kAllLanes, tiles.large); left; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const int64_t of = __shfl_sync(kAllLanes, r, source);
      AddToRuns part{&sums, shift, __shfl_sync(kAllLanes, sum.share, source), 0, 0};
      const Record record = load48(in.record + of);
      const View& view = in.views[in.view_of(of)];
      math::TileEllipse ellipse;
      if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) continue;
      for_rows(record, view, ellipse, [&](int y, math::TileSpan span) {
        for (int x = span.begin; x < span.end; ++x) part.add(view, x, y);
      });
      part.done();
    }
  }
  __syncthreads();
  for (int run = threadIdx.x; run < runs; run += kThreads) {
    const auto pairs = static_cast<unsigned long long>(sums.pairs[run] * step);
    if (pairs) atomicAdd(count + run, pairs << 32 | static_cast<unsigned long long>(sums.shares[run] * step));
  }
}

// ---- which ranges each record meets

struct RangeEnds {
  int64_t end[kMaxShards];
  int count;

  __device__ __forceinline__ int range_of(int64_t position) const {
    int range = 0;
    while (range + 1 < count && position >= end[range]) ++range;
    return range;
  }
};

// Before the records: the runs of each tile, and zeros in the words before the table.
__global__ void __launch_bounds__(kThreads)
    clear_parcels_kernel(const View* views, int num_views, const __grid_constant__ RangeEnds ends,
                         ParcelWords layout, SumState* words) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = threadIdx.x % kWarp;
  if (i < layout.table()) words[i] = 0;
  if (i - lane >= layout.tiles) return;
  int range = kMaxShards;
  bool last = true;  // of its row
  if (i < layout.tiles) {
    int v = 0;
    while (v + 1 < num_views && i >= views[v + 1].tile_begin) ++v;
    const int64_t tile = i - views[v].tile_begin;
    range = ends.range_of(views[v].position_of(tile));
    last = (tile + 1) % views[v].tiles_x == 0;
  }
  const int next = __shfl_down_sync(kAllLanes, range, 1);
  const unsigned ends_here = __ballot_sync(kAllLanes, last || lane == kWarp - 1 || next != range);
  if (i < layout.tiles)
    layout.range_runs(words)[i] = {static_cast<uint8_t>(range),
                                   static_cast<uint8_t>(__ffs(ends_here >> lane))};
}

// What a block has found in each range: exact, whatever an image holds.
struct RangeSums {
  SumState pairs[kMaxShards], patches[kMaxShards];
};

// What a lane has met: tiles of one range after another.
struct RangesMet {
  RangeSums* sums;
  uint32_t mask;
  int range;
  uint32_t pairs, patches;  // of `range`, not yet among the sums

  __device__ __forceinline__ void add(int of, int tiles, int32_t of_patches) {
    if (of != range) {
      put(range, pairs, patches);
      pairs = patches = 0;
      range = of;
    }
    mask |= 1u << of;
    pairs += static_cast<uint32_t>(tiles);
    patches += static_cast<uint32_t>(of_patches);
  }
  __device__ __forceinline__ void put(int to, uint32_t more_pairs, uint32_t more_patches) const {
    if (more_pairs) atomicAdd(sums->pairs + to, static_cast<SumState>(more_pairs));
    if (more_patches) atomicAdd(sums->patches + to, static_cast<SumState>(more_patches));
  }
  // By all lanes of a warp: the last ones, at once if they are of this range.
  __device__ __forceinline__ void put_by_warp(int of) const {
    const uint32_t all_pairs = __reduce_add_sync(kAllLanes, range == of ? pairs : 0);
    const uint32_t all_patches = __reduce_add_sync(kAllLanes, range == of ? patches : 0);
    if (threadIdx.x % kWarp == 0) put(of, all_pairs, all_patches);
  }
};

// A small record's tiles, of which several ranges have some. Not inlined, as the next one: few records need
// it, and the others do without its registers.
__device__ __noinline__ RangesMet met_by_small(const MeasuredRecords& in, int64_t r,
                                               const RangeRun* range_runs, RangeSums* sums) {
  RangesMet met{sums, 0, 0, 0, 0};
  const Record record = load48(in.record + r);
  math::TileEllipse ellipse;
  if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) return met;
  const PatchBox box = patch_box(record.mean2d, half_extent_of(ellipse));
  const View& view = in.views[in.view_of(r)];
  const RangeRun* const of_view = range_runs + view.tile_begin;
  RecordTiles(in, r, true).for_tiles([&](int x, int y) {
    met.add(of_view[int64_t{y} * view.tiles_x + x].range, 1, box.in_span(y, x, x + 1));
  });
  return met;
}

// By all lanes of a warp: adds a large record to the sums, and returns the ranges that it meets.
__device__ __noinline__ uint32_t add_large(const MeasuredRecords& in, int64_t r, const RangeRun* range_runs,
                                           RangeSums* sums) {
  const Record record = load48(in.record + r);
  math::TileEllipse ellipse;
  if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) return 0;
  const PatchBox box = patch_box(record.mean2d, half_extent_of(ellipse));
  const View& view = in.views[in.view_of(r)];
  const RangeRun* const of_view = range_runs + view.tile_begin;
  RangesMet met{sums, 0, 0, 0, 0};
  for_rows(record, view, ellipse, [&](int y, math::TileSpan span) {
    const RangeRun* const row = of_view + int64_t{y} * view.tiles_x;
    for (int x = span.begin; x < span.end;) {
      const RangeRun run = row[x];
      const int end = min(x + run.length, span.end);
      met.add(run.range, end - x, box.in_span(y, x, end));
      x = end;
    }
  });
  const uint32_t all = __reduce_or_sync(kAllLanes, met.mask);
  for (uint32_t left = all; left; left &= left - 1) met.put_by_warp(__ffs(left) - 1);
  return all;
}

// counts: RangeCounts, zero before.
__global__ void __launch_bounds__(kThreads)
    mark_ranges_kernel(const __grid_constant__ MeasuredRecords in, int64_t records,
                       const RangeRun* range_runs, RangeCounts layout, RangeMask* range_mask,
                       uint32_t* tile_mask, SumState* counts) {
  __shared__ unsigned s_parcel[kMaxShards], s_alone[kMaxShards], s_met;  // s_parcel: of a single view
  __shared__ RangeSums sums;
  if (threadIdx.x < kMaxShards) {
    s_parcel[threadIdx.x] = s_alone[threadIdx.x] = 0;
    sums.pairs[threadIdx.x] = sums.patches[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) s_met = 0;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = blockIdx.x; block * kThreads < records; block += gridDim.x) {
    const int64_t r = block * kThreads + threadIdx.x;
    const bool held = r < records;
    const RecordTiles tiles(in, r, held);
    const int v = held ? in.view_of(r) : 0;
    RangesMet met{&sums, 0, 0, 0, 0};
    if (tiles.small) {
      const int32_t patches = in.patches[r];
      const View& view = in.views[v];
      const RangeRun* const of_view = range_runs + view.tile_begin;
      uint32_t mask = 0;
      tiles.for_tiles([&](int x, int y) { mask |= 1u << of_view[int64_t{y} * view.tiles_x + x].range; });
      if ((mask & (mask - 1)) == 0)
        met.add(__ffs(mask) - 1, tiles.cover.count, patches);
      else
        met = met_by_small(in, r, range_runs, &sums);
    }
    uint32_t mask = met.mask;
    for (unsigned left = __ballot_sync(kAllLanes, tiles.large); left; left &= left - 1) {
      const int source = __ffs(left) - 1;
      const uint32_t of_it = add_large(in, __shfl_sync(kAllLanes, r, source), range_runs, &sums);
      if (lane == source) mask = of_it;
    }
    if (held) {
      range_mask[r] = mask;
      tile_mask[r] = tiles.cover.mask;
    }
    const unsigned any = __ballot_sync(kAllLanes, mask != 0);
    if (lane == 0 && any) atomicAdd(&s_met, static_cast<unsigned>(__popc(any)));
    for (uint32_t left = __reduce_or_sync(kAllLanes, mask); left; left &= left - 1) {
      const int range = __ffs(left) - 1;
      met.put_by_warp(range);
      unsigned lanes = __ballot_sync(kAllLanes, mask >> range & 1u);
      const unsigned alone = __ballot_sync(kAllLanes, mask == 1u << range);
      if (lane == 0 && alone) atomicAdd(s_alone + range, static_cast<unsigned>(__popc(alone)));
      if (in.num_views == 1) {
        if (lane == 0) atomicAdd(s_parcel + range, static_cast<unsigned>(__popc(lanes)));
        continue;
      }
      while (lanes) {  // the warp's views, one after the other
        const int view = __shfl_sync(kAllLanes, v, __ffs(lanes) - 1);
        const unsigned of_view = __ballot_sync(kAllLanes, v == view) & lanes;
        if (lane == 0) atomicAdd(counts + layout.parcel(range, view), static_cast<SumState>(__popc(of_view)));
        lanes &= ~of_view;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < layout.ranges) {
    const auto add = [&](int64_t word, SumState more) {
      if (more) atomicAdd(counts + word, more);
    };
    const int range = threadIdx.x;
    add(layout.parcel(range, 0), s_parcel[range]);
    add(layout.alone(range), s_alone[range]);
    add(layout.pairs(range), sums.pairs[range]);
    add(layout.patches(range), sums.patches[range]);
  }
  if (threadIdx.x == 0 && s_met) atomicAdd(counts + layout.met(), static_cast<SumState>(s_met));
}

void mark_ranges(Frame& frame, int home) {
  ShardRecords& in = frame.shards[static_cast<size_t>(home)];
  const ParcelWords layout = parcel_words(frame, home);
  in.parcel_words = Buffer<SumState>(layout.words(), home);
  in.range_mask = Buffer<RangeMask>(in.count, home);
  in.tile_mask = Buffer<uint32_t>(in.count, home);
  RangeEnds ends{};
  ends.count = static_cast<int>(frame.ranges.end.size());
  std::copy(frame.ranges.end.begin(), frame.ranges.end.end(), ends.end);
  clear_parcels_kernel<<<blocks_for(std::max(layout.table(), layout.tiles), kThreads), kThreads, 0,
                         shard_stream(home)>>>(frame.constants[static_cast<size_t>(home)].views,
                                               static_cast<int>(frame.views.size()), ends, layout,
                                               in.parcel_words.data());
  KERNEL_CHECK("assign", home, in.count);
  if (in.count > 0) {
    const int64_t resident =
        prepare_kernel(reinterpret_cast<const void*>(mark_ranges_kernel), kThreads, 0, home);
    const unsigned blocks =
        static_cast<unsigned>(std::min<int64_t>(blocks_for(in.count, kThreads), resident));
    mark_ranges_kernel<<<blocks, kThreads, 0, shard_stream(home)>>>(
        measured_records(frame, home), in.count, layout.range_runs(in.parcel_words.data()), layout.counts,
        in.range_mask.data(), in.tile_mask.data(), in.parcel_words.data());
    KERNEL_CHECK("assign", home, in.count);
  }
  in.patches = Buffer<int32_t>();
  in.cover = Buffer<TileCover>();
}

struct RunTable {
  int64_t tiles, run, runs;

  explicit RunTable(const Frame& frame)
      : tiles(frame.tile_count()), run(tiles_of_run(tiles)), runs((tiles + run - 1) / run) {}
};

// What a record spreads over its tiles: no run's shares of one home may reach 2^32.
uint32_t record_share(const Frame& frame) {
  int64_t most = 1;  // records of a home
  for (const RowRange& home : frame.homes)
    most = std::max(most, home.size() * static_cast<int64_t>(frame.views.size()));
  return static_cast<uint32_t>(std::clamp<int64_t>((int64_t{1} << 31) / most, 1, kRecordShare));
}

}  // namespace

std::shared_ptr<const DeviceCurve> device_curve(const View& view, const TileCurve& curve, int shard) {
  constexpr size_t kCached = 256;
  static std::mutex mutex;
  static auto* const cache = new std::map<std::tuple<int, int, int>, std::shared_ptr<const DeviceCurve>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const DeviceCurve>& known = (*cache)[{view.tiles_x, view.tiles_y, shard}];
  if (known) return known;
  auto made = std::make_shared<DeviceCurve>();
  made->position_from_tile = to_buffer(curve.position_from_tile, shard);
  made->tile_from_position = to_buffer(curve.tile_from_position, shard);
  to_vector(made->tile_from_position, std::min<int64_t>(1, made->tile_from_position.size()));  // waits: other
                                                                                               // streams too
  std::shared_ptr<const DeviceCurve> out = made;
  if (cache->size() > kCached) cache->clear();  // frames keep what they use
  (*cache)[{view.tiles_x, view.tiles_y, shard}] = out;
  return out;
}

int64_t run_table_words(const Frame& frame) { return RunTable(frame).runs; }

void count_tiles(const Frame& frame, int home, const SumState* records, int64_t room, SumState* counts) {
  const RunTable table(frame);
  const int64_t resident =
      prepare_kernel(reinterpret_cast<const void*>(count_tiles_kernel), kThreads, 0, home);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(blocks_for(room, kThreads), resident));
  count_tiles_kernel<<<blocks, kThreads, 0, shard_stream(home)>>>(
      measured_records(frame, home), records, room, std::countr_zero(static_cast<uint64_t>(table.run)),
      record_share(frame), static_cast<int>(table.runs), counts);
  KERNEL_CHECK("assign", home, room);
}

void assign_tiles(Frame& frame) {
  const int64_t shards = static_cast<int64_t>(frame.homes.size());
  if (shards == 1) return;
  const RunTable layout(frame);
  transport().gather(frame.run_table.data(), layout.runs);
  frame.ranges = choose_ranges(frame.run_table.data(), static_cast<int>(shards), layout.tiles, layout.run);
  frame.run_table.clear();

  for_each_shard(
      "assign", [&](const Shard& shard) { mark_ranges(frame, shard.index); }, Access::kLocal,
      Launch::kSideBySide);

  const RangeCounts counts = range_counts(frame);
  std::vector<uint64_t> table(static_cast<size_t>(shards * counts.words()), 0);
  ReadBack read_back;
  for (int64_t home = 0; home < shards; ++home) {
    read_back.add(reinterpret_cast<SumState*>(table.data() + home * counts.words()),
                  frame.shards[static_cast<size_t>(home)].parcel_words.data(), counts.words(),
                  static_cast<int>(home));
  }
  read_back.wait();
  transport().gather(table.data(), counts.words());
  give_ranges(frame, table);
}

}  // namespace mgpu::splat
