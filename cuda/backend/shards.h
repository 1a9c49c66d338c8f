// SPDX-License-Identifier: Apache-2.0
// shards.h: run torch's own kernels on the shards: fork, join, and the thread-local state that they need.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>

namespace mgpu {

// Run `work(shard)` for every shard at once and wait. Inside, autograd is off and kernels do not start
// threads of their own (the shards are the threads). The exception of the lowest shard comes out with its own
// type. On a mesh of one shard the caller runs it, with all of torch's threads.
void run_on_shards(const std::function<void(int shard)>& work);

// True if a tensor's elements fill at least the sharding threshold.
bool is_large(const at::Tensor& tensor);
// The same for any tensor among an operator's arguments (mgpu tensors, also in lists).
bool any_large(const torch::jit::Stack& stack, size_t arguments);

}  // namespace mgpu
