// SPDX-License-Identifier: Apache-2.0
// buffer.h: a stage's temporary array, on one shard or in the exchange.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace mgpu {

constexpr int kExchange = -1;  // owner of a buffer that every shard may touch

constexpr int kNoOwner = std::numeric_limits<int>::min();  // of a buffer made without one: it stays empty

// Bytes for temporaries, 64-byte aligned, uninitialised; null for 0. `owner` is a shard, or kExchange.
// Throws std::bad_alloc.
void* allocate_temporary(int64_t bytes, int owner);
void free_temporary(void* data, int64_t bytes, int owner) noexcept;

// RAII array of trivially copyable T.
template <typename T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Buffer() = default;
  Buffer(int64_t count, int owner) : owner_(owner) { resize_discard(count); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free_temporary(data_, capacity_ * static_cast<int64_t>(sizeof(T)), owner_); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }
  int owner() const { return owner_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

  // New size; the contents are lost unless it fits in what is there. Grows by at least a half. Throws
  // std::logic_error if nobody owns the buffer: it would lie on the lead shard, and another shard's stream
  // would use it out of order.
  void resize_discard(int64_t count) {
    if (count > capacity_) {
      if (owner_ == kNoOwner) throw std::logic_error("a Buffer without an owner was to hold something");
      const int64_t wanted =
          capacity_ > 0 && count < capacity_ + capacity_ / 2 ? capacity_ + capacity_ / 2 : count;
      free_temporary(data_, capacity_ * static_cast<int64_t>(sizeof(T)), owner_);
      data_ = nullptr;
      capacity_ = size_ = 0;
      data_ = static_cast<T*>(allocate_temporary(wanted * static_cast<int64_t>(sizeof(T)), owner_));
      capacity_ = wanted;
    }
    size_ = count;
  }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    std::swap(owner_, other.owner_);
  }
  T* data_ = nullptr;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
  int owner_ = kNoOwner;
};

}  // namespace mgpu
