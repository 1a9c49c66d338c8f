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

// Where a thread's units of a slice lie. Scratch holds them one after the other, kThreads apart for a thread.
// kWidth: the slice's width where the compiler is to know it, else 0.
template <int kCount, int kWidth>
class ThreadUnits {
 public:
  __device__ __forceinline__ ThreadUnits(int64_t rows, int64_t slice_width)
      : width_(kWidth > 0 ? kWidth : static_cast<unsigned>(slice_width)),
        left_(rows * width_ - first_unit()),
        first_row_(first_unit() / width_),
        offset_(static_cast<unsigned>(first_unit() - first_row_ * width_) + threadIdx.x) {}

  __device__ __forceinline__ bool inside(int k) const { return at(k) < left_; }
  // Of unit k, or of the last one of all, so that loads need no branch.
  __device__ __forceinline__ unsigned clamped(int k) const {
    const unsigned past = inside(k) ? 0u : at(k) - static_cast<unsigned>(left_) + 1u;
    return offset_ + k * kThreads - past;
  }
  __device__ __forceinline__ int64_t row(int k) const { return first_row_ + clamped(k) / width_; }
  __device__ __forceinline__ int64_t unit(int k) const { return clamped(k) % width_; }
  __device__ __forceinline__ int64_t in_scratch(int k) const { return first_unit() + at(k); }

 private:
  static __device__ __forceinline__ int64_t first_unit() { return int64_t{blockIdx.x} * (kThreads * kCount); }
  static __device__ __forceinline__ unsigned at(int k) { return threadIdx.x + k * kThreads; }
  unsigned width_;
  int64_t left_, first_row_;
  unsigned offset_;  // of the thread's first unit from the first row
};

template <typename Unit, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const Unit* __restrict__ column, Slice slice, const RowOrigin* __restrict__ origin,
                  int64_t rows, Unit* __restrict__ scratch) {
  constexpr int kCount = kUnroll<Unit>;
  const ThreadUnits<kCount, kWidth> mine(rows, slice.width);
  RowOrigin from[kCount];
  Unit value[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) from[k] = origin[mine.row(k)];
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    value[k] = column[from[k].row() * slice.row_units + slice.first + mine.unit(k)];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (mine.inside(k)) scratch[mine.in_scratch(k)] = value[k];
  }
}

// Where a slice is not the whole row. column: of the shard's first row.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    put_kernel(const Unit* __restrict__ scratch, Slice slice, int64_t rows, Unit* __restrict__ column) {
  constexpr int kCount = kUnroll<Unit>;
  const ThreadUnits<kCount, 0> mine(rows, slice.width);
  Unit value[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) value[k] = mine.inside(k) ? scratch[mine.in_scratch(k)] : Unit{};
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (mine.inside(k)) column[mine.row(k) * slice.row_units + slice.first + mine.unit(k)] = value[k];
  }
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
  const std::vector<RowRange>& homes = map.homes;
  const int64_t most = most_rows(homes);
  for (const RowBytes& column : columns) {
    const RowSlices slices = slices_of(column.row_bytes, most, scratch_bytes);
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
