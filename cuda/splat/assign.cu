// SPDX-License-Identifier: Apache-2.0
// assign.cu: who blends what, on several shards. From the 16 bytes that stage "project" keeps of a record's
// tiles (cover.h): first what each home has in each run of tiles, for the host to choose ranges by; then, of
// each record, which ranges it meets, from a table of a byte a tile; a small record's mask of tiles is kept
// for its owners. Floor: 16 bytes a record twice and 8 more, and three atomics in shared memory a record and
// run. Two read-backs: that of stage "project", with 12 bytes a run more, and one here of some numbers.
#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>

#include "memory/transfer.h"
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
  const float2* half_extent;
  const TileCover* cover;
  const View* views;
  int num_views;

  __device__ __forceinline__ int view_of(int64_t r) const { return num_views > 1 ? view[r] : 0; }
};

MeasuredRecords measured_records(const Frame& frame, int home) {
  const ShardRecords& in = frame.shards[static_cast<size_t>(home)];
  return {in.record.data(),
          in.view.data(),
          reinterpret_cast<const float2*>(in.half_extent.data()),
          in.cover.data(),
          frame.constants[static_cast<size_t>(home)].views,
          static_cast<int>(frame.views.size())};
}

// By all lanes of a warp: what the tiles of each lane's record come to. A record of few tiles is its own
// lane's, from its mask; a larger one is walked by all. A Sum starts out as start(number of tiles); it has
// add(view, box, x, y) for a tile, done() behind a lane's last one, and over_warp(), the total of all lanes'
// parts.
template <typename Sum, typename Start>
__device__ __forceinline__ Sum sum_over_tiles(const MeasuredRecords& in, int64_t r, bool held,
                                              const Start& start) {
  const int lane = threadIdx.x % kWarp;
  uint4 words{};
  if (held) words = *reinterpret_cast<const uint4*>(in.cover + r);
  const TileCover cover = std::bit_cast<TileCover>(words);
  const int columns = cover.tile_rect[2] - cover.tile_rect[0];
  const bool large = columns * (cover.tile_rect[3] - cover.tile_rect[1]) > kSmallTiles;
  Sum own = start(cover.count);
  if (!large && cover.count > 0) {
    const View& view = in.views[in.view_of(r)];
    const PatchBox box = patch_box(in.record[r].mean2d, in.half_extent[r]);
    for (uint32_t left = cover.mask; left; left &= left - 1) {
      const int bit = __ffs(left) - 1;
      own.add(view, box, cover.tile_rect[0] + bit % columns, cover.tile_rect[1] + bit / columns);
    }
    own.done();
  }
  for (unsigned left = __ballot_sync(kAllLanes, large && cover.count > 0); left; left &= left - 1) {
    const int source = __ffs(left) - 1;
    const int64_t of = __shfl_sync(kAllLanes, r, source);
    Sum part = start(__shfl_sync(kAllLanes, cover.count, source));
    const Record record = load48(in.record + of);
    const View& view = in.views[in.view_of(of)];
    const PatchBox box = patch_box(record.mean2d, in.half_extent[of]);
    math::TileEllipse ellipse;
    if (math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) {
      for (int y = record.tile_rect[1] + lane; y < record.tile_rect[3]; y += kWarp) {
        const math::TileSpan span = math::tile_span_of(ellipse, view, record.tile_rect, y);
        for (int x = span.begin; x < span.end; ++x) part.add(view, box, x, y);
      }
    }
    part.done();
    part = part.over_warp();
    if (lane == source) own = part;
  }
  return own;
}

// ---- what each home has in each run of tiles

// What a block has counted. Neighbouring rows meet the same runs, so that sums in memory would have blocks
// wait for each other at a few addresses.
struct RunSums {
  uint32_t pairs[kMostRuns], shares[kMostRuns], patches[kMostRuns];
};

// Tiles of a record come in rows, and neighbours are mostly of one run: these are added at once.
struct AddToRuns {
  RunSums* sums;
  int shift;  // of a position: its run
  uint32_t share;
  int32_t run;
  uint32_t pairs, patches;

  __device__ __forceinline__ void add(const View& view, const PatchBox& box, int x, int y) {
    const auto at = static_cast<int32_t>(view.position_of(int64_t{y} * view.tiles_x + x) >> shift);
    if (at != run) {
      done();
      run = at;
    }
    ++pairs;
    const int32_t met = box.in_span(y, x, x + 1);
    if (met > 0) patches += static_cast<uint32_t>(met);
  }
  __device__ __forceinline__ void done() {
    if (pairs) {
      atomicAdd(sums->pairs + run, pairs);
      atomicAdd(sums->shares + run, pairs * share);
    }
    if (patches) atomicAdd(sums->patches + run, patches);
    pairs = patches = 0;
  }
  __device__ __forceinline__ AddToRuns over_warp() const { return *this; }
};

// count: [runs] TileCount; patches: [runs]; added to.
__global__ void __launch_bounds__(kThreads)
    count_tiles_kernel(const __grid_constant__ MeasuredRecords in, const SumState* records, int64_t room,
                       int shift, uint32_t share, int runs, unsigned long long* count, uint32_t* patches) {
  __shared__ RunSums sums;
  for (int run = threadIdx.x; run < runs; run += kThreads)
    sums.pairs[run] = sums.shares[run] = sums.patches[run] = 0;
  __syncthreads();
  int64_t held = 0;
  for (int v = 0; v < in.num_views; ++v) held += static_cast<int64_t>(records[v]);
  held = held < room ? held : room;
  for (int64_t block = blockIdx.x; block * kThreads < held; block += gridDim.x) {
    const int64_t r = block * kThreads + threadIdx.x;
    sum_over_tiles<AddToRuns>(in, r, r < held, [&](int32_t tiles) {
      const TileCount one = tiles > 0 ? tile_count_of(static_cast<uint32_t>(tiles), share) : 0;
      return AddToRuns{&sums, shift, static_cast<uint32_t>(share_of(one)), 0, 0, 0};
    });
  }
  __syncthreads();
  for (int run = threadIdx.x; run < runs; run += kThreads) {
    const uint32_t pairs = sums.pairs[run];
    if (pairs) atomicAdd(count + run, static_cast<unsigned long long>(pairs) << 32 | sums.shares[run]);
    if (sums.patches[run]) atomicAdd(patches + run, sums.patches[run]);
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

// Before the records: the range of each tile, and zeros in the words before the table.
__global__ void __launch_bounds__(kThreads)
    clear_parcels_kernel(const View* views, int num_views, const __grid_constant__ RangeEnds ends,
                         ParcelWords layout, SumState* words) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < layout.table()) words[i] = 0;
  if (i >= layout.tiles) return;
  int v = 0;
  while (v + 1 < num_views && i >= views[v + 1].tile_begin) ++v;
  reinterpret_cast<uint8_t*>(words + layout.table())[i] =
      static_cast<uint8_t>(ends.range_of(views[v].position_of(i - views[v].tile_begin)));
}

struct RangesMet {
  const uint8_t* range_of_tile;
  uint32_t mask;

  __device__ __forceinline__ void add(const View& view, const PatchBox&, int x, int y) {
    mask |= 1u << range_of_tile[view.tile_begin + int64_t{y} * view.tiles_x + x];
  }
  __device__ __forceinline__ void done() {}
  __device__ __forceinline__ RangesMet over_warp() const {
    return {range_of_tile, __reduce_or_sync(kAllLanes, mask)};
  }
};

// counts: RangeCounts, zero before.
__global__ void __launch_bounds__(kThreads)
    mark_ranges_kernel(const __grid_constant__ MeasuredRecords in, int64_t records,
                       const uint8_t* range_of_tile, RangeCounts layout, RangeMask* range_mask,
                       uint32_t* tile_mask, SumState* counts) {
  __shared__ unsigned s_parcel[kMaxShards], s_alone[kMaxShards], s_met;  // s_parcel: of a single view
  if (threadIdx.x < kMaxShards) s_parcel[threadIdx.x] = s_alone[threadIdx.x] = 0;
  if (threadIdx.x == 0) s_met = 0;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = blockIdx.x; block * kThreads < records; block += gridDim.x) {
    const int64_t r = block * kThreads + threadIdx.x;
    const bool held = r < records;
    const uint32_t mask =
        sum_over_tiles<RangesMet>(in, r, held, [&](int32_t) { return RangesMet{range_of_tile, 0}; }).mask;
    if (held) {
      range_mask[r] = mask;
      tile_mask[r] = in.cover[r].mask;
    }
    const int v = held ? in.view_of(r) : 0;
    const unsigned met = __ballot_sync(kAllLanes, mask != 0);
    if (lane == 0 && met) atomicAdd(&s_met, static_cast<unsigned>(__popc(met)));
    for (uint32_t left = __reduce_or_sync(kAllLanes, mask); left; left &= left - 1) {
      const int range = __ffs(left) - 1;
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
    if (s_parcel[threadIdx.x])
      atomicAdd(counts + layout.parcel(threadIdx.x, 0), static_cast<SumState>(s_parcel[threadIdx.x]));
    if (s_alone[threadIdx.x])
      atomicAdd(counts + layout.alone(threadIdx.x), static_cast<SumState>(s_alone[threadIdx.x]));
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
        measured_records(frame, home), in.count, layout.range_of_tile(in.parcel_words.data()), layout.counts,
        in.range_mask.data(), in.tile_mask.data(), in.parcel_words.data());
    KERNEL_CHECK("assign", home, in.count);
  }
  in.half_extent = Buffer<float>();
  in.cover = Buffer<TileCover>();
}

struct RunTable {
  int64_t tiles, run, runs, words;

  explicit RunTable(const Frame& frame)
      : tiles(frame.tile_count()),
        run(tiles_of_run(tiles)),
        runs((tiles + run - 1) / run),
        words(runs + (runs + 1) / 2) {}
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

int64_t run_table_words(const Frame& frame) { return RunTable(frame).words; }

void count_tiles(const Frame& frame, int home, const SumState* records, int64_t room, SumState* counts) {
  const RunTable table(frame);
  const int64_t resident =
      prepare_kernel(reinterpret_cast<const void*>(count_tiles_kernel), kThreads, 0, home);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(blocks_for(room, kThreads), resident));
  count_tiles_kernel<<<blocks, kThreads, 0, shard_stream(home)>>>(
      measured_records(frame, home), records, room, std::countr_zero(static_cast<uint64_t>(table.run)),
      record_share(frame), static_cast<int>(table.runs), counts,
      reinterpret_cast<uint32_t*>(counts + table.runs));
  KERNEL_CHECK("assign", home, room);
}

void assign_tiles(Frame& frame) {
  const int64_t shards = static_cast<int64_t>(frame.homes.size());
  if (shards == 1) return;
  const RunTable layout(frame);
  transport().gather(frame.run_table.data(), layout.words);
  std::vector<TileCount> run_counts;  // [shards, runs]
  run_counts.reserve(static_cast<size_t>(shards * layout.runs));
  for (int64_t home = 0; home < shards; ++home) {
    const TileCount* const of_home = frame.run_table.data() + home * layout.words;
    run_counts.insert(run_counts.end(), of_home, of_home + layout.runs);
  }
  frame.ranges = choose_ranges(run_counts.data(), static_cast<int>(shards), layout.tiles, layout.run);

  for_each_shard(
      "assign", [&](const Shard& shard) { mark_ranges(frame, shard.index); }, Access::kLocal,
      Launch::kSideBySide);

  // meanwhile: exact sums of what the runs of each range hold
  std::vector<int64_t> pairs(static_cast<size_t>(shards), 0), patches(static_cast<size_t>(shards), 0);
  for (int64_t home = 0; home < shards; ++home) {
    const TileCount* const count = frame.run_table.data() + home * layout.words;
    const auto* const patch = reinterpret_cast<const uint32_t*>(count + layout.runs);
    int64_t at = 0;
    for (size_t range = 0; range < pairs.size(); ++range) {
      for (; at * layout.run < frame.ranges.end[range]; ++at) {
        pairs[range] += pairs_of(count[at]);
        patches[range] += patch[at];
      }
    }
  }

  const int64_t row = range_counts(frame).words();
  std::vector<uint64_t> table(static_cast<size_t>(shards * row), 0);
  ReadBack read_back;
  for (int64_t home = 0; home < shards; ++home) {
    read_back.add(reinterpret_cast<SumState*>(table.data() + home * row),
                  frame.shards[static_cast<size_t>(home)].parcel_words.data(), row, static_cast<int>(home));
  }
  read_back.wait();
  transport().gather(table.data(), row);
  give_ranges(frame, table);
  for (size_t range = 0; range < pairs.size(); ++range) {
    TileOwner& owner = frame.owners[static_cast<size_t>(frame.ranges.owner[range])];
    owner.pairs = pairs[range];
    owner.patch_pairs = patches[range];
  }
  frame.run_table.clear();
}

}  // namespace mgpu::splat
