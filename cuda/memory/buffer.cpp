// SPDX-License-Identifier: Apache-2.0
#include "memory/buffer.h"

#include <cstdlib>
#include <new>

namespace mgpu {

void* allocate_temporary(int64_t bytes, int /*owner*/) {
  if (bytes <= 0) return nullptr;
  void* data = std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
  if (!data) throw std::bad_alloc();
  return data;
}

void free_temporary(void* data, int64_t /*bytes*/, int /*owner*/) noexcept { std::free(data); }

}  // namespace mgpu
