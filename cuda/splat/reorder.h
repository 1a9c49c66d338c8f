// SPDX-License-Identifier: Apache-2.0
// reorder.h: rows that are close in space close in memory: the order of their means along a Morton curve.
//
// Neighbours on the screen then read neighbouring cache lines, and a shard's rows are one region of space.
// The order does not depend on the mesh.
#pragma once
#include <cmath>
#include <cstdint>

#include "math/host_device.h"
#include "splat/columns.h"
#include "splat/gather.h"

namespace mgpu::splat {

// Where rows go: ascending by key; rows with equal keys keep their order.
RowMap morton_order(const SplatColumns& columns);

// ---- the key of one row

constexpr int kMortonBits = 21;                   // an axis
constexpr uint64_t kNowhere = uint64_t{1} << 63;  // key of a mean that is not finite: behind all others

// The smallest box around all finite means, as the cube that keys divide.
struct MortonCube {
  double low[3];
  double cells;  // a world unit; 0 if the cube has no extent
};
HOST_DEVICE inline MortonCube morton_cube(const float low[3], const float high[3]) {
  MortonCube cube{};
  double extent = 0.0;
  for (int axis = 0; axis < 3; ++axis) {
    cube.low[axis] = low[axis];
    const double side = static_cast<double>(high[axis]) - low[axis];
    if (side > extent) extent = side;
  }
  cube.cells = extent > 0.0 ? (1 << kMortonBits) / extent : 0.0;
  return cube;
}

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

HOST_DEVICE inline bool is_finite_mean(const float mean[3]) {
  return std::isfinite(mean[0]) && std::isfinite(mean[1]) && std::isfinite(mean[2]);
}

HOST_DEVICE inline uint64_t morton_key(const MortonCube& cube, const float mean[3]) {
  if (!is_finite_mean(mean)) return kNowhere;
  uint64_t key = 0;
  for (int axis = 0; axis < 3; ++axis) {
    const double cell =
        (mean[axis] - cube.low[axis]) * cube.cells;  // 0 .. 2^21; doubles: the same everywhere
    const int64_t inside = static_cast<int64_t>(cell);
    constexpr int64_t kLast = (int64_t{1} << kMortonBits) - 1;
    key |= spread_bits(static_cast<uint64_t>(inside < kLast ? inside : kLast)) << axis;
  }
  return key;
}

}  // namespace mgpu::splat
