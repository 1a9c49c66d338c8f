// SPDX-License-Identifier: Apache-2.0
#include "mesh/mesh.h"

#include <stdexcept>

namespace mgpu {

namespace {
Mesh& mutable_mesh() {
  static Mesh* instance = new Mesh;  // never destroyed: tensors may outlive static destruction
  return *instance;
}
}  // namespace

const Mesh& mesh() {
  Mesh& current = mutable_mesh();
  if (current.size() == 0) set_mesh({"cpu:0"});
  return current;
}

void set_mesh(const std::vector<std::string>& names) {
  if (names.empty()) throw std::invalid_argument("A mesh needs at least one shard; MGPU_DEVICES names none.");
  Mesh& current = mutable_mesh();
  current.shards_.clear();
  for (size_t i = 0; i < names.size(); ++i) current.shards_.push_back({static_cast<int>(i), names[i]});
}

}  // namespace mgpu
