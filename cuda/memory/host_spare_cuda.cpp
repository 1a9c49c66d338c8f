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

int64_t bound_of_machine() {
  const int64_t memory = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  return std::min(kMost, memory / 64 / vmm::kHandleBytes * vmm::kHandleBytes);
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
  if (filling_ || stop_) return;
  filling_ = true;
  std::thread([this] { fill(); }).detach();
}

void HostSpare::fill() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_ && static_cast<int64_t>(whole_.size() + 1) * vmm::kHandleBytes <= bound_) {
    lock.unlock();
    std::optional<vmm::Physical> made;
    try {
      made.emplace(vmm::kHandleBytes, -1);
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
  std::vector<vmm::Physical>& list = bytes == vmm::kHandleBytes ? whole_ : small_;
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const vmm::Physical& memory) { return memory.bytes() == bytes; });
  if (found == list.end()) return std::nullopt;
  std::swap(*found, list.back());
  std::optional<vmm::Physical> out(std::move(list.back()));
  list.pop_back();
  if (bytes != vmm::kHandleBytes) small_bytes_ -= bytes;
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
    if (bytes == vmm::kHandleBytes) {
      if (static_cast<int64_t>(whole_.size() + 1) * bytes <= bound_) whole_.push_back(std::move(mine));
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
  changed_.wait(lock, [this] { return !filling_; });
  stop_ = false;
  gone.swap(whole_);
  gone_too.swap(small_);
  small_bytes_ = 0;
}

}  // namespace mgpu
