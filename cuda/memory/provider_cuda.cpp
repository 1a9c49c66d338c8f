// SPDX-License-Identifier: Apache-2.0
#include "memory/provider_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "memory/page.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

struct Choice {
  PageProvider* provider = nullptr;
  bool managed = false;
};

Choice& choice() {
  static Choice* instance = new Choice;
  return *instance;
}

bool has_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value != 0;
}

// Two GPUs of the mesh that cannot read each other's memory, or nothing.
std::string pair_without_access() {
  for (const int a : mesh_gpus())
    for (const int b : mesh_gpus()) {
      int reachable = 1;
      if (a != b) CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, a, b));
      if (!reachable)
        return "cuda:" + std::to_string(a) + " cannot reach the memory of cuda:" + std::to_string(b);
    }
  return "";
}

// Why the GPUs cannot do it, or nothing.
std::string obstacle_to_managed() {
  for (const int gpu : mesh_gpus())
    if (!has_attribute(cudaDevAttrConcurrentManagedAccess, gpu))
      return "cuda:" + std::to_string(gpu) + " does not page managed memory in on demand";
  return "";
}

}  // namespace

std::string choose_memory(const std::string& wanted) {
  if (wanted != "" && wanted != "vmm" && wanted != "managed")
    throw std::invalid_argument("MGPU_MEMORY is \"" + wanted + "\", expected vmm or managed.");
  if (choice().provider) throw std::runtime_error("the kind of memory was chosen already");
  const std::string no_vmm = pair_without_access();
  const std::string no_managed = obstacle_to_managed();
  if (wanted == "vmm" && no_vmm != "")
    throw std::runtime_error("MGPU_MEMORY=vmm needs GPUs that reach each other's memory, but " + no_vmm +
                             ". Set MGPU_MEMORY=managed, or choose other GPUs in MGPU_DEVICES.");
  const bool managed = wanted == "managed" || no_vmm != "";
  if (managed && no_managed != "")
    throw std::runtime_error((wanted == "managed"
                                  ? std::string("MGPU_MEMORY=managed is not possible: ")
                                  : no_vmm + ", and managed memory is not possible either: ") +
                             no_managed + ". Choose other GPUs in MGPU_DEVICES.");
  choice().managed = managed;
  choice().provider = managed ? make_managed_provider() : make_vmm_provider();
  if (wanted != "") return "memory: " + wanted + " (MGPU_MEMORY)";
  return managed ? "memory: managed, because " + no_vmm : "memory: vmm (pages of 2 MiB on chosen shards)";
}

bool memory_is_managed() { return choice().managed; }

PageProvider& provider() {
  if (!choice().provider) throw std::runtime_error("mgpu memory was asked for before ns_mgpu_splat.init()");
  return *choice().provider;
}

std::string free_memory_table() {
  std::string text;
  for (const int gpu : mesh_gpus()) {
    DeviceGuard guard(gpu);
    size_t free = 0, total = 0;
    char line[96];
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    snprintf(line, sizeof line, "%scuda:%d has %.2f of %.1f GiB free", text.empty() ? "" : ", ", gpu,
             static_cast<double>(free) / (1 << 30), static_cast<double>(total) / (1 << 30));
    text += line;
  }
  return text;
}

}  // namespace mgpu
