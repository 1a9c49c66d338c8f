// SPDX-License-Identifier: Apache-2.0
// row_source.h: a shard's rows as the kernels of projection and its adjoint read them.
#pragma once
#include "splat/kernels.h"
#include "splat/project.h"

namespace mgpu::splat {

struct RowSource {
  SplatColumns columns;
  AdamState state;
  AdamHistory history;
  bool replays;
  RenderSettings settings;
  const View* views;
  int num_views;
  RowRange rows;

  __device__ const AdamState* state_or_null() const { return replays ? &state : nullptr; }
  __device__ const AdamHistory* history_or_null() const { return replays ? &history : nullptr; }
};

inline RowSource row_source(const Frame& frame, int shard) {
  const ShardConstants& constants = frame.constants[static_cast<size_t>(shard)];
  return {frame.columns,
          frame.state,
          constants.history,
          frame.replays,
          frame.settings,
          constants.views,
          static_cast<int>(frame.views.size()),
          frame.homes[static_cast<size_t>(shard)]};
}

}  // namespace mgpu::splat
