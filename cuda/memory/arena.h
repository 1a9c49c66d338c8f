// SPDX-License-Identifier: Apache-2.0
// arena.h: one reserved address range, pages mapped into it from the front, and the table of where each page
// lies.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/page.h"

namespace mgpu {

class Arena {
 public:
  // Reserve `pages` of address space; nothing is mapped yet. Throws OutOfMemory.
  explicit Arena(int64_t pages);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  char* base() const { return base_; }
  int64_t reserved_pages() const { return reserved_pages_; }
  int64_t mapped_pages() const { return static_cast<int64_t>(shard_.size()); }

  // Map pages until there are `pages`; `shard_of(page)` says where a new one goes. Throws OutOfMemory, and
  // then nothing has changed.
  template <typename F>
  void grow_to(int64_t pages, F shard_of) {
    std::vector<int16_t> wanted;
    for (int64_t page = mapped_pages(); page < pages; ++page)
      wanted.push_back(static_cast<int16_t>(shard_of(page)));
    map_more(wanted);
  }

  // Where a page lies: a shard, or kHostPage.
  int16_t place(int64_t page) const {
    return on_host_[static_cast<size_t>(page)] ? kHostPage : shard_[static_cast<size_t>(page)];
  }
  // Its shard, also while it is away in host memory.
  int16_t shard(int64_t page) const { return shard_[static_cast<size_t>(page)]; }

  // Move pages [first, first + to.size()) each to a shard, or to host memory (kHostPage; it then remembers
  // its shard). Contents stay. Returns how many were elsewhere. Throws OutOfMemory; some pages may have moved
  // then, and the table is right.
  int64_t move(int64_t first, const std::vector<int16_t>& to);

  // True if moving so needs no copying.
  bool lies_at(const std::vector<int16_t>& places) const;

  // Fill pages with zero that were just mapped.
  void zero(int64_t first, int64_t pages);

  bool placed_by_user = false;  // place() was called: growth then leaves the older pages where they are

 private:
  void map_more(const std::vector<int16_t>& shards);

  char* base_;
  int64_t reserved_pages_;
  std::vector<int16_t> shard_;
  std::vector<char> on_host_;
};

// Shard of page `page` when `pages` are split into equal contiguous chunks over the mesh.
int16_t equal_page_shard(int64_t page, int64_t pages);

}  // namespace mgpu
