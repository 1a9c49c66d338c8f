// SPDX-License-Identifier: Apache-2.0
// reorder.h: rows that are close in space close in memory: in the order of their means along a Hilbert curve.
//
// Neighbours on the screen then read neighbouring cache lines, any run of rows is one region of space, and so
// are a shard's rows. The curve visits a voxel as a whole before the next one, whatever the voxels' size: the
// cube's side by a power of two. The order does not depend on the mesh.
//
// A sequence in that order can be dealt in stretches, so that each of several ranges of rows has a part of
// every region: what one camera sees is then at home on all shards.
#pragma once
#include <cstdint>
#include <vector>

#include "math/host_device.h"
#include "mesh/mesh.h"
#include "splat/columns.h"
#include "splat/gather.h"
#include "splat/row_cube.h"

namespace mgpu::splat {

// Who gets which part of a sequence: in each of `rounds` rounds every range takes its next stretch of it, the
// first range first. A range's stretches are of one length, but for the rounding of their ends.
struct RowDeal {
  static constexpr int64_t kUnit = 256;  // rows: a stretch begins at a multiple, so no cell has rows of two

  RowRange
      range[mgpu::kMaxShards];  // ascending, without gaps; they begin at multiples of kUnit, or are empty
  int ranges = 0;
  int64_t rounds = 0;

  // Rows that a range of so many has taken before a round.
  HOST_DEVICE int64_t taken(int64_t rows, int64_t round) const {
    const int64_t end = (rows * round / rounds + kUnit / 2) / kUnit * kUnit;
    return round == rounds || end > rows ? rows : end;
  }

  // Place in the sequence of what comes to lie at `row`. Consecutive within a unit.
  HOST_DEVICE int64_t rank(int64_t row) const {
    int own = 0;
    while (row >= range[own].end) ++own;
    const int64_t rows = range[own].size(), inside = row - range[own].begin;
    int64_t round = inside * rounds / rows;  // but for the rounding
    while (taken(rows, round + 1) <= inside) ++round;
    while (taken(rows, round) > inside) --round;
    int64_t rank = inside - taken(rows, round);
    for (int other = 0; other < ranges; ++other)
      rank += taken(range[other].size(), other < own ? round + 1 : round);
    return rank;
  }
};

// Stretches of at most `stripe_rows` rows, but for the rounding. Throws std::invalid_argument unless `ranges`
// are as in RowDeal and end at row `num_rows`, and there are 1 to kMaxShards of them.
RowDeal row_deal(const std::vector<RowRange>& ranges, int64_t stripe_rows, int64_t num_rows);

// Where rows go: ascending by row_key(); rows with equal keys keep their order. With a deal, the sequence in
// this order is dealt so; whose ranges need not be the homes of the mesh.
RowMap hilbert_order(const SplatColumns& columns, const RowDeal* deal = nullptr);

}  // namespace mgpu::splat
