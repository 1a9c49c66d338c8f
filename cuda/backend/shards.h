// SPDX-License-Identifier: Apache-2.0
// shards.h: run torch's own kernels on the shards: fork, join, and the thread-local state that they need
// (shards_host.cpp, shards_cuda.cpp).
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>

#include "mesh/mesh.h"

namespace mgpu {

// A sharded operator is issued once for each part: a shard, or neighbouring shards that lie on one GPU. Parts
// cover the shards in order.
int part_count();
// A part's share of `count` items that are dealt to the shards in equal chunks.
RowRange part_range(int64_t count, int part);
// True if one ordinary call of the backing kernel does the work of all shards: on one GPU.
bool one_part_runs_whole();
// False: every shard is a part of its own, also on one GPU. For tests of the multi-GPU path.
void set_parts_merged(bool merged);

// torch's index of the GPU of the part that this thread works on; -1 outside a part, on the lead shard's GPU,
// and on the host.
inline thread_local int part_gpu = -1;
// The backing device that a part's kernels run on.
c10::Device part_device();

// Run `work(part)` for every part and, on the host, wait. Inside, autograd is off, and on the host kernels do
// not start threads of their own (the shards are the threads). The exception of the lowest part comes out
// with its own type. On a mesh of one shard the caller runs it, with all of torch's threads.
void run_on_parts(const std::function<void(int part)>& work);

// True if a tensor's elements fill at least the sharding threshold.
bool is_large(const at::Tensor& tensor);
// The same for any tensor among an operator's arguments (mgpu tensors, also in lists).
bool any_large(const torch::jit::Stack& stack, size_t arguments);

}  // namespace mgpu
