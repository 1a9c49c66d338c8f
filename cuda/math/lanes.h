// SPDX-License-Identifier: Apache-2.0
// lanes.h: what the per-pixel functions of tile.h need of their number type F: `float` (one thread of the
// CUDA flavour, one pixel in a test) or `Lanes`, eight pixels in one register of the host flavour. Every
// operation acts on each lane alone, so a pixel's value does not depend on the lane it is in. Explicit
// vectors, because GCC 12 gives up on the same loops written lane by lane (a select on a computed mask).
#pragma once
#include <cstdint>
#include <cstring>

#include "math/host_device.h"

namespace mgpu::math {

HOST_DEVICE inline float select(bool condition, float yes, float no) { return condition ? yes : no; }
HOST_DEVICE inline int32_t select(bool condition, int32_t yes, int32_t no) { return condition ? yes : no; }

HOST_DEVICE inline float absolute(float x) { return x < 0.f ? -x : x; }

// p * 2^n, where `shifted` holds the integer n in its low bits (see exp_negative); p must stay a normal
// number.
HOST_DEVICE inline float scale_by_exponent(float p, float shifted) {
  uint32_t bits, exponent;
  std::memcpy(&bits, &p, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

#if !defined(__CUDACC__)

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // all of these are inlined; no call passes a vector

constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));  // also the masks: -1 true, 0 false
typedef uint32_t UintLanes __attribute__((vector_size(4 * kLanes)));

[[gnu::always_inline]] inline Lanes select(IntLanes condition, Lanes yes, Lanes no) {
  return condition ? yes : no;
}
[[gnu::always_inline]] inline IntLanes select(IntLanes condition, IntLanes yes, IntLanes no) {
  return condition ? yes : no;
}

[[gnu::always_inline]] inline Lanes absolute(Lanes x) { return (Lanes)((UintLanes)x & 0x7fffffffu); }

[[gnu::always_inline]] inline Lanes scale_by_exponent(Lanes p, Lanes shifted) {
  return (Lanes)((UintLanes)p + ((UintLanes)shifted << 23));
}

[[gnu::always_inline]] inline Lanes load_lanes(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
[[gnu::always_inline]] inline IntLanes load_lanes(const int32_t* from) {
  IntLanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
[[gnu::always_inline]] inline void store_lanes(float* to, Lanes lanes) {
  std::memcpy(to, &lanes, sizeof lanes);
}
[[gnu::always_inline]] inline void store_lanes(int32_t* to, IntLanes lanes) {
  std::memcpy(to, &lanes, sizeof lanes);
}

[[gnu::always_inline]] inline float sum_lanes(Lanes v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#pragma GCC diagnostic pop

#endif  // host only

}  // namespace mgpu::math
