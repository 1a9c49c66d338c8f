// SPDX-License-Identifier: Apache-2.0
// bindings_mesh.cpp: the mesh and its threads, for ns_mgpu_splat.device.
#include <pybind11/stl.h>

#include "bindings.h"
#include "mesh/fork_join.h"
#include "mesh/mesh.h"

namespace mgpu {

MGPU_BINDINGS(mesh) {
  m.def("set_mesh", &set_mesh, pybind11::arg("names"), pybind11::arg("apart") = false,
        "Set the shards by name, once, before the first tensor.");
  m.def("mesh_shards", [] {
    std::vector<std::string> names;
    for (const Shard& shard : mesh().shards()) names.push_back(shard.name);
    return names;
  });
  m.def("shard_gpus", [] {  // their numbers, -1: none
    std::vector<int> gpus;
    for (const Shard& shard : mesh().shards()) gpus.push_back(shard.gpu);
    return gpus;
  });
  m.def("gpus_of", &gpus_of);
  m.def("set_num_threads", &set_num_threads,
        "Threads of the host flavour's pool, the caller's own included.");
  m.def("num_threads", &num_threads);
}

}  // namespace mgpu
