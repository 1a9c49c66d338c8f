// SPDX-License-Identifier: Apache-2.0
// fallback.h: the boxed kernel of every operator that has none of its own on device `mgpu`.
#pragma once
#include <ATen/core/stack.h>

#include "backend/op_table.h"

namespace mgpu {

// Run an operator: shard by shard if it can be cut, else on the lead shard through aliases of its tensors.
void run_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

// The lead shard's way: arguments become aliases, the backing kernel runs, results become mgpu tensors.
void run_on_lead(const Operator& entry, torch::jit::Stack* stack);

// A plain argument (no tensor) as the backing kernel wants it: devices and generators change sides.
c10::IValue backing_value(const Operator& entry, size_t argument, const c10::IValue& value);

}  // namespace mgpu
