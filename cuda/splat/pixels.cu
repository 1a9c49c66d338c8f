// SPDX-License-Identifier: Apache-2.0
// pixels.cu: rectangles of pixels from image to image: a block each. They are borders of tiles, some KB.
#include "splat/pixels.h"

#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int kCopyThreads = 128;

__global__ void __launch_bounds__(kCopyThreads) copy_rects_kernel(const CopyRect* rects) {
  const CopyRect rect = rects[blockIdx.x];
  const int values = rect.width * rect.height;  // of a tile
  for (int i = threadIdx.x; i < values; i += kCopyThreads) {
    const int row = i / rect.width, column = i - row * rect.width;
    rect.to[row * rect.to_row + column] = rect.from[row * rect.from_row + column];
  }
}

}  // namespace

namespace flavour {

void copy_rects(const std::vector<CopyRect>& rects, int shard) {
  if (rects.empty()) return;
  const Buffer<CopyRect> list = to_buffer(rects, shard);
  copy_rects_kernel<<<static_cast<unsigned>(rects.size()), kCopyThreads, 0, shard_stream(shard)>>>(
      list.data());
  KERNEL_CHECK("pixels", shard, list.size());
}

}  // namespace flavour

}  // namespace mgpu::splat
