// SPDX-License-Identifier: Apache-2.0
#include "mesh/mesh.h"

#include <algorithm>
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

void set_mesh(const std::vector<std::string>& names) {
  if (names.empty()) throw std::invalid_argument("A mesh needs at least one shard; MGPU_DEVICES names none.");
  if (names.size() > kMaxShards)
    throw std::invalid_argument("A mesh has at most " + std::to_string(kMaxShards) + " shards.");
  Mesh& current = mutable_mesh();
  current.shards_.clear();
  current.gpus_.clear();
  for (size_t i = 0; i < names.size(); ++i) {
    const int gpu = gpu_of(names[i]);
    current.shards_.push_back({static_cast<int>(i), names[i], gpu});
    const bool known = std::find(current.gpus_.begin(), current.gpus_.end(), gpu) != current.gpus_.end();
    if (gpu >= 0 && !known) current.gpus_.push_back(gpu);
  }
}

}  // namespace mgpu
