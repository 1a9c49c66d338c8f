// SPDX-License-Identifier: Apache-2.0
// columns.h: the splat table as stages see it: plain pointers, valid on every shard.
#pragma once
#include <cstdint>
#include <vector>

#include "math/adam.h"
#include "math/half.h"
#include "math/host_device.h"
#include "memory/homes.h"

namespace mgpu::splat {

constexpr int kColumns = 6;  // order everywhere: means, quats, scales, opacities, sh0, shN
constexpr int kShColumn = 5;

// Numbers that are stored in 32 bits or in 16 (math/half.h). Arithmetic is in float.
class FloatArray {
 public:
  enum class Kind : int32_t { kFloat32, kFloat16, kBfloat16 };

  HOST_DEVICE constexpr FloatArray() {}
  HOST_DEVICE constexpr FloatArray(float* data) : data_(data) {}  // NOLINT: implicit
  HOST_DEVICE constexpr FloatArray(uint16_t* data, Kind kind) : data_(data), kind_(kind) {}

  HOST_DEVICE Kind kind() const { return kind_; }
  HOST_DEVICE bool is_float32() const { return kind_ == Kind::kFloat32; }
  HOST_DEVICE int bytes() const { return is_float32() ? 4 : 2; }  // of a number
  HOST_DEVICE void* data() const { return data_; }
  HOST_DEVICE float* float32() const { return static_cast<float*>(data_); }       // of that kind only
  HOST_DEVICE uint16_t* bits16() const { return static_cast<uint16_t*>(data_); }  // of the others

  HOST_DEVICE float operator[](int64_t i) const {
    if (is_float32()) return float32()[i];
    return kind_ == Kind::kFloat16 ? math::from_float16(bits16()[i]) : math::from_bfloat16(bits16()[i]);
  }
  // Rounds by 16 bits of `random`, where there is something to round.
  HOST_DEVICE void set(int64_t i, float value, uint32_t random) const {
    if (is_float32())
      float32()[i] = value;
    else
      bits16()[i] =
          kind_ == Kind::kFloat16 ? math::to_float16(value, random) : math::to_bfloat16(value, random);
  }

 private:
  void* data_ = nullptr;
  Kind kind_ = Kind::kFloat32;
};

// Row-major: means [N,3], quats [N,4] wxyz, scales [N,3] log, opacities [N] logit, sh0 [N,3], shN
// [N,sh_rest,3]; shN in float32 or float16.
struct SplatColumns {
  float *means, *quats, *scales, *opacities, *sh0;
  FloatArray shN;
  int64_t num_rows;
  int sh_rest;  // 0, 3, 8 or 15: bands above the constant one
};

// A table's rows over the shards of the mesh: as its means were placed (memory/homes.h).
inline std::vector<RowRange> homes_of(const SplatColumns& columns) {
  return row_homes(columns.means, columns.num_rows);
}

// Optimizer state of a table, and what is needed to replay missed steps. All pointers may be null (no
// replay).
struct AdamState {
  FloatArray exp_avg[kColumns];  // all in float32, or all in bfloat16
  float* exp_avg_sq[kColumns];
  int32_t* last_step;  // last_step[row]: steps already applied to the row
};

// Steps base+1 .. now; made and kept by History (splat/history.h). Arrays per step have length now - base,
// index j - base - 1; arrays per last step l = base .. now have one more, index l - base.
struct AdamHistory {
  int64_t base, now;
  double beta1, beta2;
  float eps;
  const float* step_size[kColumns];     // lr_j / (1 - beta1^j)
  const float* inv_sqrt_bc2;            // 1 / sqrt(1 - beta2^j)
  const math::TwoSteps* two[kColumns];  // by l: the steps after l in two
  const float* closed_from;             // by l: second moment from which these hold
  float max_step_size[kColumns];        // of the steps held
  const float* beta1_power;             // beta1^k, k = 0 .. now - base
  const float* beta2_power;             // beta2^k
  const float* noise_var;               // prefix sums of the squared MCMC noise scale, by l; null: no noise
  uint64_t seed;
};

}  // namespace mgpu::splat
