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
#include <type_traits>
#include <vector>

#include "math/adam.h"
#include "memory/transfer.h"
#include "splat/cells.h"
#include "splat/kernels.h"
#include "splat/project.h"
#include "splat/replay.h"
#include "splat/step_check.h"

namespace mgpu::splat {

namespace {

constexpr int kStepThreads = 64;
constexpr int kStepWarps = kStepThreads / kWarp;
constexpr int kStepBlocks = 8;    // on an SM: 128 registers; a ninth would cost spills
constexpr int kFlushBlocks = 10;  // 96 registers
constexpr int kTogether = 2;      // loads of so many rows a lane are on their way together

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

// What step and flush read and write.
struct Table {
  SplatColumns columns;
  AdamState state;
  AdamHistory history;
};

struct StepInput {
  Table table;
  History::Step now;
  RecordList only;                     // of one list; its view is in constant memory
  UnitedRows united;                   // of several
  const float* weights;                // [2] on the device, or null: the two below
  float opacity_weight, scale_weight;  // of the regularisers, divided by the rows seen
  double* sums;                        // [blocks, 2] of opacities and scales; null: not wanted
  ShardCells cells;                    // whose boxes are to stay right
};

// ---- a warp's rows in shared memory: all but the higher SH

struct WarpRows {
  static constexpr int kFloats = 14;               // of a row
  static constexpr int kStride = 3 * kFloats | 1;  // odd: no bank conflicts where lane = row
  int64_t row[kWarp];                              // -1: none
  float data[kWarp * kStride];                     // by row: parameters, first moments, second moments
  // What a row's higher SH missed.
  math::TwoSteps two[kWarp];
  float4 powers[kWarp];  // beta1^k, beta2^k, the second moment from which `two` holds, the bits of last_step
};

// The lane's own row.
struct LaneRow {
  int64_t row, last;     // -1: none; its last step
  bool behind;           // has missed steps
  float power1, power2;  // of the betas, to the number of missed steps
  float* data;           // its part of WarpRows
};

// Where a column starts among the floats of a row.
__device__ constexpr int first_float(int column) {
  constexpr int first[kColumns] = {0, 3, 7, 10, 11, 14};
  return first[column];
}

// Calls visit(place in shared memory, address in the table) for each float of the columns of `kSize` floats a
// row: parameters and moments. Neighbouring lanes have neighbouring floats, so that each sector is touched
// once.
template <int kSize, bool kHalf, typename Visit>
__device__ __forceinline__ void for_each_float_of(const Table& table, WarpRows& rows, int lane,
                                                  const Visit& visit) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const int f = lane + j * kWarp, r = f / kSize, i = f % kSize;
    const int64_t row = rows.row[r], at = row * kSize + i;
    if (row < 0) continue;
    const auto column = [&](int c, float* data) {
      float* place = rows.data + r * WarpRows::kStride + first_float(c) + i;
      visit(place, data + at);
      if constexpr (kHalf)
        visit(place + WarpRows::kFloats, table.state.exp_avg[c].bits16() + at, row, c, i);
      else
        visit(place + WarpRows::kFloats, table.state.exp_avg[c].float32() + at);
      visit(place + 2 * WarpRows::kFloats, table.state.exp_avg_sq[c] + at);
    };
    if constexpr (kSize == 1) column(3, table.columns.opacities);
    if constexpr (kSize == 4) column(1, table.columns.quats);
    if constexpr (kSize == 3) {
      column(0, table.columns.means);
      column(2, table.columns.scales);
      column(4, table.columns.sh0);
    }
  }
}

template <bool kHalf, typename Visit>
__device__ __forceinline__ void for_each_float(const Table& table, WarpRows& rows, int lane,
                                               const Visit& visit) {
  for_each_float_of<3, kHalf>(table, rows, lane, visit);
  for_each_float_of<4, kHalf>(table, rows, lane, visit);
  for_each_float_of<1, kHalf>(table, rows, lane, visit);
}

// Between shared memory and the table: numbers of 32 bits, or first moments of 16.
struct FetchFloat {
  __device__ __forceinline__ void operator()(float* place, const float* from) const {
    __pipeline_memcpy_async(place, from, sizeof(float));
  }
  __device__ __forceinline__ void operator()(float* place, const uint16_t* from, int64_t, int, int) const {
    *place = math::from_bfloat16(*from);
  }
};
struct PutFloat {
  uint64_t seed;
  int64_t step;
  __device__ __forceinline__ void operator()(const float* place, float* to) const { __stcs(to, *place); }
  __device__ __forceinline__ void operator()(const float* place, uint16_t* to, int64_t row, int column,
                                             int i) const {
    __stcs(to, math::to_bfloat16(*place, rounding_bits(seed, step, row, column, i) >> 16));
  }
};

template <bool kHalf>
__device__ __forceinline__ LaneRow load_rows(const Table& table, WarpRows& rows, int lane, int64_t row) {
  LaneRow mine{row, 0, false, 1.f, 1.f, rows.data + lane * WarpRows::kStride};
  rows.row[lane] = row;
  __syncwarp();
  for_each_float<kHalf>(table, rows, lane, FetchFloat{});
  __pipeline_commit();
  if (row >= 0) {
    mine.last = table.state.last_step[row];
    mine.behind = mine.last < table.history.now;
    float holds_from = 0.f;
    if (mine.behind) {
      const math::MissedSteps missed = missed_steps(table.history, kShColumn, mine.last);
      mine.power1 = missed.beta1_power;
      mine.power2 = missed.beta2_power;
      rows.two[lane] = missed.two;
      holds_from = missed.closed_from;
    }
    rows.powers[lane] = {mine.power1, mine.power2, holds_from, __int_as_float(static_cast<int>(mine.last))};
  }
  __pipeline_wait_prior(0);
  __syncwarp();
  return mine;
}

// After step number `step`.
template <bool kHalf>
__device__ __forceinline__ void store_rows(const Table& table, WarpRows& rows, int lane, int64_t step) {
  __syncwarp();
  for_each_float<kHalf>(table, rows, lane, PutFloat{table.history.seed, step});
}

// Parameters of the row after the steps that it missed.
template <int kSize>
__device__ __forceinline__ void replay_column(const Table& table, const LaneRow& mine, int column,
                                              float* parameter) {
  const float* from = mine.data + first_float(column);
  for (int i = 0; i < kSize; ++i) parameter[i] = from[i];
  if (!mine.behind) return;
  float m[kSize], v[kSize];
  for (int i = 0; i < kSize; ++i) m[i] = from[WarpRows::kFloats + i];
  for (int i = 0; i < kSize; ++i) v[i] = from[2 * WarpRows::kFloats + i];
  replay_components(table.history, column, mine.last, kSize, m, v, parameter);
}

// Puts a column back: advance(i, m, v) takes the moments after the missed steps further, with parameter[i].
template <int kSize, typename Advance>
__device__ __forceinline__ void put_column(const LaneRow& mine, int column, float* parameter,
                                           const Advance& advance) {
  float* to = mine.data + first_float(column);
  for (int i = 0; i < kSize; ++i) {
    float m = to[WarpRows::kFloats + i] * mine.power1, v = to[2 * WarpRows::kFloats + i] * mine.power2;
    advance(i, m, v);
    to[i] = parameter[i];
    to[WarpRows::kFloats + i] = m;
    to[2 * WarpRows::kFloats + i] = v;
  }
}

template <int kSize>
__device__ __forceinline__ void step_column(const StepInput& in, const math::AdamConstants& constants,
                                            const LaneRow& mine, int column, const float* gradient,
                                            float* parameter) {
  put_column<kSize>(mine, column, parameter, [&](int i, float& m, float& v) {
    math::adam_step(constants, in.now.step_size[column], in.now.inv_sqrt_bc2, gradient[i], parameter[i], m,
                    v);
  });
}

// ---- colour

// dL/d(colour before its clamp at 0).
__device__ __forceinline__ void unclamp(const Record& record, const RecordGrad& grad, float g[3]) {
  for (int c = 0; c < 3; ++c) g[c] = record.rgb[c] > 0.f ? grad.rgb[c] : 0.f;
}

template <bool kAnyModel>
__device__ __forceinline__ float unit_direction_to(const View& view, const float mean[3], float unit[3]) {
  float direction[3];
  direction_to<kAnyModel>(view, mean, direction);
  return math::normalize3(direction, unit);
}

// ---- the higher SH in registers: several lanes a row

// Which floats of a row a lane has: windows of kLanes floats that start where a sector of memory does, so
// that no sector is touched twice.
template <int kRest>
struct RowWindows {
  static constexpr int kFloats = 3 * kRest;
  static constexpr int kLanes = kRest > 8 ? 16 : kRest > 3 ? 8 : 4;
  static constexpr int kRows = kWarp / kLanes;  // at a time
  static constexpr int kSector = kLanes < 8 ? kLanes : 8;
  static constexpr int kMaxShift = kFloats % kSector == 0 ? 0 : kSector - 1;
  static constexpr int kCount = (kFloats + kMaxShift + kLanes - 1) / kLanes;

  int64_t first;  // of the row's floats in the column; negative: no row
  int begin;      // the lane's float of window 0, from the row's first

  __device__ __forceinline__ RowWindows(int64_t row, int lane) {
    first = row * kFloats;
    begin = lane % kLanes - static_cast<int>(first & kMaxShift);
  }
  __device__ __forceinline__ bool has(int w) const {
    return first >= 0 && static_cast<unsigned>(begin + w * kLanes) < static_cast<unsigned>(kFloats);
  }
};

// Numbers of shN and of its first moment.
template <bool kHalf>
__device__ __forceinline__ float load_value(const Table& table, int64_t at) {
  if constexpr (kHalf) return math::from_float16(table.columns.shN.bits16()[at]);
  return table.columns.shN.float32()[at];
}
template <bool kHalf>
__device__ __forceinline__ float load_exp_avg(const Table& table, int64_t at) {
  if constexpr (kHalf) return math::from_bfloat16(table.state.exp_avg[kShColumn].bits16()[at]);
  return table.state.exp_avg[kShColumn].float32()[at];
}
template <bool kHalf>
__device__ __forceinline__ void store_rest(const Table& table, int64_t at, float value, float m,
                                           uint32_t random) {
  if constexpr (kHalf) {
    __stcs(table.columns.shN.bits16() + at, math::to_float16(value, random));
    __stcs(table.state.exp_avg[kShColumn].bits16() + at, math::to_bfloat16(m, random >> 16));
  } else {
    __stcs(table.columns.shN.float32() + at, value);
    __stcs(table.state.exp_avg[kShColumn].float32() + at, m);
  }
}

// Replays the higher SH of the warp's rows, calls advance(row in the warp, which float, value, m, v) for each
// and writes them back. kMissed: some row has missed steps.
template <int kRest, bool kHalf, bool kMissed, typename Advance>
__device__ __forceinline__ void update_rest(const Table& table, const WarpRows& rows, int lane, int64_t step,
                                            const Advance& advance) {
  using Windows = RowWindows<kRest>;
  constexpr int kLanes = Windows::kLanes;
#pragma unroll 1
  for (int first = 0; first < kWarp; first += Windows::kRows * kTogether) {
    float value[kTogether][Windows::kCount], m[kTogether][Windows::kCount], v[kTogether][Windows::kCount];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const Windows windows(rows.row[first + t * Windows::kRows + lane / kLanes], lane);
      const int64_t at = windows.first + windows.begin;
#pragma unroll
      for (int w = 0; w < Windows::kCount; ++w) {
        const bool has = windows.has(w);
        value[t][w] = has ? load_value<kHalf>(table, at + w * kLanes) : 0.f;
        m[t][w] = has ? load_exp_avg<kHalf>(table, at + w * kLanes) : 0.f;
        v[t][w] = has ? table.state.exp_avg_sq[kShColumn][at + w * kLanes] : 0.f;
      }
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int r = first + t * Windows::kRows + lane / kLanes;
      if constexpr (kMissed) {
        const float4 powers = rows.powers[r];
        const int last = __float_as_int(powers.w);
        if (last < table.history.now) {
          const math::TwoSteps two = rows.two[r];
#pragma unroll
          for (int w = 0; w < Windows::kCount; ++w) {
            if (math::closed_form_holds(powers.z, m[t][w], v[t][w]))
              value[t][w] -= math::missed_drift(two, m[t][w], v[t][w]);
            else
              value[t][w] = replay_slowly(table.history, kShColumn, last, value[t][w], m[t][w], v[t][w]);
            m[t][w] *= powers.x;
            v[t][w] *= powers.y;
          }
        }
      }
      const Windows windows(rows.row[r], lane);
      const int64_t at = windows.first + windows.begin;
      math::Random4 random{};
      if (kHalf && kLanes == 16) {
        random = math::draw_rounding(table.history.seed, step, rows.row[r], windows.begin & 15);
        if (windows.begin < 0)
          random = {{0, random.x[0], random.x[1], random.x[2]}};  // window w is word w - 1
      }
#pragma unroll
      for (int w = 0; w < Windows::kCount; ++w) {
        if (!windows.has(w)) continue;
        const int k = windows.begin + w * kLanes;
        advance(r, k, value[t][w], m[t][w], v[t][w]);
        uint32_t bits = 0;
        if constexpr (kHalf) {
          if (kLanes == 16)  // one call has the bits of all the lane's floats
            bits = random.x[w];
          else
            bits = rounding_bits(table.history.seed, step, rows.row[r], kShColumn, k);
        }
        store_rest<kHalf>(table, at + w * kLanes, value[t][w], m[t][w], bits);
        __stcs(table.state.exp_avg_sq[kShColumn] + at + w * kLanes, v[t][w]);
      }
    }
  }
}

template <int kRest, bool kHalf, typename Advance>
__device__ __forceinline__ void update_rest(const Table& table, const WarpRows& rows, int lane, int64_t step,
                                            bool behind, const Advance& advance) {
  if constexpr (kRest > 0) {
    if (__any_sync(kAllLanes, behind))
      update_rest<kRest, kHalf, true>(table, rows, lane, step, advance);
    else
      update_rest<kRest, kHalf, false>(table, rows, lane, step, advance);
  }
}

// ---- cells

__device__ __forceinline__ void lower(float* to, float value) {
  value += 0.f;  // no -0, whose bits are in neither order
  if (value >= 0.f)
    atomicMin(reinterpret_cast<int*>(to), __float_as_int(value));
  else
    atomicMax(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
}
__device__ __forceinline__ void raise(float* to, float value) {
  value += 0.f;
  if (value >= 0.f)
    atomicMax(reinterpret_cast<int*>(to), __float_as_int(value));
  else
    atomicMin(reinterpret_cast<unsigned*>(to), __float_as_uint(value));
}

// Takes the row into its cell, as it is going to be stored. Most stay inside.
__device__ __forceinline__ void expand_cell(const ShardCells& cells, const LaneRow& mine) {
  const float* const mean = mine.data + first_float(0);
  const float* const log_scale = mine.data + first_float(2);
  const float* const logit = mine.data + first_float(3);
  const math::CellRow row{
      {mean[0], mean[1], mean[2]},
      {log_scale[0], log_scale[1], log_scale[2]},
      logit[0],
      math::drift_ratio_of(logit[WarpRows::kFloats], logit[2 * WarpRows::kFloats], cells.moment_ratio)};
  if (!row.finite()) return;
  const math::CellDemand wanted(row, cells.logit_drift);
  math::Cell& cell = cells.of(mine.row);
  if (wanted.met_by(cell)) return;
  for (int i = 0; i < 3; ++i) {
    if (wanted.mean[i] < cell.low[i]) lower(&cell.low[i], wanted.mean[i]);
    if (wanted.mean[i] > cell.high[i]) raise(&cell.high[i], wanted.mean[i]);
  }
  if (wanted.log_scale > cell.log_scale) raise(&cell.log_scale, wanted.log_scale);
  if (wanted.log_reach > cell.log_reach) raise(&cell.log_reach, wanted.log_reach);
}

// ---- the step

// Of the higher SH by row: the gradient before phase 2, the coefficient before the step after it.
template <int kRest>
struct RestRoom {
  static constexpr int kStride = 3 * kRest | 1;  // odd: no bank conflicts where lane = row
  float data[kWarp * kStride];
};

template <int kRest, bool kSeveral, bool kHalf, bool kAnyModel>
__global__ void __launch_bounds__(kStepThreads, kStepBlocks)
    step_kernel(const __grid_constant__ StepInput in) {
  __shared__ WarpRows all_rows[kStepWarps];
  __shared__ RestRoom<kRest> all_rests[kStepWarps];
  WarpRows& rows = all_rows[threadIdx.x / kWarp];
  float* const rest_of_rows = all_rests[threadIdx.x / kWarp].data;
  const int lane = threadIdx.x % kWarp;
  const int64_t i = int64_t{blockIdx.x} * kStepThreads + threadIdx.x;
  const bool held = i < (kSeveral ? *in.united.count : in.only.size);
  const AdamHistory& history = in.table.history;
  const math::AdamConstants constants = math::adam_constants(history.beta1, history.beta2, history.eps);
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

  const LaneRow mine = load_rows<kHalf>(in.table, rows, lane,
                                        !held      ? -1
                                        : kSeveral ? in.united.row[i]
                                                   : in.only.row[i]);
  float* const rest = rest_of_rows + lane * RestRoom<kRest>::kStride;
  float mean[3], dL_dmean[3] = {}, noise[3] = {};
  double sum[2] = {0.0, 0.0};
  if (held) {
    float quat[4], log_scale[3], logit, sh0[3];
    replay_column<3>(in.table, mine, 0, mean);
    replay_column<4>(in.table, mine, 1, quat);
    replay_column<3>(in.table, mine, 2, log_scale);
    replay_column<1>(in.table, mine, 3, &logit);
    replay_column<3>(in.table, mine, 4, sh0);
    if (mine.behind) replay_noise(history, mine.last, mine.row, quat, log_scale, logit, mean);

    float dL_dquat[4] = {}, dL_dlog_scale[3] = {}, dL_dlogit = 0.f, dL_dsh0[3] = {};
    if constexpr (kSeveral) {
      for (int k = 0; k < 3 * kRest; ++k) rest[k] = 0.f;
    }
    for_each_record([&](const RecordList& list, int64_t position) {
      const RecordGrad grad = load48(list.grad + position);
      float g[3], unit[3], basis[math::kMaxShCount] = {},
                           unused_dL_dviewmat[12] = {};  // the way back has it already
      unclamp(list.record[position], grad, g);
      unit_direction_to<kAnyModel>(list.view, mean, unit);
      math::sh_basis(list.sh_degree, unit[0], unit[1], unit[2], basis);
      for (int c = 0; c < 3; ++c) dL_dsh0[c] += basis[0] * g[c];
#pragma unroll
      for (int k = 0; k < 3 * kRest; ++k) {
        const float gradient = basis[1 + k / 3] * g[k % 3];
        rest[k] = kSeveral ? rest[k] + gradient : gradient;
      }
      math::project_gaussian_backward<kAnyModel>(list.view, mean, quat, log_scale, logit, list.antialiased,
                                                 grad.mean2d, grad.conic, grad.opacity, grad.depth, dL_dmean,
                                                 dL_dquat, dL_dlog_scale, dL_dlogit, unused_dL_dviewmat);
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

    step_column<4>(in, constants, mine, 1, dL_dquat, quat);
    step_column<3>(in, constants, mine, 2, dL_dlog_scale, log_scale);
    step_column<1>(in, constants, mine, 3, &dL_dlogit, &logit);
    step_column<3>(in, constants, mine, 4, dL_dsh0, sh0);
    if (in.now.noise_scale > 0.f) {
      const math::Random4 random = math::draw(history.seed, math::Stream::kNoise, in.now.number, mine.row);
      math::add_mcmc_noise(random, in.now.noise_scale, quat, log_scale, logit, noise);
    }
  }

  __syncwarp();
  update_rest<kRest, kHalf>(
      in.table, rows, lane, in.now.number, mine.behind, [&](int r, int k, float& value, float& m, float& v) {
        float& shared = rest_of_rows[r * RestRoom<kRest>::kStride + k];
        const float gradient = shared;
        shared = value;
        math::adam_step(constants, in.now.step_size[kShColumn], in.now.inv_sqrt_bc2, gradient, value, m, v);
      });
  __syncwarp();

  if (held) {
    if constexpr (kRest > 0) {
      for_each_record([&](const RecordList& list, int64_t position) {
        if (kAnyModel && list.view.model == CameraModel::kOrtho) return;  // seen along the axis
        float g[3], unit[3], weight[math::kMaxShCount];
        RecordGrad grad;
        for (int c = 0; c < 3; ++c) grad.rgb[c] = list.grad[position].rgb[c];
        unclamp(list.record[position], grad, g);
        weight[0] = 0.f;
#pragma unroll
        for (int k = 0; k < kRest; ++k) weight[1 + k] = math::dot3(rest + 3 * k, g);
        const float inverse = unit_direction_to<kAnyModel>(list.view, mean, unit);
        math::sh_direction_backward(list.sh_degree, unit, inverse, weight, dL_dmean);
      });
    }
    step_column<3>(in, constants, mine, 0, dL_dmean, mean);
    for (int axis = 0; axis < 3; ++axis) mine.data[axis] = mean[axis] + noise[axis];
    if (in.cells.cell) expand_cell(in.cells, mine);
    in.table.state.last_step[mine.row] = static_cast<int32_t>(in.now.number);
  }
  store_rows<kHalf>(in.table, rows, lane, in.now.number);

  if (!in.sums) return;
  store_block_sums<kStepWarps>(sum, in.sums + int64_t{blockIdx.x} * 2);
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

// ---- launchers

// Calls visit(std::integral_constant of the bands above the constant one).
template <typename Visit>
void with_rest(int sh_rest, const Visit& visit) {
  switch (sh_rest) {
    case 0:
      return visit(std::integral_constant<int, 0>{});
    case 3:
      return visit(std::integral_constant<int, 3>{});
    case 8:
      return visit(std::integral_constant<int, 8>{});
    default:
      return visit(std::integral_constant<int, 15>{});
  }
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
        pinholes_ &= frame->views[view].model == CameraModel::kPinhole;
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
           const float* device_weights, float opacity_weight, float scale_weight,
           const StepSettings& settings) {
    const bool wanted_means = settings.wanted_means;
    if (lists_.empty()) return;
    const unsigned blocks = blocks_for(most_rows_, kStepThreads);
    Buffer<double> part(wanted_means ? int64_t{blocks} * 2 : 0, shard_);
    const StepInput in{{columns, state, history_},
                       now,
                       lists_[0],
                       united_,
                       device_weights,
                       opacity_weight,
                       scale_weight,
                       part.data(),
                       settings.cells ? settings.cells->of_shard(static_cast<size_t>(shard_)) : ShardCells{}};
    launch(in, blocks);
    KERNEL_CHECK("step", shard_, most_rows_);
    if (!wanted_means) return;
    sums_ = Buffer<double>(2, shard_);
    sum_parts_kernel<2><<<1, kThreads, 0, shard_stream(shard_)>>>(part.data(), blocks, sums_.data());
    KERNEL_CHECK("step", shard_, most_rows_);
  }

  void ask_sums(ReadBack& read_back) { read_back.add(sums, sums_.data(), sums_.size(), shard_); }

  double sums[2] = {0.0, 0.0};  // of opacities and scales

 private:
  void launch(const StepInput& in, unsigned blocks) const {
    with_rest(in.table.columns.sh_rest, [&](auto rest) {
      constexpr int kRest = decltype(rest)::value;
      const auto start = [&](auto kernel) { kernel<<<blocks, kStepThreads, 0, shard_stream(shard_)>>>(in); };
      const bool half = !in.table.state.exp_avg[0].is_float32();
      const auto choose = [&](auto any_model) {
        constexpr bool kAnyModel = decltype(any_model)::value;
        if (knows_rows())
          half ? start(step_kernel<kRest, false, true, kAnyModel>)
               : start(step_kernel<kRest, false, false, kAnyModel>);
        else
          half ? start(step_kernel<kRest, true, true, kAnyModel>)
               : start(step_kernel<kRest, true, false, kAnyModel>);
      };
      pinholes_ ? choose(std::false_type{}) : choose(std::true_type{});
    });
  }

  int shard_;
  RowRange home_;
  std::vector<RecordList> lists_;
  bool pinholes_ = true;  // so are all cameras
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
  Table table;
  RowRange rows;
};

template <int kRest, bool kHalf>
__global__ void __launch_bounds__(kStepThreads, kFlushBlocks)
    flush_kernel(const __grid_constant__ FlushInput in) {
  __shared__ WarpRows all_rows[kStepWarps];
  WarpRows& rows = all_rows[threadIdx.x / kWarp];
  const int lane = threadIdx.x % kWarp;
  const AdamHistory& history = in.table.history;
  const int64_t row = in.rows.begin + int64_t{blockIdx.x} * kStepThreads + threadIdx.x;
  const bool behind = row < in.rows.end && in.table.state.last_step[row] < history.now;
  if (!__any_sync(kAllLanes, behind)) return;
  const LaneRow mine = load_rows<kHalf>(in.table, rows, lane, behind ? row : -1);
  update_rest<kRest, kHalf>(in.table, rows, lane, history.now, true, [](int, int, float&, float&, float&) {});
  if (behind) {
    float mean[3], quat[4], log_scale[3], logit, sh0[3];
    replay_column<3>(in.table, mine, 0, mean);
    replay_column<4>(in.table, mine, 1, quat);
    replay_column<3>(in.table, mine, 2, log_scale);
    replay_column<1>(in.table, mine, 3, &logit);
    replay_column<3>(in.table, mine, 4, sh0);
    replay_noise(history, mine.last, mine.row, quat, log_scale, logit, mean);
    const auto as_it_is = [](int, float&, float&) {};
    put_column<3>(mine, 0, mean, as_it_is);
    put_column<4>(mine, 1, quat, as_it_is);
    put_column<3>(mine, 2, log_scale, as_it_is);
    put_column<1>(mine, 3, &logit, as_it_is);
    put_column<3>(mine, 4, sh0, as_it_is);
    in.table.state.last_step[mine.row] = static_cast<int32_t>(history.now);
  }
  store_rows<kHalf>(in.table, rows, lane, history.now);
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
  const auto run = [&](const Shard& shard) {
    work[static_cast<size_t>(shard.index)].run(
        columns, state, now, weights[static_cast<size_t>(shard.index)].data(),
        static_cast<float>(settings.opacity_reg / most_rows),
        static_cast<float>(settings.scale_reg / (3.0 * most_rows)), settings);
  };
  for_each_shard("step", run, Access::kLocal, Launch::kSideBySide);
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
  const std::vector<RowRange> homes = homes_of(columns);
  std::vector<float> packed;
  const PackedHistory arrays(history.view(), packed);
  for_each_shard("flush", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    if (home.empty()) return;
    const Buffer<float> tables = to_buffer(packed, shard.index);
    const FlushInput in{{columns, state, arrays.in(tables.data())}, home};
    with_rest(columns.sh_rest, [&](auto rest) {
      constexpr int kRest = decltype(rest)::value;
      const auto start = [&](auto kernel) {
        kernel<<<blocks_for(home.size(), kStepThreads), kStepThreads, 0, shard_stream(shard.index)>>>(in);
      };
      state.exp_avg[0].is_float32() ? start(flush_kernel<kRest, false>) : start(flush_kernel<kRest, true>);
    });
    KERNEL_CHECK("flush", shard.index, home.size());
  });
}

}  // namespace mgpu::splat
