// SPDX-License-Identifier: Apache-2.0
// transfer.h: between the host and a Buffer, and between shards. In the host flavour these are plain copies;
// in the CUDA flavour they go through the shard's stream.
#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include "memory/buffer.h"

namespace mgpu {

// ---- bytes; `shard` is whose memory it is and whose stream is used

// To the host; waits until they are there.
void read_back_bytes(void* host, const void* device, int64_t bytes, int shard);
// From the host; `host` may be changed on return.
void upload_bytes(void* device, const void* host, int64_t bytes, int shard);
void zero_bytes(void* device, int64_t bytes, int shard);
// From one shard to another, in the order of the receiver's stream: join_shards() first if they are on
// different GPUs.
void copy_between(void* to, int to_shard, const void* from, int from_shard, int64_t bytes);

// ---- arrays

template <typename T>
void read_back(T* host, const T* device, int64_t count, int shard) {
  static_assert(std::is_trivially_copyable_v<T>);
  read_back_bytes(host, device, count * static_cast<int64_t>(sizeof(T)), shard);
}

template <typename T>
void upload(T* device, const T* host, int64_t count, int shard) {
  static_assert(std::is_trivially_copyable_v<T>);
  upload_bytes(device, host, count * static_cast<int64_t>(sizeof(T)), shard);
}

// The first `count` elements of a buffer (all, if it is negative) as a vector; waits.
template <typename T>
std::vector<T> to_vector(const Buffer<T>& buffer, int64_t count = -1) {
  std::vector<T> out(static_cast<size_t>(count < 0 ? buffer.size() : count));
  read_back(out.data(), buffer.data(), static_cast<int64_t>(out.size()), buffer.owner());
  return out;
}

// A buffer of `owner` with the contents of `values`.
template <typename T>
Buffer<T> to_buffer(const std::vector<T>& values, int owner) {
  Buffer<T> out(static_cast<int64_t>(values.size()), owner);
  upload(out.data(), values.data(), out.size(), owner);
  return out;
}

template <typename T>
void zero(Buffer<T>& buffer) {
  zero_bytes(buffer.data(), buffer.size() * static_cast<int64_t>(sizeof(T)), buffer.owner());
}

// Several arrays to the host with one wait.
class ReadBack {
 public:
  ReadBack() = default;
  ReadBack(const ReadBack&) = delete;
  ReadBack& operator=(const ReadBack&) = delete;

  template <typename T>
  void add(T* host, const T* device, int64_t count, int shard) {
    static_assert(std::is_trivially_copyable_v<T>);
    add_bytes(host, device, count * static_cast<int64_t>(sizeof(T)), shard);
  }
  // Afterwards the contents are where they were asked for.
  void wait();

 private:
  struct Piece {
    void* host;
    int64_t offset, bytes;  // in the staging area of the CUDA flavour
  };
  void add_bytes(void* host, const void* device, int64_t bytes, int shard);
  std::vector<Piece> pieces_;
  std::vector<int> shards_;
  std::vector<const void*> sources_;
  int64_t used_ = 0;
};

}  // namespace mgpu
