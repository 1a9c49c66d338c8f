// SPDX-License-Identifier: Apache-2.0
// foreign_ops.cpp: operators on torch's PrivateUse1 key as gsplat 1.6 and fvdb-core have them: one host
// thread cuts the work over all GPUs that torch sees, prefetches a GPU's part, launches on the GPU's current
// c10 stream, and joins all streams at the end. It leaves another GPU current, as theirs do.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "foreign.h"

namespace {

// fvdb's TORCH_CHECK: batched prefetch refuses the null stream.
c10::cuda::CUDAStream stream_of(int gpu) {
  const auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(gpu));
  TORCH_CHECK(stream.stream() != nullptr, "the current stream of GPU ", gpu, " is the default one");
  return stream;
}

void merge_streams() {
  const int gpus = c10::cuda::device_count();
  for (int gpu = 1; gpu < gpus; ++gpu) {
    at::cuda::CUDAEvent event;
    event.record(stream_of(gpu));
    event.block(stream_of(0));
  }
  if (gpus == 1) return;
  at::cuda::CUDAEvent event;
  event.record(stream_of(0));
  for (int gpu = 1; gpu < gpus; ++gpu) event.block(stream_of(gpu));
}

// work(gpu, begin, end, stream) for every GPU's chunk.
template <typename F>
void for_each_gpu(int64_t count, F work) {
  const int64_t gpus = c10::cuda::device_count();
  const int64_t chunk = (count + gpus - 1) / gpus;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    C10_CUDA_CHECK(cudaSetDevice(gpu));
    work(gpu, std::min(count, gpu * chunk), std::min(count, (gpu + 1) * chunk), stream_of(gpu));
  }
  merge_streams();
}

at::Tensor scale(const at::Tensor& x, double factor, bool prefetch) {
  at::Tensor out = at::empty_like(x);
  const float* in = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_each_gpu(x.numel(), [&](int gpu, int64_t begin, int64_t end, cudaStream_t stream) {
    const int64_t bytes = (end - begin) * 4;
    if (prefetch && bytes > 0) {
      C10_CUDA_CHECK(foreign_prefetch(const_cast<float*>(in) + begin, bytes, gpu, 1, stream));
      C10_CUDA_CHECK(foreign_prefetch(to + begin, bytes, gpu, 0, stream));
    }
    foreign_scale(in, to, static_cast<float>(factor), begin, end, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return out;
}

at::Tensor& slow_fill(at::Tensor& x, double value, int64_t cycles) {
  for_each_gpu(x.numel(), [&](int, int64_t begin, int64_t end, cudaStream_t stream) {
    foreign_slow_fill(x.mutable_data_ptr<float>(), static_cast<float>(value), begin, end, cycles, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return x;
}

// fvdb dereferences grid metadata on the CPU.
double host_sum(const at::Tensor& x) {
  C10_CUDA_CHECK(cudaStreamSynchronize(stream_of(0)));
  double sum = 0;
  for (int64_t i = 0; i < x.numel(); ++i) sum += x.const_data_ptr<float>()[i];
  return sum;
}

// fvdb's device buffers: memory without a tensor, written on the host, read on a GPU, and given back.
double raw_round_trip(int64_t count) {
  c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  TORCH_CHECK(allocator->raw_deleter() != nullptr, "no raw deleter");
  auto* data = static_cast<float*>(allocator->raw_allocate(static_cast<size_t>(count) * 8));
  for (int64_t i = 0; i < count; ++i) data[i] = 1.5f;
  for_each_gpu(count, [&](int, int64_t begin, int64_t end, cudaStream_t stream) {
    foreign_scale(data, data + count, 2.0f, begin, end, stream);
  });
  C10_CUDA_CHECK(cudaStreamSynchronize(stream_of(0)));
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += data[count + i];
  allocator->raw_deallocate(data);
  return sum;
}

// fvdb's JaggedTensor builds its offsets in pinned memory where the device is PrivateUse1.
at::Tensor pinned_offsets(const at::Tensor& like, int64_t count) {
  TORCH_CHECK(like.device().is_privateuseone(), "expected a PrivateUse1 tensor");
  at::Tensor offsets = at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  for (int64_t i = 0; i < count; ++i) offsets.mutable_data_ptr<int64_t>()[i] = i;
  return offsets.to(like.device(), /*non_blocking=*/true);
}

// Local gradients are plain CUDA tensors of one GPU, summed into the aggregate tensor at the end.
at::Tensor through_cuda(const at::Tensor& x) {
  C10_CUDA_CHECK(cudaSetDevice(0));
  at::Tensor local = at::zeros({x.numel()}, x.options().device(c10::Device(c10::DeviceType::CUDA, 0)));
  foreign_scale(x.const_data_ptr<float>(), local.mutable_data_ptr<float>(), 3.0f, 0, x.numel(), stream_of(0));
  at::Tensor out = at::empty_like(x);
  C10_CUDA_CHECK(cudaMemcpyAsync(out.mutable_data_ptr(), local.const_data_ptr(), x.nbytes(),
                                 cudaMemcpyDeviceToDevice, stream_of(0)));
  merge_streams();
  return out;
}

}  // namespace

TORCH_LIBRARY(mgpu_foreign, m) {
  m.def("scale(Tensor x, float factor, bool prefetch) -> Tensor");
  m.def("slow_fill_(Tensor(a!) x, float value, int cycles) -> Tensor(a!)");
  m.def("host_sum(Tensor x) -> float");
  m.def("raw_round_trip(int count) -> float", &raw_round_trip);
  m.def("pinned_offsets(Tensor like, int count) -> Tensor");
  m.def("through_cuda(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(mgpu_foreign, PrivateUse1, m) {
  m.impl("scale", &scale);
  m.impl("slow_fill_", &slow_fill);
  m.impl("host_sum", &host_sum);
  m.impl("pinned_offsets", &pinned_offsets);
  m.impl("through_cuda", &through_cuda);
}
