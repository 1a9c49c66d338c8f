// SPDX-License-Identifier: Apache-2.0
// pipeline.h: the stages in their order: a table of contents of one render and its way back.
#pragma once
#include <functional>

#include "splat/blend.h"
#include "splat/frame.h"
#include "splat/project.h"

namespace mgpu::splat {

// Does the work of a stage and notes how long it took in frame.times. CUDA flavour: what the call took; with
// MGPU_STAGE_TIMES=1 the GPUs, for which the host waits around each stage; with MGPU_STAGE_TIMES=host the
// host, its waits for read-backs apart, as stage "wait".
void run_stage(Frame& frame, const char* stage, const std::function<void()>& work);

// Stage 2 alone. The frame has views, settings, columns (and state, history) and homes.
void run_project(Frame& frame);

// Stages 2 to 6 without the loss, into `images` [views]; or into what `images` makes when it is known who
// blends what, as Frame::images.
void run_forward(Frame& frame, const std::vector<ImagePointers>& images);
void run_forward(Frame& frame, const std::function<std::vector<ImagePointers>()>& images);

// Stages 7 and 8: fills frame.shards[*].grad. `grads` has as many entries as Frame::images.
void run_backward(Frame& frame, const std::vector<ImageGradPointers>& grads);

}  // namespace mgpu::splat
