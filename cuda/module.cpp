// SPDX-License-Identifier: Apache-2.0
// module.cpp: the Python module `_mgpu`; every room binds its own functions (bindings.h).
#include "bindings.h"

#include <vector>

namespace mgpu {

namespace {
std::vector<Binder>& binders() {
  static std::vector<Binder> list;
  return list;
}
}  // namespace

bool add_binder(Binder binder) {
  binders().push_back(binder);
  return true;
}

}  // namespace mgpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  for (mgpu::Binder bind : mgpu::binders()) bind(m);
}
