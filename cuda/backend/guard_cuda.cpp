// SPDX-License-Identifier: Apache-2.0
// guard_cuda.cpp: devices, streams and events as torch's C++ core asks for them (DeviceGuardImplInterface),
// on GPUs. Streams and events are streams_cuda.h's; autograd's threads get the stream of the forward pass by
// exchangeStream.
#include "backend/guard.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "backend/streams_cuda.h"
#include "memory/provider_cuda.h"

namespace mgpu {

namespace {

struct MgpuGuard final : OneDeviceGuard {
  MgpuGuard() = default;
  explicit MgpuGuard(c10::DeviceType /*type*/) {}

  void synchronizeDevice(const c10::DeviceIndex /*device*/) const override {
    for (const int gpu : mesh_gpus()) {
      c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(physical_gpu(gpu)));
      C10_CUDA_CHECK(cudaDeviceSynchronize());
    }
  }

  c10::Stream getStream(c10::Device /*device*/) const override { return stream_of(current_stream_id()); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return stream_of(next_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high_priority*/) const override {
    return stream_of(next_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream_id(stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return streams_of(stream.id())[0].stream();
  }
  bool queryStream(const c10::Stream& stream) const override {
    for (const c10::cuda::CUDAStream& part : streams_of(stream.id()))
      if (!part.query()) return false;
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    for (const c10::cuda::CUDAStream& part : streams_of(stream.id())) part.synchronize();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = make_event(flag == c10::EventFlag::BACKEND_DEFAULT);
    record_event(*static_cast<StreamEvent*>(*event), stream.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    destroy_event(static_cast<StreamEvent*>(event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) block_stream(*static_cast<StreamEvent*>(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    return !event || query_event(*static_cast<StreamEvent*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_event(*static_cast<StreamEvent*>(event));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    check_recorded(first, second);
    return elapsed_ms(*static_cast<StreamEvent*>(first), *static_cast<StreamEvent*>(second));
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, MgpuGuard)

}  // namespace mgpu
