// SPDX-License-Identifier: Apache-2.0
// launch.h: what a kernel file needs to launch on a shard: its GPU, its stream, named errors. CUDA flavour
// only; no torch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "mesh/fork_join.h"
#include "mesh/gate.h"
#include "mesh/mesh.h"

namespace mgpu {

// ---- a shard's GPU and stream

// The GPU that the shard lies on, by its number in the mesh: for whatever is kept by GPU, and for the order
// between GPUs. Throws std::invalid_argument if it lies on none.
int shard_gpu(int shard);
// The same as CUDA's ordinal: the number in its name ("cuda:2"). They differ where GPUs are apart (mesh.h).
int shard_device(int shard);

// The stream that work of the shard goes to. Shards on one GPU share it, so they need no joining. By default
// one non-default stream a GPU, made when first asked for; the backend installs a provider that knows torch's
// streams.
// Ask for it, and launch, in one turn (gate.h). Asking counts as giving it work, which join_shards() then
// makes the other GPUs wait for: ask anew after a join.
cudaStream_t shard_stream(int shard);
// The same, for whoever gives it no work that another GPU could see.
cudaStream_t quiet_stream(int shard);

// A thread launches on one set of streams at a time, a stream on each GPU, and joins are within the set.
constexpr int kStreamSets = 64;
struct StreamProvider {
  cudaStream_t (*stream)(int gpu) = nullptr;  // of the calling thread's set
  int (*set)() = nullptr;                     // which that is, from 0 on
};
// Before the first stage.
void set_stream_provider(const StreamProvider& provider);

// Every GPU's stream waits for what the others have been given so far. By events: the host does not wait.
// Free on a mesh with one GPU, and where nothing was given since the latest join.
void join_shards();

// Around a public operator whose first or last stage is local: its operands may come from any GPU, its
// results go to any. One turn (gate.h). Joins after an exception, too: buffers that other GPUs still use are
// free by then.
class JoinedOperator {
 public:
  JoinedOperator() { join_shards(); }
  ~JoinedOperator() noexcept(false);
  JoinedOperator(const JoinedOperator&) = delete;
  JoinedOperator& operator=(const JoinedOperator&) = delete;

 private:
  const LaunchScope turn_;
};

// The host waits for all shards' streams, or for one; nobody needs to be joined to what it waited for.
void synchronise_shards();
void synchronise_shard(int shard);
// What a thread notes whose lanes (lanes.h) have waited for the shard's stream. Lanes note nothing: another
// lane may have asked for this very stream, and launch after the wait.
void host_has_waited_for(int shard);

// Makes a GPU current, and the former one again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int gpu);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

// ---- errors

// Throws std::bad_alloc for cudaErrorMemoryAllocation, std::runtime_error with `what` for any other error.
void check_cuda(cudaError_t code, const char* what);
// For a launch just made: the text names stage, shard and rows.
void check_kernel(const char* stage, int shard, int64_t rows);

#define CUDA_CHECK(call) ::mgpu::check_cuda((call), #call)
#define KERNEL_CHECK(stage, shard, rows) ::mgpu::check_kernel((stage), (shard), (rows))

// ---- launch shapes

// Blocks of `threads` for `count` items; callers skip the launch when it is 0.
inline unsigned blocks_for(int64_t count, int threads) {
  return static_cast<unsigned>((count + threads - 1) / threads);
}

}  // namespace mgpu
