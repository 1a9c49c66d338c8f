// SPDX-License-Identifier: Apache-2.0
// page.h: the unit of placement, and where a page may lie.
#pragma once
#include <cstdint>

namespace mgpu {

// 2 MiB is the smallest granule of CUDA's virtual memory management, and the size of a huge page on x86.
constexpr int64_t kPageBytes = int64_t{1} << 21;

// The hardware page of the host: the granule of the locality check.
constexpr int64_t kOsPageBytes = 4096;

constexpr int16_t kHostPage = -1;  // place of a page that was moved to host memory

inline int64_t pages_for(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes; }

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace mgpu
