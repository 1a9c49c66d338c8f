// SPDX-License-Identifier: Apache-2.0
// search.h: the position in an ascending list, for kernels and for lists that are no arrays (std::lower_bound
// elsewhere).
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace mgpu::math {

// The first i with list[i] >= wanted, or count. List: a pointer, or anything with operator[](int64_t).
template <typename List, typename Value>
HOST_DEVICE inline int64_t first_at_least(const List& list, int64_t count, Value wanted) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (list[middle] < wanted)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace mgpu::math
