// SPDX-License-Identifier: Apache-2.0
#include "memory/tally.h"

#include <array>
#include <atomic>

#include "memory/page.h"
#include "mesh/mesh.h"

namespace mgpu {

namespace {

struct Counter {
  std::atomic<int64_t> allocated{0};
  std::atomic<int64_t> peak{0};

  void add(int64_t bytes) noexcept {
    const int64_t now = allocated.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t most = peak.load(std::memory_order_relaxed);
    while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
  Tally read() const { return {allocated.load(), peak.load()}; }
};

// Constant-initialised and without a destructor: Buffers in statics may outlive other statics.
std::array<Counter, kMaxShards + 1> of_place;  // the last: host memory
Counter of_all;
std::atomic<int64_t> moved{0};

Counter& counter(int place) { return of_place[static_cast<size_t>(place == kHostPage ? kMaxShards : place)]; }

}  // namespace

void tally(int place, int64_t bytes) noexcept {
  counter(place).add(bytes);
  of_all.add(bytes);
}

Tally tally_of(int place) { return counter(place).read(); }
Tally tally_of_all() { return of_all.read(); }

void tally_moved(int64_t pages) noexcept { moved.fetch_add(pages, std::memory_order_relaxed); }
int64_t pages_moved() { return moved.load(); }
void reset_pages_moved() { moved.store(0); }

void reset_tally_peaks() {
  for (Counter& one : of_place) one.peak.store(one.allocated.load());
  of_all.peak.store(of_all.allocated.load());
}

}  // namespace mgpu
