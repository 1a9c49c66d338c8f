// SPDX-License-Identifier: Apache-2.0
// transport.h: how bytes get from shard to shard: the one interface behind stages 4, 6 and 8.
//
// All shards of the mesh take part in each call, with the same arguments in the same order; what is said here
// of a shard is said of the process that holds it. In one process that is trivial. A transport over several
// (torch.distributed, a process a host) finds null where memory is another process's, and sends or receives
// what lies here; counts are known on all sides, because the tables that they come from were gathered.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

namespace mgpu::splat {

struct Frame;

// One contiguous copy.
struct Shipment {
  int from, to;        // shards; they differ
  const void* source;  // memory of `from`; null if that is another process's
  void* target;        // memory of `to`; the same
  int64_t bytes;       // above 0
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Whether work of `to` may use memory of `from` where it lies. Always true of a shard and itself. What
  // reaches is not shipped: `from` writes its parcels where `to` wants them.
  virtual bool reaches(int from, int to) const = 0;

  // Makes all copies: at most one for each pair of shards, in the order of the pairs. A copy is in order with
  // the work of both shards: it reads what was written before the call, and work after the call reads what it
  // wrote; neither side waits for the host. `stage` is for errors.
  virtual void ship(const char* stage, const std::vector<Shipment>& shipments) = 0;

  // A table on the host, a row of `words` for each shard, each filled in by its own: afterwards all rows are
  // everywhere.
  virtual void gather(uint64_t* table, int64_t words) = 0;
};

// Shards of one process: a copy a shipment, by the receiver (GPUs: in the order of its stream). GPUs with
// peer access reach each other; shards on the host do not, so that the locality check has something to see.
std::unique_ptr<Transport> make_local_transport();
// Each flavour's own: what that one says of `reaches`.
bool shards_reach(int from, int to);

// What the stages use: a local one, unless another is set. Set one while no frame is under way.
Transport& transport();
void set_transport(std::unique_ptr<Transport> transport);

}  // namespace mgpu::splat
