// SPDX-License-Identifier: Apache-2.0
// register.cpp: the list of what exists: every operator name that device mgpu answers by itself, and the
// fallback for the rest. One file, because torch/library.h costs a compiler more than all kernels together.
#include <torch/library.h>

#include "backend/device.h"
#include "backend/fallback.h"
#include "backend/operators.h"

namespace mgpu {

namespace {
void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) { run_operator(handle, stack); }

// torch puts such operators together from others on a device that has no kernel of theirs, which costs a
// multiple of their time (silu_backward, native_layer_norm), although the backing device has one.
bool is_put_together_in_vain(const c10::OperatorHandle& handle) {
  const bool put_together = handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
                            handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  return put_together && handle.hasKernelForDispatchKey(kBackingKey);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // torch would take these lists apart before the fallback sees them; together they need one fork instead of
  // many
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    // torch's way is right for these: to `convolution_backward_overrideable`, and to `cat`
    if (name.name == "aten::convolution_backward" || name.name == "aten::_stack") continue;
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind("aten::_foreach_", 0) != 0 && !(handle && is_put_together_in_vain(*handle))) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    m.impl((name.name + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  // torch would make a result of no dimensions, and the kernel behind out= would resize it with a warning
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // torch would turn masks into indices for the shape of the result, and once more behind out=
  m.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("empty.memory_format", &ops::empty);
  m.impl("empty_strided", &ops::empty_strided);
  m.impl("resize_", &ops::resize);
  m.impl("_copy_from", &ops::copy_from);
  m.impl("_copy_from_and_resize", &ops::copy_from_and_resize);
  m.impl("view", &ops::view);
  m.impl("as_strided", &ops::as_strided);
  m.impl("_reshape_alias", &ops::reshape_alias);
  m.impl("_local_scalar_dense", &ops::local_scalar);
  m.impl("record_stream", &ops::record_stream);
  m.impl("set_.source_Tensor", &ops::set_tensor);
  m.impl("set_.source_Storage", &ops::set_storage);
  m.impl("set_.source_Storage_storage_offset", &ops::set_storage_offset);
  m.impl("convolution_overrideable", &ops::convolution);
  m.impl("convolution_backward_overrideable", &ops::convolution_backward);
}

// Conjugate and negative views are resolved by the copy of their aliases; torch's own resolution would copy
// again, and so on without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace mgpu
