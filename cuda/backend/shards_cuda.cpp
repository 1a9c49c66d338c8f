// SPDX-License-Identifier: Apache-2.0
// shards_cuda.cpp: one call a part: a GPU with its neighbouring shards. The calling thread issues them one
// after the other, each on its GPU's stream, and the GPUs run side by side.
#include <c10/cuda/CUDAGuard.h>

#include <atomic>
#include <vector>

#include "backend/alias.h"
#include "backend/flavour.h"
#include "backend/shards.h"
#include "backend/streams_cuda.h"
#include "memory/provider_cuda.h"
#include "mesh/late.h"
#include "mesh/launch.h"

namespace mgpu {

namespace {

struct Part {
  int gpu;
  int first, end;  // its shards
};

std::vector<Part> parts_of_mesh(bool merged) {
  std::vector<Part> parts;
  for (int shard = 0; shard < mesh().size(); ++shard) {
    const int gpu = shard_gpu(shard);
    if (merged && !parts.empty() && parts.back().gpu == gpu)
      parts.back().end = shard + 1;
    else
      parts.push_back({gpu, shard, shard + 1});
  }
  return parts;
}

std::atomic<bool> merge{true};

const std::vector<Part>& parts() {
  static const auto* together = new std::vector<Part>(parts_of_mesh(true));
  static const auto* apart = new std::vector<Part>(parts_of_mesh(false));
  return merge.load(std::memory_order_relaxed) ? *together : *apart;
}

// While alive, aliases that this thread makes, and backing kernels that it calls, are of a part's GPU.
class PartScope {
 public:
  explicit PartScope(int gpu) : guard_(static_cast<c10::DeviceIndex>(physical_gpu(gpu))), own_stream_(gpu) {
    part_gpu = physical_gpu(gpu) == lead_gpu ? -1 : physical_gpu(gpu);
  }
  ~PartScope() {
    part_gpu = -1;
    forget_relabelled();
  }

 private:
  c10::cuda::CUDAGuard guard_;
  RepeatedGpuScope own_stream_;
};

}  // namespace

int part_count() { return static_cast<int>(parts().size()); }

RowRange part_range(int64_t count, int part) {
  const Part& wanted = parts()[static_cast<size_t>(part)];
  return {equal_chunk(count, wanted.first, mesh().size()).begin,
          equal_chunk(count, wanted.end - 1, mesh().size()).end};
}

bool one_part_runs_whole() { return part_count() == 1; }
void set_parts_merged(bool merged) { merge.store(merged); }

void run_on_parts(const std::function<void(int part)>& work) {
  BelowAutograd below_autograd;
  OperatorScope scope(OperatorScope::On::kAllShards);
  struct Given {  // also if a part fails
    ~Given() { order_after(true); }
  } given;
  const std::vector<Part>& all = parts();
  for (size_t part = 0; part < all.size(); ++part) {
    PartScope on_gpu(all[part].gpu);
    be_late(all[part].gpu, current_on(all[part].gpu).stream());
    work(static_cast<int>(part));
  }
}

}  // namespace mgpu
