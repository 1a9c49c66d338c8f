// SPDX-License-Identifier: Apache-2.0
#include "memory/provider_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "memory/page.h"
#include "memory/vmm_cuda.h"
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

bool has_attribute(cudaDeviceAttr attribute, int gpu) {
  int value = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, physical_gpu(gpu)));
  return value != 0;
}

// Why the GPUs cannot have pages of ours that all of them reach, or nothing.
std::string obstacle_to_vmm() {
  std::string obstacle;
  if (!vmm::supported(&obstacle)) return obstacle;
  for (const int a : mesh_gpus())
    for (const int b : mesh_gpus()) {
      int reachable = 1;
      const int from = physical_gpu(a), to = physical_gpu(b);
      if (from != to) CUDA_CHECK(cudaDeviceCanAccessPeer(&reachable, from, to));
      if (!reachable) return gpu_name(a) + " cannot reach the memory of " + gpu_name(b);
    }
  return "";
}

// Why they cannot have managed memory that is moved page by page, or nothing.
std::string obstacle_to_managed() {
  for (const int gpu : mesh_gpus())
    if (!has_attribute(cudaDevAttrConcurrentManagedAccess, gpu))
      return gpu_name(gpu) + " does not page managed memory in on demand";
  return "";
}

}  // namespace

std::string choose_memory(const std::string& wanted) {
  if (wanted != "" && wanted != "vmm" && wanted != "managed")
    throw std::invalid_argument("MGPU_MEMORY is \"" + wanted + "\", expected vmm or managed.");
  if (choice().provider) throw std::runtime_error("the kind of memory was chosen already");
  const std::string no_vmm = obstacle_to_vmm(), no_managed = obstacle_to_managed();
  const bool managed = wanted == "managed" || (wanted == "" && no_vmm != "");
  if (!managed && no_vmm != "")
    throw std::runtime_error("MGPU_MEMORY=vmm is not possible: " + no_vmm +
                             ". Set MGPU_MEMORY=managed, or choose other GPUs in MGPU_DEVICES.");
  if (managed && no_managed != "")
    throw std::runtime_error((wanted == "managed"
                                  ? std::string("MGPU_MEMORY=managed is not possible: ")
                                  : no_vmm + ", and managed memory is not possible either: ") +
                             no_managed + ". Choose other GPUs in MGPU_DEVICES.");
  choice().managed = managed;
  choice().provider = managed ? make_managed_provider() : make_vmm_provider();
  const std::string kind = managed ? "managed memory" : "vmm, pages of 2 MiB on chosen shards";
  if (wanted != "") return "memory: " + kind + " (MGPU_MEMORY=" + wanted + ")";
  return "memory: " + kind +
         (managed                  ? ", because " + no_vmm
          : mesh_gpus().size() > 1 ? ", because every GPU reaches the others"
                                   : "");
}

bool memory_is_managed() { return choice().managed; }

PageProvider& provider() {
  if (!choice().provider) throw std::runtime_error("mgpu memory was asked for before ns_mgpu_splat.init()");
  return *choice().provider;
}

std::string free_memory_table() {
  std::string text;
  for (const int gpu : mesh_gpus()) {
    if (is_repeated(gpu)) continue;
    DeviceGuard guard(gpu);
    size_t free = 0, total = 0;
    char line[96];
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    snprintf(line, sizeof line, "%s%s has %.2f of %.1f GiB free", text.empty() ? "" : ", ",
             gpu_name(gpu).c_str(), static_cast<double>(free) / (1 << 30),
             static_cast<double>(total) / (1 << 30));
    text += line;
  }
  return text;
}

}  // namespace mgpu
