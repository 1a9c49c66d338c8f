// SPDX-License-Identifier: Apache-2.0
// step_check.h: which frames a step takes; both flavours.
#pragma once
#include <vector>

#include "splat/columns.h"
#include "splat/frame.h"
#include "splat/history.h"

namespace mgpu::splat {

// Throws std::invalid_argument, naming the frame, unless all are of this table as it is now and at the
// history's step, have gradients, and agree on the homes.
void check_frames(const std::vector<const Frame*>& frames, const SplatColumns& columns,
                  const History& history);

}  // namespace mgpu::splat
