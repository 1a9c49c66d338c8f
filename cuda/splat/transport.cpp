// SPDX-License-Identifier: Apache-2.0
#include "splat/transport.h"

#include <utility>

#include "memory/transfer.h"
#include "mesh/fork_join.h"

namespace mgpu::splat {

namespace {

class LocalTransport final : public Transport {
 public:
  bool reaches(int from, int to) const override { return shards_reach(from, to); }

  void ship(const char* stage, const std::vector<Shipment>& shipments) override {
    if (shipments.empty()) return;
    const auto receive = [&](const Shard& shard) {
      for (const Shipment& one : shipments) {
        if (one.to == shard.index) copy_between(one.target, one.to, one.source, one.from, one.bytes);
      }
    };
    for_each_shard(stage, receive, Access::kExchange);
  }

  void gather(uint64_t*, int64_t) override {}
};

std::unique_ptr<Transport>& current() {
  static auto* const instance = new std::unique_ptr<Transport>(make_local_transport());
  return *instance;
}

}  // namespace

std::unique_ptr<Transport> make_local_transport() { return std::make_unique<LocalTransport>(); }

Transport& transport() { return *current(); }

void set_transport(std::unique_ptr<Transport> transport) { current() = std::move(transport); }

}  // namespace mgpu::splat
