// SPDX-License-Identifier: Apache-2.0
// provider.h: where pages come from. The arena asks a provider and knows nothing of mmap or CUDA.
#pragma once
#include <cstdint>
#include <new>
#include <string>
#include <vector>

namespace mgpu {

// Pages that move at a time: what a move needs beside the memory that pages leave is bounded by them.
constexpr int64_t kMovePages = 512;

// Not enough memory; the text says who asked for how much, and what helps.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Reserves address ranges and puts pages of kPageBytes behind them. All addresses and sizes are whole pages.
// A `place` is a shard's index, or kHostPage. Every shard can read and write every mapped page.
class PageProvider {
 public:
  virtual ~PageProvider() = default;
  // An address range with nothing behind it. Throws OutOfMemory.
  virtual void* reserve(int64_t pages) = 0;
  // Give back a range and what is mapped there.
  virtual void release(void* base, int64_t pages) noexcept = 0;
  // Put pages on `place` behind [at, at + pages). Throws OutOfMemory; then nothing is mapped.
  virtual void map(void* at, int64_t pages, int place) = 0;
  // Take the pages of whole former map() calls away again.
  virtual void unmap(void* at, int64_t pages) = 0;
  // Make pages that were just mapped zero, in the order of the lead shard's stream.
  virtual void zero(void* at, int64_t pages) = 0;
  // Move pages, at most kMovePages of them: the i-th lies at places[i] and shall lie at to[i]; `places` says
  // where they are afterwards, also if this throws OutOfMemory. Contents and addresses stay. The caller keeps
  // everybody else off them.
  virtual void move(void* at, std::vector<int16_t>& places, const std::vector<int16_t>& to) = 0;
  // True if two places are the same memory, so that moving from one to the other is a matter of book-keeping.
  virtual bool same(int a, int b) const = 0;
  // Give back what the provider itself keeps.
  virtual void trim() {}
  // Bytes of physical memory that this process holds through it, on the shards and on the host. The host
  // flavour does not count: its memory is the system's to give when it is touched.
  struct Held {
    int64_t shards = 0;
    int64_t host = 0;
  };
  virtual Held held() const { return {}; }
  // How many bytes of freed arenas the pool shall keep for reuse.
  virtual int64_t cache_bytes() const = 0;
};

// The provider of this process (provider_host.cpp, provider_cuda.cpp).
PageProvider& provider();
// What is free where, in words, for messages; empty on the host.
std::string free_memory_table();

}  // namespace mgpu
