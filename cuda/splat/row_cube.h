// SPDX-License-Identifier: Apache-2.0
// row_cube.h: the cube around a table's means, in 2^21 cells an axis, and a row's place along the Hilbert
// curve through them (math/hilbert.h).
//
// A few rows far out must not make the cells coarse: where the box of all finite means is much wider than the
// box of all but a thousandth at each end of each axis, the cube follows the latter, and rows outside count
// to the cells at its faces. The cube is the same whatever the order of the rows and the mesh, and its sides
// lie on a lattice, so that it seldom changes while means move a little.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "math/hilbert.h"
#include "math/host_device.h"
#include "memory/buffer.h"
#include "splat/columns.h"

namespace mgpu::splat {

struct RowCube {
  double low[3];  // world
  double side;    // world; a multiple of a power of two; 0: all means are in one place
};

// Of the finite means of a table: one element, which every shard may read.
Buffer<RowCube> row_cube(const SplatColumns& columns);

// ---- one row

constexpr uint64_t kNowhere = uint64_t{1} << 63;  // key of a mean that is not finite: behind all others

HOST_DEVICE inline bool is_finite_mean(const float mean[3]) {
  return std::isfinite(mean[0]) && std::isfinite(mean[1]) && std::isfinite(mean[2]);
}

// Doubles: the same cell everywhere.
HOST_DEVICE inline void row_cell(const RowCube& cube, const float mean[3], uint32_t cell[3]) {
  constexpr double kCells = int64_t{1} << math::kCurveBits;
  const double cells = cube.side > 0.0 ? kCells / cube.side : 0.0;  // a world unit
  for (int axis = 0; axis < 3; ++axis) {
    const double place = (mean[axis] - cube.low[axis]) * cells;
    cell[axis] = static_cast<uint32_t>(place <= 0.0 ? 0.0 : place < kCells - 1.0 ? place : kCells - 1.0);
  }
}

HOST_DEVICE inline uint64_t row_key(const RowCube& cube, const float mean[3]) {
  if (!is_finite_mean(mean)) return kNowhere;
  uint32_t cell[3];
  row_cell(cube, mean, cell);
  return math::hilbert_code(cell);
}

// ---- from means to the cube

// Floats as integers in the same order, and back.
HOST_DEVICE inline uint32_t ordered_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
HOST_DEVICE inline float from_ordered_bits(uint32_t ordered) {
  const uint32_t bits = ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A bin of coordinates: those with equal sign, exponent and first two bits of the mantissa.
constexpr int kCoordinateBins = 2048;
constexpr int kBinShift = 21;
HOST_DEVICE inline float bin_low(int bin) {
  return from_ordered_bits(static_cast<uint32_t>(bin) << kBinShift);
}
HOST_DEVICE inline float bin_high(int bin) {
  return from_ordered_bits(static_cast<uint32_t>(bin) << kBinShift | ((uint32_t{1} << kBinShift) - 1));
}

// What is gathered of a set of means, and added up over sets.
struct MeansSummary {
  uint32_t least[6];  // ordered bits: of the three axes, and of their negatives (~); all ones: no row
  uint32_t rows[3][kCoordinateBins];
};

constexpr int64_t kFarRows = 1000;  // one in so many at each end may be far out

// The box of all means (low[axis] > high[axis] if there are none) and the one without the rows far out.
HOST_DEVICE inline RowCube cube_around(const float low[3], const float high[3], const float inner_low[3],
                                       const float inner_high[3]) {
  RowCube cube{};
  if (!(low[0] <= high[0])) return cube;
  double margin = 0.0;
  for (int axis = 0; axis < 3; ++axis) {
    const double side = static_cast<double>(inner_high[axis]) - inner_low[axis];
    if (side > margin) margin = side;
  }
  double extent = 0.0, from[3];
  for (int axis = 0; axis < 3; ++axis) {
    const double least = inner_low[axis] - margin, most = inner_high[axis] + margin;
    from[axis] = low[axis] > least ? low[axis] : least;
    const double to = high[axis] < most ? high[axis] : most;
    if (to - from[axis] > extent) extent = to - from[axis];
  }
  for (int axis = 0; axis < 3; ++axis) cube.low[axis] = from[axis];
  if (extent == 0.0) return cube;
  int exponent;
  std::frexp(extent, &exponent);
  const double step = std::ldexp(1.0, exponent - 4);  // extent is 8 to 16 of them
  for (int axis = 0; axis < 3; ++axis) cube.low[axis] = std::floor(from[axis] / step) * step;
  cube.side = (std::ceil(extent / step) + 1.0) * step;
  return cube;
}

}  // namespace mgpu::splat
