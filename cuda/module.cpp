// SPDX-License-Identifier: Apache-2.0
// module.cpp: the Python module `_mgpu`; every room binds its own functions (bindings.h).
#include "bindings.h"

#include <new>
#include <string>
#include <vector>

#include "memory/pool.h"
#include "memory/provider.h"

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
  // Temporaries that find no memory raise what torch raises, with what each shard holds.
  pybind11::register_local_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const std::bad_alloc& error) {
      std::string text = error.what();
      if (!dynamic_cast<const mgpu::OutOfMemory*>(&error)) text = "mgpu is out of memory.";
      if (text.find("Shards:") == std::string::npos) text += " " + mgpu::memory_table();
      const pybind11::object type = pybind11::module_::import("torch").attr("OutOfMemoryError");
      PyErr_SetString(type.ptr(), text.c_str());
    }
  });
  for (mgpu::Binder bind : mgpu::binders()) bind(m);
}
