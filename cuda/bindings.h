// SPDX-License-Identifier: Apache-2.0
// bindings.h: how a room adds its functions to the Python module without a central list.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include "memory/pool.h"
#include "mesh/gate.h"

namespace mgpu {

using Binder = void (*)(pybind11::module_&);

// Called at load time by MGPU_BINDINGS; module.cpp runs all of them when Python imports the module.
bool add_binder(Binder binder);

// What a function does on the shards: without Python's lock, and in one turn (mesh/gate.h). RuntimeError in a
// forked process, where it could wait for threads that are not there.
class Turn {
  struct OwnProcess {
    OwnProcess() { refuse_forked_child(); }
  };
  const OwnProcess own_;
  const pybind11::gil_scoped_release no_gil_;
  const LaunchScope launch_;
};

}  // namespace mgpu

// In a bindings_*.cpp: MGPU_BINDINGS(render) { m.def("splat_forward", ...); }
#define MGPU_BINDINGS(room)                                                           \
  static void bind_##room(pybind11::module_& m);                                      \
  [[maybe_unused]] static const bool bound_##room = ::mgpu::add_binder(&bind_##room); \
  static void bind_##room(pybind11::module_& m)
