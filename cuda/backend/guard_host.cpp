// SPDX-License-Identifier: Apache-2.0
// guard_host.cpp: devices, streams and events as torch's C++ core asks for them (DeviceGuardImplInterface).
//
// The host flavour has one device, whose work is done when a call returns. Streams are numbers that each
// thread carries, so that autograd's threads get the stream of the forward pass (exchangeStream); an event is
// a point in time.
#include "backend/guard.h"

#include <atomic>
#include <chrono>

namespace mgpu {

namespace {

using Clock = std::chrono::steady_clock;

thread_local c10::StreamId current_stream = 0;

struct MgpuGuard final : OneDeviceGuard {
  MgpuGuard() = default;
  explicit MgpuGuard(c10::DeviceType /*type*/) {}

  void synchronizeDevice(const c10::DeviceIndex /*device*/) const override {}

  c10::Stream getStream(c10::Device /*device*/) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream_of(++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::StreamId before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}

  void record(void** event, const c10::Stream& /*stream*/, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    check_recorded(first, second);
    const auto between = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(between).count();
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, MgpuGuard)

}  // namespace mgpu
