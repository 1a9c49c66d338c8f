// SPDX-License-Identifier: Apache-2.0
// relocate.cu: densification of 3DGS-MCMC on GPUs. Its lists of rows are the host's (a few per cent of the
// table, every hundredth step); the rows themselves never leave the GPUs.
#include "splat/relocate.h"

#include <algorithm>
#include <bit>
#include <cub/block/block_scan.cuh>
#include <stdexcept>
#include <string>
#include <utility>

#include "math/gaussian.h"
#include "math/random.h"
#include "math/relocation.h"
#include "memory/transfer.h"
#include "splat/kernels.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kRowsPerPiece = 4096;      // of the sums that sampling searches
constexpr float kWeightScale = 16777216.0f;  // 2^24

__device__ bool alive(const SplatColumns& columns, int64_t row, float min_opacity) {
  bool finite = true;
  for (int i = 0; i < 3; ++i) finite &= isfinite(columns.means[3 * row + i]);
  for (int i = 0; i < 4; ++i) finite &= isfinite(columns.quats[4 * row + i]);
  for (int i = 0; i < 3; ++i) finite &= isfinite(columns.scales[3 * row + i]);
  return finite && math::sigmoid(columns.opacities[row]) > min_opacity;
}

__device__ uint64_t weight(const SplatColumns& columns, int64_t row, float min_opacity) {
  if (!alive(columns, row, min_opacity)) return 0;
  return static_cast<uint64_t>(math::sigmoid(columns.opacities[row]) * kWeightScale);
}

std::vector<RowRange> homes_of(int64_t rows) {
  std::vector<RowRange> homes;
  for (int shard = 0; shard < mesh().size(); ++shard)
    homes.push_back(equal_chunk(rows, shard, mesh().size()));
  return homes;
}

// The positions of `list` (ascending) whose values are in `range`.
RowRange positions_in(const std::vector<int64_t>& list, RowRange range) {
  const auto begin = std::lower_bound(list.begin(), list.end(), range.begin);
  const auto end = std::lower_bound(begin, list.end(), range.end);
  return {begin - list.begin(), end - list.begin()};
}

void check_rows(const char* name, const std::vector<int64_t>& rows, int64_t num_rows) {
  const bool ascending = std::is_sorted(rows.begin(), rows.end());
  if (!ascending || (!rows.empty() && (rows.front() < 0 || rows.back() >= num_rows))) {
    throw std::invalid_argument(std::string(name) + " must ascend and lie in [0, " +
                                std::to_string(num_rows) + ").");
  }
}

// The part of a list that a shard works on, on its GPU.
Buffer<int64_t> upload_part(const std::vector<int64_t>& list, RowRange part, int shard) {
  Buffer<int64_t> out(part.size(), shard);
  upload(out.data(), list.data() + part.begin, part.size(), shard);
  return out;
}

// ---- dead rows

// flags of 256 rows a block as bits, and their count.
__global__ void __launch_bounds__(kThreads)
    mark_dead_kernel(const __grid_constant__ SplatColumns columns, RowRange rows, float min_opacity,
                     uint32_t* bits, int32_t* count) {
  const int64_t row = rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const bool dead = row < rows.end && !alive(columns, row, min_opacity);
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
    mine += weight(columns, row, min_opacity);
  }
  atomicAdd(&sum, static_cast<unsigned long long>(mine));  // integers: any order gives the same
  __syncthreads();
  if (threadIdx.x == 0) sum_of_piece[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) draw_kernel(uint64_t seed, int64_t step, uint64_t total,
                                                        int64_t count, uint64_t* target, int32_t* unused) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const math::Random4 random = math::draw(seed, math::Stream::kSample, step, i);
  target[i] = __umul64hi(uint64_t{random.x[0]} << 32 | random.x[1], total);
  unused[i] = 0;
}

__device__ int64_t lower_bound(const uint64_t* values, int64_t count, uint64_t wanted) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (values[middle] < wanted)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// One block a piece of rows: the targets (ascending) that fall into it find their rows. weight_before: of all
// pieces before.
__global__ void __launch_bounds__(kThreads)
    pick_kernel(const __grid_constant__ SplatColumns columns, RowRange rows, float min_opacity,
                const uint64_t* weight_before, const uint64_t* target, int64_t count, int64_t* sampled) {
  using Scan = cub::BlockScan<uint64_t, kThreads>;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ uint64_t end_of_row[kThreads];  // running sum of weights up to and with the row
  uint64_t before = weight_before[blockIdx.x];
  const int64_t first = rows.begin + int64_t{blockIdx.x} * kRowsPerPiece;
  int64_t next = lower_bound(target, count, before);
  for (int64_t part = first; part < first + kRowsPerPiece && part < rows.end; part += kThreads) {
    const int64_t row = part + threadIdx.x;
    uint64_t end = row < rows.end ? weight(columns, row, min_opacity) : 0, sum;
    Scan(scratch).InclusiveSum(end, end, sum);
    end_of_row[threadIdx.x] = before + end;
    __syncthreads();
    const int64_t stop = lower_bound(target, count, before + sum);
    for (int64_t i = next + threadIdx.x; i < stop; i += kThreads) {
      sampled[i] = part + lower_bound(end_of_row, kThreads,
                                      target[i] + 1);  // the first row whose end is beyond the target
    }
    next = stop;
    before += sum;
    __syncthreads();
  }
}

// ---- moves

__device__ void reset_moments(const SplatColumns& columns, const AdamState& state, int64_t row, int64_t now) {
  const int size[kColumns] = {3, 4, 3, 1, 3, 3 * columns.sh_rest};
  for (int column = 0; column < kColumns; ++column) {
    for (int i = 0; i < size[column]; ++i) {
      state.exp_avg[column][row * size[column] + i] = 0.f;
      state.exp_avg_sq[column][row * size[column] + i] = 0.f;
    }
  }
  state.last_step[row] = static_cast<int32_t>(now);
}

// source: distinct rows. copies: how often each is copied.
__global__ void __launch_bounds__(kThreads)
    split_sources_kernel(const __grid_constant__ SplatColumns columns,
                         const __grid_constant__ AdamState state, bool with_state, const int64_t* source,
                         const int64_t* copies, int64_t count, float min_opacity, int64_t now) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t row = source[i];
  const math::Relocated split = math::relocate(math::sigmoid(columns.opacities[row]), copies[i] + 1);
  const float most = 1.0f - 0x1p-23f;
  const float opacity = split.opacity < min_opacity ? min_opacity
                        : split.opacity > most      ? most
                                                    : split.opacity;
  columns.opacities[row] = std::log(opacity / (1.0f - opacity));
  for (int axis = 0; axis < 3; ++axis) columns.scales[3 * row + axis] += std::log(split.scale_ratio);
  if (with_state) reset_moments(columns, state, row, now);
}

// A warp a copy: destination[i] becomes source[i], which may lie on another GPU.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ SplatColumns columns, const __grid_constant__ AdamState state,
                     bool with_state, const int64_t* source, const int64_t* destination, int64_t count,
                     int64_t now) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (i >= count) return;
  const int64_t from = source[i], to = destination[i];
  float* const data[kColumns] = {columns.means,     columns.quats, columns.scales,
                                 columns.opacities, columns.sh0,   columns.shN};
  const int size[kColumns] = {3, 4, 3, 1, 3, 3 * columns.sh_rest};
  for (int column = 0; column < kColumns; ++column) {
    for (int k = lane; k < size[column]; k += kWarp) {
      data[column][to * size[column] + k] = data[column][from * size[column] + k];
      if (with_state) {
        state.exp_avg[column][to * size[column] + k] = 0.f;
        state.exp_avg_sq[column][to * size[column] + k] = 0.f;
      }
    }
  }
  if (with_state && lane == 0) state.last_step[to] = static_cast<int32_t>(now);
}

__global__ void __launch_bounds__(kThreads)
    reset_rows_kernel(const __grid_constant__ SplatColumns columns, const __grid_constant__ AdamState state,
                      const int64_t* row, int64_t count, int64_t now) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) reset_moments(columns, state, row[i], now);
}

}  // namespace

std::vector<int64_t> dead_rows(const SplatColumns& columns, float min_opacity) {
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
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

  std::vector<Buffer<int64_t>> rows(shards);
  int64_t total = 0;
  for (const int64_t found : count) total += found;
  std::vector<int64_t> all(static_cast<size_t>(total));
  int64_t next = 0;
  ReadBack lists;
  for_each_shard("dead rows", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    if (count[index] == 0) return;
    rows[index] = Buffer<int64_t>(count[index], shard.index);
    list_dead_kernel<<<blocks_for(homes[index].size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        bits[index].data(), offset[index].data(), homes[index].begin, rows[index].data());
    KERNEL_CHECK("dead rows", shard.index, homes[index].size());
    lists.add(all.data() + next, rows[index].data(), count[index], shard.index);
    next += count[index];
  });
  lists.wait();
  return all;
}

std::vector<int64_t> sample_rows(const SplatColumns& columns, float min_opacity, int64_t count, uint64_t seed,
                                 int64_t step) {
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
  const size_t shards = homes.size();
  std::vector<std::vector<uint64_t>> weight_before(
      shards);  // by shard and piece: the sum of all pieces before
  std::vector<Buffer<uint64_t>> sums(shards);
  ReadBack piece_sums;
  for_each_shard("sample sums", [&](const Shard& shard) {
    const size_t index = static_cast<size_t>(shard.index);
    const int64_t pieces = (homes[index].size() + kRowsPerPiece - 1) / kRowsPerPiece;
    if (pieces == 0) return;
    weight_before[index].resize(static_cast<size_t>(pieces));
    sums[index] = Buffer<uint64_t>(pieces, shard.index);
    sum_pieces_kernel<<<static_cast<unsigned>(pieces), kThreads, 0, shard_stream(shard.index)>>>(
        columns, homes[index], min_opacity, sums[index].data());
    KERNEL_CHECK("sample sums", shard.index, homes[index].size());
    piece_sums.add(weight_before[index].data(), sums[index].data(), pieces, shard.index);
  });
  piece_sums.wait();
  uint64_t total = 0;
  for (auto& pieces : weight_before) {
    for (uint64_t& piece : pieces) total += std::exchange(piece, total);
  }
  if (total == 0 || count <= 0) return {};

  std::vector<Buffer<int64_t>> sampled(shards);
  std::vector<int64_t> all(static_cast<size_t>(count));
  std::vector<std::vector<int64_t>> parts(shards);
  ReadBack lists;
  for_each_shard("sample pick", [&](const Shard& shard) {  // every shard draws all targets: no exchange
    const size_t index = static_cast<size_t>(shard.index);
    if (weight_before[index].empty()) return;
    const cudaStream_t stream = shard_stream(shard.index);
    Buffer<uint64_t> target(count, shard.index);
    Buffer<int32_t> unused(count, shard.index);
    draw_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(seed, step, total, count, target.data(),
                                                                      unused.data());
    KERNEL_CHECK("sample pick", shard.index, count);
    sort_pairs(target, unused, std::bit_width(total), shard.index);
    const Buffer<uint64_t> before = to_buffer(weight_before[index], shard.index);
    sampled[index] = Buffer<int64_t>(count, shard.index);
    CUDA_CHECK(cudaMemsetAsync(sampled[index].data(), 0xff, static_cast<size_t>(count) * sizeof(int64_t),
                               stream));  // -1: not here
    pick_kernel<<<static_cast<unsigned>(before.size()), kThreads, 0, stream>>>(
        columns, homes[index], min_opacity, before.data(), target.data(), count, sampled[index].data());
    KERNEL_CHECK("sample pick", shard.index, count);
    parts[index].resize(static_cast<size_t>(count));
    lists.add(parts[index].data(), sampled[index].data(), count, shard.index);
  });
  lists.wait();
  for (const auto& part : parts) {
    for (size_t i = 0; i < part.size(); ++i) {
      if (part[i] >= 0) all[i] = part[i];
    }
  }
  return all;
}

void relocate(const SplatColumns& columns, const AdamState* state, const std::vector<int64_t>& source,
              const std::vector<int64_t>& destination, float min_opacity, int64_t now) {
  check_rows("source rows", source, columns.num_rows);
  check_rows("destination rows", destination, columns.num_rows);
  if (source.size() != destination.size()) {
    throw std::invalid_argument("relocate got " + std::to_string(source.size()) + " source rows for " +
                                std::to_string(destination.size()) + " destination rows.");
  }
  if (source.empty()) return;
  JoinedOperator joined;
  std::vector<int64_t> distinct, copies;  // sources, each once, and how often it is copied
  for (size_t i = 0; i < source.size(); ++i) {
    if (i == 0 || source[i] != source[i - 1]) {
      distinct.push_back(source[i]);
      copies.push_back(0);
    }
    ++copies.back();
  }
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
  const AdamState moments = state ? *state : AdamState{};
  for_each_shard("relocate sources", [&](const Shard& shard) {
    const RowRange mine = positions_in(distinct, homes[static_cast<size_t>(shard.index)]);
    if (mine.empty()) return;
    const Buffer<int64_t> rows = upload_part(distinct, mine, shard.index),
                          times = upload_part(copies, mine, shard.index);
    split_sources_kernel<<<blocks_for(mine.size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        columns, moments, state != nullptr, rows.data(), times.data(), mine.size(), min_opacity, now);
    KERNEL_CHECK("relocate sources", shard.index, mine.size());
  });
  const auto copy = [&](const Shard& shard) {
    const RowRange mine = positions_in(destination, homes[static_cast<size_t>(shard.index)]);
    if (mine.empty()) return;
    const Buffer<int64_t> from = upload_part(source, mine, shard.index),
                          to = upload_part(destination, mine, shard.index);
    copy_rows_kernel<<<blocks_for(mine.size() * kWarp, kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        columns, moments, state != nullptr, from.data(), to.data(), mine.size(), now);
    KERNEL_CHECK("relocate copies", shard.index, mine.size());
  };
  for_each_shard("relocate copies", copy, Access::kExchange);
}

void reset_rows(const SplatColumns& columns, const AdamState& state, const std::vector<int64_t>& rows,
                int64_t now) {
  check_rows("rows", rows, columns.num_rows);
  JoinedOperator joined;
  const std::vector<RowRange> homes = homes_of(columns.num_rows);
  for_each_shard("reset rows", [&](const Shard& shard) {
    const RowRange mine = positions_in(rows, homes[static_cast<size_t>(shard.index)]);
    if (mine.empty()) return;
    const Buffer<int64_t> list = upload_part(rows, mine, shard.index);
    reset_rows_kernel<<<blocks_for(mine.size(), kThreads), kThreads, 0, shard_stream(shard.index)>>>(
        columns, state, list.data(), mine.size(), now);
    KERNEL_CHECK("reset rows", shard.index, mine.size());
  });
}

}  // namespace mgpu::splat
