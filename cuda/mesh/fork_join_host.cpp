// SPDX-License-Identifier: Apache-2.0
// fork_join_host.cpp: stages on the host: the shards are threads of the pool, or take turns where locality is
// checked.
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory/locality.h"
#include "mesh/fork_join.h"

namespace mgpu {

void for_each_shard(const char* stage, const std::function<void(const Shard&)>& work, Access access,
                    Launch /*launch*/) {
  const Mesh& current = mesh();
  std::vector<std::exception_ptr> error(
      static_cast<size_t>(current.size()));  // of the shards; the first is thrown
  auto run_one = [&](int index) {
    const Shard& shard = current[index];
    try {
      LocalityScope scope(shard, stage, access);
      work(shard);
    } catch (const std::bad_alloc&) {
      error[static_cast<size_t>(index)] = std::current_exception();
    } catch (const std::exception& problem) {
      error[static_cast<size_t>(index)] = std::make_exception_ptr(
          std::runtime_error(std::string(stage) + " on shard " + std::to_string(shard.index) + " (" +
                             shard.name + "): " + problem.what()));
    }
  };
  if (current.size() == 1 || locality_checked()) {
    for (int index = 0; index < current.size(); ++index) run_one(index);
  } else {
    parallel_for(current.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) run_one(static_cast<int>(index));
    });
  }
  for (const std::exception_ptr& problem : error) {
    if (problem) std::rethrow_exception(problem);
  }
}

}  // namespace mgpu
