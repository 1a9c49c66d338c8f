// SPDX-License-Identifier: Apache-2.0
// host_spare_cuda.h: host memory for pages, kept ready. The driver makes it at 4.7 GB/s, however many threads
// ask (H200, driver 580), which is a tenth of the speed of the copy into it. So some is made ahead, by a
// thread of its own, and what pages leave is kept for others, both up to a bound; all of it goes back with
// empty_cache(), or when the host is short of memory.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "memory/vmm_cuda.h"

namespace mgpu {

// Host memory comes in handles of this size: one takes the driver 4 ms, for which others may have to wait.
constexpr int64_t kHostHandleBytes = int64_t{16} << 20;

// Thread-safe.
class HostSpare {
 public:
  HostSpare();

  // Have the bound's worth made ahead; returns at once. Whatever is there already counts.
  void fill_ahead();

  // Somebody asks the driver for something: nothing is made ahead for the next 20 ms, because the driver does
  // one thing at a time.
  void make_way() { last_way_made_ = std::chrono::steady_clock::now().time_since_epoch().count(); }

  // A handle of this size: a kept one, or a new one. Throws OutOfMemory.
  vmm::Physical take(int64_t bytes);

  // Keep a handle, or release it if there are enough.
  void give(vmm::Physical&& memory) noexcept;

  // Release everything that is kept, and make no more ahead.
  void clear() noexcept;

  // Bytes kept at most: 1 GiB, or a 64th of the machine's memory if that is less.
  int64_t bound() const { return bound_; }

 private:
  void fill();
  bool in_the_way() const;
  bool full() const { return static_cast<int64_t>(whole_.size() + 1) * kHostHandleBytes > bound_; }
  std::optional<vmm::Physical> kept(int64_t bytes);

  const int64_t bound_;
  std::atomic<std::chrono::steady_clock::rep> last_way_made_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<vmm::Physical> whole_;  // of kHostHandleBytes
  std::vector<vmm::Physical> small_;  // of any other size
  int64_t small_bytes_ = 0;
  bool filling_ = false;  // a thread is at it
  bool stop_ = false;     // it shall end
};

}  // namespace mgpu
