// SPDX-License-Identifier: Apache-2.0
#include "mesh/mesh.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace mgpu {

namespace {
Mesh& mutable_mesh() {
  static Mesh* instance = new Mesh;  // never destroyed: tensors may outlive static destruction
  return *instance;
}

// "cuda:2" is 2, and anything else -1.
int gpu_of(const std::string& name) {
  const std::string number = name.rfind("cuda:", 0) == 0 ? name.substr(5) : "";
  const bool is_number =
      !number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? std::stoi(number) : -1;
}
}  // namespace

const Mesh& mesh() {
  Mesh& current = mutable_mesh();
  if (current.size() == 0) set_mesh({"cpu:0"});
  return current;
}

void set_mesh(const std::vector<std::string>& names, bool apart) {
  if (names.empty()) throw std::invalid_argument("A mesh needs at least one shard; MGPU_DEVICES names none.");
  if (names.size() > kMaxShards)
    throw std::invalid_argument("A mesh has at most " + std::to_string(kMaxShards) + " shards.");
  const std::vector<int> gpus = gpus_of(names, apart);
  Mesh& current = mutable_mesh();
  current.shards_.clear();
  current.gpus_.clear();
  gpus_apart = apart;
  for (size_t i = 0; i < names.size(); ++i) {
    const int gpu = gpus[i];
    current.shards_.push_back({static_cast<int>(i), names[i], gpu});
    const bool known = std::find(current.gpus_.begin(), current.gpus_.end(), gpu) != current.gpus_.end();
    if (gpu >= 0 && !known) current.gpus_.push_back(gpu);
  }
}

std::vector<int> gpus_of(const std::vector<std::string>& names, bool apart) {
  std::vector<int> out;
  std::array<int, kApartStep> shards{};  // so far, by GPU
  for (const std::string& name : names) {
    int gpu = gpu_of(name);
    if (apart && gpu >= 0) {
      if (gpu >= kApartStep || shards[static_cast<size_t>(gpu)] == kMaxGpus / kApartStep)
        throw std::invalid_argument(
            "MGPU_TEST_APART=1 takes GPUs 0 to 7, each up to 8 times, and MGPU_DEVICES names " + name +
            (gpu < kApartStep ? " more often." : "."));
      gpu += kApartStep * shards[static_cast<size_t>(gpu)]++;
    }
    out.push_back(gpu);
  }
  return out;
}

}  // namespace mgpu
