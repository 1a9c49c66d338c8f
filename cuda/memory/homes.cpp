// SPDX-License-Identifier: Apache-2.0
#include "memory/homes.h"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace mgpu {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<const void*, std::vector<RowRange>> homes;
  std::atomic<size_t> count{0};  // of these: most memory has none, and asks without the lock
};

Registry& registry() {
  static Registry* instance = new Registry;  // never destroyed: tensors may outlive static destruction
  return *instance;
}

}  // namespace

void set_row_homes(const void* address, std::vector<RowRange> homes) {
  if (address == nullptr) return;
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.homes[address] = std::move(homes);
  all.count.store(all.homes.size());
}

std::vector<RowRange> row_homes(const void* address, int64_t rows) {
  Registry& all = registry();
  if (all.count.load() > 0) {
    std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.homes.find(address);
    if (found != all.homes.end()) return stretched(found->second, rows);
  }
  return equal_chunks(rows);
}

bool has_row_homes(const void* address) {
  Registry& all = registry();
  if (all.count.load() == 0) return false;
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.homes.contains(address);
}

void forget_row_homes(const void* address) noexcept {
  Registry& all = registry();
  if (all.count.load() == 0) return;
  std::lock_guard<std::mutex> lock(all.mutex);
  all.homes.erase(address);
  all.count.store(all.homes.size());
}

}  // namespace mgpu
