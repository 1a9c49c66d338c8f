// SPDX-License-Identifier: Apache-2.0
// transfer_host.cpp: all shards share the host's memory, so every transfer is a copy.
#include <cstring>

#include "memory/transfer.h"

namespace mgpu {

void read_back_bytes(void* host, const void* device, int64_t bytes, int /*shard*/) {
  if (bytes > 0) std::memcpy(host, device, static_cast<size_t>(bytes));
}

void upload_bytes(void* device, const void* host, int64_t bytes, int /*shard*/) {
  if (bytes > 0) std::memcpy(device, host, static_cast<size_t>(bytes));
}

void zero_bytes(void* device, int64_t bytes, int /*shard*/) {
  if (bytes > 0) std::memset(device, 0, static_cast<size_t>(bytes));
}

void copy_between(void* to, int /*to_shard*/, const void* from, int /*from_shard*/, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

void ReadBack::add_bytes(void* host, const void* device, int64_t bytes, int shard) {
  read_back_bytes(host, device, bytes, shard);
}

void ReadBack::wait() {}

}  // namespace mgpu
