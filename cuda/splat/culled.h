// SPDX-License-Identifier: Apache-2.0
// culled.h: what culling left of the rows, summed over the frames that links.h counts.
#pragma once
#include "splat/frame.h"

namespace mgpu::splat {

// Over all shards and frames since the process began or reset_link_totals() was called.
CullCounts cull_totals();

}  // namespace mgpu::splat
