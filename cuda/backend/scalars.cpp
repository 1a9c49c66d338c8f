// SPDX-License-Identifier: Apache-2.0
// scalars.cpp: item(), float(t), bool(t): read one element on the host; and a word about streams.
#include "backend/operators.h"

#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/record_stream_ops.h>

#include "backend/alias.h"
#include "backend/flavour.h"
#include "memory/pool.h"

namespace mgpu::ops {

at::Scalar local_scalar(const at::Tensor& self) {
  BelowAutograd below_autograd;
  OperatorScope scope;
  Aliases aliases;
  return at::_ops::_local_scalar_dense::call(aliases.to_backing(self));
}

// The memory is not used again before the stream has come past the point at which the tensor is freed.
void record_stream(at::Tensor& self, c10::Stream stream) {
  TORCH_CHECK_VALUE(stream.device_type() == kDeviceType,
                    "record_stream of a tensor on mgpu needs a mgpu stream, and got ", stream, ".");
  if (self.numel() == 0 || note_use_of_adopted(self.storage(), stream.id())) return;
  note_use(self.storage().data(), stream.id());
}

}  // namespace mgpu::ops
