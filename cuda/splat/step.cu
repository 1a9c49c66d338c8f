// SPDX-License-Identifier: Apache-2.0
// step.cu: adjoint of projection and SH, Adam and noise, for the rows that were seen. A warp takes 32 of them
// and needs no other warp. Floor: 1,480 bytes a row at SH degree 3.
//
// Three quarters of the bytes are the higher SH coefficients and their moments. These are read and written
// with neighbouring lanes on neighbouring floats, 16 lanes a row, and wait nowhere: dL/dsh[k][c] is basis[k]
// dL/drgb[c], left in shared memory by the lane that has the row, and what goes back the same way is the
// coefficient before the step, from which that lane then makes the gradient of the direction. So:
//   1. lane = row: all but the higher SH; of the means all but the step itself;
//   2. 16 lanes = row: the higher SH;
//   3. lane = row: the direction's gradient, and the step of the means.
#include "splat/step.h"

#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <vector>

#include "math/adam.h"
#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/project.h"
#include "splat/replay.h"
#include "splat/step_check.h"

namespace mgpu::splat {

namespace {

constexpr int kStepThreads = 128;
constexpr int kStepWarps = kStepThreads / kWarp;
constexpr int kStepBlocks = 4;       // on an SM; a fifth would cost spills
constexpr int kTogether = 2;         // loads of so many rows a lane are on their way together
constexpr int kGeometryFloats = 14;  // of a row: all columns but shN

// The records of one view of one frame on one shard: ascending by row.
struct RecordList {
  View view;
  const int64_t* row;  // [size]
  const Record* record;
  const RecordGrad* grad;
  int64_t size;
  int sh_degree;
  bool antialiased;
};

// A row's record: which list, and where in it.
struct Entry {
  int32_t list;
  uint32_t position;
};

// The rows of several lists, each once, and their records in the order of the lists.
struct UnitedRows {
  const int64_t* count;  // on the device
  const int64_t* row;    // [count], ascending
  const int64_t* begin;  // [count + 1], into entry
  const Entry* entry;
  const RecordList* list;  // on the device
};

struct StepInput {
  SplatColumns columns;
  AdamState state;
  AdamHistory history;
  History::Step now;
  RecordList only;                     // of one list; its view is in constant memory
  UnitedRows united;                   // of several
  const float* weights;                // [2] on the device, or null: the two below
  float opacity_weight, scale_weight;  // of the regularisers, divided by the rows seen
  double* sums;                        // [blocks, 2] of opacities and scales; null: not wanted
};

// ---- one warp's shared memory

template <int kRest>
struct WarpRoom {
  static constexpr int kFloats = 3 * kRest, kStride = kFloats | 1;  // odd: no bank conflicts, lane = row
  float exp_avg[kGeometryFloats][kWarp], exp_avg_sq[kGeometryFloats][kWarp];
  // Of the higher SH by row: the gradient before phase 2, the coefficient before the step after it.
  float rest[kRest > 0 ? kWarp * kStride : 1];
  // What a row's higher SH missed.
  float4 drift[kWarp];  // D, E, beta1^k, beta2^k
  float closed_from[kWarp];
  int last_step[kWarp];
};

// Where a column starts among the floats of a row.
__device__ constexpr int first_float(int column) {
  constexpr int first[kColumns] = {0, 3, 7, 10, 11, 14};
  return first[column];
}

template <int kRest>
__device__ __forceinline__ void fetch_moments(const AdamState& state, int64_t row, int lane,
                                              WarpRoom<kRest>& room) {
  const auto fetch = [&](int column, int size) {
    for (int i = 0; i < size; ++i) {
      const int k = first_float(column) + i;
      __pipeline_memcpy_async(&room.exp_avg[k][lane], state.exp_avg[column] + size * row + i, sizeof(float));
      __pipeline_memcpy_async(&room.exp_avg_sq[k][lane], state.exp_avg_sq[column] + size * row + i,
                              sizeof(float));
    }
  };
  fetch(0, 3);
  fetch(1, 4);
  fetch(2, 3);
  fetch(3, 1);
  fetch(4, 3);
  __pipeline_commit();
}

// ---- one column of the lane's row

struct LaneRow {
  int64_t row, last;
  bool behind;           // has missed steps
  float power1, power2;  // of the betas, to the number of missed steps
};

// Parameters of the row after the steps that it missed.
template <int kSize, int kRest>
__device__ __forceinline__ void load_column(const StepInput& in, const LaneRow& mine, int column,
                                            const float* data, int lane, const WarpRoom<kRest>& room,
                                            float* parameter) {
  for (int i = 0; i < kSize; ++i) parameter[i] = data[kSize * mine.row + i];
  if (!mine.behind) return;
  float m[kSize], v[kSize];
  for (int i = 0; i < kSize; ++i) m[i] = room.exp_avg[first_float(column) + i][lane];
  for (int i = 0; i < kSize; ++i) v[i] = room.exp_avg_sq[first_float(column) + i][lane];
  replay_components(in.history, column, mine.last, kSize, m, v, parameter);
}

// One step; the moments go to the table.
template <int kSize, int kRest>
__device__ __forceinline__ void step_column(const StepInput& in, const math::AdamConstants& constants,
                                            const LaneRow& mine, int column, int lane,
                                            const WarpRoom<kRest>& room, const float* gradient,
                                            float* parameter) {
  for (int i = 0; i < kSize; ++i) {
    float m = room.exp_avg[first_float(column) + i][lane] * mine.power1;
    float v = room.exp_avg_sq[first_float(column) + i][lane] * mine.power2;
    math::adam_step(constants, in.now.step_size[column], in.now.inv_sqrt_bc2, gradient[i], parameter[i], m,
                    v);
    in.state.exp_avg[column][kSize * mine.row + i] = m;
    in.state.exp_avg_sq[column][kSize * mine.row + i] = v;
  }
}

template <int kSize>
__device__ __forceinline__ void store_column(float* data, int64_t row, const float* parameter) {
  for (int i = 0; i < kSize; ++i) data[kSize * row + i] = parameter[i];
}

// ---- colour

// dL/d(colour before its clamp at 0).
__device__ __forceinline__ void unclamp(const Record& record, const RecordGrad& grad, float g[3]) {
  for (int c = 0; c < 3; ++c) g[c] = record.rgb[c] > 0.f ? grad.rgb[c] : 0.f;
}

__device__ __forceinline__ float direction_to(const View& view, const float mean[3], float unit[3]) {
  float direction[3];
  for (int i = 0; i < 3; ++i) direction[i] = mean[i] - view.centre[i];
  return math::normalize3(direction, unit);
}

// ---- the higher SH: several lanes a row, three floats a lane

template <int kRest, bool kMissed>
__device__ __forceinline__ void step_rest(const StepInput& in, const math::AdamConstants& constants,
                                          int64_t row, int lane, WarpRoom<kRest>& room) {
  using Room = WarpRoom<kRest>;
  constexpr int kLanes = kRest > 8 ? 16 : kRest > 3 ? 8 : 4;
  constexpr int kRows = kWarp / kLanes;
  const int part = lane % kLanes;
  const auto has = [&](int j) { return part + j * kLanes < Room::kFloats; };
#pragma unroll 1
  for (int first = 0; first < kWarp; first += kRows * kTogether) {
    float value[kTogether][3], m[kTogether][3], v[kTogether][3];
    int64_t at[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int64_t row_there = __shfl_sync(kAllLanes, row, first + t * kRows + lane / kLanes);
      at[t] = row_there < 0 ? -1 : row_there * Room::kFloats + part;
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        const bool held = at[t] >= 0 && has(j);
        value[t][j] = held ? __ldcs(in.columns.shN + at[t] + j * kLanes) : 0.f;
        m[t][j] = held ? __ldcs(in.state.exp_avg[kShColumn] + at[t] + j * kLanes) : 0.f;
        v[t][j] = held ? __ldcs(in.state.exp_avg_sq[kShColumn] + at[t] + j * kLanes) : 0.f;
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int r = first + t * kRows + lane / kLanes;
      if constexpr (kMissed) {
        const int last = room.last_step[r];
        if (last < in.history.now) {
          const float4 drift = room.drift[r];
          const float closed_from = room.closed_from[r];
#pragma unroll
          for (int j = 0; j < 3; ++j) {
            if (math::closed_form_holds(closed_from, m[t][j], v[t][j]))
              value[t][j] -= math::missed_drift(constants.eps, drift.x, drift.y, m[t][j], v[t][j]);
            else
              value[t][j] = replay_slowly(in.history, kShColumn, last, value[t][j], m[t][j], v[t][j]);
            m[t][j] *= drift.z;
            v[t][j] *= drift.w;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (!has(j)) continue;
        float& shared = room.rest[r * Room::kStride + part + j * kLanes];
        const float gradient = shared;
        shared = value[t][j];
        math::adam_step(constants, in.now.step_size[kShColumn], in.now.inv_sqrt_bc2, gradient, value[t][j],
                        m[t][j], v[t][j]);
        if (at[t] < 0) continue;
        __stcs(in.columns.shN + at[t] + j * kLanes, value[t][j]);
        __stcs(in.state.exp_avg[kShColumn] + at[t] + j * kLanes, m[t][j]);
        __stcs(in.state.exp_avg_sq[kShColumn] + at[t] + j * kLanes, v[t][j]);
      }
    }
  }
}

// ---- the kernel

template <int kRest, bool kSeveral>
__global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    step_kernel(const __grid_constant__ StepInput in) {
  __shared__ WarpRoom<kRest> rooms[kStepWarps];
  WarpRoom<kRest>& room = rooms[threadIdx.x / kWarp];
  const int lane = threadIdx.x % kWarp;
  const int64_t i = int64_t{blockIdx.x} * kStepThreads + threadIdx.x;
  const int64_t rows = kSeveral ? *in.united.count : in.only.size;
  const bool held = i < rows;
  const math::AdamConstants constants =
      math::adam_constants(in.history.beta1, in.history.beta2, in.history.eps);
  // Calls visit(list, position) for each record of the lane's row.
  const auto for_each_record = [&](const auto& visit) {
    if constexpr (kSeveral) {
      for (int64_t e = in.united.begin[i]; e < in.united.begin[i + 1]; ++e) {
        const Entry entry = in.united.entry[e];
        visit(in.united.list[entry.list], entry.position);
      }
    } else {
      visit(in.only, i);
    }
  };

  LaneRow mine{-1, 0, false, 1.f, 1.f};
  float mean[3], dL_dmean[3] = {}, noise[3] = {};
  double sum[2] = {0.0, 0.0};
  float* const rest = room.rest + lane * WarpRoom<kRest>::kStride;
  if (held) {
    mine.row = kSeveral ? in.united.row[i] : in.only.row[i];
    fetch_moments(in.state, mine.row, lane, room);
    mine.last = in.state.last_step[mine.row];
    mine.behind = mine.last < in.history.now;
    float quat[4], log_scale[3], logit, sh0[3];
    if (mine.behind) {
      mine.power1 = in.history.beta1_power[in.history.now - mine.last];
      mine.power2 = in.history.beta2_power[in.history.now - mine.last];
      if constexpr (kRest > 0) {
        const math::MissedSteps missed = missed_steps(in.history, kShColumn, mine.last);
        room.drift[lane] = {missed.drift, missed.drift_eps, missed.beta1_power, missed.beta2_power};
        room.closed_from[lane] = missed.closed_from;
      }
      __pipeline_wait_prior(0);
    }
    room.last_step[lane] = static_cast<int>(mine.last);
    load_column<3>(in, mine, 0, in.columns.means, lane, room, mean);
    load_column<4>(in, mine, 1, in.columns.quats, lane, room, quat);
    load_column<3>(in, mine, 2, in.columns.scales, lane, room, log_scale);
    load_column<1>(in, mine, 3, in.columns.opacities, lane, room, &logit);
    load_column<3>(in, mine, 4, in.columns.sh0, lane, room, sh0);
    if (mine.behind) replay_noise(in.history, mine.last, mine.row, quat, log_scale, logit, mean);

    float dL_dquat[4] = {}, dL_dlog_scale[3] = {}, dL_dlogit = 0.f, dL_dsh0[3] = {};
    if constexpr (kSeveral) {
      for (int k = 0; k < 3 * kRest; ++k) rest[k] = 0.f;
    }
    for_each_record([&](const RecordList& list, int64_t position) {
      const RecordGrad grad = load48(list.grad + position);
      float g[3], unit[3], basis[math::kMaxShCount] = {},
                           unused_dL_dviewmat[12] = {};  // the way back has reduced it already
      unclamp(list.record[position], grad, g);
      direction_to(list.view, mean, unit);
      math::sh_basis(list.sh_degree, unit[0], unit[1], unit[2], basis);
      for (int c = 0; c < 3; ++c) dL_dsh0[c] += basis[0] * g[c];
#pragma unroll
      for (int k = 0; k < 3 * kRest; ++k) {
        const float gradient = basis[1 + k / 3] * g[k % 3];
        rest[k] = kSeveral ? rest[k] + gradient : gradient;
      }
      math::project_gaussian_backward(list.view, mean, quat, log_scale, logit, list.antialiased, grad.mean2d,
                                      grad.conic, grad.opacity, grad.depth, dL_dmean, dL_dquat, dL_dlog_scale,
                                      dL_dlogit, unused_dL_dviewmat);
    });
    const float opacity = math::sigmoid(logit);
    dL_dlogit += (in.weights ? in.weights[0] : in.opacity_weight) * opacity * (1.0f - opacity);
    sum[0] = opacity;
    const float scale_weight = in.weights ? in.weights[1] : in.scale_weight;
    for (int axis = 0; axis < 3; ++axis) {
      const float scale = std::exp(log_scale[axis]);
      dL_dlog_scale[axis] += scale_weight * scale;
      sum[1] += scale;
    }

    __pipeline_wait_prior(0);
    step_column<4>(in, constants, mine, 1, lane, room, dL_dquat, quat);
    step_column<3>(in, constants, mine, 2, lane, room, dL_dlog_scale, log_scale);
    step_column<1>(in, constants, mine, 3, lane, room, &dL_dlogit, &logit);
    step_column<3>(in, constants, mine, 4, lane, room, dL_dsh0, sh0);
    store_column<4>(in.columns.quats, mine.row, quat);
    store_column<3>(in.columns.scales, mine.row, log_scale);
    store_column<1>(in.columns.opacities, mine.row, &logit);
    store_column<3>(in.columns.sh0, mine.row, sh0);
    in.state.last_step[mine.row] = static_cast<int32_t>(in.now.number);
    if (in.now.noise_scale > 0.f) {
      const math::Random4 random = math::draw(in.history.seed, math::Stream::kNoise, in.now.number, mine.row);
      math::add_mcmc_noise(random, in.now.noise_scale, quat, log_scale, logit, noise);
    }
  }

  if constexpr (kRest > 0) {
    __syncwarp();
    if (__any_sync(kAllLanes, mine.behind))
      step_rest<kRest, true>(in, constants, mine.row, lane, room);
    else
      step_rest<kRest, false>(in, constants, mine.row, lane, room);
    __syncwarp();
  }

  if (held) {
    if constexpr (kRest > 0) {
      for_each_record([&](const RecordList& list, int64_t position) {
        float g[3], unit[3], weight[math::kMaxShCount];
        RecordGrad grad;
        for (int c = 0; c < 3; ++c) grad.rgb[c] = list.grad[position].rgb[c];
        unclamp(list.record[position], grad, g);
        weight[0] = 0.f;
#pragma unroll
        for (int k = 0; k < kRest; ++k) weight[1 + k] = math::dot3(rest + 3 * k, g);
        const float inverse = direction_to(list.view, mean, unit);
        math::sh_direction_backward(list.sh_degree, unit, inverse, weight, dL_dmean);
      });
    }
    step_column<3>(in, constants, mine, 0, lane, room, dL_dmean, mean);
    for (int axis = 0; axis < 3; ++axis) mean[axis] += noise[axis];
    store_column<3>(in.columns.means, mine.row, mean);
  }

  if (!in.sums) return;
  __shared__ double warp_sums[kStepWarps][2];
  for (int k = 0; k < 2; ++k) {
    for (int step = kWarp / 2; step > 0; step /= 2) sum[k] += __shfl_down_sync(kAllLanes, sum[k], step);
    if (lane == 0) warp_sums[threadIdx.x / kWarp][k] = sum[k];
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    double total = 0.0;
    for (int warp = 0; warp < kStepWarps; ++warp) total += warp_sums[warp][threadIdx.x];
    in.sums[int64_t{blockIdx.x} * 2 + threadIdx.x] = total;
  }
}

// total[k] = sum over blocks of part[block, k], k < 2; one block of threads, always in the same order.
__global__ void __launch_bounds__(kThreads)
    sum_pairs_kernel(const double* part, int64_t blocks, double* total) {
  __shared__ double partial[kThreads];
  for (int k = 0; k < 2; ++k) {
    double sum = 0.0;
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads) sum += part[2 * block + k];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int step = kThreads / 2; step > 0; step /= 2) {
      if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
      __syncthreads();
    }
    if (threadIdx.x == 0) total[k] = partial[0];
    __syncthreads();
  }
}

// ---- several lists: their rows united

// What a row's number among the united ones is read from: a bit a row, in blocks of 256 rows, and the bits
// before each block.
struct RowBits {
  uint32_t* bits;
  const int64_t* offset;
  int64_t first_row;

  __device__ __forceinline__ int64_t rank(int64_t row) const {
    const int64_t local = row - first_row, block = local / kThreads;
    const int word = static_cast<int>(local % kThreads) / kWarp;
    const uint32_t* words = bits + block * kWarps;
    int64_t rank = offset[block] + __popc(words[word] & ((1u << local % kWarp) - 1u));
    for (int w = 0; w < word; ++w) rank += __popc(words[w]);
    return rank;
  }
};

__global__ void __launch_bounds__(kThreads)
    mark_rows_kernel(const int64_t* row, int64_t count, const __grid_constant__ RowBits rows) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t local = row[i] - rows.first_row;
  atomicOr(rows.bits + local / kWarp, 1u << (local % kWarp));
}

// count[block]: bits set among the 256 of the block; the last one, behind the blocks, is 0.
__global__ void __launch_bounds__(kThreads)
    count_bits_kernel(const uint32_t* bits, int64_t blocks, int32_t* count) {
  const int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (block > blocks) return;
  int32_t sum = 0;
  for (int w = 0; w < kWarps && block < blocks; ++w) sum += __popc(bits[block * kWarps + w]);
  count[block] = sum;
}

__global__ void __launch_bounds__(kThreads)
    list_rows_kernel(const __grid_constant__ RowBits rows, int64_t* row) {
  const int64_t local = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (!(rows.bits[local / kWarp] >> (local % kWarp) & 1u)) return;
  row[rows.rank(rows.first_row + local)] = rows.first_row + local;
}

// records[r]: how many records the united row r has.
__global__ void __launch_bounds__(kThreads)
    count_entries_kernel(const int64_t* row, int64_t count, const __grid_constant__ RowBits rows,
                         int32_t* records) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) atomicAdd(records + rows.rank(row[i]), 1);
}

// One list at a time, so that a row's entries come in the order of the lists; `left` counts down.
__global__ void __launch_bounds__(kThreads)
    place_entries_kernel(const int64_t* row, int64_t count, const __grid_constant__ RowBits rows,
                         int32_t list, const int64_t* begin, int32_t* left, Entry* entry) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t r = rows.rank(row[i]);
  entry[begin[r + 1] - left[r]--] = {list, static_cast<uint32_t>(i)};
}

// weights[0..1]: of the regularisers, which are means over the rows seen by all shards.
__global__ void weigh_kernel(const int64_t* rows_seen, int shards, double opacity_reg, double scale_reg,
                             float* weights, int64_t* total) {
  *total = 0;
  for (int shard = 0; shard < shards; ++shard) *total += rows_seen[shard];
  const double rows = static_cast<double>(*total > 0 ? *total : 1);
  weights[0] = static_cast<float>(opacity_reg / rows);
  weights[1] = static_cast<float>(scale_reg / (3.0 * rows));
}

// ---- one shard

class ShardStep {
 public:
  ShardStep(const std::vector<const Frame*>& frames, int shard)
      : shard_(shard), home_(frames[0]->homes[static_cast<size_t>(shard)]) {
    for (const Frame* frame : frames) {
      const ShardRecords& records = frame->shards[static_cast<size_t>(shard)];
      for (size_t view = 0; view < frame->views.size(); ++view) {
        const int64_t begin = records.view_begin[view], size = records.view_begin[view + 1] - begin;
        if (size == 0) continue;
        lists_.push_back({frame->views[view], records.row.data() + begin, records.record.data() + begin,
                          records.grad.data() + begin, size, frame->settings.sh_degree,
                          frame->settings.antialiased});
        records_ += size;
      }
    }
    most_rows_ = std::min(home_.size(), records_);
    history_ = frames[0]->constants[static_cast<size_t>(shard)].history;
  }

  // Whether the host knows how many rows are seen: most_rows().
  bool knows_rows() const { return lists_.size() < 2; }
  int64_t most_rows() const { return most_rows_; }

  // Unites the rows of several lists, and leaves their number in rows_seen[0].
  void find_rows(int64_t* rows_seen) {
    if (knows_rows()) {
      upload(rows_seen, &most_rows_, 1, shard_);
      return;
    }
    const cudaStream_t stream = shard_stream(shard_);
    const int64_t blocks = blocks_for(home_.size(), kThreads);
    Buffer<uint32_t> bits(blocks * kWarps, shard_);
    Buffer<int32_t> count(blocks + 1, shard_), left(most_rows_ + 1, shard_);
    offset_ = Buffer<int64_t>(blocks + 1, shard_);
    row_ = Buffer<int64_t>(most_rows_, shard_);
    begin_ = Buffer<int64_t>(most_rows_ + 1, shard_);
    entry_ = Buffer<Entry>(records_, shard_);
    list_ = to_buffer(lists_, shard_);
    const RowBits rows{bits.data(), offset_.data(), home_.begin};
    zero(bits);
    zero(left);
    for (const RecordList& list : lists_) {
      mark_rows_kernel<<<blocks_for(list.size, kThreads), kThreads, 0, stream>>>(list.row, list.size, rows);
      KERNEL_CHECK("step count", shard_, list.size);
    }
    count_bits_kernel<<<blocks_for(blocks + 1, kThreads), kThreads, 0, stream>>>(bits.data(), blocks,
                                                                                 count.data());
    KERNEL_CHECK("step count", shard_, home_.size());
    exclusive_sum(count.data(), offset_.data(), blocks + 1, shard_);
    list_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(rows, row_.data());
    KERNEL_CHECK("step count", shard_, home_.size());
    for (const RecordList& list : lists_) {
      count_entries_kernel<<<blocks_for(list.size, kThreads), kThreads, 0, stream>>>(list.row, list.size,
                                                                                     rows, left.data());
      KERNEL_CHECK("step count", shard_, list.size);
    }
    exclusive_sum(left.data(), begin_.data(), most_rows_ + 1, shard_);
    for (size_t list = 0; list < lists_.size(); ++list) {
      place_entries_kernel<<<blocks_for(lists_[list].size, kThreads), kThreads, 0, stream>>>(
          lists_[list].row, lists_[list].size, rows, static_cast<int32_t>(list), begin_.data(), left.data(),
          entry_.data());
      KERNEL_CHECK("step count", shard_, lists_[list].size);
    }
    united_ = {offset_.data() + blocks, row_.data(), begin_.data(), entry_.data(), list_.data()};
    copy_between(rows_seen, shard_, united_.count, shard_, sizeof(int64_t));
  }

  void run(const SplatColumns& columns, const AdamState& state, const History::Step& now,
           const float* device_weights, float opacity_weight, float scale_weight, bool wanted_means) {
    if (lists_.empty()) return;
    const unsigned blocks = blocks_for(most_rows_, kStepThreads);
    Buffer<double> part(wanted_means ? int64_t{blocks} * 2 : 0, shard_);
    const StepInput in{columns, state,          history_,       now,          lists_[0],
                       united_, device_weights, opacity_weight, scale_weight, part.data()};
    launch(in, blocks);
    KERNEL_CHECK("step", shard_, most_rows_);
    if (!wanted_means) return;
    sums_ = Buffer<double>(2, shard_);
    sum_pairs_kernel<<<1, kThreads, 0, shard_stream(shard_)>>>(part.data(), blocks, sums_.data());
    KERNEL_CHECK("step", shard_, most_rows_);
  }

  void ask_sums(ReadBack& read_back) { read_back.add(sums, sums_.data(), sums_.size(), shard_); }

  double sums[2] = {0.0, 0.0};  // of opacities and scales

 private:
  void launch(const StepInput& in, unsigned blocks) const {
    const auto with_rest = [&](auto rest) {
      constexpr int kRest = decltype(rest)::value;
      if (knows_rows())
        step_kernel<kRest, false><<<blocks, kStepThreads, 0, shard_stream(shard_)>>>(in);
      else
        step_kernel<kRest, true><<<blocks, kStepThreads, 0, shard_stream(shard_)>>>(in);
    };
    switch (in.columns.sh_rest) {
      case 0:
        return with_rest(std::integral_constant<int, 0>{});
      case 3:
        return with_rest(std::integral_constant<int, 3>{});
      case 8:
        return with_rest(std::integral_constant<int, 8>{});
      default:
        return with_rest(std::integral_constant<int, 15>{});
    }
  }

  int shard_;
  RowRange home_;
  std::vector<RecordList> lists_;
  AdamHistory history_{};
  int64_t records_ = 0, most_rows_ = 0;
  Buffer<int64_t> offset_, row_, begin_;
  Buffer<Entry> entry_;
  Buffer<RecordList> list_;
  UnitedRows united_{};
  Buffer<double> sums_;
};

// ---- flush

struct FlushInput {
  SplatColumns columns;
  AdamState state;
  AdamHistory history;
  RowRange rows;
};

// One float of an SH column a thread; last_step stays for the columns that follow.
__global__ void __launch_bounds__(kThreads)
    flush_column_kernel(const __grid_constant__ FlushInput in, int column, float* data, int row_floats) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= in.rows.size() * row_floats) return;
  const int64_t row = in.rows.begin + i / row_floats, at = in.rows.begin * row_floats + i;
  const int64_t last = in.state.last_step[row];
  if (last >= in.history.now) return;
  const math::AdamConstants constants =
      math::adam_constants(in.history.beta1, in.history.beta2, in.history.eps);
  const math::MissedSteps missed = missed_steps(in.history, column, last);
  float &exp_avg = in.state.exp_avg[column][at], &exp_avg_sq = in.state.exp_avg_sq[column][at];
  data[at] = math::replay_missed(constants, missed, data[at], exp_avg, exp_avg_sq);
  exp_avg *= missed.beta1_power;
  exp_avg_sq *= missed.beta2_power;
}

__global__ void __launch_bounds__(kThreads) flush_geometry_kernel(const __grid_constant__ FlushInput in) {
  const int64_t row = in.rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.rows.end) return;
  const int64_t last = in.state.last_step[row];
  if (last >= in.history.now) return;
  float mean[3], quat[4], log_scale[3], opacity_logit;
  replay_geometry(in.columns, &in.state, &in.history, row, mean, quat, log_scale, opacity_logit);
  const float power1 = in.history.beta1_power[in.history.now - last],
              power2 = in.history.beta2_power[in.history.now - last];
  const auto store = [&](int column, float* data, int size, const float* values) {
    for (int i = 0; i < size; ++i) {
      data[row * size + i] = values[i];
      in.state.exp_avg[column][row * size + i] *= power1;
      in.state.exp_avg_sq[column][row * size + i] *= power2;
    }
  };
  store(0, in.columns.means, 3, mean);
  store(1, in.columns.quats, 4, quat);
  store(2, in.columns.scales, 3, log_scale);
  store(3, in.columns.opacities, 1, &opacity_logit);
  in.state.last_step[row] = static_cast<int32_t>(in.history.now);
}

// From the shards' counts to weights[shard] [2] of the regularisers; returns the sum of the counts, on the
// lead shard. The host does not wait.
Buffer<int64_t> share_weights(const std::vector<Buffer<int64_t>>& counts, const StepSettings& settings,
                              std::vector<Buffer<float>>& weights) {
  const int shards = static_cast<int>(counts.size());
  Buffer<int64_t> all(shards, 0), total(1, 0);
  join_shards();
  for (int shard = 0; shard < shards; ++shard) {
    copy_between(all.data() + shard, 0, counts[static_cast<size_t>(shard)].data(), shard, sizeof(int64_t));
    weights[static_cast<size_t>(shard)] = Buffer<float>(2, shard);
  }
  {
    DeviceGuard guard(shard_device(0));
    weigh_kernel<<<1, 1, 0, shard_stream(0)>>>(all.data(), shards, settings.opacity_reg, settings.scale_reg,
                                               weights[0].data(), total.data());
    KERNEL_CHECK("step count", 0, shards);
  }
  join_shards();
  for (int shard = 1; shard < shards; ++shard)
    copy_between(weights[static_cast<size_t>(shard)].data(), shard, weights[0].data(), 0, 2 * sizeof(float));
  return total;
}

}  // namespace

StepReport step(const std::vector<const Frame*>& frames, const SplatColumns& columns, const AdamState& state,
                const History& history, const StepSettings& settings) {
  check_frames(frames, columns, history);
  JoinedOperator joined;
  StepReport report;
  if (frames.empty() || columns.num_rows == 0) return report;
  add_statistics(frames, settings.statistics);
  const History::Step now = history.next(settings.lrs, settings.noise_scale);
  std::vector<ShardStep> work;
  work.reserve(frames[0]->homes.size());
  for (size_t shard = 0; shard < frames[0]->homes.size(); ++shard)
    work.emplace_back(frames, static_cast<int>(shard));

  // The regularisers are means over the rows seen. With one view the host knows their number; with several
  // the lead shard has it made out of all shards' counts.
  const size_t shards = work.size();
  bool known = true;
  for (const ShardStep& part : work) known &= part.knows_rows();
  for (const ShardStep& part : work) report.rows_seen += part.most_rows();
  if (report.rows_seen == 0) return report;
  std::vector<Buffer<float>> weights(shards);
  Buffer<int64_t> total;
  if (!known) {
    std::vector<Buffer<int64_t>> counts;
    for (size_t shard = 0; shard < shards; ++shard) counts.emplace_back(1, static_cast<int>(shard));
    for_each_shard("step count", [&](const Shard& shard) {
      work[static_cast<size_t>(shard.index)].find_rows(counts[static_cast<size_t>(shard.index)].data());
    });
    total = share_weights(counts, settings, weights);
  }
  const double most_rows = static_cast<double>(report.rows_seen);
  for_each_shard("step", [&](const Shard& shard) {
    work[static_cast<size_t>(shard.index)].run(
        columns, state, now, weights[static_cast<size_t>(shard.index)].data(),
        static_cast<float>(settings.opacity_reg / most_rows),
        static_cast<float>(settings.scale_reg / (3.0 * most_rows)), settings.wanted_means);
  });
  if (!settings.wanted_means) {
    if (!known) report.rows_seen = -1;
    return report;
  }
  ReadBack read_back;
  for (ShardStep& part : work) part.ask_sums(read_back);
  if (!known) read_back.add(&report.rows_seen, total.data(), 1, 0);
  read_back.wait();
  const double rows_seen = static_cast<double>(report.rows_seen);
  for (const ShardStep& part : work) {
    report.mean_opacity += part.sums[0] / rows_seen;
    report.mean_scale += part.sums[1] / (3.0 * rows_seen);
  }
  return report;
}

void flush(const SplatColumns& columns, const AdamState& state, const History& history) {
  JoinedOperator joined;
  const int shards = mesh().size();
  for_each_shard("flush", [&](const Shard& shard) {
    const RowRange home = equal_chunk(columns.num_rows, shard.index, shards);
    if (home.empty()) return;
    Buffer<float> steps;
    const FlushInput in{columns, state, upload_history(history.view(), steps, shard.index), home};
    const cudaStream_t stream = shard_stream(shard.index);
    const auto flush_column = [&](int column, float* data, int row_floats) {
      if (row_floats == 0) return;
      flush_column_kernel<<<blocks_for(home.size() * row_floats, kThreads), kThreads, 0, stream>>>(
          in, column, data, row_floats);
      KERNEL_CHECK("flush", shard.index, home.size());
    };
    flush_column(4, columns.sh0, 3);
    flush_column(5, columns.shN, 3 * columns.sh_rest);
    flush_geometry_kernel<<<blocks_for(home.size(), kThreads), kThreads, 0, stream>>>(in);
    KERNEL_CHECK("flush", shard.index, home.size());
  });
}

}  // namespace mgpu::splat
