// SPDX-License-Identifier: Apache-2.0
// transfer_cuda.cpp: between the host and Buffers, and between GPUs, in the order of the shards' streams.
#include "memory/transfer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <mutex>
#include <vector>

#include "memory/waits_cuda.h"
#include "mesh/gate.h"
#include "mesh/lanes.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

int shard_of_owner(int owner) { return owner == kExchange ? 0 : owner; }

// Pinned memory through which host data reach a GPU without the driver stopping the stream. A ring of
// segments; a segment is used again when the copies out of it are done.
class UploadRing {
 public:
  static constexpr int64_t kSegmentBytes = int64_t{1} << 20;

  void copy(void* device, const void* host, int64_t bytes, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!memory_) start();
    if (used_ + bytes > kSegmentBytes || (used_ > 0 && stream != stream_)) next_segment();
    stream_ = stream;
    char* staged = memory_ + segment_ * kSegmentBytes + used_;
    std::memcpy(staged, host, static_cast<size_t>(bytes));
    CUDA_CHECK(cudaMemcpyAsync(device, staged, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream));
    used_ += (bytes + 255) / 256 * 256;
  }

 private:
  static constexpr int kSegments = 8;
  void start() {
    void* memory = nullptr;
    CUDA_CHECK(cudaMallocHost(&memory, kSegments * kSegmentBytes));
    memory_ = static_cast<char*>(memory);
    for (cudaEvent_t& event : done_) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  void next_segment() {
    CUDA_CHECK(cudaEventRecord(done_[segment_], stream_));
    segment_ = (segment_ + 1) % kSegments;
    used_ = 0;
    CUDA_CHECK(cudaEventSynchronize(done_[segment_]));
  }

  std::mutex mutex_;
  char* memory_ = nullptr;
  int64_t used_ = 0;
  int segment_ = 0;
  cudaStream_t stream_ = nullptr;  // of the copies out of this segment: its event stands for one stream
  std::array<cudaEvent_t, kSegments> done_{};
};

UploadRing& upload_ring(int gpu) {
  static std::array<UploadRing, kMaxGpus>* rings = new std::array<UploadRing, kMaxGpus>;
  return rings->at(static_cast<size_t>(gpu));
}

// Pinned landing area of this thread's read-backs; grows.
struct Landing {
  char* memory = nullptr;
  int64_t bytes = 0;
  ~Landing() { cudaFreeHost(memory); }
  char* at_least(int64_t wanted) {
    if (wanted > bytes) {
      void* grown = nullptr;
      wanted = std::max<int64_t>(wanted + wanted / 2, 1 << 16);
      CUDA_CHECK(cudaMallocHost(&grown, static_cast<size_t>(wanted)));
      if (memory) cudaFreeHost(memory);
      memory = static_cast<char*>(grown);
      bytes = wanted;
    }
    return memory;
  }
};

// Waits for the shard's stream, and notes for how long.
thread_local double waited_so_far = 0.0;
double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
void wait_for(int shard) {
  const auto start = std::chrono::steady_clock::now();
  synchronise_shard(shard);
  waited_so_far += seconds_since(start);
}

}  // namespace

double seconds_waited() { return waited_so_far; }

void read_back_bytes(void* host, const void* device, int64_t bytes, int shard) {
  if (bytes <= 0) return;
  const LaunchScope turn;
  const int on = shard_of_owner(shard);
  DeviceGuard guard(shard_device(on));
  CUDA_CHECK(
      cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, shard_stream(on)));
  wait_for(on);
}

void upload_bytes(void* device, const void* host, int64_t bytes, int shard) {
  if (bytes <= 0) return;
  const LaunchScope turn;
  const int on = shard_of_owner(shard);
  DeviceGuard guard(shard_device(on));
  const cudaStream_t stream = shard_stream(on);
  if (bytes <= UploadRing::kSegmentBytes) {
    upload_ring(shard_gpu(on)).copy(device, host, bytes, stream);
    return;
  }
  CUDA_CHECK(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream));
  synchronise_shard(on);
}

void zero_bytes(void* device, int64_t bytes, int shard) {
  if (bytes <= 0) return;
  const LaunchScope turn;
  const int on = shard_of_owner(shard);
  DeviceGuard guard(shard_device(on));
  CUDA_CHECK(cudaMemsetAsync(device, 0, static_cast<size_t>(bytes), shard_stream(on)));
}

void copy_between(void* to, int to_shard, const void* from, int from_shard, int64_t bytes) {
  if (bytes <= 0) return;
  const LaunchScope turn;
  const int to_device = shard_device(shard_of_owner(to_shard)),
            from_device = shard_device(shard_of_owner(from_shard));
  DeviceGuard guard(to_device);
  const cudaStream_t stream = shard_stream(shard_of_owner(to_shard));
  if (to_device == from_device) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
  } else {
    CUDA_CHECK(cudaMemcpyPeerAsync(to, to_device, from, from_device, static_cast<size_t>(bytes), stream));
  }
}

void ReadBack::add_bytes(void* host, const void* device, int64_t bytes, int shard) {
  if (bytes <= 0) return;
  // staged in wait(): the landing area may still move
  pieces_.push_back({host, used_, bytes});
  shards_.push_back(shard_of_owner(shard));
  sources_.push_back(device);
  used_ += (bytes + 15) / 16 * 16;
}

// Each GPU's lane asks and waits for its own: eight streams one after the other would take 50 microseconds.
void ReadBack::wait() {
  if (pieces_.empty()) return;
  const LaunchScope turn;
  thread_local Landing landing;
  char* memory = landing.at_least(used_);
  const auto fetch = [&](int lane) {
    uint64_t waiting = 0;  // for shards, as bits
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (lane_of_shard(shards_[i]) != lane) continue;
      DeviceGuard guard(shard_device(shards_[i]));
      CUDA_CHECK(cudaMemcpyAsync(memory + pieces_[i].offset, sources_[i],
                                 static_cast<size_t>(pieces_[i].bytes), cudaMemcpyDeviceToHost,
                                 shard_stream(shards_[i])));
      waiting |= uint64_t{1} << shards_[i];
    }
    uint64_t waited = 0;  // GPUs, as bits
    for (; waiting; waiting &= waiting - 1) {
      const int shard = std::countr_zero(waiting);
      const uint64_t bit = uint64_t{1} << shard_gpu(shard);
      if (!(waited & bit)) synchronise_shard(shard);
      waited |= bit;
    }
  };
  const auto start = std::chrono::steady_clock::now();
  run_lanes(fetch);
  waited_so_far += seconds_since(start);
  for (const int shard : shards_) host_has_waited_for(shard);
  for (const Piece& piece : pieces_)
    std::memcpy(piece.host, memory + piece.offset, static_cast<size_t>(piece.bytes));
  pieces_.clear();
  shards_.clear();
  sources_.clear();
  used_ = 0;
}

}  // namespace mgpu
