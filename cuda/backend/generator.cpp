// SPDX-License-Identifier: Apache-2.0
#include "backend/generator.h"

#include <ATen/core/Tensor.h>

#include "backend/device.h"
#include "backend/flavour.h"

namespace mgpu {

namespace {

// Seed and state live in a generator of the backing device.
struct MgpuGenerator final : c10::GeneratorImpl {
  explicit MgpuGenerator(at::Generator generator)
      : c10::GeneratorImpl(mgpu_device(), c10::DispatchKeySet(kDeviceKey)), backing(std::move(generator)) {}

  void set_current_seed(uint64_t seed) override {
    std::lock_guard<std::mutex> lock(backing.mutex());
    backing.set_current_seed(seed);
  }
  uint64_t current_seed() const override { return backing.current_seed(); }
  uint64_t seed() override {
    std::lock_guard<std::mutex> lock(backing.mutex());
    return backing.seed();
  }
  void set_offset(uint64_t offset) override { backing.set_offset(offset); }
  uint64_t get_offset() const override { return backing.get_offset(); }
  void set_state(const c10::TensorImpl& state) override {
    auto shared = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state));
    backing.set_state(at::Tensor(std::move(shared)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return backing.get_state().getIntrusivePtr();
  }
  MgpuGenerator* clone_impl() const override { return new MgpuGenerator(backing.clone()); }

  at::Generator backing;
};

}  // namespace

at::Generator new_generator() { return at::make_generator<MgpuGenerator>(make_backing_generator()); }

const at::Generator& default_generator() {
  static const at::Generator* generator = new at::Generator(new_generator());
  return *generator;
}

at::Generator backing_generator(const at::Generator& generator) {
  if (!generator.defined()) return generator;
  TORCH_CHECK(generator.device().type() == kDeviceType,
              "Expected a generator of device mgpu, and got one of ", generator.device(),
              ". Make it with torch.Generator(device='mgpu').");
  return static_cast<MgpuGenerator*>(generator.unsafeGetGeneratorImpl())->backing;
}

}  // namespace mgpu
