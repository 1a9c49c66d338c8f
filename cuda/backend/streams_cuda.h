// SPDX-License-Identifier: Apache-2.0
// streams_cuda.h: an mgpu stream is one CUDA stream on every GPU of the mesh. Stream 0 is where everything
// runs unless said otherwise; like all others it is a non-default CUDA stream.
#pragma once
#include <c10/core/Stream.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <vector>

#include "mesh/launch.h"
#include "mesh/mesh.h"

namespace mgpu {

// ---- streams

constexpr int kStreams = 33;  // stream 0, and as many others as torch's own pool has on a GPU
static_assert(kStreams <= kStreamSets);

// The CUDA streams of an mgpu stream, in the order of mesh_gpus(). Throws if there is no such stream.
const std::vector<c10::cuda::CUDAStream>& streams_of(c10::StreamId id);
// Another stream than the last call's; they repeat after kStreams - 1.
c10::StreamId next_stream();

// The calling thread's mgpu stream. A thread starts with stream 0, made to wait for what the thread gave CUDA
// before.
c10::StreamId current_stream_id();
// Make a stream the calling thread's: its CUDA streams become current on all GPUs. Returns the one before.
c10::StreamId exchange_stream_id(c10::StreamId id);
// The same for a thread that works for another one, and has given CUDA nothing of its own (mesh/lanes.h).
void adopt_stream_id(c10::StreamId id);

// ---- on one GPU

// The calling thread's stream on a GPU of the mesh: torch's current one.
c10::cuda::CUDAStream current_on(int gpu);

// torch has one current stream a thread and device. While alive, it is that of this GPU, should the mesh
// count the device as several (gpus_apart); else nothing is changed. Does not nest.
class RepeatedGpuScope {
 public:
  explicit RepeatedGpuScope(int gpu);
  ~RepeatedGpuScope();
  RepeatedGpuScope(const RepeatedGpuScope&) = delete;
  RepeatedGpuScope& operator=(const RepeatedGpuScope&) = delete;

  static bool inside();  // on another GPU than torch thinks
};

// ---- joins, all by events: the host never waits. Free on a mesh with one GPU.

// Call before work is given to the lead shard's GPU, or to all: it will run after everything given so far.
void order_before(bool all_gpus);
// Call once work has been given to the lead shard's GPU, or to all: another thread that uses the stream may
// have joined it between order_before and the last of this work.
void order_after(bool all_gpus);
// Every GPU waits for all others now: for kernels of other libraries, which know nothing of this file.
void order_all();
// The stream provider of mesh/launch.h: a set of streams is an mgpu stream's.
cudaStream_t shard_stream_provider(int gpu);
int stream_set_provider();

// ---- events

// A point in an mgpu stream: one CUDA event a GPU.
class StreamEvent;
StreamEvent* make_event(bool timed);
void destroy_event(StreamEvent* event) noexcept;
void record_event(StreamEvent& event, c10::StreamId stream);
void block_stream(StreamEvent& event, c10::StreamId stream);
bool query_event(const StreamEvent& event);
void wait_event(const StreamEvent& event);
double elapsed_ms(const StreamEvent& first, const StreamEvent& second);  // on the lead shard's GPU

}  // namespace mgpu
