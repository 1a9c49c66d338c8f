// SPDX-License-Identifier: Apache-2.0
// step.cu: adjoint of projection and SH, Adam and noise, one thread a row that was seen. Floor: 1,464 bytes a
// row at SH degree 3. The higher SH coefficients and their moments wait in shared memory; the moments of the
// other columns are read twice, for the replay and for the step, so that they need not stay in registers.
#include "splat/step.h"

#include <algorithm>
#include <vector>

#include "math/adam.h"
#include "memory/transfer.h"
#include "splat/kernels.h"
#include "splat/project.h"
#include "splat/replay.h"
#include "splat/sh_stage.h"
#include "splat/step_check.h"

namespace mgpu::splat {

namespace {

// The records of one view of one frame on one shard: ascending by row.
struct RecordList {
  const View* view;    // on the device
  const int64_t* row;  // [size]
  const RecordGrad* grad;
  int64_t size;
  RenderSettings settings;
};

struct StepInput {
  SplatColumns columns;
  AdamState state;
  AdamHistory history;
  History::Step now;
  const RecordList* list;  // on the device
  int lists;
  const int64_t* seen;        // rows that are in some list, ascending; null: those of the only list
  const int64_t* seen_count;  // on the device
  int64_t most_rows;
  float opacity_weight, scale_weight;  // of the regularisers, divided by the rows seen
  double* sums;                        // [blocks, 2] of opacities and scales; null: not wanted
};

// The position of a row in an ascending list, or -1.
__device__ __forceinline__ int64_t find_row(const RecordList& list, int64_t row) {
  int64_t low = 0, high = list.size;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (list.row[middle] < row)
      low = middle + 1;
    else
      high = middle;
  }
  return low < list.size && list.row[low] == row ? low : -1;
}

// One step of neighbouring components whose parameters have been replayed already: their moments catch up
// here.
template <int kSize>
__device__ __forceinline__ void step_column(const StepInput& in, const math::AdamConstants& constants,
                                            int column, int64_t offset, float beta1_power, float beta2_power,
                                            const float* gradient, float* parameter, float* stored) {
  float* exp_avg = in.state.exp_avg[column] + offset;
  float* exp_avg_sq = in.state.exp_avg_sq[column] + offset;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    float m = exp_avg[i] * beta1_power, v = exp_avg_sq[i] * beta2_power;
    math::adam_step(constants, in.now.step_size[column], in.now.inv_sqrt_bc2, gradient[i], parameter[i], m,
                    v);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (stored) stored[offset + i] = parameter[i];
  }
}

// kUniform: all lists have SH degree kDegree; otherwise that is the highest. Bands above have gradient zero.
template <int kDegree, bool kUniform>
__device__ void step_row(const StepInput& in, int64_t row, int64_t last, int64_t position_in_first,
                         ShStage& rest, double& opacity_sum, double& scale_sum) {
  constexpr int kCount = (kDegree + 1) * (kDegree + 1);
  const math::AdamConstants constants =
      math::adam_constants(in.history.beta1, in.history.beta2, in.history.eps);
  const int rest_floats = 3 * in.columns.sh_rest;
  RowValues values;
  replay_geometry(in.columns, &in.state, &in.history, row, values.mean, values.quat, values.log_scale,
                  values.opacity_logit);
  replay_sh(in.columns, &in.state, &in.history, row, 1, values.sh);
  rest.replay(in.history, last, rest_floats);
#pragma unroll
  for (int k = 0; k < 3 * kCount - 3; ++k) values.sh[3 + k] = rest.value(k);

  float dL_dmean[3] = {}, dL_dquat[4] = {}, dL_dlog_scale[3] = {}, dL_dlogit = 0.f, dL_dsh[3 * kCount] = {};
  float unused_dL_dviewmat[12] = {};  // the frame's backward has reduced it already
  for (int l = 0; l < in.lists; ++l) {
    const RecordList& list = in.list[l];
    const int64_t position = in.seen ? find_row(list, row) : position_in_first;
    if (position < 0) continue;
    RenderSettings settings = list.settings;
    if constexpr (kUniform) settings.sh_degree = kDegree;
    record_backward(*list.view, settings, values, load48(list.grad + position), dL_dmean, dL_dquat,
                    dL_dlog_scale, dL_dlogit, dL_dsh, unused_dL_dviewmat);
  }
  const float opacity = math::sigmoid(values.opacity_logit);
  dL_dlogit += in.opacity_weight * opacity * (1.0f - opacity);
  opacity_sum = opacity;
  for (int axis = 0; axis < 3; ++axis) {
    const float scale = std::exp(values.log_scale[axis]);
    dL_dlog_scale[axis] += in.scale_weight * scale;
    scale_sum += scale;
  }

  const float step_size = in.now.step_size[kShColumn];
#pragma unroll
  for (int k = 0; k < 3 * kCount - 3; ++k) {
    math::adam_step(constants, step_size, in.now.inv_sqrt_bc2, dL_dsh[3 + k], rest.value(k), rest.exp_avg(k),
                    rest.exp_avg_sq(k));
  }
  for (int k = 3 * kCount - 3; k < rest_floats; ++k) {
    math::adam_step(constants, step_size, in.now.inv_sqrt_bc2, 0.f, rest.value(k), rest.exp_avg(k),
                    rest.exp_avg_sq(k));
  }
  const int64_t missed = in.history.now - last;  // 0: both powers are 1
  const float power1 = in.history.beta1_power[missed > 0 ? missed : 0];
  const float power2 = in.history.beta2_power[missed > 0 ? missed : 0];
  step_column<3>(in, constants, 0, 3 * row, power1, power2, dL_dmean, values.mean, nullptr);
  step_column<4>(in, constants, 1, 4 * row, power1, power2, dL_dquat, values.quat, in.columns.quats);
  step_column<3>(in, constants, 2, 3 * row, power1, power2, dL_dlog_scale, values.log_scale,
                 in.columns.scales);
  step_column<1>(in, constants, 3, row, power1, power2, &dL_dlogit, &values.opacity_logit,
                 in.columns.opacities);
  step_column<3>(in, constants, 4, 3 * row, power1, power2, dL_dsh, values.sh, in.columns.sh0);
  if (in.now.noise_scale > 0.f) {
    const math::Random4 random = math::draw(in.history.seed, math::Stream::kNoise, in.now.number, row);
    math::add_mcmc_noise(random, in.now.noise_scale, values.quat, values.log_scale, values.opacity_logit,
                         values.mean);
  }
  for (int i = 0; i < 3; ++i) in.columns.means[3 * row + i] = values.mean[i];
  in.state.last_step[row] = static_cast<int32_t>(in.now.number);
}

template <int kDegree, bool kUniform>
__global__ void __launch_bounds__(kStageThreads, 3) step_kernel(const __grid_constant__ StepInput in) {
  extern __shared__ float shared[];
  const int64_t i = int64_t{blockIdx.x} * kStageThreads + threadIdx.x;
  const int64_t rows = in.seen ? *in.seen_count : in.most_rows;
  const int64_t row = i >= rows ? -1 : in.seen ? in.seen[i] : in.list[0].row[i];
  ShStage rest(shared, 3 * in.columns.sh_rest, true);
  rest.fetch(in.columns, in.state, row, 3 * in.columns.sh_rest);
  double sum[2] = {0.0, 0.0};
  if (row >= 0) step_row<kDegree, kUniform>(in, row, in.state.last_step[row], i, rest, sum[0], sum[1]);
  rest.store(in.columns, in.state, row);
  if (!in.sums) return;
  __shared__ double warp_sums[kStageWarps][2];
  for (int k = 0; k < 2; ++k) {
    for (int step = kWarp / 2; step > 0; step /= 2) sum[k] += __shfl_down_sync(kAllLanes, sum[k], step);
    if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp][k] = sum[k];
  }
  __syncthreads();
  if (threadIdx.x < 2) {
    double total = 0.0;
    for (int warp = 0; warp < kStageWarps; ++warp) total += warp_sums[warp][threadIdx.x];
    in.sums[int64_t{blockIdx.x} * 2 + threadIdx.x] = total;
  }
}

// total[k] = sum over blocks of part[block, k], k < 2; one block of threads, always in the same order.
__global__ void __launch_bounds__(kThreads)
    sum_pairs_kernel(const double* part, int64_t blocks, double* total) {
  __shared__ double partial[kThreads];
  for (int k = 0; k < 2; ++k) {
    double sum = 0.0;
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads) sum += part[2 * block + k];
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int step = kThreads / 2; step > 0; step /= 2) {
      if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
      __syncthreads();
    }
    if (threadIdx.x == 0) total[k] = partial[0];
    __syncthreads();
  }
}

// ---- rows that are in any of several lists

__global__ void __launch_bounds__(kThreads)
    mark_rows_kernel(const int64_t* row, int64_t count, int64_t first_row, uint32_t* bits) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t local = row[i] - first_row;
  atomicOr(bits + local / kWarp, 1u << (local % kWarp));
}

// count[block]: bits set among the 256 of the block; the last one, behind the blocks, is 0.
__global__ void __launch_bounds__(kThreads)
    count_bits_kernel(const uint32_t* bits, int64_t blocks, int32_t* count) {
  const int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (block > blocks) return;
  int32_t sum = 0;
  for (int w = 0; w < kWarps && block < blocks; ++w) sum += __popc(bits[block * kWarps + w]);
  count[block] = sum;
}

__global__ void __launch_bounds__(kThreads)
    list_rows_kernel(const uint32_t* bits, const int64_t* offset, int64_t first_row, int64_t* row) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t* words = bits + int64_t{blockIdx.x} * kWarps;
  if (!(words[warp] >> lane & 1u)) return;
  int64_t position = offset[blockIdx.x];
  for (int w = 0; w < warp; ++w) position += __popc(words[w]);
  position += __popc(words[warp] & ((1u << lane) - 1u));
  row[position] = first_row + int64_t{blockIdx.x} * kThreads + threadIdx.x;
}

// ---- one shard

class ShardStep {
 public:
  ShardStep(const std::vector<const Frame*>& frames, int shard)
      : shard_(shard), home_(frames[0]->homes[static_cast<size_t>(shard)]) {
    for (const Frame* frame : frames) {
      const ShardRecords& records = frame->shards[static_cast<size_t>(shard)];
      for (size_t view = 0; view < frame->views.size(); ++view) {
        const int64_t begin = records.view_begin[view], end = records.view_begin[view + 1];
        if (begin == end) continue;
        lists_.push_back({frame->constants[static_cast<size_t>(shard)].views.data() + view,
                          records.row.data() + begin, records.grad.data() + begin, end - begin,
                          frame->settings});
      }
    }
    history_ = frames[0]->constants[static_cast<size_t>(shard)].history;
  }

  // How many rows are seen: at once for one list; for several the count is asked for.
  void find_rows(ReadBack& read_back) {
    for (const RecordList& list : lists_) most_rows_ = std::min(home_.size(), most_rows_ + list.size);
    if (lists_.size() < 2) {
      rows_seen = most_rows_;
      return;
    }
    const cudaStream_t stream = shard_stream(shard_);
    const int64_t blocks = blocks_for(home_.size(), kThreads);
    Buffer<uint32_t> bits(blocks * kWarps, shard_);
    Buffer<int32_t> count(blocks + 1, shard_);
    offset_ = Buffer<int64_t>(blocks + 1, shard_);
    seen_ = Buffer<int64_t>(most_rows_, shard_);
    seen_count_ = offset_.data() + blocks;
    zero(bits);
    for (const RecordList& list : lists_) {
      mark_rows_kernel<<<blocks_for(list.size, kThreads), kThreads, 0, stream>>>(list.row, list.size,
                                                                                 home_.begin, bits.data());
      KERNEL_CHECK("step count", shard_, list.size);
    }
    count_bits_kernel<<<blocks_for(blocks + 1, kThreads), kThreads, 0, stream>>>(bits.data(), blocks,
                                                                                 count.data());
    KERNEL_CHECK("step count", shard_, home_.size());
    exclusive_sum(count.data(), offset_.data(), blocks + 1, shard_);
    list_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(bits.data(), offset_.data(),
                                                                             home_.begin, seen_.data());
    KERNEL_CHECK("step count", shard_, home_.size());
    read_back.add(&rows_seen, seen_count_, 1, shard_);
  }

  void run(const SplatColumns& columns, const AdamState& state, const History::Step& now,
           float opacity_weight, float scale_weight, bool wanted_means) {
    if (lists_.empty()) return;
    const cudaStream_t stream = shard_stream(shard_);
    const Buffer<RecordList> lists = to_buffer(lists_, shard_);
    const unsigned blocks = blocks_for(rows_seen, kStageThreads);
    const size_t shared = ShStage::shared_bytes(3 * columns.sh_rest, true);
    Buffer<double> part(wanted_means ? int64_t{blocks} * 2 : 0, shard_);
    const StepInput in{columns,      state,
                       history_,     now,
                       lists.data(), static_cast<int>(lists_.size()),
                       seen_.data(), seen_count_,
                       rows_seen,    opacity_weight,
                       scale_weight, part.data()};
    int degree = 0;
    bool uniform = true;
    for (const RecordList& list : lists_) degree = std::max(degree, list.settings.sh_degree);
    for (const RecordList& list : lists_) uniform &= list.settings.sh_degree == degree;
    const auto launch = [&](auto kernel) {
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared)));
      kernel<<<blocks, kStageThreads, shared, stream>>>(in);
    };
    switch (degree * 2 + uniform) {
      case 1:
        launch(step_kernel<0, true>);
        break;
      case 2:
        launch(step_kernel<1, false>);
        break;
      case 3:
        launch(step_kernel<1, true>);
        break;
      case 4:
        launch(step_kernel<2, false>);
        break;
      case 5:
        launch(step_kernel<2, true>);
        break;
      case 6:
        launch(step_kernel<3, false>);
        break;
      default:
        launch(step_kernel<3, true>);
        break;
    }
    KERNEL_CHECK("step", shard_, rows_seen);
    if (!wanted_means) return;
    sums_ = Buffer<double>(2, shard_);
    sum_pairs_kernel<<<1, kThreads, 0, stream>>>(part.data(), blocks, sums_.data());
    KERNEL_CHECK("step", shard_, rows_seen);
  }

  void ask_sums(ReadBack& read_back) { read_back.add(sums, sums_.data(), sums_.size(), shard_); }

  int64_t rows_seen = 0;
  double sums[2] = {0.0, 0.0};  // of opacities and scales

 private:
  int shard_;
  RowRange home_;
  std::vector<RecordList> lists_;
  AdamHistory history_{};
  int64_t most_rows_ = 0;
  Buffer<int64_t> offset_, seen_;
  const int64_t* seen_count_ = nullptr;
  Buffer<double> sums_;
};

// ---- flush

struct FlushInput {
  SplatColumns columns;
  AdamState state;
  AdamHistory history;
  RowRange rows;
};

// One float of an SH column a thread; last_step stays for the columns that follow.
__global__ void __launch_bounds__(kThreads)
    flush_column_kernel(const __grid_constant__ FlushInput in, int column, float* data, int row_floats) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= in.rows.size() * row_floats) return;
  const int64_t row = in.rows.begin + i / row_floats, at = in.rows.begin * row_floats + i;
  const int64_t last = in.state.last_step[row];
  if (last >= in.history.now) return;
  const math::AdamConstants constants =
      math::adam_constants(in.history.beta1, in.history.beta2, in.history.eps);
  const math::MissedSteps missed = missed_steps(in.history, column, last);
  float &exp_avg = in.state.exp_avg[column][at], &exp_avg_sq = in.state.exp_avg_sq[column][at];
  data[at] = math::replay_missed(constants, missed, data[at], exp_avg, exp_avg_sq);
  exp_avg *= missed.beta1_power;
  exp_avg_sq *= missed.beta2_power;
}

__global__ void __launch_bounds__(kThreads) flush_geometry_kernel(const __grid_constant__ FlushInput in) {
  const int64_t row = in.rows.begin + int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= in.rows.end) return;
  const int64_t last = in.state.last_step[row];
  if (last >= in.history.now) return;
  float mean[3], quat[4], log_scale[3], opacity_logit;
  replay_geometry(in.columns, &in.state, &in.history, row, mean, quat, log_scale, opacity_logit);
  const float power1 = in.history.beta1_power[in.history.now - last],
              power2 = in.history.beta2_power[in.history.now - last];
  const auto store = [&](int column, float* data, int size, const float* values) {
    for (int i = 0; i < size; ++i) {
      data[row * size + i] = values[i];
      in.state.exp_avg[column][row * size + i] *= power1;
      in.state.exp_avg_sq[column][row * size + i] *= power2;
    }
  };
  store(0, in.columns.means, 3, mean);
  store(1, in.columns.quats, 4, quat);
  store(2, in.columns.scales, 3, log_scale);
  store(3, in.columns.opacities, 1, &opacity_logit);
  in.state.last_step[row] = static_cast<int32_t>(in.history.now);
}

}  // namespace

StepReport step(const std::vector<const Frame*>& frames, const SplatColumns& columns, const AdamState& state,
                const History& history, const StepSettings& settings) {
  check_frames(frames, columns, history);
  JoinedOperator joined;
  StepReport report;
  if (frames.empty() || columns.num_rows == 0) return report;
  const History::Step now = history.next(settings.lrs, settings.noise_scale);
  std::vector<ShardStep> work;
  work.reserve(frames[0]->homes.size());
  for (size_t shard = 0; shard < frames[0]->homes.size(); ++shard)
    work.emplace_back(frames, static_cast<int>(shard));

  // The regularisers are means over the rows seen, so these are counted first.
  ReadBack counts;
  for_each_shard("step count",
                 [&](const Shard& shard) { work[static_cast<size_t>(shard.index)].find_rows(counts); });
  counts.wait();
  for (const ShardStep& part : work) report.rows_seen += part.rows_seen;
  if (report.rows_seen == 0) return report;
  const double rows_seen = static_cast<double>(report.rows_seen);
  const float opacity_weight = static_cast<float>(settings.opacity_reg / rows_seen);
  const float scale_weight = static_cast<float>(settings.scale_reg / (3.0 * rows_seen));
  for_each_shard("step", [&](const Shard& shard) {
    work[static_cast<size_t>(shard.index)].run(columns, state, now, opacity_weight, scale_weight,
                                               settings.wanted_means);
  });
  if (!settings.wanted_means) return report;
  ReadBack sums;
  for (ShardStep& part : work) part.ask_sums(sums);
  sums.wait();
  for (const ShardStep& part : work) {
    report.mean_opacity += part.sums[0] / rows_seen;
    report.mean_scale += part.sums[1] / (3.0 * rows_seen);
  }
  return report;
}

void flush(const SplatColumns& columns, const AdamState& state, const History& history) {
  JoinedOperator joined;
  const int shards = mesh().size();
  for_each_shard("flush", [&](const Shard& shard) {
    const RowRange home = equal_chunk(columns.num_rows, shard.index, shards);
    if (home.empty()) return;
    Buffer<float> steps;
    const FlushInput in{columns, state, upload_history(history.view(), steps, shard.index), home};
    const cudaStream_t stream = shard_stream(shard.index);
    const auto flush_column = [&](int column, float* data, int row_floats) {
      if (row_floats == 0) return;
      flush_column_kernel<<<blocks_for(home.size() * row_floats, kThreads), kThreads, 0, stream>>>(
          in, column, data, row_floats);
      KERNEL_CHECK("flush", shard.index, home.size());
    };
    flush_column(4, columns.sh0, 3);
    flush_column(5, columns.shN, 3 * columns.sh_rest);
    flush_geometry_kernel<<<blocks_for(home.size(), kThreads), kThreads, 0, stream>>>(in);
    KERNEL_CHECK("flush", shard.index, home.size());
  });
}

}  // namespace mgpu::splat
