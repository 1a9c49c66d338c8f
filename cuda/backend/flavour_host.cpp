// SPDX-License-Identifier: Apache-2.0
// flavour_host.cpp: the host has one memory, no streams, and is done when a call returns.
#include <ATen/CPUGeneratorImpl.h>

#include <cstring>

#include "backend/flavour.h"

namespace mgpu {

OperatorScope::OperatorScope(On /*on*/) {}
OperatorScope::~OperatorScope() = default;

std::string start_flavour(const std::string& /*memory*/) { return ""; }

void copy_bytes(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

at::Generator make_backing_generator() { return at::detail::createCPUGenerator(); }

// A generator of torch's CPU has one sequence and no place in it to go to: a chunk has one with a seed of its
// own.
ChunkedNumbers::ChunkedNumbers(const at::Generator& generator, int64_t /*length*/, int64_t /*chunks*/) {
  auto* main = at::check_generator<at::CPUGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(main->mutex_);
  seed_ = main->random();
}
at::Generator ChunkedNumbers::of_chunk(int64_t chunk) const {
  return at::detail::createCPUGenerator((seed_ + static_cast<uint64_t>(chunk)) & 0xFFFF'FFFFu);
}

bool release_caches() { return false; }
void throw_out_of_memory(const c10::OutOfMemoryError& error) { throw error; }

// The pool made it itself (AllocationScope), or it is somebody else's.
void adopted(const c10::Storage& /*storage*/) {}
void dropped(const c10::Storage& /*storage*/, const c10::SmallVectorImpl<c10::StreamId>& /*used_on*/) {}

void enter_allocation_scope() {}
void leave_allocation_scope() {}

}  // namespace mgpu
