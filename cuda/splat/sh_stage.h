// SPDX-License-Identifier: Apache-2.0
// sh_stage.h: the higher SH coefficients of a warp's 32 rows in shared memory. A row has 45 of them, so a
// thread that reads its own row touches one sector a load; a warp that reads row by row touches whole ones.
#pragma once
#include <cuda_pipeline_primitives.h>

#include "math/adam.h"
#include "splat/kernels.h"
#include "splat/replay.h"

namespace mgpu::splat {

constexpr int kStageThreads = 128;  // 3 blocks of 68 KiB on an SM
constexpr int kStageWarps = kStageThreads / kWarp;

class ShStage {
 public:
  // `floats`: of a row, in the table. With moments there are three arrays, else one.
  __device__ ShStage(float* shared, int floats, bool with_moments)
      : floats_(floats), stride_(floats | 1), arrays_(with_moments ? 3 : 1) {
    lane_ = threadIdx.x % kWarp;
    data_ = shared + threadIdx.x / kWarp * arrays_ * kWarp * stride_;
  }
  static size_t shared_bytes(int floats, bool with_moments) {
    return sizeof(float) * kStageWarps * (with_moments ? 3 : 1) * kWarp * (floats | 1);
  }

  // By all lanes: `row` is the lane's own, or -1. The first `wanted` floats of each row.
  __device__ void fetch(const SplatColumns& columns, const AdamState& state, int64_t row, int wanted) {
    for (int r = 0; r < kWarp; ++r) {
      const int64_t at = __shfl_sync(kAllLanes, row, r) * floats_;
      if (at < 0) continue;
      fetch_row(0, r, columns.shN + at, wanted);
      if (arrays_ == 1) continue;
      fetch_row(1, r, state.exp_avg[kShColumn] + at, wanted);
      fetch_row(2, r, state.exp_avg_sq[kShColumn] + at, wanted);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncwarp();
  }

  // By all lanes, without moments in the stage: the first kWanted floats of each row, as they are after the
  // steps that it missed since `last`. The loads of several rows are on their way together.
  template <int kWanted>
  __device__ void fetch_replayed(const SplatColumns& columns, const AdamState* state,
                                 const AdamHistory* history, int64_t row, int64_t last) {
    constexpr int kBatch = 4, kPieces = (kWanted + kWarp - 1) / kWarp;
    for (int first = 0; first < kWarp; first += kBatch) {
      float value[kBatch][kPieces], m[kBatch][kPieces], v[kBatch][kPieces];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t row_there = __shfl_sync(kAllLanes, row, first + b), at = row_there * floats_ + lane_;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const bool held = row_there >= 0 && lane_ + piece * kWarp < kWanted;
          value[b][piece] = held ? columns.shN[at + piece * kWarp] : 0.f;
          m[b][piece] = held && state ? state->exp_avg[kShColumn][at + piece * kWarp] : 0.f;
          v[b][piece] = held && state ? state->exp_avg_sq[kShColumn][at + piece * kWarp] : 0.f;
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t missed_after = __shfl_sync(kAllLanes, last, first + b);
        const bool missed_any =
            state && __shfl_sync(kAllLanes, row, first + b) >= 0 && missed_after < history->now;
        math::MissedSteps missed{};
        math::AdamConstants constants{};
        if (missed_any) {
          missed = missed_steps(*history, kShColumn, missed_after);
          constants = math::adam_constants(history->beta1, history->beta2, history->eps);
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          if (lane_ + piece * kWarp >= kWanted) continue;
          data_[(first + b) * stride_ + lane_ + piece * kWarp] =
              missed_any ? math::replay_missed(constants, missed, value[b][piece], m[b][piece], v[b][piece])
                         : value[b][piece];
        }
      }
    }
    __syncwarp();
  }

  // By all lanes: everything back to the table.
  __device__ void store(const SplatColumns& columns, const AdamState& state, int64_t row) const {
    __syncwarp();
    for (int r = 0; r < kWarp; ++r) {
      const int64_t at = __shfl_sync(kAllLanes, row, r) * floats_;
      if (at < 0) continue;
      store_row(0, r, columns.shN + at);
      store_row(1, r, state.exp_avg[kShColumn] + at);
      store_row(2, r, state.exp_avg_sq[kShColumn] + at);
    }
  }

  // Of the lane's own row.
  __device__ __forceinline__ float& value(int k) { return data_[lane_ * stride_ + k]; }
  __device__ __forceinline__ float& exp_avg(int k) { return data_[(kWarp + lane_) * stride_ + k]; }
  __device__ __forceinline__ float& exp_avg_sq(int k) { return data_[(2 * kWarp + lane_) * stride_ + k]; }

  // Takes the steps that the lane's row missed after `last`.
  __device__ __forceinline__ void replay(const AdamHistory& history, int64_t last, int wanted) {
    if (last >= history.now) return;
    const math::AdamConstants constants = math::adam_constants(history.beta1, history.beta2, history.eps);
    const math::MissedSteps missed = missed_steps(history, kShColumn, last);
    for (int k = 0; k < wanted; ++k) {
      value(k) = math::replay_missed(constants, missed, value(k), exp_avg(k), exp_avg_sq(k));
      exp_avg(k) *= missed.beta1_power;
      exp_avg_sq(k) *= missed.beta2_power;
    }
  }

 private:
  __device__ __forceinline__ void fetch_row(int array, int r, const float* from, int wanted) {
    float* to = data_ + (array * kWarp + r) * stride_;
    for (int k = lane_; k < wanted; k += kWarp) __pipeline_memcpy_async(to + k, from + k, sizeof(float));
  }
  __device__ __forceinline__ void store_row(int array, int r, float* to) const {
    const float* from = data_ + (array * kWarp + r) * stride_;
    for (int k = lane_; k < floats_; k += kWarp) to[k] = from[k];
  }

  float* data_;  // [arrays, 32, stride]
  int floats_, stride_, arrays_, lane_;
};

}  // namespace mgpu::splat
