// SPDX-License-Identifier: Apache-2.0
#include "backend/streams_cuda.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>

#include "memory/provider_cuda.h"

namespace mgpu {

namespace {

using c10::cuda::CUDAStream;

enum class Ahead { kNobody, kLead, kAny };

struct StreamSet {
  std::vector<CUDAStream> on_gpu;  // in the order of mesh_gpus()

  // Held while the GPUs are made to wait and the notes below are taken, in this order: a wait that fails
  // leaves them, and nobody finds them taken and the waits not yet made. Memory is freed, and a stream asked
  // for with it, outside of turns (gate.h).
  std::mutex mutex;
  Ahead ahead = Ahead::kNobody;  // whose work the other GPUs do not wait for yet: of operators ...
  bool by_stage = false;         // ... or of stages that asked for a shard's stream

  void note(Ahead whose) {
    const std::lock_guard<std::mutex> lock(mutex);
    ahead = std::max(ahead, whose);
  }
};

std::array<std::atomic<StreamSet*>, kStreams>& sets() {
  static auto* instance = new std::array<std::atomic<StreamSet*>, kStreams>{};
  return *instance;
}

// Not one of torch's pool, which everybody shares: memory is used again by the stream of the lead's GPU that
// it was taken on, so two sets with one such stream would have to wait for each other's other streams.
CUDAStream new_stream(int gpu) {
  const auto device = static_cast<c10::DeviceIndex>(physical_gpu(gpu));
  c10::cuda::CUDAGuard guard(device);
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return c10::cuda::getStreamFromExternal(stream, device);
}

StreamSet& stream_set(c10::StreamId id) {
  TORCH_CHECK(id >= 0 && id < kStreams, "There is no mgpu stream ", id, ".");
  std::atomic<StreamSet*>& slot = sets()[static_cast<size_t>(id)];
  if (StreamSet* known = slot.load(std::memory_order_acquire)) return *known;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (StreamSet* known = slot.load()) return *known;
  auto* fresh = new StreamSet;  // as long as the process
  for (const int gpu : mesh_gpus()) fresh->on_gpu.push_back(new_stream(gpu));
  slot.store(fresh, std::memory_order_release);
  return *fresh;
}

thread_local c10::StreamId current_id = -1;  // -1: this thread has not used mgpu yet

// torch's current stream of a device while that of a repeated GPU has its place.
thread_local std::optional<CUDAStream> set_aside;

void make_current(const StreamSet& set) {
  for (size_t i = 0; i < set.on_gpu.size(); ++i)
    if (!is_repeated(mesh_gpus()[i])) c10::cuda::setCurrentCUDAStream(set.on_gpu[i]);
}

// Events of this thread to join by: a wait takes the record that was latest when it was called.
at::cuda::CUDAEvent& join_event(size_t gpu) {
  thread_local std::vector<std::unique_ptr<at::cuda::CUDAEvent>> events(mesh_gpus().size());
  if (!events[gpu]) events[gpu] = std::make_unique<at::cuda::CUDAEvent>(cudaEventDisableTiming);
  return *events[gpu];
}

// All to the lead's GPU, and back from there.
void join() {
  const std::vector<int>& gpus = mesh_gpus();
  const CUDAStream lead = current_on(gpus[0]);
  for (size_t i = 1; i < gpus.size(); ++i) {
    join_event(i).record(current_on(gpus[i]));
    join_event(i).block(lead);
  }
  join_event(0).record(lead);
  for (size_t i = 1; i < gpus.size(); ++i) join_event(0).block(current_on(gpus[i]));
}

}  // namespace

const std::vector<CUDAStream>& streams_of(c10::StreamId id) { return stream_set(id).on_gpu; }

c10::StreamId next_stream() {
  static std::atomic<int> last{0};
  return 1 + last.fetch_add(1) % (kStreams - 1);
}

c10::StreamId current_stream_id() {
  if (current_id >= 0) return current_id;
  // first use in this thread: stream 0 goes on where the thread's CUDA work was
  StreamSet& set = stream_set(0);
  for (const CUDAStream& stream : set.on_gpu) {
    const CUDAStream before = c10::cuda::getCurrentCUDAStream(stream.device_index());
    if (before == stream) continue;
    at::cuda::CUDAEvent so_far(cudaEventDisableTiming);
    so_far.record(before);
    so_far.block(stream);
    set.note(Ahead::kAny);  // the other GPUs do not wait for it yet
  }
  make_current(set);
  current_id = 0;
  return current_id;
}

c10::StreamId exchange_stream_id(c10::StreamId id) {
  const c10::StreamId before = current_stream_id();
  if (id == before) return before;
  make_current(stream_set(id));
  current_id = id;
  return before;
}

void adopt_stream_id(c10::StreamId id) {
  if (id == current_id) return;
  make_current(stream_set(id));
  current_id = id;
}

CUDAStream current_on(int gpu) {
  const auto device = static_cast<c10::DeviceIndex>(physical_gpu(gpu));
  if (is_repeated(gpu)) {
    const auto at = std::find(mesh_gpus().begin(), mesh_gpus().end(), gpu) - mesh_gpus().begin();
    return stream_set(current_stream_id()).on_gpu.at(static_cast<size_t>(at));
  }
  if (set_aside && set_aside->device_index() == device) return *set_aside;
  return c10::cuda::getCurrentCUDAStream(device);
}

RepeatedGpuScope::RepeatedGpuScope(int gpu) {
  if (!is_repeated(gpu)) return;
  const CUDAStream own = current_on(gpu);
  set_aside = c10::cuda::getCurrentCUDAStream(own.device_index());
  c10::cuda::setCurrentCUDAStream(own);
}
RepeatedGpuScope::~RepeatedGpuScope() {
  if (!set_aside) return;
  c10::cuda::setCurrentCUDAStream(*set_aside);
  set_aside.reset();
}
bool RepeatedGpuScope::inside() { return set_aside.has_value(); }

void order_before(bool all_gpus) {
  if (!several_gpus()) return;
  StreamSet& set = stream_set(current_stream_id());
  const std::lock_guard<std::mutex> lock(set.mutex);
  // on the lead's GPU alone, operators follow each other by themselves; with managed memory, other libraries'
  // kernels may have been given to any GPU since
  if (set.by_stage || set.ahead == Ahead::kAny || (set.ahead == Ahead::kLead && all_gpus) ||
      memory_is_managed())
    join();
  set.by_stage = false;
  set.ahead = all_gpus ? Ahead::kAny : Ahead::kLead;
}

void order_after(bool all_gpus) {
  if (several_gpus()) stream_set(current_stream_id()).note(all_gpus ? Ahead::kAny : Ahead::kLead);
}

void order_all() {
  if (!several_gpus()) return;
  StreamSet& set = stream_set(current_stream_id());
  const std::lock_guard<std::mutex> lock(set.mutex);
  join();
  set.ahead = Ahead::kNobody;
  set.by_stage = false;
}

cudaStream_t shard_stream_provider(int gpu) {
  StreamSet& set = stream_set(current_stream_id());
  if (several_gpus()) {
    // what operators have started is waited for once; stages order themselves (mesh/fork_join.h)
    const std::lock_guard<std::mutex> lock(set.mutex);
    if (set.ahead != Ahead::kNobody) join();
    set.ahead = Ahead::kNobody;
    set.by_stage = true;
  }
  return current_on(gpu).stream();
}

int stream_set_provider() { return static_cast<int>(current_stream_id()); }

// ---- events

class StreamEvent {
 public:
  std::vector<at::cuda::CUDAEvent> on_gpu;
};

StreamEvent* make_event(bool timed) {
  auto* event = new StreamEvent;
  for (size_t i = 0; i < mesh_gpus().size(); ++i)
    event->on_gpu.emplace_back(timed ? cudaEventDefault : cudaEventDisableTiming);
  return event;
}

void destroy_event(StreamEvent* event) noexcept { delete event; }

void record_event(StreamEvent& event, c10::StreamId stream) {
  const auto& streams = streams_of(stream);
  for (size_t i = 0; i < streams.size(); ++i) event.on_gpu[i].record(streams[i]);
}

// GPU by GPU; what the event's stream gave to one GPU, operators of this stream wait for on all.
void block_stream(StreamEvent& event, c10::StreamId stream) {
  StreamSet& set = stream_set(stream);
  for (size_t i = 0; i < set.on_gpu.size(); ++i) event.on_gpu[i].block(set.on_gpu[i]);
  set.note(Ahead::kAny);
}

bool query_event(const StreamEvent& event) {
  for (const at::cuda::CUDAEvent& part : event.on_gpu)
    if (!part.query()) return false;
  return true;
}

void wait_event(const StreamEvent& event) {
  for (const at::cuda::CUDAEvent& part : event.on_gpu) part.synchronize();
}

double elapsed_ms(const StreamEvent& first, const StreamEvent& second) {
  return first.on_gpu[0].elapsed_time(second.on_gpu[0]);
}

}  // namespace mgpu
