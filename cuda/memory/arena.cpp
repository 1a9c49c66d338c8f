// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include "memory/provider.h"
#include "mesh/mesh.h"

namespace mgpu {

Arena::Arena(int64_t pages) : base_(static_cast<char*>(provider().reserve(pages))), reserved_pages_(pages) {}

Arena::~Arena() { provider().release(base_, reserved_pages_); }

void Arena::map_more(const std::vector<int16_t>& shards) {
  // runs of pages with the same shard are mapped in one call
  const int64_t first = mapped_pages();
  int64_t done = 0;
  const int64_t count = static_cast<int64_t>(shards.size());
  while (done < count) {
    int64_t end = done + 1;
    while (end < count && shards[static_cast<size_t>(end)] == shards[static_cast<size_t>(done)]) ++end;
    provider().map(base_ + (first + done) * kPageBytes, end - done, shards[static_cast<size_t>(done)]);
    done = end;
  }
  shard_.insert(shard_.end(), shards.begin(), shards.end());
  on_host_.resize(shard_.size(), 0);
}

void Arena::move(int64_t page, int to) {
  const int from = place(page);
  if (from != to) provider().move(base_ + page * kPageBytes, 1, from, to);
  on_host_[static_cast<size_t>(page)] = to == kHostPage;
  if (to != kHostPage) shard_[static_cast<size_t>(page)] = static_cast<int16_t>(to);
}

int16_t equal_page_shard(int64_t page, int64_t pages) {
  // the shard in whose part of the bytes the middle of the page lies
  return static_cast<int16_t>((2 * page + 1) * mesh().size() / (2 * pages));
}

}  // namespace mgpu
