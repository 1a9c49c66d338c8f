// SPDX-License-Identifier: Apache-2.0
// generator.h: random numbers of device `mgpu`.
#pragma once
#include <ATen/core/Generator.h>

namespace mgpu {

// The default generator; torch.manual_seed() seeds it through torch.mgpu.manual_seed_all().
const at::Generator& default_generator();
at::Generator new_generator();

// The generator that a backing kernel draws from in place of `generator`: the same numbers as on the backing
// device.
at::Generator backing_generator(const at::Generator& generator);

}  // namespace mgpu
