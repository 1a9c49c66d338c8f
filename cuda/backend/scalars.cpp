// SPDX-License-Identifier: Apache-2.0
// scalars.cpp: item(), float(t), bool(t): read one element on the host. Streams have no extra work to wait
// for here.
#include "backend/operators.h"

#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/record_stream_ops.h>

#include "backend/alias.h"

namespace mgpu::ops {

at::Scalar local_scalar(const at::Tensor& self) {
  BelowAutograd below_autograd;
  Aliases aliases;
  return at::_ops::_local_scalar_dense::call(aliases.to_backing(self));
}

// The host has finished with memory when the call returns, so there is nothing to remember.
void record_stream(at::Tensor& /*self*/, c10::Stream /*stream*/) {}

}  // namespace mgpu::ops
