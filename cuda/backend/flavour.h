// SPDX-License-Identifier: Apache-2.0
// flavour.h: what the host and the CUDA flavour do differently beneath the operators (flavour_host.cpp,
// flavour_cuda.cpp).
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>

#include "mesh/gate.h"

namespace mgpu {

// Brackets the work of one operator. Host flavour: nothing. CUDA flavour: this thread's mgpu stream is
// current on every GPU, the lead shard's GPU is the current one, what other GPUs have been given before is
// waited for (on the GPUs), pages stay where they are meanwhile, and a capture into a CUDA graph is refused.
// Nests.
class OperatorScope {
 public:
  enum class On { kLead, kAllShards };
  explicit OperatorScope(On on = On::kLead);
  ~OperatorScope();
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;

 private:
  std::optional<LaunchScope> launch_;
  int former_gpu_ = -1;
};

// Get ready, once, after set_mesh and before the first tensor. `memory` is MGPU_MEMORY, or "". Returns a line
// to log: the kind of memory that was chosen, and why.
std::string start_flavour(const std::string& memory);

// Copy bytes of backing memory, in the order of this thread's stream.
void copy_bytes(void* to, const void* from, size_t bytes);

// A fresh generator of the backing device.
at::Generator make_backing_generator();

// Random numbers for one large fill, in chunks of `length` elements. They depend on the generator's state and
// on the chunk alone; the generator goes on behind them.
class ChunkedNumbers {
 public:
  ChunkedNumbers(const at::Generator& generator, int64_t length, int64_t chunks);
  // A generator for one chunk, on the part's device (shards.h). Parts may ask at once.
  at::Generator of_chunk(int64_t chunk) const;

 private:
  uint64_t seed_ = 0;
  uint64_t first_ = 0;   // offset of chunk 0 (CUDA flavour)
  uint64_t stride_ = 0;  // from one chunk's offset to the next
};

// Give back what the pool, and the allocators beside it, keep for reuse; waits for the GPUs. False if there
// is nothing of the kind beyond the pool (host flavour).
bool release_caches();

// Throw torch.OutOfMemoryError with what each shard holds.
[[noreturn]] void throw_out_of_memory(const c10::OutOfMemoryError& error);

// ---- memory that a backing kernel made: it stays what it is, and is known to the pool as the lead shard's

void adopted(const c10::Storage& storage);
void dropped(const c10::Storage& storage, const c10::SmallVectorImpl<c10::StreamId>& used_on);

// ---- this thread's new backing tensors (AllocationScope)

void enter_allocation_scope();
void leave_allocation_scope();

}  // namespace mgpu
