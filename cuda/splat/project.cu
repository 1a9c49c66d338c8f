// SPDX-License-Identifier: Apache-2.0
// project.cu: rows to records and back. Formulas: math/gaussian.h, math/sh.h.
//
// Two passes, so that the records come out ordered without a temporary of N records: the first reads the
// geometry of all rows and leaves one bit a row and view; the second works on full warps of visible rows
// only. Floor: 44 N + 248 V bytes read, 48 V written. The buffers are sized from the frame before; a frame
// that needs more is done again.
#include "splat/project.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/sh_stage.h"

namespace mgpu::splat {

namespace {

// What both passes read.
struct RowSource {
  SplatColumns columns;
  AdamState state;
  AdamHistory history;
  bool replays;
  RenderSettings settings;
  const View* views;
  int num_views;
  RowRange rows;

  __device__ const AdamState* state_or_null() const { return replays ? &state : nullptr; }
  __device__ const AdamHistory* history_or_null() const { return replays ? &history : nullptr; }
  __device__ void load_geometry(int64_t row, RowValues& values) const {
    replay_geometry(columns, state_or_null(), history_or_null(), row, values.mean, values.quat,
                    values.log_scale, values.opacity_logit);
  }
  __device__ bool project(const View& view, const RowValues& values, math::Projected& out) const {
    return math::project_gaussian(view, values.mean, values.quat, values.log_scale, values.opacity_logit,
                                  settings.antialiased, out);
  }
};

// ---- first pass: which rows are visible

// bits: [views, blocks, 8] words, bit = row; count: [views, blocks].
__global__ void __launch_bounds__(kThreads)
    mark_kernel(const __grid_constant__ RowSource in, uint32_t* bits, int32_t* count) {
  const int64_t row = in.rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  RowValues values;
  if (row < in.rows.end) in.load_geometry(row, values);
  for (int v = 0; v < in.num_views; ++v) {
    math::Projected unused;
    const bool visible = row < in.rows.end && in.project(in.views[v], values, unused);
    const unsigned word = __ballot_sync(kAllLanes, visible);
    const int64_t block = int64_t{v} * gridDim.x + blockIdx.x;
    if (threadIdx.x % kWarp == 0) bits[block * kWarps + threadIdx.x / kWarp] = word;
    const int total = __syncthreads_count(visible);
    if (threadIdx.x == 0) count[block] = total;
  }
}

// ---- between: bits to lists of (row, view), ordered by (view, row)

__global__ void __launch_bounds__(kThreads)
    list_kernel(const uint32_t* bits, const int64_t* offset, int64_t blocks_a_view, int views,
                int64_t first_row, int64_t capacity, int64_t* row, int32_t* view, int64_t* view_begin) {
  const int64_t block = blockIdx.x;
  const int v = static_cast<int>(block / blocks_a_view);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t* words = bits + block * kWarps;
  int64_t position = offset[block];
  for (int w = 0; w < warp; ++w) position += __popc(words[w]);
  position += __popc(words[warp] & ((1u << lane) - 1u));
  if ((words[warp] >> lane & 1u) && position < capacity) {
    row[position] = first_row + (block - v * blocks_a_view) * kThreads + threadIdx.x;
    view[position] = v;
  }
  if (threadIdx.x == 0 && block == v * blocks_a_view) view_begin[v] = offset[block];
  if (threadIdx.x == 0 && block + 1 == blocks_a_view * views) view_begin[views] = offset[block + 1];
}

// ---- second pass: the records

struct RecordTarget {
  const int64_t* row;
  const int32_t* view;
  const int64_t* total;  // device: how many; only `capacity` have room
  int64_t capacity;
  Record* record;
  uint32_t* owner_mask;  // null: one owner, or none yet
  OwnerEnds owners;      // count 0: records alone are wanted
  // counts, added up by integer atomics: any order gives the same
  unsigned long long* parcel;   // [owners, views]
  unsigned long long* pairs;    // [owners]
  unsigned long long* dropped;  // rows whose colour is not finite
  // to unmark a dropped row
  uint32_t* bits;
  int32_t* block_count;
  int64_t blocks_a_view;
};

template <int kDegree>
__device__ bool make_record(const RowSource& in, int64_t row, const View& view, ShStage& rest, Record& out) {
  RowValues values;
  math::Projected p;
  in.load_geometry(row, values);
  if (!in.project(view, values, p)) return false;
  constexpr int kRest = 3 * ((kDegree + 1) * (kDegree + 1) - 1);
  replay_sh(in.columns, in.state_or_null(), in.history_or_null(), row, 1, values.sh);
#pragma unroll
  for (int k = 0; k < kRest; ++k) values.sh[3 + k] = rest.value(k);
  float direction[3];
  for (int i = 0; i < 3; ++i) direction[i] = values.mean[i] - view.centre[i];
  if (!math::eval_sh(kDegree, direction, values.sh, out.rgb)) return false;
  for (int i = 0; i < 2; ++i) out.mean2d[i] = p.mean2d[i];
  for (int i = 0; i < 3; ++i) out.conic[i] = p.conic[i];
  for (int i = 0; i < 4; ++i) out.tile_rect[i] = p.tile_rect[i];
  out.opacity = p.opacity;
  out.depth = p.depth;
  return true;
}

template <int kDegree>
__global__ void __launch_bounds__(kStageThreads)
    record_kernel(const __grid_constant__ RowSource in, const __grid_constant__ RecordTarget out) {
  __shared__ unsigned long long pairs_of_owner[kMaxShards];
  if (threadIdx.x < kMaxShards) pairs_of_owner[threadIdx.x] = 0;
  __syncthreads();
  extern __shared__ float shared[];
  const int64_t i = int64_t{blockIdx.x} * kStageThreads + threadIdx.x;
  const int64_t total = *out.total;
  const int64_t row = i < total && i < out.capacity ? out.row[i] : -1;
  ShStage rest(shared, 3 * in.columns.sh_rest, false);
  if constexpr (kDegree > 0) {
    rest.fetch_replayed<3 * ((kDegree + 1) * (kDegree + 1) - 1)>(
        in.columns, in.state_or_null(), in.history_or_null(), row,
        in.replays && row >= 0 ? in.state.last_step[row] : 0);
  }
  if (row >= 0) {
    const int v = out.view[i];
    const View& view = in.views[v];
    Record record;
    uint32_t mask = 0;
    if (make_record<kDegree>(in, row, view, rest, record)) {
      store48(out.record + i, record);
      math::TileEllipse ellipse;
      if (out.owners.count > 0 &&
          math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) {
        int64_t count = 0;
        int owner = 0;
        for_each_span(view, record, ellipse, [&](int64_t begin, int64_t end) {
          while (begin < end) {  // tiles ascend, and so do their owners
            const int at = out.owners.owner_of(begin);
            if (at != owner && count > 0) {
              atomicAdd(&pairs_of_owner[owner], static_cast<unsigned long long>(count));
              count = 0;
            }
            owner = at;
            mask |= 1u << at;
            const int64_t stop = end < out.owners.end[at] ? end : out.owners.end[at];
            count += stop - begin;
            begin = stop;
          }
        });
        if (count > 0) atomicAdd(&pairs_of_owner[owner], static_cast<unsigned long long>(count));
      }
    } else {  // a colour that is not finite; unmark it, and the lists are made again
      const int64_t local = row - in.rows.begin;
      const int64_t block = v * out.blocks_a_view + local / kThreads;
      atomicAnd(out.bits + block * kWarps + local % kThreads / kWarp, ~(1u << (local % kWarp)));
      atomicSub(out.block_count + block, 1);
      atomicAdd(out.dropped, 1ull);
    }
    if (out.owner_mask) {
      out.owner_mask[i] = mask;
      for (uint32_t left = mask; left; left &= left - 1) {
        atomicAdd(out.parcel + (__ffs(left) - 1) * in.num_views + v, 1ull);
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < out.owners.count && pairs_of_owner[threadIdx.x]) {
    atomicAdd(out.pairs + threadIdx.x, pairs_of_owner[threadIdx.x]);
  }
}

void launch_record_kernel(const RowSource& in, const RecordTarget& out, cudaStream_t stream) {
  const size_t shared = ShStage::shared_bytes(3 * in.columns.sh_rest, false);
  const auto launch = [&](auto kernel) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    kernel<<<blocks_for(out.capacity, kStageThreads), kStageThreads, shared, stream>>>(in, out);
  };
  switch (in.settings.sh_degree) {
    case 0:
      launch(record_kernel<0>);
      break;
    case 1:
      launch(record_kernel<1>);
      break;
    case 2:
      launch(record_kernel<2>);
      break;
    default:
      launch(record_kernel<3>);
      break;
  }
}

// ---- one shard

RowSource row_source(const Frame& frame, int shard) {
  const ShardConstants& constants = frame.constants[static_cast<size_t>(shard)];
  return {frame.columns,
          frame.state,
          constants.history,
          frame.replays,
          frame.settings,
          constants.views.data(),
          static_cast<int>(frame.views.size()),
          frame.homes[static_cast<size_t>(shard)]};
}

// Rooms for records: what the frame before needed and an eighth more. By shard.
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

Rooms& rooms() {
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
        blocks_(blocks_for(frame.homes[static_cast<size_t>(shard)].size(), kThreads)),
        counts_(static_cast<size_t>(views_ + 1 + owners_ * views_ + owners_ + 1), 0) {}

  void mark() {
    done_ = blocks_ * views_ == 0;
    if (done_) return;
    const int64_t items = blocks_ * views_;
    bits_ = Buffer<uint32_t>(items * kWarps, shard_);
    block_count_ = Buffer<int32_t>(items + 1, shard_);
    offset_ = Buffer<int64_t>(items + 1, shard_);
    device_counts_ = Buffer<int64_t>(static_cast<int64_t>(counts_.size()), shard_);
    zero_bytes(block_count_.data() + items, sizeof(int32_t), shard_);
    mark_kernel<<<static_cast<unsigned>(blocks_), kThreads, 0, shard_stream(shard_)>>>(
        row_source(frame_, shard_), bits_.data(), block_count_.data());
    KERNEL_CHECK("project", shard_, rows());
    room_ = rooms().of(shard_, rows() * views_);
  }

  // Lists, records and counts, as far as there is room.
  void fill() {
    if (done_) return;
    const int64_t items = blocks_ * views_;
    ShardRecords& out = frame_.shards[static_cast<size_t>(shard_)];
    out.row.resize_discard(room_);
    out.view.resize_discard(room_);
    out.record.resize_discard(room_);
    if (owners_ > 1) out.owner_mask.resize_discard(room_);
    zero(device_counts_);
    exclusive_sum(block_count_.data(), offset_.data(), items + 1, shard_);
    const cudaStream_t stream = shard_stream(shard_);
    list_kernel<<<static_cast<unsigned>(items), kThreads, 0, stream>>>(
        bits_.data(), offset_.data(), blocks_, static_cast<int>(views_),
        frame_.homes[static_cast<size_t>(shard_)].begin, room_, out.row.data(), out.view.data(),
        device_counts_.data());
    KERNEL_CHECK("project", shard_, rows());

    auto* counters = reinterpret_cast<unsigned long long*>(device_counts_.data());
    RecordTarget target{};
    target.row = out.row.data();
    target.view = out.view.data();
    target.total = offset_.data() + items;
    target.capacity = room_;
    target.record = out.record.data();
    target.owner_mask = owners_ > 1 ? out.owner_mask.data() : nullptr;
    target.owners = owner_ends(frame_);
    target.parcel = counters + views_ + 1;
    target.pairs = target.parcel + owners_ * views_;
    target.dropped = target.pairs + owners_;
    target.bits = bits_.data();
    target.block_count = block_count_.data();
    target.blocks_a_view = blocks_;
    launch_record_kernel(row_source(frame_, shard_), target, stream);
    KERNEL_CHECK("project", shard_, room_);
  }

  void ask(ReadBack& read_back) {
    if (!done_) read_back.add(counts_.data(), device_counts_.data(), device_counts_.size(), shard_);
  }

  // With the counts on the host: true if nothing is left to do.
  bool finish() {
    if (done_) {
      take_counts();
      return true;
    }
    const int64_t total = counts_[static_cast<size_t>(views_)];
    if (total > room_ || counts_.back() > 0) {
      room_ = std::max(room_, total);
      return false;
    }
    done_ = true;
    rooms().saw(shard_, total);
    take_counts();
    bits_ = Buffer<uint32_t>();
    block_count_ = Buffer<int32_t>();
    offset_ = Buffer<int64_t>();
    device_counts_ = Buffer<int64_t>();
    return true;
  }

 private:
  int64_t rows() const { return frame_.homes[static_cast<size_t>(shard_)].size(); }

  void take_counts() {
    if (taken_) return;
    taken_ = true;
    ShardRecords& out = frame_.shards[static_cast<size_t>(shard_)];
    out.view_begin.assign(counts_.begin(), counts_.begin() + views_ + 1);
    out.count = out.view_begin.back();
    if (out.record.owner() == shard_) {  // there were rows
      out.row.resize_discard(out.count);
      out.view.resize_discard(out.count);
      out.record.resize_discard(out.count);
      if (owners_ > 1) out.owner_mask.resize_discard(out.count);
    }
    for (int64_t owner = 0; owner < owners_; ++owner) {
      Parcel& parcel = frame_.parcels[static_cast<size_t>(shard_)][static_cast<size_t>(owner)];
      if (owners_ == 1) {
        parcel.view_begin = out.view_begin;
      } else {
        parcel.view_begin.assign(1, 0);
        for (int64_t v = 0; v < views_; ++v) {
          const int64_t count = counts_[static_cast<size_t>(views_ + 1 + owner * views_ + v)];
          parcel.view_begin.push_back(parcel.view_begin.back() + count);
        }
      }
      parcel.count = parcel.view_begin.back();
      frame_.owners[static_cast<size_t>(owner)].pairs +=
          counts_[static_cast<size_t>(views_ + 1 + owners_ * views_ + owner)];
    }
  }

  Frame& frame_;
  int shard_;
  int64_t views_, owners_, blocks_;
  int64_t room_ = 0;
  bool done_ = false, taken_ = false;
  std::vector<int64_t> counts_;  // view_begin [views + 1], parcels [owners, views], pairs [owners], dropped
  Buffer<uint32_t> bits_;
  Buffer<int32_t> block_count_;
  Buffer<int64_t> offset_;
  Buffer<int64_t> device_counts_;
};

// ---- the way back

struct GradTarget {
  const int64_t* row;
  const RecordGrad* grad;
  RowRange records;
  ColumnGrads columns;
  bool with_columns;
  double* view_sums;  // [blocks, 12]; null: not wanted
};

__device__ __forceinline__ void add_to(float* column, int64_t row, int width, const float* values) {
  if (!column) return;
  for (int i = 0; i < width; ++i) column[row * width + i] += values[i];
}

template <int kDegree>
__global__ void __launch_bounds__(kThreads)
    project_backward_kernel(const __grid_constant__ RowSource in, const __grid_constant__ GradTarget out,
                            int v) {
  constexpr int kCount = (kDegree + 1) * (kDegree + 1);
  const int64_t r = out.records.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float dL_dview[12] = {};
  if (r < out.records.end) {
    const int64_t row = out.row[r];
    RowValues values;
    in.load_geometry(row, values);
    replay_sh(in.columns, in.state_or_null(), in.history_or_null(), row, kCount, values.sh);
    RenderSettings settings = in.settings;
    settings.sh_degree = kDegree;  // a constant, so that the arrays stay in registers
    float dL_dmean[3] = {}, dL_dquat[4] = {}, dL_dlog_scale[3] = {}, dL_dlogit = 0.f, dL_dsh[3 * kCount] = {};
    const RecordGrad grad = load48(out.grad + r);
    record_backward(in.views[v], settings, values, grad, dL_dmean, dL_dquat, dL_dlog_scale, dL_dlogit, dL_dsh,
                    dL_dview);
    if (out.with_columns) {
      add_to(out.columns.means, row, 3, dL_dmean);
      add_to(out.columns.quats, row, 4, dL_dquat);
      add_to(out.columns.scales, row, 3, dL_dlog_scale);
      add_to(out.columns.opacities, row, 1, &dL_dlogit);
      add_to(out.columns.sh0, row, 3, dL_dsh);
      if (out.columns.shN) {
        float* rest = out.columns.shN + row * in.columns.sh_rest * 3;
        for (int i = 3; i < 3 * kCount; ++i) rest[i - 3] += dL_dsh[i];
      }
    }
  }
  if (!out.view_sums) return;
  __shared__ double warp_sums[kWarps][12];
  for (int i = 0; i < 12; ++i) {
    double sum = static_cast<double>(dL_dview[i]);
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_down_sync(kAllLanes, sum, step);
    if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp][i] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 12) {
    double sum = 0.0;
    for (int warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp][threadIdx.x];
    out.view_sums[int64_t{blockIdx.x} * 12 + threadIdx.x] = sum;
  }
}

// sums[i] = sum over blocks of part[block, i], i < 12; one block of threads, always in the same order.
__global__ void __launch_bounds__(kThreads)
    sum_views_kernel(const double* part, int64_t blocks, double* sums) {
  __shared__ double partial[kThreads];
  for (int i = 0; i < 12; ++i) {
    double sum = 0.0;
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads) sum += part[block * 12 + i];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int step = kThreads / 2; step > 0; step /= 2) {
      if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
      __syncthreads();
    }
    if (threadIdx.x == 0) sums[i] = partial[0];
    __syncthreads();
  }
}

template <typename... Arguments>
void launch_project_backward_kernel(int degree, unsigned blocks, cudaStream_t stream,
                                    const Arguments&... arguments) {
  switch (degree) {
    case 0:
      project_backward_kernel<0><<<blocks, kThreads, 0, stream>>>(arguments...);
      break;
    case 1:
      project_backward_kernel<1><<<blocks, kThreads, 0, stream>>>(arguments...);
      break;
    case 2:
      project_backward_kernel<2><<<blocks, kThreads, 0, stream>>>(arguments...);
      break;
    default:
      project_backward_kernel<3><<<blocks, kThreads, 0, stream>>>(arguments...);
      break;
  }
}

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
  for (TileOwner& owner : frame.owners) owner.pairs = 0;

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
  for_each_shard("project", [&](const Shard& shard) { work[static_cast<size_t>(shard.index)].mark(); });
  for (bool done = false; !done;) {
    for_each_shard("project", [&](const Shard& shard) { work[static_cast<size_t>(shard.index)].fill(); });
    ReadBack read_back;  // the one of the whole step
    for (ShardProjection& part : work) part.ask(read_back);
    read_back.wait();
    done = true;
    for (ShardProjection& part : work) done &= part.finish();
  }
}

void project_backward(const Frame& frame, const ColumnGrads* columns, double* dL_dviewmat) {
  JoinedOperator joined;
  const int64_t views = static_cast<int64_t>(frame.views.size());
  const size_t shards = frame.homes.size();
  std::vector<Buffer<double>> sums(shards);
  for_each_shard("project_backward", [&](const Shard& shard) {
    const ShardRecords& in = frame.shards[static_cast<size_t>(shard.index)];
    if (in.count == 0 || in.grad.size() == 0) return;
    const cudaStream_t stream = shard_stream(shard.index);
    Buffer<double>& view_sums = sums[static_cast<size_t>(shard.index)];
    if (dL_dviewmat) {
      view_sums = Buffer<double>(views * 12, shard.index);
      zero(view_sums);
    }
    for (int64_t v = 0; v < views; ++v) {  // in turn: a row seen twice gets its sums in the order of views
      const RowRange records{in.view_begin[static_cast<size_t>(v)],
                             in.view_begin[static_cast<size_t>(v + 1)]};
      if (records.empty()) continue;
      const unsigned blocks = blocks_for(records.size(), kThreads);
      Buffer<double> part(dL_dviewmat ? int64_t{blocks} * 12 : 0, shard.index);
      const GradTarget target{in.row.data(),      in.grad.data(), records, columns ? *columns : ColumnGrads{},
                              columns != nullptr, part.data()};
      launch_project_backward_kernel(frame.settings.sh_degree, blocks, stream, row_source(frame, shard.index),
                                     target, static_cast<int>(v));
      KERNEL_CHECK("project_backward", shard.index, records.size());
      if (!dL_dviewmat) continue;
      sum_views_kernel<<<1, kThreads, 0, stream>>>(part.data(), blocks, view_sums.data() + v * 12);
      KERNEL_CHECK("project_backward", shard.index, records.size());
    }
  });
  if (!dL_dviewmat) return;
  std::fill_n(dL_dviewmat, views * 12, 0.0);
  std::vector<std::vector<double>> host(shards, std::vector<double>(static_cast<size_t>(views * 12), 0.0));
  ReadBack read_back;
  for (size_t shard = 0; shard < shards; ++shard) {
    read_back.add(host[shard].data(), sums[shard].data(), sums[shard].size(), static_cast<int>(shard));
  }
  read_back.wait();
  for (size_t shard = 0; shard < shards; ++shard) {
    for (int64_t i = 0; i < views * 12; ++i) dL_dviewmat[i] += host[shard][static_cast<size_t>(i)];
  }
}

}  // namespace mgpu::splat
