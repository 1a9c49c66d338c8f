// SPDX-License-Identifier: Apache-2.0
// project.cu: rows to records. Formulas: math/gaussian.h, math/sh.h, math/cull.h.
//
// Two kernels, because most rows of a large table are out of sight. The first reads means and scales of all
// rows and lists, in order, those that the view may see; rows that missed steps are tested with a margin for
// where replay may take them, so their moments stay unread. The second makes the records of the listed rows.
// Both order their output by a running sum over blocks (look_back.h). On a mesh of one shard the second also
// measures the records for stage "bin", while the SH coefficients are on their way. Floor: 28 N + 264 V bytes
// read (and the moments of what missed steps), 88 V written. Buffers are sized from the frame before; a frame
// that needs more is done again.
#include "splat/project.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "math/cull.h"
#include "memory/transfer.h"
#include "splat/cover.h"
#include "splat/kernels.h"
#include "splat/look_back.h"
#include "splat/row_source.h"
#include "splat/sh_rows.h"

namespace mgpu::splat {

namespace {

constexpr int kCullRows = 4;  // a thread's, so that enough loads are on their way
constexpr int kChunk = kThreads * kCullRows;
constexpr int kBlocks = 3;  // of the second kernel, on a processor: 80 registers

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
  return !math::surely_unseen(view, row.mean, row.log_scale, row.margin, row.noise * gate);
}

// A block a chunk of rows, in all views. state: [views, chunks], zero before; also clears the histogram that
// the second kernel adds to.
template <bool kOneView>
__global__ void __launch_bounds__(kThreads, 4)
    cull_kernel(const __grid_constant__ CullSource in, const __grid_constant__ Candidates out,
                SumState* state, SumState* histogram) {
  static_assert(kCullRows * kWarps == kWarp);
  __shared__ int s_before[kWarp];  // by (row of the thread, warp): candidates before its first
  __shared__ int64_t s_base;
  __shared__ math::CullView s_view;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t chunk = blockIdx.x;
  if (chunk == 0 && histogram) {
    for (int bin = threadIdx.x; bin < kDepthBins; bin += kThreads) histogram[bin] = 0;
  }
  const int64_t first = in.rows.begin + chunk * kChunk + threadIdx.x;
  CullRow row[kCullRows];
#pragma unroll
  for (int k = 0; k < kCullRows; ++k) {
    const int64_t at = first + k * kThreads;
    row[k] = at < in.rows.end ? load_cull_row(in, at) : CullRow{};
  }
  for (int v = 0; v < in.num_views; ++v) {
    if (!kOneView) {
      __syncthreads();
      if (threadIdx.x == 0) s_view = math::make_cull_view(in.views[v]);
      __syncthreads();
    }
    const math::CullView& view = kOneView ? in.view0 : s_view;
    bool kept[kCullRows];
    unsigned lanes[kCullRows];
#pragma unroll
    for (int k = 0; k < kCullRows; ++k) {
      kept[k] = (first + k * kThreads < in.rows.end) &
                !math::surely_unseen(view, row[k].mean, row[k].log_scale, row[k].margin, row[k].noise);
    }
    if (in.replays && in.history.noise_var) {
#pragma unroll
      for (int k = 0; k < kCullRows; ++k) {
        if (kept[k] && row[k].noise > 0.f)
          kept[k] = may_be_seen_by_noise(in, view, row[k], first + k * kThreads);
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
      const int64_t base = sum_of_blocks_before(state + int64_t{v} * gridDim.x, chunk, total);
      if (lane == 0) {
        s_base = base;
        if (chunk + 1 == gridDim.x) out.count[v] = static_cast<SumState>(base + total);
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kCullRows; ++k) {
      const int64_t at = s_base + s_before[k * kWarps + warp] + __popc(lanes[k] & ((1u << lane) - 1u));
      if ((lanes[k] >> lane & 1u) && at < out.room)
        out.row[v * out.room + at] = static_cast<int32_t>(first + k * kThreads - in.rows.begin);
    }
  }
}

// ---- second: the records

struct RecordTarget {
  int64_t room;
  int64_t* row;
  int32_t* view;
  Record* record;
  OwnerEnds owners;  // count 0: records alone are wanted
  // one owner: what stage "bin" needs
  float2* half_extent;
  TileCover* cover;
  uint32_t* depth_key;
  SumState* depth_histogram;
  // several
  uint32_t* owner_mask;
  SumState* parcel;  // [owners, views]
  // added up by integer atomics: any order gives the same
  SumState* records;            // [views]
  SumState *pairs, *patches;    // [owners]
  SumState* largest_depth_key;  // [1]
  SumState* state;              // [blocks of candidates], zero before
  SumState* ticket;
};

template <int kDegree>
constexpr int kStagedPieces =
    ShRows<kDegree>::kWarpPieces > 3 * kWarp ? ShRows<kDegree>::kWarpPieces : 3 * kWarp;

// A block's share of the candidates: of one view, so that the records come out by (view, row).
struct CandidateBlock {
  int view;  // num_views: behind the last
  int64_t first, count;

  __device__ CandidateBlock(const Candidates& in, int num_views, int64_t ticket)
      : view(0), first(ticket * kThreads), count(0) {
    for (; view < num_views; ++view) {
      const int64_t found = static_cast<int64_t>(in.count[view]);
      count = found < in.room ? found : in.room;
      if (first < count) break;
      first -= (count + kThreads - 1) / kThreads * kThreads;
    }
  }
  // Of this thread, counted from the shard's first; -1: none.
  __device__ int32_t row(const Candidates& in, int num_views) const {
    const int64_t at = first + threadIdx.x;
    return view < num_views && at < count ? in.row[view * in.room + at] : -1;
  }
};

template <int kDegree, bool kReplays>
__global__ void __launch_bounds__(kThreads, kBlocks)
    record_kernel(const __grid_constant__ RowSource in, const __grid_constant__ Candidates candidates,
                  const __grid_constant__ RecordTarget out) {
  extern __shared__ float4 s_staged[];       // of each warp: SH rows, then its records in their order
  __shared__ float4 s_record[3 * kThreads];  // of each thread, so that registers are free for the walk
  __shared__ unsigned s_histogram[kDepthBins];
  __shared__ SumState s_pairs[kMaxShards], s_patches[kMaxShards], s_parcel[kMaxShards];
  __shared__ uint32_t s_largest;
  __shared__ int s_count[kWarps];
  __shared__ int64_t s_begin[kWarps], s_ticket;
  __shared__ TileWalk s_walk[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool one_owner = out.owners.count == 1, many_owners = out.owners.count > 1;
  for (int bin = threadIdx.x; bin < kDepthBins; bin += kThreads) s_histogram[bin] = 0;
  if (threadIdx.x < kMaxShards) s_pairs[threadIdx.x] = s_patches[threadIdx.x] = s_parcel[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    s_largest = 0;
    s_ticket = static_cast<int64_t>(atomicAdd(out.ticket, 1ull));
  }
  float4* const staged = s_staged + warp * kStagedPieces<kDegree>;
  Record& record = reinterpret_cast<Record*>(s_record)[threadIdx.x];
  const AdamState* const state = kReplays ? &in.state : nullptr;
  const AdamHistory* const history = kReplays ? &in.history : nullptr;
  __syncthreads();
  int64_t ticket = s_ticket;
  CandidateBlock block(candidates, in.num_views, ticket);
  int32_t next_row = block.row(candidates, in.num_views);

  while (block.view < in.num_views) {
    const int v = block.view;
    const View& view = in.views[v];
    const int32_t local_row = next_row;

    // geometry
    TileWalk walk;  // set where the row is visible, and used there only
    float2 half_extent;
    bool visible = false;
    int64_t last = 0;
    if (local_row >= 0) {
      const int64_t row = in.rows.begin + local_row;
      RowValues values;
      math::Projected p;
      if constexpr (kReplays) last = in.state.last_step[row];
      replay_geometry(in.columns, state, history, row, values.mean, values.quat, values.log_scale,
                      values.opacity_logit);
      visible = math::project_gaussian(view, values.mean, values.quat, values.log_scale, values.opacity_logit,
                                       in.settings.antialiased, p, walk.ellipse);
      if (visible) {
        half_extent = half_extent_of(walk.ellipse);
        walk.ellipse.half_width = walk.ellipse.half_height = 0.0;  // the walk does without: fewer registers
        for (int i = 0; i < 4; ++i) walk.rect[i] = p.tile_rect[i];
        walk.box = patch_box(p.mean2d, half_extent);
        Record made;
        for (int i = 0; i < 2; ++i) made.mean2d[i] = p.mean2d[i];
        for (int i = 0; i < 3; ++i) made.conic[i] = p.conic[i];
        for (int i = 0; i < 4; ++i) made.tile_rect[i] = p.tile_rect[i];
        made.opacity = p.opacity;
        made.depth = p.depth;
        for (int i = 0; i < 3; ++i) made.rgb[i] = values.mean[i] - view.centre[i];  // the direction, for now
        store48(&record, made);
      }
    }
    ShRows<kDegree> rest(staged);
    if constexpr (kDegree > 0)
      rest.start(in.columns, state, history, in.rows.begin, visible ? local_row : -1, last);

    // tiles, for the only owner
    CoverPart<false> cover{};
    if (one_owner) cover = walk_tiles(walk, visible, in.views, v, cover, s_walk[warp]);

    // colour
    if constexpr (kDegree > 0) rest.finish();
    if (visible) {
      float sh[3 + ShRows<kDegree>::kWanted], direction[3], rgb[3];
      replay_sh(in.columns, state, history, in.rows.begin + local_row, 1, sh);
      for (int i = 0; i < 3; ++i) direction[i] = record.rgb[i];
#pragma unroll
      for (int k = 0; k < ShRows<kDegree>::kWanted; ++k) sh[3 + k] = rest.value(k);
      visible = math::eval_sh(kDegree, direction, sh, rgb);
      for (int i = 0; i < 3; ++i) record.rgb[i] = rgb[i];
    }

    // tiles of several owners
    uint32_t mask = 0;
    if (many_owners) {
      if (visible) math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, walk.ellipse);
      const OwnersPart none{&out.owners, s_pairs, s_patches, 0};
      mask = walk_tiles(walk, visible, in.views, v, none, s_walk[warp]).mask;
      for (uint32_t left = mask; left; left &= left - 1) atomicAdd(s_parcel + __ffs(left) - 1, 1ull);
    }

    // place among the records; meanwhile, the next block
    const unsigned lanes = __ballot_sync(kAllLanes, visible);
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
      const int64_t base = sum_of_blocks_before(out.state, ticket, total);
      if (lane < kWarps) s_begin[lane] = base + inclusive - count;
      if (lane == 0) atomicAdd(out.records + v, static_cast<SumState>(total));
    } else if (warp == 2 && many_owners && lane < out.owners.count) {
      if (s_parcel[lane]) atomicAdd(out.parcel + lane * in.num_views + v, s_parcel[lane]);
      s_parcel[lane] = 0;
    } else if (threadIdx.x == kWarp) {
      s_ticket = static_cast<int64_t>(atomicAdd(out.ticket, 1ull));
    }
    __syncthreads();
    ticket = s_ticket;
    block = CandidateBlock(candidates, in.num_views, ticket);
    next_row = block.row(candidates, in.num_views);

    // out, a warp's records side by side
    const int rank = __popc(lanes & ((1u << lane) - 1u));
    const int64_t begin = s_begin[warp], space = out.room - begin;
    const int stored = space < __popc(lanes) ? (space > 0 ? static_cast<int>(space) : 0) : __popc(lanes);
    if (visible) store48(reinterpret_cast<Record*>(staged) + rank, load48(&record));
    __syncwarp();
    float4* const records = reinterpret_cast<float4*>(out.record + begin);
    for (int i = lane; i < 3 * stored; i += kWarp) records[i] = staged[i];
    __syncwarp();  // the stage is free for the next block's rows
    if (visible && rank < stored) {
      const int64_t to = begin + rank;
      out.row[to] = in.rows.begin + local_row;
      out.view[to] = v;
      if (many_owners) out.owner_mask[to] = mask;
      if (one_owner) {
        const uint32_t key = depth_key_of(record.depth);
        out.half_extent[to] = half_extent;
        out.cover[to] = cover_of(walk.rect, cover);
        out.depth_key[to] = key;
        atomicAdd(s_histogram + key % kDepthBins, 1u);
      }
    }
    const uint32_t largest = __reduce_max_sync(kAllLanes, visible ? depth_key_of(record.depth) : 0);
    if (lane == 0) atomicMax(&s_largest, largest);
    if (one_owner) {
      const int32_t pairs = __reduce_add_sync(kAllLanes, visible ? cover.count : 0);
      const int32_t patches = __reduce_add_sync(kAllLanes, visible ? cover.patches : 0);
      if (lane == 0) {
        atomicAdd(s_pairs, static_cast<SumState>(pairs));
        atomicAdd(s_patches, static_cast<SumState>(patches));
      }
    }
  }

  __syncthreads();
  if (threadIdx.x < out.owners.count) {
    if (s_pairs[threadIdx.x]) atomicAdd(out.pairs + threadIdx.x, s_pairs[threadIdx.x]);
    if (s_patches[threadIdx.x]) atomicAdd(out.patches + threadIdx.x, s_patches[threadIdx.x]);
  }
  if (threadIdx.x == 0 && s_largest) atomicMax(out.largest_depth_key, static_cast<SumState>(s_largest));
  if (!one_owner) return;
  for (int bin = threadIdx.x; bin < kDepthBins; bin += kThreads) {
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

class ShardProjection {
 public:
  ShardProjection(Frame& frame, int shard)
      : frame_(frame),
        shard_(shard),
        views_(static_cast<int64_t>(frame.views.size())),
        owners_(static_cast<int64_t>(frame.owners.size())),
        rows_(frame.homes[static_cast<size_t>(shard)]),
        done_(rows_.empty() || views_ == 0),
        counts_(static_cast<size_t>(2 * views_ + owners_ * (views_ + 2) + 1), 0) {
    if (done_) return;
    if (rows_.size() > std::numeric_limits<int32_t>::max()) {
      throw std::runtime_error("shard " + std::to_string(shard) + " holds " + std::to_string(rows_.size()) +
                               " Gaussians, more than 2^31 - 1; add shards to MGPU_DEVICES");
    }
    room_ = record_rooms().of(shard, rows_.size() * views_);
    candidate_room_ = candidate_rooms().of(shard, rows_.size());
  }

  // Records and counts, as far as there is room.
  void fill() {
    if (done_) return;
    const int64_t chunks = blocks_for(rows_.size(), kChunk);
    const int64_t candidate_blocks = views_ * blocks_for(candidate_room_, kThreads);
    const int64_t counts = static_cast<int64_t>(counts_.size());
    Buffer<int32_t> candidate(views_ * candidate_room_, shard_);
    scratch_ = Buffer<SumState>(1 + counts + views_ * chunks + candidate_blocks, shard_);
    zero(scratch_);
    SumState* const counters = scratch_.data() + 1;
    SumState* const states = counters + counts;
    const Candidates candidates{candidate.data(), counters, candidate_room_};
    const RecordTarget target = make_target(counters + views_, states + views_ * chunks);
    const cudaStream_t stream = shard_stream(shard_);
    const auto cull = views_ == 1 ? cull_kernel<true> : cull_kernel<false>;
    cull<<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(cull_source(), candidates, states,
                                                                 target.depth_histogram);
    KERNEL_CHECK("project", shard_, rows_.size());
    with_sh_degree(frame_.settings.sh_degree, [&](auto degree) {
      const auto kernel =
          frame_.replays ? record_kernel<degree.value, true> : record_kernel<degree.value, false>;
      constexpr size_t kBytes = sizeof(float4) * kWarps * kStagedPieces<degree.value>;
      const int64_t resident =
          prepare_kernel(reinterpret_cast<const void*>(kernel), kThreads, kBytes, shard_);
      const unsigned blocks = static_cast<unsigned>(std::min(candidate_blocks, resident));
      kernel<<<blocks, kThreads, kBytes, stream>>>(row_source(frame_, shard_), candidates, target);
    });
    KERNEL_CHECK("project", shard_, candidate_room_);
  }

  void ask(ReadBack& read_back) {
    if (!done_)
      read_back.add(counts_.data(), scratch_.data() + 1, static_cast<int64_t>(counts_.size()), shard_);
  }

  // With the counts on the host: true if nothing is left to do.
  bool finish() {
    if (!done_) {
      int64_t total = 0, most_candidates = 0;
      for (int64_t v = 0; v < views_; ++v) {
        most_candidates = std::max(most_candidates, static_cast<int64_t>(counts_[static_cast<size_t>(v)]));
        total += static_cast<int64_t>(counts_[static_cast<size_t>(views_ + v)]);
      }
      const bool filled = most_candidates <= candidate_room_ && total <= room_;
      candidate_room_ = std::max(candidate_room_, most_candidates);
      room_ = std::max(room_, total);
      if (!filled) return false;
      done_ = true;
      candidate_rooms().saw(shard_, most_candidates);
      record_rooms().saw(shard_, total);
      scratch_ = Buffer<SumState>();
    }
    take_counts();
    return true;
  }

 private:
  CullSource cull_source() const {
    const ShardConstants& constants = frame_.constants[static_cast<size_t>(shard_)];
    CullSource in{};
    in.means = frame_.columns.means;
    in.scales = frame_.columns.scales;
    in.opacities = frame_.columns.opacities;
    in.state = frame_.state;
    in.history = constants.history;
    in.replays = frame_.replays;
    in.view0 = math::make_cull_view(frame_.views[0]);
    in.views = constants.views.data();
    in.num_views = static_cast<int>(views_);
    in.rows = rows_;
    if (frame_.replays) {
      const AdamHistory& steps = frame_.history;  // on the host
      const auto farthest = [&](int column) {
        const math::TwoSteps* two = steps.two[column];
        float most = 0.f;
        for (int64_t i = 0; i <= steps.now - steps.base; ++i)
          most = std::max(most, math::largest_drift(two[i]));
        return in.moment_ratio * most;
      };
      in.moment_ratio = math::moment_ratio_bound(steps.beta1, steps.beta2, steps.eps);
      // rounded up by 2^-8 in each of the ten steps that a first moment is made of
      if (!frame_.state.exp_avg[0].is_float32()) in.moment_ratio *= 1.05f;
      in.margin = farthest(0);
      in.scale_margin = farthest(2);
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
    target.owners = owner_ends(frame_);
    if (owners_ == 1) {
      TileOwner& owner = frame_.owners[0];
      owner.half_extent.resize_discard(2 * room_);
      owner.cover.resize_discard(room_);
      owner.depth_key.resize_discard(room_);
      owner.depth_histogram.resize_discard(kDepthBins);
      target.half_extent = reinterpret_cast<float2*>(owner.half_extent.data());
      target.cover = owner.cover.data();
      target.depth_key = owner.depth_key.data();
      target.depth_histogram = owner.depth_histogram.data();
    }
    if (owners_ > 1) {
      out.owner_mask.resize_discard(room_);
      target.owner_mask = out.owner_mask.data();
    }
    target.records = counters;
    target.parcel = counters + views_;
    target.pairs = target.parcel + owners_ * views_;
    target.patches = target.pairs + owners_;
    target.largest_depth_key = target.patches + owners_;
    target.state = state;
    target.ticket = scratch_.data();
    return target;
  }

  void take_counts() {
    if (taken_) return;
    taken_ = true;
    const SumState* const records = counts_.data() + views_;
    const SumState* const parcels = records + views_;
    const SumState* const pairs = parcels + owners_ * views_;
    ShardRecords& out = frame_.shards[static_cast<size_t>(shard_)];
    const auto running_sums = [this](const SumState* count, std::vector<int64_t>& begin) {
      begin.assign(1, 0);
      for (int64_t v = 0; v < views_; ++v) begin.push_back(begin.back() + static_cast<int64_t>(count[v]));
    };
    running_sums(records, out.view_begin);
    out.count = out.view_begin.back();
    if (!rows_.empty() && views_ > 0) {
      out.row.resize_discard(out.count);
      out.view.resize_discard(out.count);
      out.record.resize_discard(out.count);
      if (owners_ > 1) out.owner_mask.resize_discard(out.count);
    }
    for (int64_t o = 0; o < owners_; ++o) {
      Parcel& parcel = frame_.parcels[static_cast<size_t>(shard_)][static_cast<size_t>(o)];
      TileOwner& owner = frame_.owners[static_cast<size_t>(o)];
      running_sums(owners_ == 1 ? records : parcels + o * views_, parcel.view_begin);
      parcel.count = parcel.view_begin.back();
      owner.pairs += static_cast<int64_t>(pairs[o]);
      owner.patch_pairs += static_cast<int64_t>(pairs[owners_ + o]);
      owner.largest_depth_key = std::max(owner.largest_depth_key, static_cast<uint32_t>(pairs[2 * owners_]));
      if (owners_ == 1) owner.half_extent.resize_discard(2 * out.count);
    }
  }

  Frame& frame_;
  int shard_;
  int64_t views_, owners_;
  RowRange rows_;
  bool done_, taken_ = false;
  int64_t room_ = 0, candidate_room_ = 0;
  // candidates [views], records [views], parcels [owners, views], pairs [owners], patches [owners], largest
  // key
  std::vector<SumState> counts_;
  Buffer<SumState> scratch_;  // a ticket, the counts, states of the running sums
};

}  // namespace

void upload_constants(Frame& frame) {
  frame.constants.clear();
  frame.constants.resize(frame.homes.size());
  for (size_t shard = 0; shard < frame.homes.size(); ++shard) {
    ShardConstants& constants = frame.constants[shard];
    const int owner = static_cast<int>(shard);
    constants.views = Buffer<View>(static_cast<int64_t>(frame.views.size()), owner);
    upload(constants.views.data(), frame.views.data(), constants.views.size(), owner);
    if (frame.replays) constants.history = upload_history(frame.history, constants.steps, owner);
  }
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
    out.owner_mask = Buffer<uint32_t>(0, owner);
    work.emplace_back(frame, owner);
  }
  for (bool done = false; !done;) {
    for_each_shard("project", [&](const Shard& shard) { work[static_cast<size_t>(shard.index)].fill(); });
    ReadBack read_back;  // the one of the whole step
    for (ShardProjection& part : work) part.ask(read_back);
    read_back.wait();
    done = true;
    for (ShardProjection& part : work) done &= part.finish();
  }
}

}  // namespace mgpu::splat
