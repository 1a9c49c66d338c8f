// SPDX-License-Identifier: Apache-2.0
// step_stage.cu: the step and flush stages alone, on made-up rows, against their floors of bytes. No
// renderer: which rows are seen is drawn, one by one or in runs (as after Morton order). Variants:
// step_variants.py.
//
//   step_stage ROWS SEEN SLOW ROUNDS HALF [RUN:DENSITY]...
//
// SLOW: share of rows whose moments are near eps. HALF: 1 for shN in float16 and first moments in bfloat16.
// Seen are rows in runs of RUN, of which DENSITY per cent.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "memory/transfer.h"
#include "mesh/launch.h"
#include "splat/history.h"
#include "splat/kernels.h"
#include "splat/step.h"

using namespace mgpu;
using namespace mgpu::splat;

namespace {

constexpr int kFloats[kColumns] = {3, 4, 3, 1, 3, 45};
constexpr double kSeenBytes = 48 + 12 + 8;  // of a row seen besides its state: gradient, colour, number

__device__ float hash_unit(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return (static_cast<float>((x ^ (x >> 31)) >> 40) + 0.5f) * 0x1p-24f;
}

// offset + scale * uniform(-1, 1)
__global__ void fill_kernel(float* data, int64_t count, float offset, float scale, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) data[i] = offset + scale * (2.f * hash_unit(static_cast<uint64_t>(i) * 977 + seed) - 1.f);
}
__global__ void mean_kernel(float* means, int64_t rows) {  // in front of the camera
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < rows) means[3 * i + 2] += 6.f;
}
__global__ void slow_kernel(float* m, float* v, int64_t rows, int floats, float share) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows || hash_unit(static_cast<uint64_t>(row) * 31 + 5) >= share) return;
  for (int i = 0; i < floats; ++i) {
    m[row * floats + i] *= 1e-11f;
    v[row * floats + i] *= 1e-22f;
  }
}
__global__ void last_kernel(int32_t* last, int64_t rows, int base, int spread) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < rows) last[i] = base + static_cast<int>(hash_unit(static_cast<uint64_t>(i) * 7 + 3) * spread);
}

__global__ void round_kernel(const float* from, int64_t count, FloatArray to) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to.set(i, from[i], 0x8000u);
}

template <typename Kernel, typename... Arguments>
void over(int64_t count, Kernel kernel, Arguments... arguments) {
  kernel<<<blocks_for(count, kThreads), kThreads, 0, shard_stream(0)>>>(arguments...);
  KERNEL_CHECK("fill", 0, count);
}

double median_ms(int rounds, const std::function<void()>& prepare, const std::function<void()>& work) {
  std::vector<float> times;
  cudaEvent_t start, stop;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  for (int round = 0; round < rounds + 2; ++round) {
    prepare();
    CUDA_CHECK(cudaEventRecord(start, shard_stream(0)));
    work();
    CUDA_CHECK(cudaEventRecord(stop, shard_stream(0)));
    CUDA_CHECK(cudaEventSynchronize(stop));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    if (round >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int count, char** arguments) {
  const int64_t rows = std::atoll(arguments[1]), wanted = std::atoll(arguments[2]);
  const float slow = static_cast<float>(std::atof(arguments[3]));
  const int rounds = std::atoi(arguments[4]);
  const bool half = std::atoi(arguments[5]) != 0;
  const double state_bytes = 2.0 * (half ? 504 : 712);  // of a row, read and written
  set_mesh({"cuda:0"});
  if (const char* granularity = std::getenv("L2_GRANULARITY"))
    CUDA_CHECK(
        cudaDeviceSetLimit(cudaLimitMaxL2FetchGranularity, static_cast<size_t>(std::atoi(granularity))));
  Buffer<float> column[kColumns], m[kColumns], v[kColumns];
  Buffer<int32_t> last(rows, 0);
  for (int c = 0; c < kColumns; ++c) {
    const int64_t floats = rows * kFloats[c];
    column[c] = Buffer<float>(floats, 0);
    m[c] = Buffer<float>(floats, 0);
    v[c] = Buffer<float>(floats, 0);
    over(floats, fill_kernel, column[c].data(), floats, c == 2 ? -4.f : 0.f, 1.f, uint64_t(c));
    over(floats, fill_kernel, m[c].data(), floats, 0.f, 1e-4f, uint64_t(c + 10));
    over(floats, fill_kernel, v[c].data(), floats, 1e-8f, 9e-9f, uint64_t(c + 20));
    if (slow > 0.f) over(rows, slow_kernel, m[c].data(), v[c].data(), rows, kFloats[c], slow);
  }
  over(rows, mean_kernel, column[0].data(), rows);
  SplatColumns columns{column[0].data(),
                       column[1].data(),
                       column[2].data(),
                       column[3].data(),
                       column[4].data(),
                       column[5].data(),
                       rows,
                       15};
  AdamState state{};
  for (int c = 0; c < kColumns; ++c) {
    state.exp_avg[c] = m[c].data();
    state.exp_avg_sq[c] = v[c].data();
  }
  Buffer<uint16_t> half_sh, half_m[kColumns];
  const auto round = [&](Buffer<float>& from, Buffer<uint16_t>& to, FloatArray::Kind kind) {
    to = Buffer<uint16_t>(from.size(), 0);
    const FloatArray array(to.data(), kind);
    over(from.size(), round_kernel, static_cast<const float*>(from.data()), from.size(), array);
    return array;
  };
  if (half) columns.shN = round(column[kShColumn], half_sh, FloatArray::Kind::kFloat16);
  for (int c = 0; c < kColumns && half; ++c)
    state.exp_avg[c] = round(m[c], half_m[c], FloatArray::Kind::kBfloat16);
  state.last_step = last.data();
  History history(2000, 0.9, 0.999, 1e-15, 1);
  for (int i = 0; i < 200; ++i) history.push({1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6}, 1e-7);

  for (int pattern = 6; pattern < count; ++pattern) {
    int64_t run = 1;
    double density = 100;
    std::sscanf(arguments[pattern], "%ld:%lf", &run, &density);
    density /= 100;
    std::vector<int64_t> seen;
    uint64_t random = 88172645463325252ull;
    const auto chance = [&] {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      return static_cast<double>(random >> 11) * 0x1p-53;
    };
    const double share = static_cast<double>(wanted) / static_cast<double>(rows) / density;
    for (int64_t row = 0; row < rows; row += run) {
      if (chance() >= share) continue;
      for (int64_t r = row; r < std::min(rows, row + run); ++r) {
        if (density == 1 || chance() < density) seen.push_back(r);
      }
    }
    const int64_t records = static_cast<int64_t>(seen.size());

    Frame frame;
    const float viewmat[16] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
    frame.views.push_back(make_view(viewmat, 1000, 1000, 960, 622, 1920, 1244, 0));
    frame.columns = columns;
    frame.state = state;
    frame.history = history.view();
    frame.replays = true;
    frame.homes.push_back({0, rows});
    frame.shards.resize(1);
    ShardRecords& shard = frame.shards[0];
    shard.row = Buffer<int64_t>(records, 0);
    CUDA_CHECK(cudaMemcpy(shard.row.data(), seen.data(), seen.size() * 8, cudaMemcpyHostToDevice));
    shard.record = Buffer<Record>(records, 0);
    shard.grad = Buffer<RecordGrad>(records, 0);
    over(12 * records, fill_kernel, reinterpret_cast<float*>(shard.record.data()), 12 * records, 1.f, 0.5f,
         uint64_t(31));
    over(12 * records, fill_kernel, reinterpret_cast<float*>(shard.grad.data()), 12 * records, 0.f, 1e-5f,
         uint64_t(32));
    shard.count = records;
    shard.view_begin = {0, records};
    upload_constants(frame);

    const int now = static_cast<int>(history.now());
    StepSettings settings;
    settings.lrs = {1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6};
    settings.opacity_reg = settings.scale_reg = 0.01;
    settings.wanted_means = false;
    const auto report = [&](const char* what, double ms, double bytes) {
      std::printf(
          "%-22s %9lld of %9lld rows, runs of %3lld, slow %.2f: %7.3f ms, %5.0f GB/s of the nominal bytes\n",
          what, static_cast<long long>(records), static_cast<long long>(rows), static_cast<long long>(run),
          static_cast<double>(slow), ms, bytes / ms * 1e-6);
      std::fflush(stdout);
    };
    const auto up_to_date = [&] { over(rows, last_kernel, last.data(), rows, now, 1); };
    const auto behind = [&] { over(rows, last_kernel, last.data(), rows, now - 100, 100); };
    const double bytes = static_cast<double>(records) * (state_bytes + kSeenBytes);
    const auto take_step = [&] { step({&frame}, columns, state, history, settings); };
    report("step", median_ms(rounds, up_to_date, take_step), bytes);
    settings.noise_scale = 1e-7;
    report("step, noise", median_ms(rounds, up_to_date, take_step), bytes);
    report("step, noise, missed", median_ms(rounds, behind, take_step), bytes);
    report("flush", median_ms(rounds, behind, [&] { flush(columns, state, history); }),
           static_cast<double>(rows) * state_bytes);
    const int64_t copied = column[5].size() * static_cast<int64_t>(sizeof(float));
    const double copy_ms = median_ms(
        rounds, [] {},
        [&] {
          CUDA_CHECK(cudaMemcpyAsync(m[5].data(), v[5].data(), static_cast<size_t>(copied),
                                     cudaMemcpyDeviceToDevice, shard_stream(0)));
        });
    report("copy", copy_ms, 2.0 * static_cast<double>(copied));
  }
  synchronise_shards();
  return 0;
}
