// SPDX-License-Identifier: Apache-2.0
// half.h: floats of 16 bits, the same bits in both flavours. Reading is exact; writing rounds stochastically:
// up with the probability of the part that is cut off, so that what is too small for one step adds up over
// many.
#pragma once
#include <cstdint>
#include <cstring>

#include "math/host_device.h"

namespace mgpu::math {

HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
HOST_DEVICE inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// ---- bfloat16: the upper half of a float, with its range. For first moments: gradients go from 1e-16 to
// 1e-1.

HOST_DEVICE inline float from_bfloat16(uint16_t stored) {
  return float_of(static_cast<uint32_t>(stored) << 16);
}

// `random`: 16 bits.
HOST_DEVICE inline uint16_t to_bfloat16(float value, uint32_t random) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7f800000u) == 0x7f800000u)  // infinite, or no number: which it stays
    return static_cast<uint16_t>(bits >> 16 | ((bits & 0xffffu) != 0 ? 1u : 0u));
  const uint32_t rounded = bits + (random & 0xffffu);
  return static_cast<uint16_t>(((rounded & 0x7f800000u) == 0x7f800000u ? bits : rounded) >> 16);
}

// ---- float16: eleven digits, up to 65,504, evenly spaced by 6e-8 below 6e-5. For SH coefficients: small
// numbers whose absolute error counts.

HOST_DEVICE inline float from_float16(uint16_t stored) {
  const float value = float_of((stored & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t sign = static_cast<uint32_t>(stored & 0x8000u) << 16;
  return float_of(sign | bits_of(value) | ((stored & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u));
}

// `random`: 16 bits. What is too large becomes the largest number.
HOST_DEVICE inline uint16_t to_float16(float value, uint32_t random) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size >= 0x7f800000u) return static_cast<uint16_t>(sign | (size > 0x7f800000u ? 0x7e00u : 0x7c00u));
  if (size < 0x38800000u) {  // below 2^-14: multiples of 2^-24; sizes are exact in float
    const float steps = float_of(size) * 0x1p24f;
    const uint32_t whole = static_cast<uint32_t>(steps);
    const bool up =
        static_cast<uint32_t>((steps - static_cast<float>(whole)) * 65536.0f) > (random & 0xffffu);
    return static_cast<uint16_t>(sign | (whole + (up ? 1u : 0u)));
  }
  const uint32_t rounded = (size + (random & 0x1fffu)) >> 13;  // exponent and ten digits
  constexpr uint32_t kBias = (127u - 15u) << 10, kLargest = 0x7bffu;
  const uint32_t stored = rounded - kBias;
  return static_cast<uint16_t>(sign | (stored > kLargest ? kLargest : stored));
}

}  // namespace mgpu::math
