// SPDX-License-Identifier: Apache-2.0
// behalf.h: threads that start work on the shards for another thread.
#pragma once

namespace mgpu {

// While alive, this thread starts work for another one, which is inside a LaunchScope (gate.h) all the while.
class LaunchOnBehalf {
 public:
  LaunchOnBehalf();
  ~LaunchOnBehalf();
  LaunchOnBehalf(const LaunchOnBehalf&) = delete;
  LaunchOnBehalf& operator=(const LaunchOnBehalf&) = delete;
};

}  // namespace mgpu
