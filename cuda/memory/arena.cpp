// SPDX-License-Identifier: Apache-2.0
#include "memory/arena.h"

#include <algorithm>

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
  try {
    while (done < count) {
      int64_t end = done + 1;
      while (end < count && shards[static_cast<size_t>(end)] == shards[static_cast<size_t>(done)]) ++end;
      provider().map(base_ + (first + done) * kPageBytes, end - done, shards[static_cast<size_t>(done)]);
      done = end;
    }
  } catch (...) {
    if (done > 0) provider().unmap(base_ + first * kPageBytes, done);
    throw;
  }
  shard_.insert(shard_.end(), shards.begin(), shards.end());
  on_host_.resize(shard_.size(), 0);
}

int64_t Arena::move(int64_t first, const std::vector<int16_t>& to) {
  const int64_t count = static_cast<int64_t>(to.size());
  int64_t moved = 0;
  for (int64_t done = 0; done < count;) {
    const int64_t begin = done, end = std::min(count, begin + kMovePages);
    const std::vector<int16_t> wanted(to.begin() + begin, to.begin() + end);
    std::vector<int16_t> places;
    for (int64_t page = begin; page < end; ++page) places.push_back(place(first + page));
    const auto note = [&] {
      for (int64_t page = begin; page < end; ++page) {
        const int16_t now = places[static_cast<size_t>(page - begin)];
        const size_t index = static_cast<size_t>(first + page);
        moved += now != place(first + page);
        on_host_[index] = now == kHostPage;
        if (now != kHostPage) shard_[index] = now;
      }
    };
    try {
      provider().move(base_ + (first + begin) * kPageBytes, places, wanted);
    } catch (...) {
      note();
      throw;
    }
    note();
    done = end;
  }
  return moved;
}

bool Arena::lies_at(const std::vector<int16_t>& places) const {
  for (size_t page = 0; page < places.size(); ++page)
    if (!provider().same(place(static_cast<int64_t>(page)), places[page])) return false;
  return true;
}

void Arena::zero(int64_t first, int64_t pages) {
  if (pages > 0) provider().zero(base_ + first * kPageBytes, pages);
}

int16_t equal_page_shard(int64_t page, int64_t pages) {
  // the shard in whose part of the bytes the middle of the page lies
  return static_cast<int16_t>((2 * page + 1) * mesh().size() / (2 * pages));
}

}  // namespace mgpu
