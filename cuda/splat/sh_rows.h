// SPDX-License-Identifier: Apache-2.0
// sh_rows.h: the higher SH coefficients of a warp's 32 rows on their way through shared memory. A row of 45
// floats starts at any multiple of 4 bytes, and a thread that reads its own row touches one sector a load;
// here a warp reads the rows in aligned pieces of 16 bytes, neighbours side by side, all of them in flight at
// once.
#pragma once
#include <cuda_pipeline_primitives.h>

#include "math/adam.h"
#include "splat/kernels.h"
#include "splat/replay.h"

namespace mgpu::splat {

// kHalf: of a half table.
template <int kDegree, bool kHalf>
class ShRows {
 public:
  static constexpr int kWanted = 3 * ((kDegree + 1) * (kDegree + 1) - 1);   // floats of a row
  static constexpr int kPieces = kWanted == 0 ? 0 : (kWanted + 3 + 3) / 4;  // with up to 3 floats before them
  static constexpr int kStride = kPieces | 1;                               // pieces from row to row
  static constexpr int kWarpPieces = kWarp * kStride;

  __device__ explicit ShRows(float4* shared) : data_(shared) {}

  // By all lanes: starts to read the lane's own row, `first_row` + `row` (-1: none), as it is after the steps
  // that it missed since `last`.
  __device__ __forceinline__ void start(const SplatColumns& columns, const AdamState* state,
                                        const AdamHistory* history, int64_t first_row, int32_t row,
                                        int64_t last) {
    if constexpr (kHalf) {
      own_ = reinterpret_cast<float*>(data_ + slot(lane_here()) * kStride);
      fetch_half(data_, columns, state, history, first_row, row, last);
    } else {
      fetch(columns, state, history, first_row, row, last);
    }
  }

  // By all lanes: value() may be read afterwards.
  __device__ __forceinline__ void finish() {
    __pipeline_wait_prior(0);
    __syncwarp();
  }

  // Of the lane's own row.
  __device__ __forceinline__ float value(int k) const { return own_[k]; }

 private:
  // Of a table in float32: what needs no replay goes to shared memory by itself.
  __device__ __forceinline__ void fetch(const SplatColumns& columns, const AdamState* state,
                                        const AdamHistory* history, int64_t first_row, int32_t row,
                                        int64_t last) {
    const float* const sh = columns.shN.float32();
    const int lane = lane_here(), floats = 3 * columns.sh_rest;
    const bool missed = state && row >= 0 && last < history->now;
    const unsigned any_missed = __ballot_sync(kAllLanes, missed);
    const float* const from = sh + (first_row + (row < 0 ? 0 : row)) * floats;
    const int shift = shift_of(from);
    own_ = reinterpret_cast<float*>(data_ + slot(lane) * kStride) + shift;
    // The lane's first piece, and in the 4 bits below its address how many there are; of the column's last
    // row only the whole ones, so that nothing behind the column is read.
    const bool ends_column = first_row + row + 1 == columns.num_rows;
    const int wanted = (shift + kWanted + 3) / 4, whole = (shift + floats) / 4;
    const int pieces = row < 0 || missed ? 0 : ends_column ? min(whole, wanted) : wanted;
    const uint64_t mine = reinterpret_cast<uint64_t>(from - shift) + static_cast<uint64_t>(pieces);
    int source = lane / kPieces, piece = lane % kPieces;  // i * 32 + lane = source * kPieces + piece
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint64_t there = __shfl_sync(kAllLanes, mine, source);
      if (piece < static_cast<int>(there & 15u))
        __pipeline_memcpy_async(data_ + slot(source) * kStride + piece,
                                reinterpret_cast<const float4*>(there & ~uint64_t{15}) + piece, 16);
      source += kWarp / kPieces;
      piece += kWarp % kPieces;
      if (piece >= kPieces) {
        piece -= kPieces;
        ++source;
      }
    }
    if (ends_column && pieces > 0) {
      for (int k = 4 * pieces - shift; k < kWanted; ++k) own_[k] = from[k];
    }
#pragma unroll 2
    for (int i = 0; i < kPieces && any_missed; ++i) {
      const int source = (i * kWarp + lane) / kPieces, piece = (i * kWarp + lane) % kPieces;
      const int64_t first = (first_row + __shfl_sync(kAllLanes, row, source)) * floats;
      const int64_t source_last = __shfl_sync(kAllLanes, last, source);
      if (!(any_missed >> source & 1u)) continue;
      const int begin = 4 * piece - shift_of(sh + first);
      if (begin < kWanted)
        data_[slot(source) * kStride + piece] =
            replayed(columns, *state, *history, first, begin, source_last);
    }
    __pipeline_commit();
  }

  // Of a half table: numbers of 2 bytes, through registers.
  static __device__ __noinline__ void fetch_half(float4* data, const SplatColumns& columns,
                                                 const AdamState* state, const AdamHistory* history,
                                                 int64_t first_row, int32_t row, int64_t last) {
    const int lane = lane_here(), floats = 3 * columns.sh_rest;
#pragma unroll 2
    for (int i = 0; i < kPieces; ++i) {
      const int source = (i * kWarp + lane) / kPieces, begin = 4 * ((i * kWarp + lane) % kPieces);
      const int32_t source_row = __shfl_sync(kAllLanes, row, source);
      const int64_t source_last = __shfl_sync(kAllLanes, last, source);
      if (source_row < 0 || begin >= kWanted) continue;
      const int64_t first = (first_row + source_row) * floats + begin;
      float value[4] = {};
      for (int k = 0; k < 4 && begin + k < kWanted; ++k)
        value[k] = math::from_float16(columns.shN.bits16()[first + k]);
      if (state && source_last < history->now) {
        const math::MissedSteps missed = missed_steps(*history, kShColumn, source_last);
        const math::AdamConstants constants =
            math::adam_constants(history->beta1, history->beta2, history->eps);
        for (int k = 0; k < 4 && begin + k < kWanted; ++k) {
          value[k] = math::replay_missed(constants, missed, value[k], state->exp_avg[kShColumn][first + k],
                                         state->exp_avg_sq[kShColumn][first + k]);
        }
      }
      data[slot(source) * kStride + begin / 4] = make_float4(value[0], value[1], value[2], value[3]);
    }
  }

  static __device__ __forceinline__ int shift_of(const float* row) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(row) / 4 % 4);
  }
  // Where a lane's row is kept. Rows 8 apart in memory would meet in a bank, unless they start elsewhere in
  // their 16 bytes: four neighbours of the table do.
  static __device__ __forceinline__ int slot(int lane) { return lane % 4 * 8 + lane / 4; }

  static __device__ float4 replayed(const SplatColumns& columns, const AdamState& state,
                                    const AdamHistory& history, int64_t first, int begin, int64_t last) {
    constexpr int kColumn = 5;
    const float* value = columns.shN.float32() + first + begin;
    const float* exp_avg = state.exp_avg[kColumn].float32() + first + begin;
    const float* exp_avg_sq = state.exp_avg_sq[kColumn] + first + begin;
    float p[4], m[4], v[4];
    const bool whole = begin >= 0 && begin + 4 <= kWanted;
    if (whole && (reinterpret_cast<uintptr_t>(exp_avg) | reinterpret_cast<uintptr_t>(exp_avg_sq)) % 16 == 0) {
      load4(value, p);
      load4(exp_avg, m);
      load4(exp_avg_sq, v);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const bool held = begin + k >= 0 && begin + k < kWanted;
        p[k] = held ? value[k] : 0.f;
        m[k] = held ? exp_avg[k] : 0.f;
        v[k] = held ? exp_avg_sq[k] : 0.f;
      }
    }
    const math::MissedSteps missed = missed_steps(history, kColumn, last);
    const math::AdamConstants constants = math::adam_constants(history.beta1, history.beta2, history.eps);
#pragma unroll
    for (int k = 0; k < 4; ++k) p[k] = math::replay_missed(constants, missed, p[k], m[k], v[k]);
    return make_float4(p[0], p[1], p[2], p[3]);
  }
  static __device__ __forceinline__ void load4(const float* from, float to[4]) {
    const float4 value = *reinterpret_cast<const float4*>(from);
    to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
  }

  float4* data_;  // [32, kStride]
  float* own_;    // the lane's row
};

}  // namespace mgpu::splat
