// SPDX-License-Identifier: Apache-2.0
// relocate.cu: densification of 3DGS-MCMC on GPUs. A row is read three times by its geometry (44 bytes) in a
// refinement; lists of rows are in order, so that copies read and write rows close to each other. Floor: the
// bytes of the copied rows and their moments.
#include "splat/relocate.h"

#include <bit>
#include <cub/block/block_scan.cuh>
#include <stdexcept>
#include <string>

#include "math/random.h"
#include "math/relocation.h"
#include "math/search.h"
#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/row_kernels.h"

namespace mgpu::splat {

namespace {

// ---- dead rows

// flags of 256 rows a block as bits, and their count.
__global__ void __launch_bounds__(kThreads)
    mark_dead_kernel(const __grid_constant__ SplatColumns columns, RowRange rows, float min_opacity,
                     uint32_t* bits, int32_t* count) {
  const int64_t row = rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool dead = row < rows.end && !is_alive(columns, row, min_opacity);
  const unsigned word = __ballot_sync(kAllLanes, dead);
  if (threadIdx.x % kWarp == 0) bits[int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp] = word;
  const int total = __syncthreads_count(dead);
  if (threadIdx.x == 0) count[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads)
    list_dead_kernel(const uint32_t* bits, const int64_t* offset, int64_t first_row, int64_t* row) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t* words = bits + int64_t{blockIdx.x} * kWarps;
  if (!(words[warp] >> lane & 1u)) return;
  int64_t position = offset[blockIdx.x];
  for (int w = 0; w < warp; ++w) position += __popc(words[w]);
  position += __popc(words[warp] & ((1u << lane) - 1u));
  row[position] = first_row + int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

// ---- samples

__global__ void __launch_bounds__(kThreads)
    sum_pieces_kernel(const __grid_constant__ SplatColumns columns, RowRange rows, float min_opacity,
                      uint64_t* sum_of_piece) {
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  const int64_t first = rows.begin + int64_t{blockIdx.x} * kRowsPerPiece;
  uint64_t mine = 0;
  for (int64_t row = first + threadIdx.x; row < first + kRowsPerPiece && row < rows.end; row += kThreads) {
    mine += sample_weight(columns, row, min_opacity);
  }
  atomicAdd(&sum, static_cast<unsigned long long>(mine));  // integers: any order gives the same
  __syncthreads();
  if (threadIdx.x == 0) sum_of_piece[blockIdx.x] = sum;
}

__device__ uint64_t sum_of(const uint64_t* values, int count) {
  uint64_t sum = 0;
  for (int i = 0; i < count; ++i) sum += values[i];
  return sum;
}

// shard_weight: of all rows of each of the mesh's shards.
__global__ void __launch_bounds__(kThreads)
    draw_kernel(uint64_t seed, int64_t step, const uint64_t* shard_weight, int shards, int64_t count,
                uint64_t* target) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const math::Random4 random = math::draw(seed, math::Stream::kSample, step, i);
  target[i] = __umul64hi(uint64_t{random.x[0]} << 32 | random.x[1], sum_of(shard_weight, shards));
}

// One block a piece of rows: the targets (ascending) that fall into it find their rows. weight_before: of all
// pieces before on this shard.
__global__ void __launch_bounds__(kThreads)
    pick_kernel(const __grid_constant__ SplatColumns columns, RowRange rows, float min_opacity,
                const uint64_t* weight_before, const uint64_t* shard_weight, int shard,
                const uint64_t* target, int64_t count, int64_t* sampled) {
  using Scan = cub::BlockScan<uint64_t, kThreads>;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ uint64_t end_of_row[kThreads];  // running sum of weights up to and with the row
  uint64_t before = sum_of(shard_weight, shard) + weight_before[blockIdx.x];
  const int64_t first = rows.begin + int64_t{blockIdx.x} * kRowsPerPiece;
  int64_t next = math::first_at_least(target, count, before);
  for (int64_t part = first; part < first + kRowsPerPiece && part < rows.end; part += kThreads) {
    const int64_t row = part + threadIdx.x;
    uint64_t end = row < rows.end ? sample_weight(columns, row, min_opacity) : 0, sum;
    Scan(scratch).InclusiveSum(end, end, sum);
    end_of_row[threadIdx.x] = before + end;
    __syncthreads();
    const int64_t stop = math::first_at_least(target, count, before + sum);
    for (int64_t i = next + threadIdx.x; i < stop; i += kThreads) {
      sampled[i] =
          part + math::first_at_least(end_of_row, kThreads,
                                      target[i] + 1);  // the first row whose end is beyond the target
    }
    next = stop;
    before += sum;
    __syncthreads();
  }
}

// ---- moves

// A thread an entry of the list: the first of a row computes for all of them. Then the warp resets moments,
// row by row.
__global__ void __launch_bounds__(kThreads)
    split_sources_kernel(const __grid_constant__ Rows rows, RowListView source, float min_opacity) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = i < source.count ? source[i] : -1;
  const bool first =
      row >= rows.home.begin && row < rows.home.end && (i == 0 || source[i - 1] != row);  // no home has -1
  if (first) {
    int64_t copies = 1;  // the list ascends; more than kMaxSplit do not count
    while (copies < math::kMaxSplit && i + copies < source.count && source[i + copies] == row) ++copies;
    const SplatColumns& columns = rows.columns;
    const math::Relocated split = math::relocate(math::sigmoid(columns.opacities[row]), copies + 1);
    columns.opacities[row] = math::relocated_logit(split.opacity, min_opacity);
    for (int axis = 0; axis < 3; ++axis) columns.scales[3 * row + axis] += std::log(split.scale_ratio);
  }
  for (unsigned left = __ballot_sync(kAllLanes, first); left != 0; left &= left - 1)
    reset_moments(rows, __shfl_sync(kAllLanes, row, __ffs(left) - 1), lane);
}

// A warp a copy: destination[i] becomes source[i], which may lie on another GPU.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ Rows rows, RowListView source, RowListView destination) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (i >= destination.count) return;
  const int64_t from = source[i], to = destination[i];
  if (from < 0 || to < rows.home.begin || to >= rows.home.end) return;
  for_each_float(rows.values, lane, [&](int column, int k, int size) {
    const FloatArray data = rows.values.column[column];
    data.set(to * size + k, data[from * size + k], 0);  // exact
  });
  reset_moments(rows, to, lane);
}

__global__ void __launch_bounds__(kThreads)
    reset_rows_kernel(const __grid_constant__ Rows rows, RowListView list) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (i >= list.count) return;
  const int64_t row = list[i];
  if (row >= rows.home.begin && row < rows.home.end) reset_moments(rows, row, threadIdx.x % kWarp);
}

}  // namespace

RowList dead_rows(const SplatColumns& columns, float min_opacity) {
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns);
  const size_t shards = homes.size();
  std::vector<Buffer<uint32_t>> bits(shards);
  std::vector<Buffer<int64_t>> offset(shards);
  std::vector<int64_t> count(shards, 0);
  ReadBack counts;
  for_each_shard("dead rows", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const RowRange home = homes[index];
    if (home.empty()) return;
    const int64_t blocks = blocks_for(home.size(), kThreads);
    Buffer<int32_t> block_count(blocks + 1, shard.index);
    bits[index] = Buffer<uint32_t>(blocks * kWarps, shard.index);
    offset[index] = Buffer<int64_t>(blocks + 1, shard.index);
    zero_bytes(block_count.data() + blocks, sizeof(int32_t), shard.index);
    mark_dead_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, shard_stream(shard.index)>>>(
        columns, home, min_opacity, bits[index].data(), block_count.data());
    KERNEL_CHECK("dead rows", shard.index, home.size());
    exclusive_sum(block_count.data(), offset[index].data(), blocks + 1, shard.index);
    counts.add(&count[index], offset[index].data() + blocks, 1, shard.index);
  });
  counts.wait();

  RowList dead;
  for (const int64_t found : count) dead.count += found;
  dead.row = Buffer<int64_t>(dead.count, kExchange);
  const auto list = [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    if (count[index] == 0) return;
    int64_t before = 0;
    for (size_t other = 0; other < index; ++other) before += count[other];
    list_dead_kernel<<<blocks_for(homes[index].size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        bits[index].data(), offset[index].data(), homes[index].begin, dead.row.data() + before);
    KERNEL_CHECK("dead rows", shard.index, homes[index].size());
  };
  if (dead.count > 0) for_each_shard("list dead rows", list, Access::kExchange);
  return dead;
}

RowList sample_rows(const SplatColumns& columns, float min_opacity, int64_t count, uint64_t seed,
                    int64_t step) {
  RowList sampled;
  if (count <= 0) return sampled;
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns);
  const int shards = mesh().size();
  std::vector<Buffer<uint64_t>> weight_before(homes.size());  // by shard and piece, and of the whole shard
  for_each_shard("sample sums", [&](const Shard& shard) {
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    const int64_t pieces = blocks_for(home.size(), kRowsPerPiece);
    Buffer<uint64_t> sums(pieces + 1, shard.index);
    zero_bytes(sums.data() + pieces, sizeof(uint64_t), shard.index);
    if (pieces > 0) {
      sum_pieces_kernel<<<static_cast<unsigned>(pieces), kThreads, 0, shard_stream(shard.index)>>>(
          columns, home, min_opacity, sums.data());
      KERNEL_CHECK("sample sums", shard.index, home.size());
    }
    Buffer<uint64_t>& before = weight_before[static_cast<size_t>(shard.index)];
    before = Buffer<uint64_t>(pieces + 1, shard.index);
    exclusive_sum(sums.data(), before.data(), pieces + 1, shard.index);
  });

  Buffer<uint64_t> shard_weight(shards, kExchange);
  const auto collect = [&](const Shard& shard) {
    const Buffer<uint64_t>& before = weight_before[static_cast<size_t>(shard.index)];
    CUDA_CHECK(cudaMemcpyAsync(shard_weight.data() + shard.index, before.data() + before.size() - 1,
                               sizeof(uint64_t), cudaMemcpyDefault, shard_stream(shard.index)));
  };
  for_each_shard("sample totals", collect, Access::kExchange);

  sampled.count = count;
  sampled.row = Buffer<int64_t>(count, kExchange);
  {
    DeviceGuard guard(shard_device(0));
    CUDA_CHECK(cudaMemsetAsync(sampled.row.data(), 0xff, static_cast<size_t>(count) * sizeof(int64_t),
                               shard_stream(0)));  // -1: no row
  }
  const int bits = std::bit_width(static_cast<uint64_t>(columns.num_rows) << 24);
  const auto pick = [&](const Shard& shard) {  // every shard draws all targets
    const RowRange home = homes[static_cast<size_t>(shard.index)];
    if (home.empty()) return;
    const cudaStream_t stream = shard_stream(shard.index);
    Buffer<uint64_t> target(count, shard.index);
    draw_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(seed, step, shard_weight.data(), shards,
                                                                      count, target.data());
    KERNEL_CHECK("sample pick", shard.index, count);
    sort_keys(target, bits, shard.index);
    pick_kernel<<<blocks_for(home.size(), kRowsPerPiece), kThreads, 0, stream>>>(
        columns, home, min_opacity, weight_before[static_cast<size_t>(shard.index)].data(),
        shard_weight.data(), shard.index, target.data(), count, sampled.row.data());
    KERNEL_CHECK("sample pick", shard.index, count);
  };
  for_each_shard("sample pick", pick, Access::kExchange);
  return sampled;
}

void relocate(const SplatColumns& columns, const AdamState* state, const RowList& source,
              const RowList& destination, float min_opacity, int64_t now) {
  check_pairs(source, destination);
  if (source.count == 0) return;
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns);
  const auto mine = [&](const Shard& shard) {
    return rows_of(columns, state, now, homes[static_cast<size_t>(shard.index)]);
  };
  for_each_shard("relocate sources", [&](const Shard& shard) {
    split_sources_kernel<<<blocks_for(source.count, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        mine(shard), source.view(), min_opacity);
    KERNEL_CHECK("relocate sources", shard.index, source.count);
  });
  const auto copy = [&](const Shard& shard) {
    copy_rows_kernel<<<warps_for(source.count), kThreads, 0, shard_stream(shard.index)>>>(
        mine(shard), source.view(), destination.view());
    KERNEL_CHECK("relocate copies", shard.index, source.count);
  };
  for_each_shard("relocate copies", copy, Access::kExchange);
}

void reset_rows(const SplatColumns& columns, const AdamState& state, const RowList& rows, int64_t now) {
  if (rows.count == 0) return;
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns);
  for_each_shard("reset rows", [&](const Shard& shard) {
    reset_rows_kernel<<<warps_for(rows.count), kThreads, 0, shard_stream(shard.index)>>>(
        rows_of(columns, &state, now, homes[static_cast<size_t>(shard.index)]), rows.view());
    KERNEL_CHECK("reset rows", shard.index, rows.count);
  });
}

}  // namespace mgpu::splat
