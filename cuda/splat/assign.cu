// SPDX-License-Identifier: Apache-2.0
// assign.cu: who blends what, on several shards. From the 16 bytes that stage "project" keeps of a record's
// tiles (cover.h): first what each home has in each run of tiles, for the host to choose ranges by, from a
// sample of the records where there are many; then, of each record, which ranges it meets, from a table of
// the tiles' ranges, and what the ranges come to, exactly; a small record's mask of tiles is kept for its
// owners. Floor: 20 bytes a record and 8 more. Two read-backs: that of stage "project", with 8 bytes a run
// more, and one here of some numbers.
#include "splat/assign.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>

#include "memory/transfer.h"
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
  const uint32_t* large;
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
          in.large.data(),
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

// A large record, by all lanes of a warp. They are neighbours, and would keep the few blocks that meet them
// busy and all else waiting: the launch's warps take them in turn.
struct LargeRecord {
  Record record;
  int v;
  math::TileEllipse ellipse;
  bool met;

  __device__ __forceinline__ LargeRecord(const MeasuredRecords& in, int64_t r)
      : record(load48(in.record + r)), v(in.view_of(r)) {
    met = math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse);
  }
};

// ---- what each home has in each run of tiles

// Many records are counted by every kSample-th, which says where ranges may end as well: there, a range's
// share of the cost is known to a per cent or so; where a few 10,000 large ones are all that there is, loads
// were up to 1.2 times the mean instead of 1.1. Large ones are listed in any order, another one each time:
// what is to repeat to the bit counts them all, as sums over owners depend on the ranges.
constexpr int64_t kSampledFrom = int64_t{1} << 17, kSampledLargeFrom = kSampledFrom / 8;
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
  uint32_t share, weight;
  int32_t run;
  uint32_t pairs;

  __device__ __forceinline__ void add(const View& view, int x, int y) {
    const auto at = static_cast<int32_t>(view.position_of(int64_t{y} * view.tiles_x + x) >> shift);
    if (at != run) {
      done();
      run = at;
    }
    pairs += weight;
  }
  __device__ __forceinline__ void done() {
    if (pairs) {
      atomicAdd(sums->pairs + run, pairs);
      atomicAdd(sums->shares + run, pairs * share);
    }
    pairs = 0;
  }
};

struct RunCounting {
  const SumState *records, *large;  // how many there are: [views], [1]
  int64_t room;
  int shift;  // of a position: its run
  uint32_t share;
  int runs;
  bool all_large;

  __device__ __forceinline__ AddToRuns sum(RunSums* sums, int32_t tiles, int64_t weight) const {
    const TileCount one = tiles > 0 ? tile_count_of(static_cast<uint32_t>(tiles), share) : 0;
    return {sums, shift, static_cast<uint32_t>(share_of(one)), static_cast<uint32_t>(weight), 0, 0};
  }
};

// count: [runs] TileCount; added to.
__global__ void __launch_bounds__(kThreads)
    count_tiles_kernel(const __grid_constant__ MeasuredRecords in, const __grid_constant__ RunCounting how,
                       unsigned long long* count) {
  __shared__ RunSums sums;
  for (int run = threadIdx.x; run < how.runs; run += kThreads) sums.pairs[run] = sums.shares[run] = 0;
  __syncthreads();

  const auto large = static_cast<int64_t>(*how.large);
  const int64_t large_weight = large < kSampledLargeFrom || how.all_large ? 1 : kSample;
  for (int64_t i = warp_of_launch(); i * large_weight < large; i += warps_of_launch()) {
    const int64_t r = in.large[i * large_weight];
    const LargeRecord of(in, r);
    if (!of.met) continue;
    const View& view = in.views[of.v];
    AddToRuns sum = how.sum(&sums, in.cover[r].count, large_weight);
    for (int y = of.record.tile_rect[1] + static_cast<int>(threadIdx.x % kWarp); y < of.record.tile_rect[3];
         y += kWarp) {
      const math::TileSpan span = math::tile_span_of(of.ellipse, view, of.record.tile_rect, y);
      for (int x = span.begin; x < span.end; ++x) sum.add(view, x, y);
    }
    sum.done();
  }

  int64_t held = 0;
  for (int v = 0; v < in.num_views; ++v) held += static_cast<int64_t>(how.records[v]);
  held = held < how.room ? held : how.room;
  const int64_t weight = held < kSampledFrom ? 1 : kSample;
  for (int64_t block = blockIdx.x; block * kThreads * weight < held; block += gridDim.x) {
    const int64_t r = (block * kThreads + threadIdx.x) * weight;
    const RecordTiles tiles(in, r, r < held);
    if (!tiles.small) continue;
    const View& view = in.views[in.view_of(r)];
    AddToRuns sum = how.sum(&sums, tiles.cover.count, weight);
    tiles.for_tiles([&](int x, int y) { sum.add(view, x, y); });
    sum.done();
  }
  __syncthreads();
  for (int run = threadIdx.x; run < how.runs; run += kThreads) {
    const uint32_t pairs = sums.pairs[run];
    if (pairs) atomicAdd(count + run, static_cast<unsigned long long>(pairs) << 32 | sums.shares[run]);
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

// What a block has found in each range, and a warp: the lane of the range's number keeps its own. Sums of 32
// bits, in shared memory, are of records with tiles of several ranges alone; memory ends before they do.
struct RangeSums {
  SumState pairs[kMaxShards], patches[kMaxShards];
  uint32_t cut_pairs[kMaxShards], cut_patches[kMaxShards];
  uint32_t records[kMaxShards], alone[kMaxShards];  // records: of a single view
  uint32_t met;
};
struct LaneRange {
  SumState pairs = 0, patches = 0;
  uint32_t records = 0, alone = 0;
};

struct MarkTarget {
  RangeMask* range_mask;
  uint32_t* tile_mask;
  SumState* counts;  // RangeCounts, zero before
};

// By a warp, whose lanes have records that meet the ranges in `mask`, views `v`: their numbers.
__device__ __forceinline__ void add_records(uint32_t mask, int v, int range, bool single_view,
                                            const RangeCounts& layout, SumState* counts, LaneRange& own) {
  const int lane = threadIdx.x % kWarp;
  unsigned lanes = __ballot_sync(kAllLanes, mask >> range & 1u);
  const unsigned alone = __ballot_sync(kAllLanes, mask == 1u << range);
  if (lane == range) own.alone += static_cast<uint32_t>(__popc(alone));
  if (single_view) {
    if (lane == range) own.records += static_cast<uint32_t>(__popc(lanes));
    return;
  }
  while (lanes) {  // the warp's views, one after the other
    const int view = __shfl_sync(kAllLanes, v, __ffs(lanes) - 1);
    const unsigned of_view = __ballot_sync(kAllLanes, v == view) & lanes;
    if (lane == 0) atomicAdd(counts + layout.parcel(range, view), static_cast<SumState>(__popc(of_view)));
    lanes &= ~of_view;
  }
}

// A small record's tiles, of which several ranges have some. Not inlined: few records need it, and the
// others do without its registers.
__device__ __noinline__ void add_cut(const MeasuredRecords& in, int64_t r, const RangeRun* range_runs,
                                     RangeSums* sums) {
  const Record record = load48(in.record + r);
  math::TileEllipse ellipse;
  if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) return;
  const PatchBox box = patch_box(record.mean2d, half_extent_of(ellipse));
  const View& view = in.views[in.view_of(r)];
  const RangeRun* const of_view = range_runs + view.tile_begin;
  RecordTiles(in, r, true).for_tiles([&](int x, int y) {
    const int range = of_view[int64_t{y} * view.tiles_x + x].range;
    atomicAdd(sums->cut_pairs + range, 1u);
    const int32_t patches = box.in_span(y, x, x + 1);
    if (patches) atomicAdd(sums->cut_patches + range, static_cast<uint32_t>(patches));
  });
}

// By all lanes of a warp: the ranges that a large record meets, 32 rows of tiles at a time and a run of each.
__device__ __forceinline__ uint32_t mark_large(const MeasuredRecords& in, const LargeRecord& of,
                                               const RangeRun* range_runs, LaneRange& own) {
  if (!of.met) return 0;
  const int lane = threadIdx.x % kWarp;
  const PatchBox box = patch_box(of.record.mean2d, half_extent_of(of.ellipse));
  const View& view = in.views[of.v];
  uint32_t mask = 0;
  for (int top = of.record.tile_rect[1]; top < of.record.tile_rect[3]; top += kWarp) {
    const int y = top + lane;
    math::TileSpan span{0, 0};
    if (y < of.record.tile_rect[3]) span = math::tile_span_of(of.ellipse, view, of.record.tile_rect, y);
    const RangeRun* const row = range_runs + view.tile_begin + int64_t{y} * view.tiles_x;
    for (int x = span.begin; __any_sync(kAllLanes, x < span.end);) {
      int range = kMaxShards;
      uint32_t pairs = 0, patches = 0;
      if (x < span.end) {
        const RangeRun run = row[x];
        const int end = min(x + run.length, span.end);
        range = run.range;
        pairs = static_cast<uint32_t>(end - x);
        patches = static_cast<uint32_t>(box.in_span(y, x, end));
        x = end;
      }
      const uint32_t here = __reduce_or_sync(kAllLanes, pairs ? 1u << range : 0u);
      mask |= here;
      for (uint32_t left = here; left; left &= left - 1) {
        const int one = __ffs(left) - 1;
        const uint32_t all_pairs = __reduce_add_sync(kAllLanes, range == one ? pairs : 0u);
        const uint32_t all_patches = __reduce_add_sync(kAllLanes, range == one ? patches : 0u);
        if (lane == one) {
          own.pairs += all_pairs;
          own.patches += all_patches;
        }
      }
    }
  }
  return mask;
}

__global__ void __launch_bounds__(kThreads)
    mark_ranges_kernel(const __grid_constant__ MeasuredRecords in, int64_t records, int64_t large,
                       const RangeRun* range_runs, RangeCounts layout,
                       const __grid_constant__ MarkTarget out) {
  __shared__ RangeSums sums;
  for (int i = threadIdx.x; i < kMaxShards; i += kThreads) {
    sums.pairs[i] = sums.patches[i] = 0;
    sums.cut_pairs[i] = sums.cut_patches[i] = sums.records[i] = sums.alone[i] = 0;
  }
  if (threadIdx.x == 0) sums.met = 0;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  const bool single_view = in.num_views == 1;
  LaneRange own;  // of range `lane`
  uint32_t met = 0;

  for (int64_t i = warp_of_launch(); i < large; i += warps_of_launch()) {
    const int64_t r = in.large[i];
    const LargeRecord of(in, r);
    const uint32_t mask = mark_large(in, of, range_runs, own);
    if (lane == 0) {
      out.range_mask[r] = mask;
      out.tile_mask[r] = 0;
      met += mask != 0;
    }
    for (uint32_t left = mask; left; left &= left - 1)
      add_records(lane == 0 ? mask : 0u, of.v, __ffs(left) - 1, single_view, layout, out.counts, own);
  }

  for (int64_t block = blockIdx.x; block * kThreads < records; block += gridDim.x) {
    const int64_t r = block * kThreads + threadIdx.x;
    const RecordTiles tiles(in, r, r < records);
    uint32_t mask = 0, found = 0;  // found: of a record of one range, patches and pairs
    int v = 0;
    if (tiles.small) {
      const int32_t patches = in.patches[r];
      v = in.view_of(r);
      const View& view = in.views[v];
      const RangeRun* const of_view = range_runs + view.tile_begin;
      tiles.for_tiles([&](int x, int y) { mask |= 1u << of_view[int64_t{y} * view.tiles_x + x].range; });
      static_assert(kWarp * kSmallTiles * math::kTilePatches < 1 << 16);
      if ((mask & (mask - 1)) == 0)
        found = static_cast<uint32_t>(patches) << 16 | static_cast<uint32_t>(tiles.cover.count);
      else
        add_cut(in, r, range_runs, &sums);
    }
    if (r < records && !tiles.large) {
      out.range_mask[r] = mask;
      out.tile_mask[r] = tiles.cover.mask;
    }
    met += mask != 0;
    for (uint32_t left = __reduce_or_sync(kAllLanes, mask); left; left &= left - 1) {
      const int range = __ffs(left) - 1;
      const uint32_t all = __reduce_add_sync(kAllLanes, mask == 1u << range ? found : 0u);
      if (lane == range) {
        own.pairs += all & 0xffffu;
        own.patches += all >> 16;
      }
      add_records(mask, v, range, single_view, layout, out.counts, own);
    }
  }

  met = __reduce_add_sync(kAllLanes, met);
  if (lane == 0 && met) atomicAdd(&sums.met, met);
  if (lane < kMaxShards) {
    if (own.pairs) atomicAdd(sums.pairs + lane, own.pairs);
    if (own.patches) atomicAdd(sums.patches + lane, own.patches);
    if (own.records) atomicAdd(sums.records + lane, own.records);
    if (own.alone) atomicAdd(sums.alone + lane, own.alone);
  }
  __syncthreads();
  const auto add = [&](int64_t word, SumState more) {
    if (more) atomicAdd(out.counts + word, more);
  };
  if (threadIdx.x < layout.ranges) {
    const int range = threadIdx.x;
    add(layout.parcel(range, 0), sums.records[range]);
    add(layout.alone(range), sums.alone[range]);
    add(layout.pairs(range), sums.pairs[range] + sums.cut_pairs[range]);
    add(layout.patches(range), sums.patches[range] + sums.cut_patches[range]);
  }
  if (threadIdx.x == 0) add(layout.met(), sums.met);
}
static_assert(kMaxShards <= kWarp);

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
        measured_records(frame, home), in.count, in.large_count, layout.range_runs(in.parcel_words.data()),
        layout.counts, MarkTarget{in.range_mask.data(), in.tile_mask.data(), in.parcel_words.data()});
    KERNEL_CHECK("assign", home, in.count);
  }
  in.patches = Buffer<int32_t>();
  in.large = Buffer<uint32_t>();
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

void count_tiles(const Frame& frame, int home, const SumState* records, const SumState* large, int64_t room,
                 SumState* counts) {
  const RunTable table(frame);
  const int64_t resident =
      prepare_kernel(reinterpret_cast<const void*>(count_tiles_kernel), kThreads, 0, home);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(blocks_for(room, kThreads), resident));
  const RunCounting how{records,
                        large,
                        room,
                        std::countr_zero(static_cast<uint64_t>(table.run)),
                        record_share(frame),
                        static_cast<int>(table.runs),
                        frame.settings.deterministic};
  count_tiles_kernel<<<blocks, kThreads, 0, shard_stream(home)>>>(measured_records(frame, home), how, counts);
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
