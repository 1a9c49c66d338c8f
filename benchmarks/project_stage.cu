// SPDX-License-Identifier: Apache-2.0
// project_stage.cu: stages "project" and "bin" alone on the garden scene of fast_step.py, without torch;
// built and run by project_variants.py, once for each variant. Prints one line: milliseconds (GPU, with the
// read-back) of project and bin, records, pairs, patches.
//
// project_stage FOLDER GRID WIDTH SCALE MODE: FOLDER as for blend_stage.cpp. MODE: `none`: no replay; `seen`:
// what the camera sees is up to date, all else missed 20 steps, as in a step of fast_step.py; `missed`: all
// rows missed them; `noise`: as `seen`, with MCMC noise.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "garden_rows.h"
#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "mesh/launch.h"
#include "splat/assign.h"
#include "splat/bin.h"
#include "splat/exchange.h"
#include "splat/history.h"
#include "splat/project.h"

using namespace mgpu;
using namespace mgpu::splat;

namespace {

constexpr int kFloats[kColumns] = {3, 4, 3, 1, 3, 45};
constexpr int kWarm = 3, kCalls = 11;
constexpr int64_t kFirstStep = 100, kSteps = 20;

__device__ int64_t first_item() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t item_step() { return int64_t{gridDim.x} * blockDim.x; }

__global__ void fill_rows(SplatColumns out, const float* means, const float* colors, int64_t points, int grid,
                          float scale) {
  for (int64_t row = first_item(); row < out.num_rows; row += item_step()) {
    RowRandom random{static_cast<uint64_t>(row) * 0xD1B54A32D192ED03ull + 5};
    const int64_t point = row % points, cell = row / points;
    const float offset[3] = {4.f * static_cast<float>(cell / grid - grid / 2),
                             4.f * static_cast<float>(cell % grid - grid / 2), 0.f};
    for (int i = 0; i < 3; ++i) out.means[3 * row + i] = means[3 * point + i] + offset[i];
    for (int i = 0; i < 4; ++i) out.quats[4 * row + i] = random.normal();
    for (int i = 0; i < 3; ++i) out.scales[3 * row + i] = logf(fmaxf(1e-6f, random.unit() * 0.02f) * scale);
    const float opacity = random.unit();
    out.opacities[row] = logf(opacity / (1.f - opacity));
    for (int i = 0; i < 3; ++i) out.sh0[3 * row + i] = (colors[3 * point + i] - 0.5f) / 0.2820948f;
    for (int i = 0; i < 45; ++i) out.shN.float32()[45 * row + i] = 0.02f * random.normal();
  }
}

__global__ void fill_moments(float* exp_avg, float* exp_avg_sq, int64_t count) {
  for (int64_t i = first_item(); i < count; i += item_step()) {
    RowRandom random{static_cast<uint64_t>(i) * 77 + 3};
    exp_avg[i] = 1e-4f * (random.unit() - 0.5f);
    exp_avg_sq[i] = 1e-8f * (0.1f + random.unit());
  }
}

__global__ void set_last_step(int32_t* last_step, const int64_t* rows, int64_t count, int32_t step) {
  for (int64_t i = first_item(); i < count; i += item_step()) last_step[rows ? rows[i] : i] = step;
}

constexpr int kBlocks = 2048, kBlockThreads = 256;

double median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(const std::string& folder, int grid, int width, float scale, const std::string& mode) {
  const auto means = read_file<float>(folder + "/means.bin"),
             colors = read_file<float>(folder + "/colors.bin");
  const auto camera = read_file<double>(folder + "/camera.bin");
  float viewmat[16];
  for (int i = 0; i < 16; ++i) viewmat[i] = static_cast<float>(camera[i]);
  const double stretch = width / camera[25];
  const int height = static_cast<int>(camera[26] * stretch + 0.5);
  const View view = make_view(viewmat, camera[16] * stretch, camera[20] * stretch, camera[18] * stretch,
                              camera[21] * stretch, width, height, 0);

  const int64_t points = static_cast<int64_t>(means.size() / 3), rows = points * grid * grid;
  const cudaStream_t stream = shard_stream(0);
  Buffer<float> column[kColumns], exp_avg[kColumns], exp_avg_sq[kColumns];
  Buffer<int32_t> last_step(rows, 0);
  AdamState state{};
  const bool replays = mode != "none";
  for (int c = 0; c < kColumns; ++c) {
    const int64_t count = rows * kFloats[c];
    column[c] = Buffer<float>(count, 0);
    if (!replays) continue;
    exp_avg[c] = Buffer<float>(count, 0);
    exp_avg_sq[c] = Buffer<float>(count, 0);
    fill_moments<<<kBlocks, kBlockThreads, 0, stream>>>(exp_avg[c].data(), exp_avg_sq[c].data(), count);
    state.exp_avg[c] = exp_avg[c].data();
    state.exp_avg_sq[c] = exp_avg_sq[c].data();
  }
  state.last_step = last_step.data();
  const SplatColumns columns{column[0].data(),
                             column[1].data(),
                             column[2].data(),
                             column[3].data(),
                             column[4].data(),
                             column[5].data(),
                             rows,
                             15};
  const Buffer<float> device_means = to_buffer(means, 0), device_colors = to_buffer(colors, 0);
  fill_rows<<<kBlocks, kBlockThreads, 0, stream>>>(columns, device_means.data(), device_colors.data(), points,
                                                   grid, scale);
  set_last_step<<<kBlocks, kBlockThreads, 0, stream>>>(last_step.data(), nullptr, rows, kFirstStep);
  History history(kFirstStep, 0.9, 0.999, 1e-15, 1);
  for (int64_t i = 0; i < kSteps; ++i)
    history.push({1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6}, mode == "noise" ? 1e-7 : 0.0);

  cudaEvent_t mark[4];
  for (cudaEvent_t& event : mark) CUDA_CHECK(cudaEventCreate(&event));
  std::vector<float> project_ms, bin_ms;
  int64_t records = 0, pairs = 0, patches = 0;
  for (int call = 0; call < kWarm + kCalls; ++call) {
    Frame frame;
    frame.views = {view};
    frame.columns = columns;
    frame.homes = {{0, rows}};
    if (replays) {
      frame.state = state;
      frame.history = history.view();
      frame.replays = true;
    }
    assign_tiles(frame);
    synchronise_shards();
    CUDA_CHECK(cudaEventRecord(mark[0], stream));
    project(frame);
    CUDA_CHECK(cudaEventRecord(mark[1], stream));
    exchange_records(frame);
    CUDA_CHECK(cudaEventRecord(mark[2], stream));
    bin_records(frame);
    CUDA_CHECK(cudaEventRecord(mark[3], stream));
    records = frame.shards[0].count;
    pairs = frame.owners[0].pairs;
    patches = frame.owners[0].patch_pairs;
    if (call == 0 && (mode == "seen" || mode == "noise"))
      set_last_step<<<kBlocks, kBlockThreads, 0, stream>>>(last_step.data(), frame.shards[0].row.data(),
                                                           records, kFirstStep + kSteps);
    synchronise_shards();
    if (call < kWarm) continue;
    float ms = 0.f;
    CUDA_CHECK(cudaEventElapsedTime(&ms, mark[0], mark[1]));
    project_ms.push_back(ms);
    CUDA_CHECK(cudaEventElapsedTime(&ms, mark[2], mark[3]));
    bin_ms.push_back(ms);
  }
  std::printf("%.4f %.4f %lld %lld %lld\n", median(project_ms), median(bin_ms),
              static_cast<long long>(records), static_cast<long long>(pairs),
              static_cast<long long>(patches));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) return std::fprintf(stderr, "project_stage FOLDER GRID WIDTH SCALE MODE\n"), 2;
  try {
    set_mesh({"cuda:0"});
    measure(arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3]),
            static_cast<float>(std::atof(arguments[4])), arguments[5]);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
  return 0;
}
