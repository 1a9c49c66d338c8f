// SPDX-License-Identifier: Apache-2.0
// blend_stage.cpp: the blend stages alone on the garden scene of fast_step.py, without torch; built and run
// by blend_variants.py, once for each variant of blend.cu. Prints one line: milliseconds and counts.
//
// blend_stage FOLDER GRID WIDTH SCALE [RESULT]: FOLDER holds means.bin and colors.bin [N, 3] and camera.bin
// (viewmat [4, 4], K [3, 3], width, height as doubles); RESULT gets the image and the record gradients.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "garden_rows.h"
#include "memory/temporaries.h"
#include "memory/transfer.h"
#include "mesh/fork_join.h"
#include "mesh/launch.h"
#include "splat/bin.h"
#include "splat/pipeline.h"

using namespace mgpu;
using namespace mgpu::splat;

namespace {

constexpr int kRest = 15;    // higher SH coefficients, all zero
constexpr int kCalls = 10;   // between two events
constexpr int kRepeats = 5;  // of which the median counts

struct Columns {
  Buffer<float> means, quats, scales, opacities, sh0, shN;
  int64_t rows = 0;
};

// The garden on a grid of grid x grid cells of 4 units, as gsplat's load_test_data makes it.
Columns make_columns(const std::string& folder, int grid, float scale) {
  const std::vector<float> means = read_file<float>(folder + "/means.bin"),
                           colors = read_file<float>(folder + "/colors.bin");
  const int64_t cell_rows = static_cast<int64_t>(means.size()) / 3, rows = cell_rows * grid * grid;
  std::vector<float> mean(3 * rows), quat(4 * rows), log_scale(3 * rows), logit(rows), sh0(3 * rows);
  parallel_for(rows, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      RowRandom random{static_cast<uint64_t>(row) * 0xD1B54A32D192ED03ull + 5};
      const int64_t from = row % cell_rows, cell = row / cell_rows;
      mean[3 * row] = means[3 * from] + 4.f * static_cast<float>(cell / grid - grid / 2);
      mean[3 * row + 1] = means[3 * from + 1] + 4.f * static_cast<float>(cell % grid - grid / 2);
      mean[3 * row + 2] = means[3 * from + 2];
      for (int k = 0; k < 4; ++k) quat[4 * row + k] = random.normal();
      for (int k = 0; k < 3; ++k)
        log_scale[3 * row + k] = std::log(std::max(1e-6f, 0.02f * random.unit()) * scale);
      const float opacity = random.unit();
      logit[row] = std::log(opacity / (1.f - opacity));
      for (int k = 0; k < 3; ++k) sh0[3 * row + k] = (colors[3 * from + k] - 0.5f) / 0.2820948f;
    }
  });
  Columns out{to_buffer(mean, 0),
              to_buffer(quat, 0),
              to_buffer(log_scale, 0),
              to_buffer(logit, 0),
              to_buffer(sh0, 0),
              Buffer<float>(3 * kRest * rows, 0),
              rows};
  zero(out.shN);
  return out;
}

template <typename Work>
double median_ms(const Work& work) {
  cudaEvent_t start, stop;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&stop));
  std::vector<float> times;
  for (int i = 0; i < 3; ++i) work();
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    CUDA_CHECK(cudaEventRecord(start, shard_stream(0)));
    for (int i = 0; i < kCalls; ++i) work();
    CUDA_CHECK(cudaEventRecord(stop, shard_stream(0)));
    CUDA_CHECK(cudaEventSynchronize(stop));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    times.push_back(ms / kCalls);
  }
  std::sort(times.begin(), times.end());
  return times[kRepeats / 2];
}

void run(const std::string& folder, int grid, int width, float scale, const char* result) {
  const std::vector<double> camera = read_file<double>(folder + "/camera.bin");
  float viewmat[16];
  std::copy_n(camera.begin(), 16, viewmat);
  const double zoom = width / camera[25];
  const int height = static_cast<int>(camera[26] * zoom);
  Columns columns = make_columns(folder, grid, scale);
  Frame frame;
  frame.views = {make_view(viewmat, camera[16] * zoom, camera[20] * zoom, camera[18] * zoom,
                           camera[21] * zoom, width, height, 0)};
  frame.settings.wanted_absgrad = false;
  frame.settings.wanted_depth = false;
  frame.columns = {
      columns.means.data(), columns.quats.data(), columns.scales.data(), columns.opacities.data(),
      columns.sh0.data(),   columns.shN.data(),   columns.rows,          kRest};
  frame.homes = {{0, columns.rows}};
  const int64_t pixels = int64_t{width} * height;
  Buffer<float> rgb(3 * pixels, 0), accumulation(pixels, 0);
  std::vector<float> signs(static_cast<size_t>(3 * pixels));
  RowRandom random{77};
  for (float& sign : signs) sign = (random.unit() < 0.5f ? -1.f : 1.f) / static_cast<float>(3 * pixels);
  const Buffer<float> gradient = to_buffer(signs, 0);  // of an L1 loss
  const std::vector<ImageGradPointers> grads = {{gradient.data(), nullptr, nullptr}};
  run_forward(frame, {{rgb.data(), nullptr, accumulation.data()}});
  run_backward(frame, grads);
  synchronise_shards();

  const double forward = median_ms([&] { blend(frame); });
  const double backward = median_ms([&] { blend_backward(frame, grads); });
  frame.settings.wanted_backward = false;
  const double show = median_ms([&] { blend(frame); });
  frame.settings.wanted_backward = true;
  blend(frame);
  const TileOwner& owner = frame.owners[0];
  int64_t steps = 0;
  const int64_t buckets = to_vector(owner.bucket_count)[0];
  for (const PatchBucket& bucket : to_vector(owner.bucket, buckets)) steps += bucket.view_and_count % 64;
  std::printf("%.4f %.4f %.4f %lld %lld %lld %lld\n", forward, backward, show,
              static_cast<long long>(frame.shards[0].count),
              static_cast<long long>(intersection_count(frame)), static_cast<long long>(buckets),
              static_cast<long long>(steps));
  if (!result) return;
  run_backward(frame, grads);
  const std::vector<float> image = to_vector(rgb);
  const std::vector<RecordGrad> grad = to_vector(frame.shards[0].grad);
  std::ofstream file(result, std::ios::binary);
  file.write(reinterpret_cast<const char*>(image.data()), static_cast<std::streamsize>(4 * image.size()));
  file.write(reinterpret_cast<const char*>(grad.data()),
             static_cast<std::streamsize>(sizeof(RecordGrad) * grad.size()));
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) {
    std::fprintf(stderr, "blend_stage FOLDER GRID WIDTH SCALE [RESULT]\n");
    return 2;
  }
  set_num_threads(16);
  set_mesh({"cuda:0"});
  try {
    run(arguments[1], std::atoi(arguments[2]), std::atoi(arguments[3]),
        static_cast<float>(std::atof(arguments[4])), count > 5 ? arguments[5] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
