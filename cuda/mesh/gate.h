// SPDX-License-Identifier: Apache-2.0
// gate.h: keeps work from being started while pages move. Whoever launches on the shards passes the gate;
// whoever moves pages shuts it, and then waits for what is under way.
#pragma once

namespace mgpu {

// While alive, this thread may start work on the shards. Any number of threads at once; nests freely.
class LaunchScope {
 public:
  LaunchScope();
  ~LaunchScope();
  LaunchScope(const LaunchScope&) = delete;
  LaunchScope& operator=(const LaunchScope&) = delete;
};

// While alive, no other thread is inside a LaunchScope; waits for those that are. This thread must not be in
// one. Take it before the pool's lock.
class StillScope {
 public:
  StillScope();
  ~StillScope();
  StillScope(const StillScope&) = delete;
  StillScope& operator=(const StillScope&) = delete;

 private:
  bool shut_;
};

}  // namespace mgpu
