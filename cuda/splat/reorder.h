// SPDX-License-Identifier: Apache-2.0
// reorder.h: rows that are close in space close in memory: in the order of their means along a Hilbert curve.
//
// Neighbours on the screen then read neighbouring cache lines, any run of rows is one region of space, and so
// are a shard's rows. The curve visits a voxel as a whole before the next one, whatever the voxels' size: the
// cube's side by a power of two. The order does not depend on the mesh.
#pragma once
#include "splat/columns.h"
#include "splat/gather.h"
#include "splat/row_cube.h"

namespace mgpu::splat {

// Where rows go: ascending by row_key(); rows with equal keys keep their order.
RowMap hilbert_order(const SplatColumns& columns);

}  // namespace mgpu::splat
