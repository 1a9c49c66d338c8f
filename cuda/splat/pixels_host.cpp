// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "splat/pixels.h"

namespace mgpu::splat::flavour {

void copy_rects(const std::vector<CopyRect>& rects, int) {
  for (const CopyRect& rect : rects) {
    for (int32_t row = 0; row < rect.height; ++row)
      std::copy_n(rect.from + row * rect.from_row, rect.width, rect.to + row * rect.to_row);
  }
}

}  // namespace mgpu::splat::flavour
