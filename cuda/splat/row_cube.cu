// SPDX-License-Identifier: Apache-2.0
// row_cube.cu: each shard reads its means once, 12 bytes a row; then one block adds the shards up.
#include "splat/row_cube.h"

#include <vector>

#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int kBlocksPerProcessor = 4;  // of the summary: what their 24 kB of bins and the registers allow
constexpr int kBinsPerThread = kCoordinateBins / kThreads;

__global__ void __launch_bounds__(kThreads)
    summary_kernel(const float* means, RowRange rows, MeansSummary* summary) {
  __shared__ uint32_t bins[3][kCoordinateBins];
  for (int i = threadIdx.x; i < 3 * kCoordinateBins; i += kThreads) (&bins[0][0])[i] = 0;
  __syncthreads();
  uint32_t least[6];
  for (uint32_t& value : least) value = ~0u;
  for (int64_t row = rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows.end;
       row += int64_t{gridDim.x} * kThreads) {
    const float* mean = means + 3 * row;
    if (!is_finite_mean(mean)) continue;
    for (int axis = 0; axis < 3; ++axis) {
      const uint32_t bits = ordered_bits(mean[axis]);
      least[axis] = min(least[axis], bits);
      least[axis + 3] = min(least[axis + 3], ~bits);
      atomicAdd(&bins[axis][bits >> kBinShift], 1u);
    }
  }
  for (int i = 0; i < 6; ++i) {
    const uint32_t warp = __reduce_min_sync(kAllLanes, least[i]);
    if (threadIdx.x % kWarp == 0 && warp != ~0u) atomicMin(&summary->least[i], warp);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 3 * kCoordinateBins; i += kThreads) {
    const uint32_t count = (&bins[0][0])[i];
    if (count > 0) atomicAdd(&(&summary->rows[0][0])[i], count);
  }
}

struct Summaries {
  const MeansSummary* of[kMaxShards];
  int shards;
};

// The first bin with more than `skip` rows up to it, from either end. chunk_rows: of kBinsPerThread bins.
__device__ int bin_after(const int64_t* bin_rows, const int64_t* chunk_rows, int64_t skip, bool from_above) {
  int64_t passed = 0;
  for (int i = 0; i < kThreads; ++i) {
    const int chunk = from_above ? kThreads - 1 - i : i;
    if (passed + chunk_rows[chunk] <= skip) {
      passed += chunk_rows[chunk];
      continue;
    }
    for (int k = 0; k < kBinsPerThread; ++k) {
      const int bin = chunk * kBinsPerThread + (from_above ? kBinsPerThread - 1 - k : k);
      passed += bin_rows[bin];
      if (passed > skip) return bin;
    }
  }
  return 0;
}

__global__ void __launch_bounds__(kThreads)
    cube_kernel(const __grid_constant__ Summaries summaries, RowCube* cube) {
  __shared__ int64_t bin_rows[kCoordinateBins], chunk_rows[kThreads];
  float low[3], high[3], inner_low[3], inner_high[3];
  for (int axis = 0; axis < 3; ++axis) {
    int64_t chunk = 0;
    for (int k = 0; k < kBinsPerThread; ++k) {
      const int bin = threadIdx.x * kBinsPerThread + k;
      int64_t rows = 0;
      for (int shard = 0; shard < summaries.shards; ++shard) rows += summaries.of[shard]->rows[axis][bin];
      bin_rows[bin] = rows;
      chunk += rows;
    }
    chunk_rows[threadIdx.x] = chunk;
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t count = 0;
      for (int i = 0; i < kThreads; ++i) count += chunk_rows[i];
      uint32_t least = ~0u, most = ~0u;
      for (int shard = 0; shard < summaries.shards; ++shard) {
        least = min(least, summaries.of[shard]->least[axis]);
        most = min(most, summaries.of[shard]->least[axis + 3]);
      }
      low[axis] = count > 0 ? from_ordered_bits(least) : 1.f;
      high[axis] = count > 0 ? from_ordered_bits(~most) : 0.f;
      inner_low[axis] = fmaxf(low[axis], bin_low(bin_after(bin_rows, chunk_rows, count / kFarRows, false)));
      inner_high[axis] = fminf(high[axis], bin_high(bin_after(bin_rows, chunk_rows, count / kFarRows, true)));
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *cube = cube_around(low, high, inner_low, inner_high);
}

}  // namespace

Buffer<RowCube> row_cube(const SplatColumns& columns) {
  const std::vector<RowRange> homes = homes_of(columns);
  std::vector<Buffer<MeansSummary>> own;
  for (int shard = 0; shard < static_cast<int>(homes.size()); ++shard) own.emplace_back(1, shard);
  for_each_shard("row summary", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    MeansSummary* const summary = own[static_cast<size_t>(shard.index)].data();
    const cudaStream_t stream = shard_stream(shard.index);
    CUDA_CHECK(cudaMemsetAsync(summary->least, 0xff, sizeof summary->least, stream));
    CUDA_CHECK(cudaMemsetAsync(summary->rows, 0, sizeof summary->rows, stream));
    if (home.empty()) return;
    const unsigned blocks = std::min(blocks_for(home.size(), kThreads), 132u * kBlocksPerProcessor);
    summary_kernel<<<blocks, kThreads, 0, stream>>>(columns.means, home, summary);
    KERNEL_CHECK("row summary", shard.index, home.size());
  });
  Summaries summaries{};
  summaries.shards = static_cast<int>(homes.size());
  for (size_t shard = 0; shard < homes.size(); ++shard) summaries.of[shard] = own[shard].data();
  Buffer<RowCube> cube(1, kExchange);
  const auto sum = [&](const Shard& shard) {
    if (shard.index != 0) return;
    cube_kernel<<<1, kThreads, 0, shard_stream(0)>>>(summaries, cube.data());
    KERNEL_CHECK("row cube", 0, columns.num_rows);
  };
  for_each_shard("row cube", sum, Access::kExchange);
  return cube;
}

}  // namespace mgpu::splat
