// SPDX-License-Identifier: Apache-2.0
// forward_stage.cu: the stages of a forward pass, and blend's way back, on the garden scenes of fast_step.py,
// without torch; built and run by forward_variants.py, once for each variant. A line a scene: milliseconds
// (GPU) of project (with the read-back), bin, blend, blend without a way back, blend backward; records,
// pairs, patches, buckets; sums of the bits of the records and of the image, and the norm of the record
// gradients.
//
// forward_stage FOLDER MODE [GRID WIDTH SCALE]...: FOLDER holds means.bin and colors.bin [N, 3] and
// camera.bin (viewmat [4, 4], K [3, 3], width, height as doubles). MODE: `none`: no replay; `seen`: what the
// camera sees is up to date, all else missed 20 steps, as in a step of fast_step.py; `missed`: all rows
// missed them; `noise`: as `seen`, with MCMC noise.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "mesh/launch.h"
#include "splat/assign.h"
#include "splat/bin.h"
#include "splat/exchange.h"
#include "splat/history.h"
#include "splat/pipeline.h"

using namespace mgpu;
using namespace mgpu::splat;

namespace {

constexpr int kFloats[kColumns] = {3, 4, 3, 1, 3, 45};
constexpr int kWarm = 3, kCalls = 9;
constexpr int64_t kFirstStep = 100, kSteps = 20;
constexpr int kBlocks = 2048, kBlockThreads = 256;

// A file of numbers, whole.
template <typename T>
std::vector<T> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error("cannot read " + path + "; forward_variants.py makes it");
  std::vector<T> values(static_cast<size_t>(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
  return values;
}

// Random numbers of one row, the same whichever thread draws them.
struct RowRandom {
  uint64_t state;
  HOST_DEVICE float unit() {  // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (static_cast<float>((z ^ (z >> 31)) >> 40) + 0.5f) * 0x1p-24f;
  }
  HOST_DEVICE float normal() { return std::sqrt(-2.f * std::log(unit())) * std::cos(6.2831853f * unit()); }
};

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

// Of an L1 loss: signs over the number of floats.
__global__ void fill_signs(float* out, int64_t count) {
  for (int64_t i = first_item(); i < count; i += item_step()) {
    RowRandom random{static_cast<uint64_t>(i) * 91 + 7};
    out[i] = (random.unit() < 0.5f ? -1.f : 1.f) / static_cast<float>(count);
  }
}

// Sums of words that each know their place, in integers: the same in any order.
__global__ void add_words(const uint32_t* words, int64_t count, unsigned long long* sum) {
  unsigned long long own = 0;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    uint64_t z = (static_cast<uint64_t>(i) << 32 ^ words[i]) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    own += z ^ (z >> 31);
  }
  atomicAdd(sum, own);
}

__global__ void add_squares(const float* values, int64_t count, double* sum) {
  double own = 0.0;
  for (int64_t i = first_item(); i < count; i += item_step()) own += double{values[i]} * double{values[i]};
  atomicAdd(sum, own);
}

template <typename T>
unsigned long long bits_of(const Buffer<T>& values, int64_t count) {
  Buffer<unsigned long long> sum(1, 0);
  zero(sum);
  add_words<<<kBlocks, kBlockThreads, 0, shard_stream(0)>>>(reinterpret_cast<const uint32_t*>(values.data()),
                                                            count * static_cast<int64_t>(sizeof(T) / 4),
                                                            sum.data());
  return to_vector(sum)[0];
}

double median(std::vector<float> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The scene's table, its optimizer state and its camera.
struct Scene {
  Buffer<float> column[kColumns], exp_avg[kColumns], exp_avg_sq[kColumns];
  Buffer<int32_t> last_step;
  SplatColumns columns{};
  AdamState state{};
  View view{};
};

Scene make_scene(const std::string& folder, int grid, int width, float scale, bool replays) {
  const auto means = read_file<float>(folder + "/means.bin"),
             colors = read_file<float>(folder + "/colors.bin");
  const auto camera = read_file<double>(folder + "/camera.bin");
  float viewmat[16];
  for (int i = 0; i < 16; ++i) viewmat[i] = static_cast<float>(camera[static_cast<size_t>(i)]);
  const double stretch = width / camera[25];
  const int height = static_cast<int>(camera[26] * stretch + 0.5);
  const int64_t points = static_cast<int64_t>(means.size() / 3), rows = points * grid * grid;
  const cudaStream_t stream = shard_stream(0);
  Scene scene;
  scene.view = make_view(viewmat, camera[16] * stretch, camera[20] * stretch, camera[18] * stretch,
                         camera[21] * stretch, width, height, 0);
  for (int c = 0; c < kColumns; ++c) {
    const int64_t count = rows * kFloats[c];
    scene.column[c] = Buffer<float>(count, 0);
    if (!replays) continue;
    scene.exp_avg[c] = Buffer<float>(count, 0);
    scene.exp_avg_sq[c] = Buffer<float>(count, 0);
    fill_moments<<<kBlocks, kBlockThreads, 0, stream>>>(scene.exp_avg[c].data(), scene.exp_avg_sq[c].data(),
                                                        count);
    scene.state.exp_avg[c] = scene.exp_avg[c].data();
    scene.state.exp_avg_sq[c] = scene.exp_avg_sq[c].data();
  }
  scene.last_step = Buffer<int32_t>(rows, 0);
  scene.state.last_step = scene.last_step.data();
  scene.columns = {scene.column[0].data(),
                   scene.column[1].data(),
                   scene.column[2].data(),
                   scene.column[3].data(),
                   scene.column[4].data(),
                   scene.column[5].data(),
                   rows,
                   15};
  const Buffer<float> device_means = to_buffer(means, 0), device_colors = to_buffer(colors, 0);
  fill_rows<<<kBlocks, kBlockThreads, 0, stream>>>(scene.columns, device_means.data(), device_colors.data(),
                                                   points, grid, scale);
  set_last_step<<<kBlocks, kBlockThreads, 0, stream>>>(scene.last_step.data(), nullptr, rows, kFirstStep);
  return scene;
}

void measure(const std::string& folder, const std::string& mode, int grid, int width, float scale) {
  const bool replays = mode != "none";
  const cudaStream_t stream = shard_stream(0);
  Scene scene = make_scene(folder, grid, width, scale, replays);
  History history(kFirstStep, 0.9, 0.999, 1e-15, 1);
  for (int64_t i = 0; i < kSteps; ++i)
    history.push({1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6}, mode == "noise" ? 1e-7 : 0.0);
  const int64_t pixels = int64_t{scene.view.width} * scene.view.height;
  Buffer<float> rgb(3 * pixels, 0), accumulation(pixels, 0), signs(3 * pixels, 0);
  fill_signs<<<kBlocks, kBlockThreads, 0, stream>>>(signs.data(), signs.size());
  const std::vector<ImageGradPointers> grads = {{signs.data(), nullptr, nullptr}};

  constexpr int kParts = 5;
  cudaEvent_t mark[kParts + 1];
  for (cudaEvent_t& event : mark) CUDA_CHECK(cudaEventCreate(&event));
  std::vector<float> times[kParts];
  for (int call = 0; call < kWarm + kCalls; ++call) {
    Frame frame;
    frame.views = {scene.view};
    frame.settings.wanted_absgrad = frame.settings.wanted_depth = false;
    frame.columns = scene.columns;
    frame.homes = {{0, scene.columns.num_rows}};
    if (replays) {
      frame.state = scene.state;
      frame.history = history.view();
      frame.replays = true;
    }
    frame.images = {{rgb.data(), nullptr, accumulation.data()}};
    order_tiles(frame);
    synchronise_shards();
    const auto at = [&](int i) { CUDA_CHECK(cudaEventRecord(mark[i], stream)); };
    at(0);
    project(frame);
    at(1);
    assign_tiles(frame);
    exchange_records(frame);
    bin_records(frame);
    at(2);
    frame.settings.wanted_backward = false;
    blend(frame);
    at(3);
    frame.settings.wanted_backward = true;
    blend(frame);
    at(4);
    blend_backward(frame, grads);
    at(5);
    const int64_t records = frame.shards[0].count;
    if (call == 0 && (mode == "seen" || mode == "noise"))
      set_last_step<<<kBlocks, kBlockThreads, 0, stream>>>(scene.last_step.data(), frame.shards[0].row.data(),
                                                           records, kFirstStep + kSteps);
    synchronise_shards();
    for (int part = 0; part < kParts && call >= kWarm; ++part) {
      float ms = 0.f;
      CUDA_CHECK(cudaEventElapsedTime(&ms, mark[part], mark[part + 1]));
      times[part].push_back(ms);
    }
    if (call + 1 < kWarm + kCalls) continue;
    const TileOwner& owner = frame.owners[0];
    Buffer<double> squares(1, 0);
    zero(squares);
    add_squares<<<kBlocks, kBlockThreads, 0, stream>>>(
        reinterpret_cast<const float*>(owner.record_grad.data()), 12 * records, squares.data());
    std::printf("%.4f %.4f %.4f %.4f %.4f %lld %lld %lld %d %016llx %016llx %.6e\n", median(times[0]),
                median(times[1]), median(times[3]), median(times[2]), median(times[4]),
                static_cast<long long>(records), static_cast<long long>(owner.pairs),
                static_cast<long long>(owner.patch_pairs), to_vector(owner.bucket_count)[0],
                bits_of(frame.shards[0].record, records), bits_of(rgb, rgb.size()),
                std::sqrt(to_vector(squares)[0]));
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 6 || count % 3 != 0)
    return std::fprintf(stderr, "forward_stage FOLDER MODE [GRID WIDTH SCALE]...\n"), 2;
  try {
    set_num_threads(16);
    set_mesh({"cuda:0"});
    for (int i = 3; i + 2 < count; i += 3) {
      measure(arguments[1], arguments[2], std::atoi(arguments[i]), std::atoi(arguments[i + 1]),
              static_cast<float>(std::atof(arguments[i + 2])));
    }
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
  return 0;
}
