// SPDX-License-Identifier: Apache-2.0
// homes.h: which shard is home to which rows of a tensor, once somebody has said so (torch.mgpu.place_rows).
// Stages ask it of the means of a splat table.
#pragma once
#include <cstdint>
#include <vector>

#include "mesh/mesh.h"

namespace mgpu {

// `homes`: ascending ranges without gaps from row 0 on, one a shard of the mesh, some perhaps empty. Holds
// for the tensor at `address` until it is said anew or forgotten. Thread-safe, as all here.
void set_row_homes(const void* address, std::vector<RowRange> homes);

// Homes of `rows` rows: as said, stretched if the tensor has more or fewer rows by now; else equal chunks.
std::vector<RowRange> row_homes(const void* address, int64_t rows);

// Whether somebody has said so.
bool has_row_homes(const void* address);

// The memory at `address` is free (called by the pool).
void forget_row_homes(const void* address) noexcept;

}  // namespace mgpu
