// SPDX-License-Identifier: Apache-2.0
// row_measure.h: how well the rows of a table are in order: how wide runs of neighbouring rows are, and how
// often the next row lies in another voxel. One pass over the means; the same on any mesh.
#pragma once
#include <cstdint>

#include "splat/row_cube.h"

namespace mgpu::splat {

constexpr int64_t kRunRows = 256;
constexpr int kLevels = math::kCurveBits + 1;  // voxels of level l are 2^-l of the cube's side wide

struct RowMeasure {
  RowCube cube;
  int64_t finite_rows;
  // Runs (RowRuns) with a finite mean, and the sum over them of their boxes' three sides, in cells of the
  // cube.
  int64_t runs, run_cells;
  // Of rows whose next one lies in another voxel of level l, but in the same of level l - 1: all, and those
  // whose next row comes before them along the curve. Rows that are not finite do not count.
  int64_t changes[kLevels], descents[kLevels];
};

// How rows are cut into runs of kRunRows, but for the first and the last one, which may be shorter.
struct RowRuns {
  int64_t first = kRunRows;  // rows of the first run, 1 to kRunRows

  HOST_DEVICE int64_t begin(int64_t run) const { return run == 0 ? 0 : first + (run - 1) * kRunRows; }
  // The first run that begins at a row or after it.
  HOST_DEVICE int64_t from(int64_t row) const {
    return row <= 0 ? 0 : row <= first ? 1 : 1 + (row - first + kRunRows - 1) / kRunRows;
  }
};

RowMeasure measure_rows(const SplatColumns& columns, RowRuns runs = {});

// The level at which two rows part, 1 to 21; 0: in no voxel.
HOST_DEVICE inline int parting_level(uint64_t key, uint64_t other) {
  const uint64_t differ = key ^ other;
  if (differ == 0) return 0;
  int bit = 0;
  for (int step = 32; step > 0; step /= 2)
    if (differ >> (bit + step) != 0) bit += step;
  return math::kCurveBits - bit / 3;
}

}  // namespace mgpu::splat
