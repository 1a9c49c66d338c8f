// SPDX-License-Identifier: Apache-2.0
// buffer_cuda.cpp: temporaries from one stream-ordered pool a GPU, and transfers. A pool keeps what it has
// until trim_temporaries(), so after the first step nothing is allocated from the driver.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "memory/buffer.h"
#include "memory/temporaries.h"
#include "memory/transfer.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

constexpr int kMaxDevices = 64;

struct Block {
  int64_t bytes;
  int device;
  cudaStream_t stream;  // on which it was allocated
};

// Never destroyed: Buffers in statics may outlive it.
struct Temporaries {
  std::mutex mutex;
  std::array<cudaMemPool_t, kMaxDevices> pool{};
  std::array<cudaEvent_t, kMaxDevices> event{};
  std::array<TemporaryCounts, kMaxDevices> counts{};
  std::unordered_map<void*, Block> live;
};

Temporaries& temporaries() {
  static Temporaries* instance = new Temporaries;
  return *instance;
}

void open_to_peers(cudaMemPool_t pool, int device) {
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  for (int peer = 0; peer < devices; ++peer) {
    int reachable = 0;
    if (peer == device) continue;
    CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, peer, device));
    if (!reachable) continue;
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    CUDA_CHECK(cudaMemPoolSetAccess(pool, &access, 1));
  }
}

// With the mutex held.
cudaMemPool_t pool_of(Temporaries& all, int device) {
  cudaMemPool_t& pool = all.pool.at(static_cast<size_t>(device));
  if (pool) return pool;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  CUDA_CHECK(cudaMemPoolCreate(&pool, &properties));
  uint64_t keep = std::numeric_limits<uint64_t>::max();
  CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  open_to_peers(pool, device);
  return pool;
}

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
    CUDA_CHECK(cudaEventRecord(done_[segment_], stream));
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

UploadRing& upload_ring(int device) {
  static std::array<UploadRing, kMaxDevices>* rings = new std::array<UploadRing, kMaxDevices>;
  return rings->at(static_cast<size_t>(device));
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

}  // namespace

void* allocate_temporary(int64_t bytes, int owner) {
  if (bytes <= 0) return nullptr;
  Temporaries& all = temporaries();
  const int shard = shard_of_owner(owner), device = shard_device(shard);
  const cudaStream_t stream = shard_stream(shard);
  DeviceGuard guard(device);
  std::lock_guard<std::mutex> lock(all.mutex);
  const cudaMemPool_t pool = pool_of(all, device);
  void* data = nullptr;
  cudaError_t code = cudaMallocFromPoolAsync(&data, static_cast<size_t>(bytes), pool, stream);
  if (code == cudaErrorMemoryAllocation) {  // blocks of other sizes may be what is in the way
    cudaGetLastError();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemPoolTrimTo(pool, 0));
    code = cudaMallocFromPoolAsync(&data, static_cast<size_t>(bytes), pool, stream);
  }
  check_cuda(code, "cudaMallocFromPoolAsync");
  all.live.emplace(data, Block{bytes, device, stream});
  TemporaryCounts& counts = all.counts[static_cast<size_t>(device)];
  counts.allocated += bytes;
  counts.peak = std::max(counts.peak, counts.allocated);
  return data;
}

void free_temporary(void* data, int64_t /*bytes*/, int /*owner*/) noexcept {
  if (!data) return;
  Temporaries& all = temporaries();
  try {
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.live.find(data);
    if (found == all.live.end()) return;
    const Block block = found->second;
    all.live.erase(found);
    all.counts[static_cast<size_t>(block.device)].allocated -= block.bytes;
    DeviceGuard guard(block.device);
    cudaStream_t stream = block.stream;
    for (int shard = 0; shard < mesh().size(); ++shard) {
      if (shard_device(shard) == block.device) stream = shard_stream(shard);
    }
    if (stream != block.stream) {  // freed behind the work of both streams
      cudaEvent_t& event = all.event[static_cast<size_t>(block.device)];
      if (!event) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      CUDA_CHECK(cudaEventRecord(event, block.stream));
      CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
    }
    cudaFreeAsync(data, stream);
  } catch (...) {  // the driver is gone: the process ends, and its memory with it
  }
}

TemporaryCounts temporary_counts(int device) {
  Temporaries& all = temporaries();
  std::lock_guard<std::mutex> lock(all.mutex);
  TemporaryCounts counts = all.counts.at(static_cast<size_t>(device));
  uint64_t reserved = 0;
  if (all.pool[static_cast<size_t>(device)]) {
    CUDA_CHECK(cudaMemPoolGetAttribute(all.pool[static_cast<size_t>(device)],
                                       cudaMemPoolAttrReservedMemCurrent, &reserved));
  }
  counts.reserved = static_cast<int64_t>(reserved);
  return counts;
}

void reset_temporary_peak() {
  Temporaries& all = temporaries();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (TemporaryCounts& counts : all.counts) counts.peak = counts.allocated;
}

void trim_temporaries() {
  Temporaries& all = temporaries();
  synchronise_shards();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const cudaMemPool_t pool : all.pool) {
    if (pool) CUDA_CHECK(cudaMemPoolTrimTo(pool, 0));
  }
}

void read_back_bytes(void* host, const void* device, int64_t bytes, int shard) {
  if (bytes <= 0) return;
  const int on = shard_of_owner(shard);
  DeviceGuard guard(shard_device(on));
  CUDA_CHECK(
      cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, shard_stream(on)));
  CUDA_CHECK(cudaStreamSynchronize(shard_stream(on)));
}

void upload_bytes(void* device, const void* host, int64_t bytes, int shard) {
  if (bytes <= 0) return;
  const int on = shard_of_owner(shard);
  DeviceGuard guard(shard_device(on));
  const cudaStream_t stream = shard_stream(on);
  if (bytes <= UploadRing::kSegmentBytes) {
    upload_ring(shard_device(on)).copy(device, host, bytes, stream);
    return;
  }
  CUDA_CHECK(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

void zero_bytes(void* device, int64_t bytes, int shard) {
  if (bytes <= 0) return;
  const int on = shard_of_owner(shard);
  DeviceGuard guard(shard_device(on));
  CUDA_CHECK(cudaMemsetAsync(device, 0, static_cast<size_t>(bytes), shard_stream(on)));
}

void copy_between(void* to, int to_shard, const void* from, int from_shard, int64_t bytes) {
  if (bytes <= 0) return;
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

void ReadBack::wait() {
  if (pieces_.empty()) return;
  thread_local Landing landing;
  char* memory = landing.at_least(used_);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    DeviceGuard guard(shard_device(shards_[i]));
    CUDA_CHECK(cudaMemcpyAsync(memory + pieces_[i].offset, sources_[i], static_cast<size_t>(pieces_[i].bytes),
                               cudaMemcpyDeviceToHost, shard_stream(shards_[i])));
  }
  for (const int shard : shards_) CUDA_CHECK(cudaStreamSynchronize(shard_stream(shard)));
  for (const Piece& piece : pieces_)
    std::memcpy(piece.host, memory + piece.offset, static_cast<size_t>(piece.bytes));
  pieces_.clear();
  shards_.clear();
  sources_.clear();
  used_ = 0;
}

}  // namespace mgpu
