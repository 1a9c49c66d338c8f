// SPDX-License-Identifier: Apache-2.0
// random.h: random numbers that depend on (seed, step, row) alone, so that any mesh and any order draws the
// same.
//
// Philox4x32-10: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), table 2 and section 4.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/vec.h"

namespace mgpu::math {

// What a draw is for: streams of the same seed never meet.
enum class Stream : uint32_t { kNoise = 1, kSample = 2, kSplit = 3, kRounding = 4 };

struct Random4 {
  uint32_t x[4];
};

// Ten rounds of Philox4x32 on the 128-bit counter under the 64-bit key.
HOST_DEVICE inline Random4 philox4x32(Random4 counter, uint64_t key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * counter.x[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * counter.x[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.x[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.x[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// The draw of one item (a row, or the number of a sample) at one step. Steps are taken modulo 2^24... 2^32
// - 1.
HOST_DEVICE inline Random4 draw(uint64_t seed, Stream stream, int64_t step, int64_t item) {
  return philox4x32({{static_cast<uint32_t>(item), static_cast<uint32_t>(static_cast<uint64_t>(item) >> 32),
                      static_cast<uint32_t>(step), static_cast<uint32_t>(stream)}},
                    seed);
}

// Bits to round a row's numbers with, sixteen each: those of the higher SH's float k are of call k % 16, word
// k / 16; of the float k before them (means to sh0) of call 16 + k / 4, word k % 4. The lower half of a word
// is the parameter's, the upper the first moment's.
HOST_DEVICE inline Random4 draw_rounding(uint64_t seed, int64_t step, int64_t row, int call) {
  return philox4x32({{static_cast<uint32_t>(row), static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32),
                      static_cast<uint32_t>(step),
                      static_cast<uint32_t>(Stream::kRounding) | static_cast<uint32_t>(call) << 8}},
                    seed);
}

// Uniform in (0, 1), never an end.
HOST_DEVICE inline float unit_float(uint32_t bits) {
  return (static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f;
}

// Cosine and sine of a part of a full turn. On the GPU without the range reduction of std::cos, which needs a
// stack.
HOST_DEVICE inline void cos_sin_of_turn(float turn, float& cosine, float& sine) {
#if defined(__CUDA_ARCH__)
  sincospif(2.0f * turn, &sine, &cosine);
#else
  constexpr float kTwoPi = 6.28318530717958647692f;
  cosine = std::cos(kTwoPi * turn);
  sine = std::sin(kTwoPi * turn);
#endif
}

// Three independent standard normals (Box-Muller).
HOST_DEVICE inline void normal3(const Random4& random, float normal[3]) {
  const float radius0 = std::sqrt(-2.0f * std::log(unit_float(random.x[0])));
  const float radius1 = std::sqrt(-2.0f * std::log(unit_float(random.x[2])));
  float cosine, sine;
  cos_sin_of_turn(unit_float(random.x[1]), cosine, sine);
  normal[0] = radius0 * cosine;
  normal[1] = radius0 * sine;
  cos_sin_of_turn(unit_float(random.x[3]), cosine, sine);
  normal[2] = radius1 * cosine;
}

// The exploration noise of 3DGS-MCMC (Kheradmand et al. 2024, section 3.2) added to a mean:
// covariance * normal * gate * sigma, where the gate closes for opaque Gaussians. `sigma` is lr * noise_lr,
// or the root of the sum of its squares over several steps.
HOST_DEVICE inline void add_mcmc_noise(const Random4& random, float sigma, const float quat[4],
                                       const float log_scale[3], float opacity_logit, float mean[3]) {
  constexpr float kGateSlope = 100.0f, kGateOpacity = 0.005f;  // 1 - 0.995 of the paper's code
  const float opacity = 1.0f / (1.0f + std::exp(-opacity_logit));
  const float gate = 1.0f / (1.0f + std::exp(kGateSlope * (opacity - kGateOpacity)));
  const float inv_norm =
      1.0f / std::sqrt(quat[0] * quat[0] + quat[1] * quat[1] + quat[2] * quat[2] + quat[3] * quat[3]);
  const float unit[4] = {quat[0] * inv_norm, quat[1] * inv_norm, quat[2] * inv_norm, quat[3] * inv_norm};
  float rotation[9];
  rotation_from_unit_quat(unit, rotation);
  float normal[3], local[3], noise[3];
  normal3(random, normal);
  mat3_transposed_mul(rotation, normal, local);
  for (int axis = 0; axis < 3; ++axis) {
    const float scale = std::exp(log_scale[axis]);
    local[axis] *= scale * scale * gate * sigma;
  }
  mat3_mul(rotation, local, noise);
  // A zero quaternion or an overflowing scale has no noise rather than a NaN that would kill the row.
  const bool finite = std::isfinite(noise[0]) && std::isfinite(noise[1]) && std::isfinite(noise[2]);
  for (int axis = 0; axis < 3; ++axis) mean[axis] += finite ? noise[axis] : 0.0f;
}

}  // namespace mgpu::math
