// SPDX-License-Identifier: Apache-2.0
#include "memory/host_spare_cuda.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace mgpu {

namespace {

constexpr int64_t kMost = int64_t{1} << 30;
constexpr int64_t kMostSmall = int64_t{128} << 20;
constexpr std::chrono::milliseconds kQuiet{20};

int64_t bound_of_machine() {
  const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  return std::min(kMost, memory / 64 / kHostHandleBytes * kHostHandleBytes);
}

HostSpare* to_stop_at_exit = nullptr;

}  // namespace

HostSpare::HostSpare() : bound_(bound_of_machine()) {
  // no thread may be inside the driver when the driver goes
  to_stop_at_exit = this;
  std::atexit([] { to_stop_at_exit->clear(); });
}

void HostSpare::fill_ahead() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (filling_ || stop_ || full()) return;
  filling_ = true;
  std::thread([this] { fill(); }).detach();
}

bool HostSpare::in_the_way() const {
  const std::chrono::steady_clock::duration last(last_way_made_.load());
  return std::chrono::steady_clock::now().time_since_epoch() - last < kQuiet;
}

void HostSpare::fill() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_ && !full()) {
    if (in_the_way()) {
      changed_.wait_for(lock, kQuiet);
      continue;
    }
    lock.unlock();
    std::optional<vmm::Physical> made;
    try {
      made.emplace(kHostHandleBytes, -1);
    } catch (
        ...) {  // the host is short of memory, or the driver gone: whoever needs a handle will hear of it
    }
    lock.lock();
    if (!made) break;
    whole_.push_back(std::move(*made));
  }
  filling_ = false;
  changed_.notify_all();
}

std::optional<vmm::Physical> HostSpare::kept(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<vmm::Physical>& list = bytes == kHostHandleBytes ? whole_ : small_;
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const vmm::Physical& memory) { return memory.bytes() == bytes; });
  if (found == list.end()) return std::nullopt;
  std::swap(*found, list.back());
  std::optional<vmm::Physical> out(std::move(list.back()));
  list.pop_back();
  if (bytes != kHostHandleBytes) small_bytes_ -= bytes;
  return out;
}

vmm::Physical HostSpare::take(int64_t bytes) {
  if (std::optional<vmm::Physical> found = kept(bytes)) return std::move(*found);
  try {
    return vmm::Physical(bytes, -1);
  } catch (const std::bad_alloc&) {
    clear();
    return vmm::Physical(bytes, -1);
  }
}

void HostSpare::give(vmm::Physical&& memory) noexcept {
  vmm::Physical mine(std::move(memory));
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t bytes = mine.bytes();
    if (bytes == kHostHandleBytes) {
      if (!full()) whole_.push_back(std::move(mine));
    } else if (small_bytes_ + bytes <= kMostSmall) {
      small_.push_back(std::move(mine));
      small_bytes_ += bytes;
    }
  } catch (...) {  // no memory for the list: released
  }
}

void HostSpare::clear() noexcept {
  std::vector<vmm::Physical> gone, gone_too;  // released without the lock
  std::unique_lock<std::mutex> lock(mutex_);
  stop_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !filling_; });
  stop_ = false;
  gone.swap(whole_);
  gone_too.swap(small_);
  small_bytes_ = 0;
}

}  // namespace mgpu
