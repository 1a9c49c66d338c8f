// SPDX-License-Identifier: Apache-2.0
// provider_cuda.h: the two ways to have pages on GPUs, and which one this process uses.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "memory/page.h"
#include "memory/provider.h"
#include "mesh/mesh.h"

namespace mgpu {

// GPUs of the mesh, each once, the lead shard's first.
inline const std::vector<int>& mesh_gpus() { return mesh().gpus(); }
// The GPU that a place lies on; -1 for kHostPage.
inline int gpu_of_place(int place) { return place == kHostPage ? -1 : mesh()[place].gpu; }

// Choose the provider: `wanted` is MGPU_MEMORY ("vmm", "managed", or "" for the best that the GPUs can do).
// Called once by init(), after set_mesh. Returns one line that says what was chosen and why. Throws
// std::invalid_argument if `wanted` is no kind, std::runtime_error if these GPUs cannot do it.
std::string choose_memory(const std::string& wanted);
bool memory_is_managed();

// One process has one of these, which lives as long as it does.
PageProvider* make_vmm_provider();
PageProvider* make_managed_provider();

}  // namespace mgpu
