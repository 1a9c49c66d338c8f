// SPDX-License-Identifier: Apache-2.0
// hilbert.h: places of the cells of a cube along two space-filling curves, 21 bits an axis. Codes are those
// of fvdb.Grid: Morton has x in the lowest bit; Hilbert is Skilling's curve ("Programming the Hilbert curve",
// AIP Conf. Proc. 707, 2004), x first. A cell's code without its last 3 k bits is that of the cell, 2^k times
// as wide, that it lies in.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace mgpu::math {

constexpr int kCurveBits = 21;  // an axis

// The low 21 bits of x, two zeros between neighbours.
HOST_DEVICE inline uint64_t spread_bits(uint64_t x) {
  x &= 0x1fffff;
  x = (x | x << 32) & 0x001f00000000ffffull;
  x = (x | x << 16) & 0x001f0000ff0000ffull;
  x = (x | x << 8) & 0x100f00f00f00f00full;
  x = (x | x << 4) & 0x10c30c30c30c30c3ull;
  x = (x | x << 2) & 0x1249249249249249ull;
  return x;
}

// The inverse: every third bit of x, from the lowest on.
HOST_DEVICE inline uint32_t gather_bits(uint64_t x) {
  x &= 0x1249249249249249ull;
  x = (x | x >> 2) & 0x10c30c30c30c30c3ull;
  x = (x | x >> 4) & 0x100f00f00f00f00full;
  x = (x | x >> 8) & 0x001f0000ff0000ffull;
  x = (x | x >> 16) & 0x001f00000000ffffull;
  x = (x | x >> 32) & 0x1fffff;
  return static_cast<uint32_t>(x);
}

HOST_DEVICE inline uint64_t morton_code(const uint32_t cell[3]) {
  return spread_bits(cell[0]) | spread_bits(cell[1]) << 1 | spread_bits(cell[2]) << 2;
}

// What a bit of an axis does to all lower bits: set, it inverts those of x; clear, it exchanges them with
// those of x. Its own inverse.
HOST_DEVICE inline void hilbert_turn(uint32_t axes[3], int bit, int axis) {
  const uint32_t lower = (uint32_t{1} << bit) - 1;
  const uint32_t set = 0u - (axes[axis] >> bit & 1u);
  const uint32_t change = (set | (axes[0] ^ axes[axis])) & lower;
  axes[0] ^= change;
  axes[axis] ^= change & ~set;
}

// Of a cell with coordinates below 2^21; below 2^63.
HOST_DEVICE inline uint64_t hilbert_code(const uint32_t cell[3]) {
  uint32_t axes[3] = {cell[0], cell[1], cell[2]};
  for (int bit = kCurveBits - 1; bit > 0; --bit) {
    // for x itself there is nothing to exchange
    axes[0] ^= (0u - (axes[0] >> bit & 1u)) & ((uint32_t{1} << bit) - 1);
    hilbert_turn(axes, bit, 1);
    hilbert_turn(axes, bit, 2);
  }
  uint64_t code = spread_bits(axes[0]) << 2 | spread_bits(axes[1]) << 1 | spread_bits(axes[2]);
  for (int shift = 1; shift < 64; shift *= 2) code ^= code >> shift;  // from Gray code
  return code;
}

// The inverse.
HOST_DEVICE inline void hilbert_cell(uint64_t code, uint32_t cell[3]) {
  const uint64_t gray = code ^ code >> 1;
  cell[0] = gather_bits(gray >> 2);
  cell[1] = gather_bits(gray >> 1);
  cell[2] = gather_bits(gray);
  for (int bit = 1; bit < kCurveBits; ++bit) {
    hilbert_turn(cell, bit, 2);
    hilbert_turn(cell, bit, 1);
    cell[0] ^= (0u - (cell[0] >> bit & 1u)) & ((uint32_t{1} << bit) - 1);
  }
}

}  // namespace mgpu::math
