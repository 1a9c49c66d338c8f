// SPDX-License-Identifier: Apache-2.0
// autocast.cpp: torch.autocast("mgpu"): torch's own lists say which operators run in lower precision, which
// in float32.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define MGPU_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(MGPU_LOWER_PRECISION)
#undef MGPU_LOWER_PRECISION
#define MGPU_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(MGPU_FLOAT32)
#undef MGPU_FLOAT32
#define MGPU_FLOAT32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(MGPU_FLOAT32_DTYPE)
#undef MGPU_FLOAT32_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define MGPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(MGPU_PROMOTE)
#undef MGPU_PROMOTE
}

}  // namespace

}  // namespace at::autocast
