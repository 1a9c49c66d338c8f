// SPDX-License-Identifier: Apache-2.0
#include "mesh/gate.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <shared_mutex>

#include "mesh/mesh.h"

namespace mgpu {

namespace {

// First come, first served: a training loop that is back within microseconds does not keep the viewer out.
class Queue {
 public:
  void lock() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t mine = last_++;
    next_.wait(lock, [&] { return served_ == mine; });
  }
  void unlock() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++served_;
    }
    next_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable next_;
  uint64_t last_ = 0, served_ = 0;
};

// Both live until the process ends: threads may outlive static destruction.
std::shared_mutex& gate() {
  static std::shared_mutex* instance = new std::shared_mutex;
  return *instance;
}
Queue& turns() {
  static Queue* instance = new Queue;
  return *instance;
}

thread_local int depth = 0;
thread_local bool in_turn = false;  // how this thread's outermost scope was entered

}  // namespace

LaunchScope::LaunchScope() {
  if (depth++ > 0) return;
  in_turn = several_gpus();
  if (in_turn)
    turns().lock();
  else
    gate().lock_shared();
}

LaunchScope::~LaunchScope() {
  if (--depth > 0) return;
  if (in_turn)
    turns().unlock();
  else
    gate().unlock_shared();
}

// Inside a LaunchScope of its own the thread would wait for itself: it stays in, and the pages move all the
// same, because a thread that is moving pages launches nothing.
StillScope::StillScope() : shut_(depth == 0) {
  if (!shut_) return;
  in_turn = several_gpus();
  if (in_turn)
    turns().lock();
  else
    gate().lock();
  depth = 1;  // launches from inside pass
}

StillScope::~StillScope() {
  if (!shut_) return;
  depth = 0;
  if (in_turn)
    turns().unlock();
  else
    gate().unlock();
}

TurnOfAnother::TurnOfAnother() { ++depth; }
TurnOfAnother::~TurnOfAnother() { --depth; }

}  // namespace mgpu
