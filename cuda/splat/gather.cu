// SPDX-License-Identifier: Apache-2.0
// gather.cu: a thread takes several units of a slice, so that enough loads are on their way. Floor: a slice
// is read and written twice.
#include "splat/gather.h"

#include <algorithm>

#include "mesh/launch.h"
#include "splat/rows.h"

namespace mgpu::splat {

namespace {

constexpr int kThreads = 256;
template <typename Unit>
constexpr int kUnroll = sizeof(Unit) == 16 ? 4 : 8;  // units a thread

// A slice of a column's rows: `width` units from `first` on.
struct Slice {
  int64_t row_units, first, width;
};

// Calls visit(k, row, unit of the row's slice) for the thread's kCount units of a slice of `rows` rows.
// kWidth: the slice's width where the compiler is to know it, else 0.
template <int kCount, int kWidth, typename Visit>
__device__ __forceinline__ void for_each_unit(int64_t rows, int64_t slice_width, const Visit& visit) {
  const int width = kWidth > 0 ? kWidth : static_cast<int>(slice_width);
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kCount);
  const int64_t first_row = first / width;
  const unsigned offset = static_cast<unsigned>(first - first_row * width) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const unsigned unit = offset + k * kThreads;
    const int64_t row = first_row + unit / width;
    if (row < rows) visit(k, row, static_cast<int>(unit % width));
  }
}

template <typename Unit, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Unit* __restrict__ column, Slice slice, const RowOrigin* __restrict__ origin,
                  int64_t rows, Unit* __restrict__ scratch) {
  const Unit* from[kUnroll<Unit>];
  Unit value[kUnroll<Unit>];
  for_each_unit<kUnroll<Unit>, kWidth>(rows, slice.width, [&](int k, int64_t row, int unit) {
    from[k] = column + origin[row].row() * slice.row_units + slice.first + unit;
  });
  for_each_unit<kUnroll<Unit>, kWidth>(rows, slice.width, [&](int k, int64_t, int) { value[k] = *from[k]; });
  for_each_unit<kUnroll<Unit>, kWidth>(rows, slice.width, [&](int k, int64_t row, int unit) {
    scratch[row * (kWidth > 0 ? kWidth : slice.width) + unit] = value[k];
  });
}

// Where a slice is not the whole row. column: of the shard's first row.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    put_kernel(const Unit* __restrict__ scratch, Slice slice, int64_t rows, Unit* __restrict__ column) {
  Unit value[kUnroll<Unit>];
  for_each_unit<kUnroll<Unit>, 0>(
      rows, slice.width, [&](int k, int64_t row, int unit) { value[k] = scratch[row * slice.width + unit]; });
  for_each_unit<kUnroll<Unit>, 0>(rows, slice.width, [&](int k, int64_t row, int unit) {
    column[row * slice.row_units + slice.first + unit] = value[k];
  });
}

template <typename Unit>
void gather_slice(const RowBytes& column, const Slice& slice, const RowMap& map,
                  const std::vector<RowRange>& homes) {
  Unit* const data = static_cast<Unit*>(column.data);
  std::vector<Buffer<Unit>> scratch(homes.size());
  const auto gather = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const int64_t rows = homes[index].size();
    if (rows == 0) return;
    scratch[index] = Buffer<Unit>(rows * slice.width, shard.index);
    const unsigned blocks = blocks_for(rows * slice.width, kThreads * kUnroll<Unit>);
    const auto launch = [&](auto kernel) {
      kernel<<<blocks, kThreads, 0, shard_stream(shard.index)>>>(data, slice, map.origin[index].data(), rows,
                                                                 scratch[index].data());
    };
    switch (slice.width) {
      case 1:
        launch(gather_kernel<Unit, 1>);
        break;
      case 3:
        launch(gather_kernel<Unit, 3>);
        break;
      case 45:
        launch(gather_kernel<Unit, 45>);
        break;
      default:
        launch(gather_kernel<Unit, 0>);
        break;
    }
    KERNEL_CHECK("gather rows", shard.index, rows);
  };
  for_each_shard("gather rows", gather, Access::kExchange);
  for_each_shard("put rows", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const int64_t rows = homes[index].size();
    if (rows == 0) return;
    const cudaStream_t stream = shard_stream(shard.index);
    Unit* const to = data + homes[index].begin * slice.row_units;
    if (slice.width == slice.row_units) {
      CUDA_CHECK(cudaMemcpyAsync(to, scratch[index].data(),
                                 static_cast<size_t>(rows * slice.width) * sizeof(Unit),
                                 cudaMemcpyDeviceToDevice, stream));
    } else {
      put_kernel<Unit><<<blocks_for(rows * slice.width, kThreads * kUnroll<Unit>), kThreads, 0, stream>>>(
          scratch[index].data(), slice, rows, to);
      KERNEL_CHECK("put rows", shard.index, rows);
    }
  });
}

}  // namespace

void gather_rows(const std::vector<RowBytes>& columns, const RowMap& map, int64_t scratch_bytes) {
  if (map.rows == 0) return;
  JoinedOperator joined;
  const std::vector<RowRange> homes = equal_chunks(map.rows);
  for (const RowBytes& column : columns) {
    const RowSlices slices = slices_of(column.row_bytes, homes[0].size(), scratch_bytes);
    for (int64_t first = 0; first < slices.row_units; first += slices.most_units) {
      const Slice slice{slices.row_units, first, std::min(slices.most_units, slices.row_units - first)};
      switch (slices.unit) {
        case 16:
          gather_slice<uint4>(column, slice, map, homes);
          break;
        case 4:
          gather_slice<uint32_t>(column, slice, map, homes);
          break;
        default:
          gather_slice<uint16_t>(column, slice, map, homes);
          break;
      }
    }
  }
}

}  // namespace mgpu::splat
