// SPDX-License-Identifier: Apache-2.0
// project.cu: rows to records. Formulas: math/gaussian.h, math/sh.h, math/cull.h.
//
// Three kernels, because most rows of a large table are out of sight, and because only what is short may wait
// for its turn. The first reads means and scales of all rows and lists, in order, those that the view may
// see; rows that missed steps are tested with a margin for where replay may take them, so their moments stay
// unread. Where the table has cells (cells.h), a kernel before it lists those that some view may see, and it
// walks the rows of these alone. The second makes the records of the listed rows, but for their colour. All
// order their output by a running sum over blocks (look_back.h). In the third each warp goes by itself: it
// brings the SH coefficients, meanwhile measures the records for stage "bin" (on several shards, for
// "assign"), and fills in the colours. Floor: 28 N + 264 V bytes read (and the moments of what
// missed steps), 88 V written; the third kernel reads 56 V again. By cells, N is the rows of those listed,
// and 32 bytes a cell are read. Buffers are sized from the frame before; a frame that needs more is done
// again, and so is one with a colour that is not finite: then the second kernel looks at colours, too.
#include "splat/project.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "math/cull.h"
#include "memory/transfer.h"
#include "mesh/lanes.h"
#include "splat/assign_kernels.h"
#include "splat/cells.h"
#include "splat/cover.h"
#include "splat/kernels.h"
#include "splat/look_back.h"
#include "splat/row_source.h"
#include "splat/sh_rows.h"

namespace mgpu::splat {

namespace {

constexpr int kCullRows = 4;  // a thread's, so that enough loads are on their way
constexpr int kChunk = kThreads * kCullRows;
static_assert(kCellRows == kThreads);  // a thread has one row of each of kCullRows cells
constexpr int kRecordBlocks = 4;       // on a processor
constexpr int kFinishThreads = 128, kFinishWarps = kFinishThreads / kWarp;
constexpr int kFinishBlocks = 6;  // on a processor: 80 registers

// ---- before all: which cells may be seen

struct CellSource {
  ShardCells cells;
  math::CellMargins margins;
  math::CullView view0;  // of the first view
  const View* views;
  int num_views;
};

// Cells that some view may see, ascending.
struct ListedCells {
  int32_t* cell;     // [cells]
  SumState* count;   // [1]
  SumState* ticket;  // [1], zero before: of the blocks that walk them
};

// A thread a cell. state: [blocks], zero before; also clears the histogram that the last kernel adds to.
template <bool kOneView, bool kAnyModel>
__global__ void __launch_bounds__(kThreads)
    list_cells_kernel(const __grid_constant__ CellSource in, const __grid_constant__ ListedCells out,
                      SumState* state, SumState* histogram) {
  __shared__ int s_count[kWarps];
  __shared__ int64_t s_begin[kWarps];
  __shared__ math::CullView s_view;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (blockIdx.x == 0 && histogram) {
    for (int bin = threadIdx.x; bin < kDepthBins; bin += kThreads) histogram[bin] = 0;
  }
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const math::Cell cell = at < in.cells.count ? in.cells.cell[at] : math::empty_cell();
  bool kept = false;
  for (int v = 0; v < in.num_views; ++v) {
    if (!kOneView) {
      __syncthreads();
      if (threadIdx.x == 0) s_view = math::make_cull_view<kAnyModel>(in.views[v]);
      __syncthreads();
    }
    const math::CullView& view = kOneView ? in.view0 : s_view;
    kept |= at < in.cells.count && !math::surely_unseen<kAnyModel>(view, cell, in.margins);
  }
  const unsigned lanes = __ballot_sync(kAllLanes, kept);
  if (lane == 0) s_count[warp] = __popc(lanes);
  __syncthreads();
  if (warp == 0) {
    const int count = lane < kWarps ? s_count[lane] : 0;
    int inclusive = count;
    for (int step = 1; step < kWarps; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    const int total = __shfl_sync(kAllLanes, inclusive, kWarps - 1);
    const int64_t base = sum_of_blocks_before(state, blockIdx.x, total);
    if (lane < kWarps) s_begin[lane] = base + inclusive - count;
    if (lane == 0 && blockIdx.x + 1 == gridDim.x) *out.count = static_cast<SumState>(base + total);
  }
  __syncthreads();
  if (kept) out.cell[s_begin[warp] + __popc(lanes & ((1u << lane) - 1u))] = static_cast<int32_t>(at);
}

// ---- first: which rows may be seen

struct CullSource {
  const float *means, *scales, *opacities;
  AdamState state;
  AdamHistory history;
  bool replays;
  float moment_ratio;          // how far drift can go: math::moment_ratio_bound
  float margin, scale_margin;  // the farthest that steps of the history move a mean, a log scale
  math::CullView view0;        // of the first view
  const View* views;
  int num_views;
  RowRange rows;
};

struct Candidates {
  int32_t* row;     // [views, room], counted from the shard's first
  SumState* count;  // [views]; may exceed `room`
  int64_t room;
};

// What a row's test reads: the mean and largest scale that are stored, and how far replay may move them.
struct CullRow {
  float mean[3], log_scale;
  float margin;
  float noise;  // longest draw times sigma
};

__device__ __forceinline__ CullRow load_cull_row(const CullSource& in, int64_t row) {
  CullRow out{};
  for (int i = 0; i < 3; ++i) out.mean[i] = in.means[3 * row + i];
  const float* scale = in.scales + 3 * row;
  out.log_scale = fmaxf(fmaxf(scale[0], scale[1]), scale[2]);
  if (!in.replays) return out;
  const int64_t last = in.state.last_step[row];
  if (last >= in.history.now) return out;
  out.margin = in.margin;
  out.log_scale += in.scale_margin;
  if (in.history.noise_var) {
    const float variance =
        in.history.noise_var[in.history.now - in.history.base] - in.history.noise_var[last - in.history.base];
    out.noise = variance > 0.f ? math::kMaxNormal3 * sqrtf(variance) : 0.f;
  }
  return out;
}

// Whether a row that its noise may bring into view can be: how far noise goes depends on how transparent the
// row may have become. Few rows are asked.
template <bool kAnyModel>
__device__ __noinline__ bool may_be_seen_by_noise(const CullSource& in, const math::CullView& view,
                                                  CullRow row, int64_t index) {
  constexpr int kOpacities = 3;
  const float exp_avg = in.state.exp_avg[kOpacities][index],
              exp_avg_sq = in.state.exp_avg_sq[kOpacities][index];
  const float ratio =
      exp_avg == 0.f ? 0.f : fminf(in.moment_ratio, 1.01f * fabsf(exp_avg) * rsqrtf(exp_avg_sq));
  const int64_t missed_from = in.state.last_step[index] - in.history.base;
  const float logit =
      in.opacities[index] - ratio * math::largest_drift(in.history.two[kOpacities][missed_from]);
  const float gate = 1.001f / (1.f + expf(100.f * (math::sigmoid(logit) - 0.005f)));  // add_mcmc_noise's
  return !math::surely_unseen<kAnyModel>(view, row.mean, row.log_scale, row.margin, row.noise * gate);
}

// A chunk of rows, in all views: of all rows a block each, of the listed cells as many as there are, in turn.
// state: [views, chunks] (of all rows), zero before; also clears the histogram that the last kernel adds to.
template <bool kOneView, bool kListed, bool kAnyModel>
__global__ void __launch_bounds__(kThreads, 4)
    cull_kernel(const __grid_constant__ CullSource in, const __grid_constant__ ListedCells listed,
                const __grid_constant__ Candidates out, SumState* state, int64_t all_chunks,
                SumState* histogram) {
  static_assert(kCullRows * kWarps == kWarp);
  __shared__ int s_before[kWarp];  // by (row of the thread, warp): candidates before its first
  __shared__ int64_t s_base, s_ticket;
  __shared__ math::CullView s_view;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (!kListed && blockIdx.x == 0 && histogram) {
    for (int bin = threadIdx.x; bin < kDepthBins; bin += kThreads) histogram[bin] = 0;
  }
  const int64_t cells = kListed ? static_cast<int64_t>(*listed.count) : 0;
  const int64_t chunks = kListed ? (cells + kCullRows - 1) / kCullRows : all_chunks;
  const auto take_chunk = [&]() -> int64_t {
    if (threadIdx.x == 0) s_ticket = static_cast<int64_t>(atomicAdd(listed.ticket, 1ull));
    __syncthreads();
    return s_ticket;
  };
  for (int64_t chunk = kListed ? take_chunk() : blockIdx.x; chunk < chunks;
       chunk = kListed ? take_chunk() : chunks) {
    int64_t index[kCullRows];  // rows.end or more: none
    CullRow row[kCullRows];
#pragma unroll
    for (int k = 0; k < kCullRows; ++k) {
      if constexpr (kListed) {
        const int64_t cell = chunk * kCullRows + k;
        index[k] =
            cell < cells ? in.rows.begin + int64_t{listed.cell[cell]} * kCellRows + threadIdx.x : in.rows.end;
      } else {
        index[k] = in.rows.begin + chunk * kChunk + k * kThreads + threadIdx.x;
      }
    }
#pragma unroll
    for (int k = 0; k < kCullRows; ++k)
      row[k] = index[k] < in.rows.end ? load_cull_row(in, index[k]) : CullRow{};
    for (int v = 0; v < in.num_views; ++v) {
      if (!kOneView) {
        __syncthreads();
        if (threadIdx.x == 0) s_view = math::make_cull_view<kAnyModel>(in.views[v]);
        __syncthreads();
      }
      const math::CullView& view = kOneView ? in.view0 : s_view;
      bool kept[kCullRows];
      unsigned lanes[kCullRows];
#pragma unroll
      for (int k = 0; k < kCullRows; ++k) {
        kept[k] =
            (index[k] < in.rows.end) &
            !math::surely_unseen<kAnyModel>(view, row[k].mean, row[k].log_scale, row[k].margin, row[k].noise);
      }
      if (in.replays && in.history.noise_var) {
#pragma unroll
        for (int k = 0; k < kCullRows; ++k) {
          if (kept[k] && row[k].noise > 0.f)
            kept[k] = may_be_seen_by_noise<kAnyModel>(in, view, row[k], index[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kCullRows; ++k) {
        lanes[k] = __ballot_sync(kAllLanes, kept[k]);
        if (lane == 0) s_before[k * kWarps + warp] = __popc(lanes[k]);
      }
      __syncthreads();
      if (warp == 0) {
        const int count = s_before[lane];
        int inclusive = count;
        for (int step = 1; step < kWarp; step *= 2) {
          const int other = __shfl_up_sync(kAllLanes, inclusive, step);
          if (lane >= step) inclusive += other;
        }
        const int total = __shfl_sync(kAllLanes, inclusive, kWarp - 1);
        s_before[lane] = inclusive - count;
        const int64_t base = sum_of_blocks_before(state + v * all_chunks, chunk, total);
        if (lane == 0) {
          s_base = base;
          if (chunk + 1 == chunks) out.count[v] = static_cast<SumState>(base + total);
        }
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kCullRows; ++k) {
        const int64_t at = s_base + s_before[k * kWarps + warp] + __popc(lanes[k] & ((1u << lane) - 1u));
        if ((lanes[k] >> lane & 1u) && at < out.room)
          out.row[v * out.room + at] = static_cast<int32_t>(index[k] - in.rows.begin);
      }
    }
  }
}

// ---- second: the records

struct RecordTarget {
  int64_t room;
  int64_t* row;
  int32_t* view;
  Record* record;
  bool measured;  // false: records alone are wanted
  // what stage "bin" needs, or on several shards "assign"
  float2* half_extent;  // one shard; else null
  int32_t* patches_of;  // several shards; else null, as the next one
  uint32_t* large;      // records without a mask of their tiles, in any order
  TileCover* cover;
  uint32_t* depth_key;
  SumState* depth_histogram;
  // added up by integer atomics: any order gives the same
  SumState* records;            // [views]
  SumState *pairs, *patches;    // [1]
  SumState* largest_depth_key;  // [1]
  SumState* colourless;         // [1]: rows whose colour is not finite
  SumState* large_count;        // [1]
  SumState* state;              // [blocks of candidates], zero before
};

// A block's share of the candidates: of one view, so that the records come out by (view, row).
struct CandidateBlock {
  int view;  // num_views: behind the last
  int64_t first, count;

  __device__ CandidateBlock(const Candidates& in, int num_views)
      : view(0), first(int64_t{blockIdx.x} * kThreads), count(0) {
    for (; view < num_views; ++view) {
      const int64_t found = static_cast<int64_t>(in.count[view]);
      count = found < in.room ? found : in.room;
      if (first < count) break;
      first -= (count + kThreads - 1) / kThreads * kThreads;
    }
  }
  // Of this thread, counted from the shard's first; -1: none.
  __device__ int32_t row(const Candidates& in) const {
    const int64_t at = first + threadIdx.x;
    return at < count ? in.row[view * in.room + at] : -1;
  }
};

// Whether a row's colour is finite.
template <bool kAnyModel>
__device__ __noinline__ bool has_colour(const RowSource& in, const View& view, int64_t row,
                                        const float mean[3]) {
  float sh[3 * math::kMaxShCount], direction[3], rgb[3];
  const int degree = in.settings.sh_degree;
  replay_sh(in.columns, in.state_or_null(), in.history_or_null(), row, (degree + 1) * (degree + 1), sh);
  direction_to<kAnyModel>(view, mean, direction);
  return math::eval_sh(degree, direction, sh, rgb);
}

// A block 256 candidates: their records but for the colour, in whose place stands the direction. Colours are
// looked at only after finish_kernel met one that is not finite.
template <bool kReplays, bool kChecksColour, bool kAnyModel>
__global__ void __launch_bounds__(kThreads, kRecordBlocks)
    record_kernel(const __grid_constant__ RowSource in, const __grid_constant__ Candidates candidates,
                  const __grid_constant__ RecordTarget out) {
  __shared__ float4 s_record[3 * kThreads];  // in their order
  __shared__ int s_count[kWarps];
  __shared__ int64_t s_begin;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const CandidateBlock block(candidates, in.num_views);
  if (block.view >= in.num_views) return;
  const View& view = in.views[block.view];
  const int32_t local_row = block.row(candidates);

  Record record;
  float2 half_extent;
  bool visible = false;
  if (local_row >= 0) {
    const int64_t row = in.rows.begin + local_row;
    RowValues values;
    math::Projected p;
    math::TileEllipse ellipse;
    replay_geometry(in.columns, kReplays ? &in.state : nullptr, kReplays ? &in.history : nullptr, row,
                    values.mean, values.quat, values.log_scale, values.opacity_logit);
    visible = math::project_gaussian<kAnyModel>(view, values.mean, values.quat, values.log_scale,
                                                values.opacity_logit, in.settings.antialiased, p, ellipse);
    if (kChecksColour && visible && !has_colour<kAnyModel>(in, view, row, values.mean)) {
      visible = false;
      atomicAdd(out.colourless, 1ull);
    }
    if (visible) {
      half_extent = half_extent_of(ellipse);
      for (int i = 0; i < 2; ++i) record.mean2d[i] = p.mean2d[i];
      for (int i = 0; i < 3; ++i) record.conic[i] = p.conic[i];
      direction_to<kAnyModel>(view, values.mean, record.rgb);
      for (int i = 0; i < 4; ++i) record.tile_rect[i] = p.tile_rect[i];
      record.opacity = p.opacity;
      record.depth = p.depth;
    }
  }

  // place among the records
  const unsigned lanes = __ballot_sync(kAllLanes, visible);
  if (lane == 0) s_count[warp] = __popc(lanes);
  __syncthreads();
  int before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? s_count[w] : 0;
    total += s_count[w];
  }
  if (warp == 0) {
    const int64_t begin = sum_of_blocks_before<4>(out.state, blockIdx.x, total);
    if (lane == 0) {
      s_begin = begin;
      atomicAdd(out.records + block.view, static_cast<SumState>(total));
    }
  }
  const int rank = before + __popc(lanes & ((1u << lane) - 1u));
  if (visible) store48(reinterpret_cast<Record*>(s_record) + rank, record);
  const uint32_t largest = __reduce_max_sync(kAllLanes, visible ? depth_key_of(record.depth) : 0);
  if (lane == 0 && largest) atomicMax(out.largest_depth_key, static_cast<SumState>(largest));
  __syncthreads();

  // out, side by side
  const int64_t begin = s_begin, space = out.room - begin;
  const int stored = space < total ? (space > 0 ? static_cast<int>(space) : 0) : total;
  float4* const records = reinterpret_cast<float4*>(out.record + begin);
  for (int i = threadIdx.x; i < 3 * stored; i += kThreads) records[i] = s_record[i];
  if (visible && rank < stored) {
    out.row[begin + rank] = in.rows.begin + local_row;
    out.view[begin + rank] = block.view;
    if (out.half_extent) out.half_extent[begin + rank] = half_extent;
  }
}

// ---- third: their colours and tiles

// A warp 32 records, one group after another, without waiting for others.
template <int kDegree, bool kReplays, bool kHalf>
__global__ void __launch_bounds__(kFinishThreads, kFinishBlocks)
    finish_kernel(const __grid_constant__ RowSource in, const __grid_constant__ RecordTarget out) {
  extern __shared__ float4 s_sh[];  // rows of higher SH, by warp
  __shared__ unsigned s_histogram[kDepthBins];
  __shared__ SumState s_pairs, s_patches;
  __shared__ TileWalk s_walk[kFinishWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int bin = threadIdx.x; bin < kDepthBins; bin += kFinishThreads) s_histogram[bin] = 0;
  if (threadIdx.x == 0) s_pairs = s_patches = 0;
  __syncthreads();
  const AdamState* const state = kReplays ? &in.state : nullptr;
  const AdamHistory* const history = kReplays ? &in.history : nullptr;
  ShRows<kDegree, kHalf> rest(s_sh + warp * ShRows<kDegree, kHalf>::kWarpPieces);

  int64_t records = 0;
  for (int v = 0; v < in.num_views; ++v) records += static_cast<int64_t>(out.records[v]);
  records = records < out.room ? records : out.room;
  int32_t pairs = 0, patches = 0;
  const int64_t stride = int64_t{gridDim.x} * kFinishThreads;
  int64_t r = int64_t{blockIdx.x} * kFinishThreads + threadIdx.x;
  int64_t next_row = r < records ? out.row[r] : -1;
  for (; r - lane < records; r += stride) {
    const int64_t row = next_row;
    const bool held = row >= 0;

    // the coefficients, on their way
    int64_t last = 0;
    float sh[3 + ShRows<kDegree, kHalf>::kWanted];
    if (held) {
      if constexpr (kReplays) last = in.state.last_step[row];
      for (int i = 0; i < 3; ++i) sh[i] = in.columns.sh0[3 * row + i];
    }
    if constexpr (kDegree > 0) {
      const int32_t local_row = held ? static_cast<int32_t>(row - in.rows.begin) : -1;
      rest.start(in.columns, state, history, in.rows.begin, local_row, last);
    }
    next_row = r + stride < records ? out.row[r + stride] : -1;

    // tiles
    Record record;
    TileWalk walk;
    int v = 0;
    bool met = false;
    if (held) {
      record = load48(out.record + r);
      if (in.num_views > 1) v = out.view[r];
      for (int i = 0; i < 4; ++i) walk.rect[i] = record.tile_rect[i];
      met = math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, walk.ellipse);
      walk.box = patch_box(record.mean2d, half_extent_of(walk.ellipse));
    }
    if (out.measured) {
      const CoverPart<false> cover = walk_tiles(walk, met, in.views, v, CoverPart<false>{}, s_walk[warp]);
      pairs += cover.count;
      patches += cover.patches;
      if (held) {
        const uint32_t key = depth_key_of(record.depth);
        out.cover[r] = cover_of(walk.rect, cover);
        out.depth_key[r] = key;
        if (out.patches_of) out.patches_of[r] = cover.patches;
        atomicAdd(s_histogram + key % kDepthBins, 1u);
      }
      if (out.large) {
        const bool large = held && cover.count > 0 && !walk.is_small();
        const unsigned lanes = __ballot_sync(kAllLanes, large);
        SumState first = 0;
        if (lane == 0 && lanes) first = atomicAdd(out.large_count, static_cast<SumState>(__popc(lanes)));
        first = __shfl_sync(kAllLanes, first, 0);
        if (large) out.large[first + __popc(lanes & ((1u << lane) - 1u))] = static_cast<uint32_t>(r);
      }
    }

    // colour
    if constexpr (kDegree > 0) rest.finish();
    if (held) {
      float direction[3], rgb[3];
      if (kReplays && last < in.history.now) replay_column(in.state, in.history, 4, last, 3 * row, 3, sh);
      for (int i = 0; i < 3; ++i) direction[i] = record.rgb[i];
#pragma unroll
      for (int k = 0; k < ShRows<kDegree, kHalf>::kWanted; ++k) sh[3 + k] = rest.value(k);
      if (!math::eval_sh(kDegree, direction, sh, rgb)) atomicAdd(out.colourless, 1ull);
      for (int i = 0; i < 3; ++i) out.record[r].rgb[i] = rgb[i];
    }
    __syncwarp();  // the rows' place is free
  }

  if (out.measured) {
    pairs = __reduce_add_sync(kAllLanes, pairs);
    patches = __reduce_add_sync(kAllLanes, patches);
    if (lane == 0) {
      atomicAdd(&s_pairs, static_cast<SumState>(pairs));
      atomicAdd(&s_patches, static_cast<SumState>(patches));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (s_pairs) atomicAdd(out.pairs, s_pairs);
    if (s_patches) atomicAdd(out.patches, s_patches);
  }
  for (int bin = threadIdx.x; bin < kDepthBins && out.measured; bin += kFinishThreads) {
    if (s_histogram[bin]) atomicAdd(out.depth_histogram + bin, static_cast<SumState>(s_histogram[bin]));
  }
}

// ---- one shard

// Rooms for records and candidates: what the frame before needed and an eighth more. By shard.
class Rooms {
 public:
  int64_t of(int shard, int64_t most) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t known = shard < static_cast<int>(room_.size()) ? room_[static_cast<size_t>(shard)] : 0;
    return std::min(most, std::max<int64_t>({known, most / 16, 4096}));
  }
  void saw(int shard, int64_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shard >= static_cast<int>(room_.size())) room_.resize(static_cast<size_t>(shard) + 1, 0);
    int64_t& room = room_[static_cast<size_t>(shard)];
    room = std::max(count + count / 8, room - room / 64);  // shrinks slowly
  }

 private:
  std::mutex mutex_;
  std::vector<int64_t> room_;
};

Rooms& record_rooms() {
  static Rooms* instance = new Rooms;
  return *instance;
}
Rooms& candidate_rooms() {
  static Rooms* instance = new Rooms;
  return *instance;
}

// Shards whose latest frame met rows without a finite colour, a bit each.
std::atomic<uint32_t>& shards_with_colourless_rows() {
  static std::atomic<uint32_t> shards = 0;
  return shards;
}

// The kernels for the frame's cameras.
template <bool kListed>
auto choose_cull(bool pinholes, bool one_view) {
  return !pinholes  ? cull_kernel<false, kListed, true>
         : one_view ? cull_kernel<true, kListed, false>
                    : cull_kernel<false, kListed, false>;
}
template <bool kAnyModel>
auto choose_record(bool replays, bool checks_colour) {
  return replays
             ? checks_colour ? record_kernel<true, true, kAnyModel> : record_kernel<true, false, kAnyModel>
         : checks_colour ? record_kernel<false, true, kAnyModel>
                         : record_kernel<false, false, kAnyModel>;
}

class ShardProjection {
 public:
  ShardProjection(Frame& frame, int shard)
      : frame_(frame),
        shard_(shard),
        views_(static_cast<int64_t>(frame.views.size())),
        owners_(static_cast<int64_t>(frame.owners.size())),
        rows_(frame.homes[static_cast<size_t>(shard)]),
        done_(rows_.empty() || views_ == 0),
        pinholes_(frame.all_pinholes()),
        counters_(2 * views_ + 6),
        counts_(static_cast<size_t>(counters_ + (owners_ > 1 ? run_table_words(frame) : 0)), 0),
        depth_key_(0, shard),
        depth_histogram_(0, shard) {
    if (done_) return;
    if (frame.cells) cells_ = frame.cells->of_shard(static_cast<size_t>(shard));
    if (rows_.size() > std::numeric_limits<int32_t>::max()) {
      throw std::runtime_error("shard " + std::to_string(shard) + " holds " + std::to_string(rows_.size()) +
                               " Gaussians, more than 2^31 - 1; add shards to MGPU_DEVICES");
    }
    room_ = record_rooms().of(shard, rows_.size() * views_);
    candidate_room_ = candidate_rooms().of(shard, rows_.size());
    checks_colour_ = shards_with_colourless_rows() >> shard & 1u;
  }

  // Records and counts, as far as there is room.
  void fill() {
    if (done_) return;
    const int64_t chunks = blocks_for(rows_.size(), kChunk);
    const int64_t candidate_blocks = views_ * blocks_for(candidate_room_, kThreads);
    const int64_t cell_blocks = blocks_for(cells_.count, kThreads);
    const int64_t counts = static_cast<int64_t>(counts_.size());
    Buffer<int32_t> candidate(views_ * candidate_room_, shard_), listed_cell(cells_.count, shard_);
    scratch_ = Buffer<SumState>(kTickets + counts + views_ * chunks + candidate_blocks + cell_blocks, shard_);
    zero(scratch_);
    SumState* const counters = scratch_.data() + kTickets;
    SumState* const states = counters + counts;
    const Candidates candidates{candidate.data(), counters, candidate_room_};
    const RecordTarget target = make_target(counters + views_, states + views_ * chunks);
    const cudaStream_t stream = shard_stream(shard_);
    const CullSource source = cull_source();
    const ListedCells listed{listed_cell.data(), counters + counters_ - 1, scratch_.data()};
    if (cells_.cell) {
      const CellSource cells{cells_, bounds_.margins(), source.view0, source.views, source.num_views};
      const auto list = !pinholes_    ? list_cells_kernel<false, true>
                        : views_ == 1 ? list_cells_kernel<true, false>
                                      : list_cells_kernel<false, false>;
      list<<<static_cast<unsigned>(cell_blocks), kThreads, 0, stream>>>(
          cells, listed, states + views_ * chunks + candidate_blocks, target.depth_histogram);
      KERNEL_CHECK("project", shard_, rows_.size());
    }
    const auto cull =
        cells_.cell ? choose_cull<true>(pinholes_, views_ == 1) : choose_cull<false>(pinholes_, views_ == 1);
    const int64_t cull_blocks =
        cells_.cell
            ? std::min(chunks, prepare_kernel(reinterpret_cast<const void*>(cull), kThreads, 0, shard_))
            : chunks;
    cull<<<static_cast<unsigned>(cull_blocks), kThreads, 0, stream>>>(source, listed, candidates, states,
                                                                      chunks, target.depth_histogram);
    KERNEL_CHECK("project", shard_, rows_.size());
    const RowSource rows = row_source(frame_, shard_);
    const auto record = pinholes_ ? choose_record<false>(frame_.replays, checks_colour_)
                                  : choose_record<true>(frame_.replays, checks_colour_);
    record<<<static_cast<unsigned>(candidate_blocks), kThreads, 0, stream>>>(rows, candidates, target);
    KERNEL_CHECK("project", shard_, candidate_room_);
    with_sh_degree(frame_.settings.sh_degree, [&](auto degree) {
      const auto launch = [&](auto half) {
        constexpr bool kHalf = half.value;
        const auto finish = frame_.replays ? finish_kernel<degree.value, true, kHalf>
                                           : finish_kernel<degree.value, false, kHalf>;
        constexpr size_t kBytes = sizeof(float4) * kFinishWarps * ShRows<degree.value, kHalf>::kWarpPieces;
        const int64_t resident =
            prepare_kernel(reinterpret_cast<const void*>(finish), kFinishThreads, kBytes, shard_);
        const int64_t blocks = std::min<int64_t>(blocks_for(room_, kFinishThreads), resident);
        finish<<<static_cast<unsigned>(blocks), kFinishThreads, kBytes, stream>>>(rows, target);
      };
      if constexpr (degree.value == 0) {
        launch(std::false_type{});
      } else {
        frame_.columns.shN.is_float32() ? launch(std::false_type{}) : launch(std::true_type{});
      }
    });
    KERNEL_CHECK("project", shard_, room_);
    if (owners_ > 1)
      count_tiles(frame_, shard_, target.records, target.large_count, room_, counters + counters_);
  }

  void ask(ReadBack& read_back) {
    if (done_) return;
    read_back.add(counts_.data(), scratch_.data() + kTickets, static_cast<int64_t>(counts_.size()), shard_);
  }

  // With the counts on the host: true if nothing is left to do.
  bool finish() {
    if (!done_) {
      int64_t total = 0, most_candidates = 0;
      for (int64_t v = 0; v < views_; ++v) {
        most_candidates = std::max(most_candidates, static_cast<int64_t>(counts_[static_cast<size_t>(v)]));
        total += static_cast<int64_t>(counts_[static_cast<size_t>(views_ + v)]);
      }
      const bool colourless = counts_[static_cast<size_t>(counters_ - 3)] > 0;
      const bool filled =
          most_candidates <= candidate_room_ && total <= room_ && (checks_colour_ || !colourless);
      checks_colour_ |= colourless;
      candidate_room_ = std::max(candidate_room_, most_candidates);
      room_ = std::max(room_, total);
      if (!filled) return false;
      done_ = true;
      candidate_rooms().saw(shard_, most_candidates);
      record_rooms().saw(shard_, total);
      const uint32_t own = 1u << shard_;
      colourless ? shards_with_colourless_rows() |= own : shards_with_colourless_rows() &= ~own;
      scratch_ = Buffer<SumState>();
      depth_key_ = Buffer<uint32_t>();
      depth_histogram_ = Buffer<SumState>();
    }
    take_counts();
    return true;
  }

 private:
  CullSource cull_source() {
    const ShardConstants& constants = frame_.constants[static_cast<size_t>(shard_)];
    CullSource in{};
    in.means = frame_.columns.means;
    in.scales = frame_.columns.scales;
    in.opacities = frame_.columns.opacities;
    in.state = frame_.state;
    in.history = constants.history;
    in.replays = frame_.replays;
    in.view0 = math::make_cull_view(frame_.views[0]);
    in.views = constants.views;
    in.num_views = static_cast<int>(views_);
    in.rows = rows_;
    if (frame_.replays) {
      bounds_ = drift_bounds(frame_.history, !frame_.state.exp_avg[0].is_float32());
      in.moment_ratio = bounds_.moment_ratio;
      in.margin = bounds_.mean;
      in.scale_margin = bounds_.log_scale;
    }
    return in;
  }

  RecordTarget make_target(SumState* counters, SumState* state) {
    ShardRecords& out = frame_.shards[static_cast<size_t>(shard_)];
    out.row.resize_discard(room_);
    out.view.resize_discard(room_);
    out.record.resize_discard(room_);
    RecordTarget target{};
    target.room = room_;
    target.row = out.row.data();
    target.view = out.view.data();
    target.record = out.record.data();
    target.measured = owners_ > 0;
    const auto measure_into = [&](Buffer<TileCover>& cover, Buffer<uint32_t>& depth_key,
                                  Buffer<SumState>& depth_histogram) {
      cover.resize_discard(room_);
      depth_key.resize_discard(room_);
      depth_histogram.resize_discard(kDepthBins);
      target.cover = cover.data();
      target.depth_key = depth_key.data();
      target.depth_histogram = depth_histogram.data();
    };
    if (owners_ == 1) {
      TileOwner& owner = frame_.owners[0];
      measure_into(owner.cover, owner.depth_key, owner.depth_histogram);
      owner.half_extent.resize_discard(2 * room_);
      target.half_extent = reinterpret_cast<float2*>(owner.half_extent.data());
    }
    if (owners_ > 1) {
      measure_into(out.cover, depth_key_, depth_histogram_);  // depths are sorted by their owners
      out.patches.resize_discard(room_);
      target.patches_of = out.patches.data();
      out.large.resize_discard(room_);
      target.large = out.large.data();
    }
    target.records = counters;
    target.pairs = counters + views_;
    target.patches = target.pairs + 1;
    target.largest_depth_key = target.patches + 1;
    target.colourless = target.largest_depth_key + 1;
    target.large_count = target.colourless + 1;
    target.state = state;
    return target;
  }

  void take_counts() {
    if (taken_) return;
    taken_ = true;
    const SumState* const records = counts_.data() + views_;
    const SumState* const pairs = records + views_;
    ShardRecords& out = frame_.shards[static_cast<size_t>(shard_)];
    out.view_begin.assign(1, 0);
    for (int64_t v = 0; v < views_; ++v)
      out.view_begin.push_back(out.view_begin.back() + static_cast<int64_t>(records[v]));
    out.count = out.view_begin.back();
    out.culled = {cells_.count, static_cast<int64_t>(counts_[static_cast<size_t>(counters_ - 1)]), 0};
    for (int64_t v = 0; v < views_; ++v)
      out.culled.candidates += static_cast<int64_t>(counts_[static_cast<size_t>(v)]);
    if (!rows_.empty() && views_ > 0) {
      out.row.resize_discard(out.count);
      out.view.resize_discard(out.count);
      out.record.resize_discard(out.count);
    }
    out.large_count = static_cast<int64_t>(counts_[static_cast<size_t>(counters_ - 2)]);
    if (owners_ > 1) {
      std::copy(counts_.begin() + counters_, counts_.end(),
                frame_.run_table.begin() + shard_ * (static_cast<int64_t>(counts_.size()) - counters_));
    }
    for (TileOwner& owner : frame_.owners)
      owner.largest_depth_key = std::max(owner.largest_depth_key, static_cast<uint32_t>(pairs[2]));
    if (owners_ != 1) return;  // else all records are the owner's
    TileOwner& owner = frame_.owners[0];
    Parcel& parcel = frame_.parcels[0][0];
    parcel.view_begin = out.view_begin;
    parcel.count = out.count;
    owner.pairs = static_cast<int64_t>(pairs[0]);
    owner.patch_pairs = static_cast<int64_t>(pairs[1]);
    owner.half_extent.resize_discard(2 * out.count);
  }

  Frame& frame_;
  int shard_;
  int64_t views_, owners_;
  RowRange rows_;
  bool done_, pinholes_, taken_ = false, checks_colour_ = false;
  int64_t room_ = 0, candidate_room_ = 0;
  static constexpr int64_t kTickets = 1;  // of the walk over cells
  ShardCells cells_;
  DriftBounds bounds_;
  // candidates [views], records [views], pairs, patches, largest key, colourless rows, large, cells listed
  int64_t counters_;
  std::vector<SumState> counts_;  // these, and on several shards the home's row of Frame::run_table
  Buffer<SumState> scratch_;      // the ticket, the counts, states of the running sums
  Buffer<uint32_t> depth_key_;    // several shards, as the next one
  Buffer<SumState> depth_histogram_;
};

}  // namespace

void upload_constants(Frame& frame) {
  static_assert(std::is_trivially_copyable_v<View> && sizeof(View) % sizeof(float) == 0);
  thread_local std::vector<float> of_caller;  // views, and the history behind them; keeps its memory
  std::vector<float>& packed = of_caller;     // lanes have another thread's `of_caller`
  packed.resize(frame.views.size() * sizeof(View) / sizeof(float));
  std::optional<PackedHistory> history;
  frame.constants.clear();
  frame.constants.resize(frame.homes.size());
  const size_t of_views = packed.size();
  if (frame.replays) history.emplace(frame.history, packed);
  const LaunchScope turn;
  run_lanes([&](int lane) {
    // Views differ by shard, so each lane writes its own in front of the history.
    thread_local std::vector<float> copy;
    std::vector<float>& all = lane == 0 ? packed : copy;
    if (lane > 0) {
      copy.resize(packed.size());
      std::copy(packed.begin() + static_cast<std::ptrdiff_t>(of_views), packed.end(),
                copy.begin() + static_cast<std::ptrdiff_t>(of_views));
    }
    for (int shard = 0; shard < mesh().size(); ++shard) {
      if (lane_of_shard(shard) != lane) continue;
      ShardConstants& constants = frame.constants[static_cast<size_t>(shard)];
      std::vector<View> views = frame.views;
      for (size_t v = 0; v < frame.curves.size(); ++v) {
        constants.curves.push_back(device_curve(views[v], *frame.curves[v], shard));
        views[v].position_from_tile = constants.curves.back()->position_from_tile.data();
        views[v].tile_from_position = constants.curves.back()->tile_from_position.data();
      }
      std::memcpy(all.data(), views.data(), views.size() * sizeof(View));
      constants.memory = to_buffer(all, shard);
      constants.views = reinterpret_cast<const View*>(constants.memory.data());
      if (history) constants.history = history->in(constants.memory.data());
    }
  });
}

void project(Frame& frame) {
  const size_t shards = frame.homes.size();
  if (shards > kMaxShards) {
    throw std::invalid_argument("the mesh has " + std::to_string(shards) + " shards; GPUs take at most " +
                                std::to_string(kMaxShards) + ". Name fewer in MGPU_DEVICES.");
  }
  upload_constants(frame);
  frame.shards.clear();
  frame.shards.resize(shards);
  frame.parcels.clear();
  frame.parcels.resize(shards);
  for (auto& from_home : frame.parcels) from_home.resize(frame.owners.size());
  for (size_t o = 0; o < frame.owners.size(); ++o) {
    TileOwner& owner = frame.owners[o];
    owner.pairs = owner.patch_pairs = 0;
    owner.largest_depth_key = 0;
    owner.half_extent = Buffer<float>(0, static_cast<int>(o));
    owner.cover = Buffer<TileCover>(0, static_cast<int>(o));
    owner.depth_key = Buffer<uint32_t>(0, static_cast<int>(o));
    owner.depth_histogram = Buffer<SumState>(0, static_cast<int>(o));
  }

  std::vector<ShardProjection> work;
  work.reserve(shards);
  for (size_t shard = 0; shard < shards; ++shard) {
    const int owner = static_cast<int>(shard);
    ShardRecords& out = frame.shards[shard];
    out.row = Buffer<int64_t>(0, owner);
    out.view = Buffer<int32_t>(0, owner);
    out.record = Buffer<Record>(0, owner);
    out.patches = Buffer<int32_t>(0, owner);
    out.large = Buffer<uint32_t>(0, owner);
    out.cover = Buffer<TileCover>(0, owner);
    work.emplace_back(frame, owner);
  }
  if (frame.owners.size() > 1)
    frame.run_table.assign(shards * static_cast<size_t>(run_table_words(frame)), 0);
  for (bool done = false; !done;) {
    for_each_shard(
        "project", [&](const Shard& shard) { work[static_cast<size_t>(shard.index)].fill(); }, Access::kLocal,
        Launch::kSideBySide);
    ReadBack read_back;  // the only one of a step on one shard
    for (ShardProjection& part : work) part.ask(read_back);
    read_back.wait();
    done = true;
    for (ShardProjection& part : work) done &= part.finish();
  }
}

}  // namespace mgpu::splat
