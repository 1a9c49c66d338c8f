// SPDX-License-Identifier: Apache-2.0
#include "memory/pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

#include "memory/arena.h"
#include "memory/locality.h"
#include "memory/page.h"
#include "memory/provider.h"

namespace mgpu {

namespace {

constexpr int64_t kAlignment = 512;                      // as torch's CUDA allocator
constexpr int64_t kSlabPages = 4;                        // 8 MiB a slab
constexpr int64_t kCacheBytes = int64_t{1} << 30;        // freed arenas kept for reuse
constexpr int64_t kDefaultThreshold = int64_t{1} << 20;  // below it a fork costs more than it saves

std::atomic<bool> forked_child{false};

// Free memory of one shard's slabs: best fit, neighbours merge again.
class Slabs {
 public:
  explicit Slabs(int shard) : shard_(shard) {}

  char* take(int64_t bytes) {
    auto fit = free_by_size_.lower_bound({bytes, nullptr});
    if (fit == free_by_size_.end()) {
      auto slab = std::make_unique<Arena>(kSlabPages);
      slab->grow_to(kSlabPages, [&](int64_t) { return shard_; });
      char* base = slab->base();
      slabs_.emplace(base, std::move(slab));
      insert(base, kSlabPages * kPageBytes);
      fit = free_by_size_.lower_bound({bytes, nullptr});
    }
    const auto [size, at] = *fit;
    erase(at, size);
    if (size > bytes) insert(at + bytes, size - bytes);
    return at;
  }

  void give(char* at, int64_t bytes) {
    const Arena& slab = *slab_of(at);
    auto next = free_by_address_.lower_bound(at);
    if (next != free_by_address_.end() && next->first == at + bytes &&
        at + bytes < slab.base() + kSlabPages * kPageBytes) {
      bytes += next->second;
      erase(next->first, next->second);
      next = free_by_address_.lower_bound(at);
    }
    if (next != free_by_address_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == at && before->first >= slab.base()) {
        const auto [begin, size] = *before;
        erase(begin, size);
        at = begin;
        bytes += size;
      }
    }
    insert(at, bytes);
  }

  Arena* slab_of(const char* at) const {
    return std::prev(slabs_.upper_bound(const_cast<char*>(at)))->second.get();
  }

  int64_t pages() const { return static_cast<int64_t>(slabs_.size()) * kSlabPages; }

  void drop_empty() {
    for (auto slab = slabs_.begin(); slab != slabs_.end();) {
      auto found = free_by_address_.find(slab->first);
      if (found != free_by_address_.end() && found->second == kSlabPages * kPageBytes) {
        erase(found->first, found->second);
        slab = slabs_.erase(slab);
      } else {
        ++slab;
      }
    }
  }

 private:
  void insert(char* at, int64_t bytes) {
    free_by_address_.emplace(at, bytes);
    free_by_size_.emplace(bytes, at);
  }
  void erase(char* at, int64_t bytes) {
    free_by_address_.erase(at);
    free_by_size_.erase({bytes, at});
  }

  int shard_;
  std::map<char*, std::unique_ptr<Arena>> slabs_;
  std::map<char*, int64_t> free_by_address_;
  std::set<std::pair<int64_t, char*>> free_by_size_;
};

struct Block {
  int64_t used = 0;   // bytes that were asked for
  int64_t bytes = 0;  // the same, rounded up
  int owner = 0;
  bool tensor = false;
  std::unique_ptr<Arena> arena;  // null: cut from the slabs of `slab_shard`
  int slab_shard = 0;
  bool growable = false;
  int64_t capacity = 0;  // bytes that it may grow to
  std::unique_ptr<RowSplit> split;
};

class Pool {
 private:
  static void check_process() {
    if (forked_child.load())
      throw std::runtime_error(
          "mgpu cannot be used in a forked process. Start workers with multiprocessing's 'spawn' method, or "
          "let them "
          "return CPU tensors and move those to mgpu in the parent.");
  }

  template <typename F>
  auto with_retry(F work) {
    try {
      return work();
    } catch (const OutOfMemory&) {
      drop_caches();
    }
    return work();
  }

  // The live block around an address, or live_.end().
  auto around(const void* address) {
    auto after = live_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    if (after == live_.begin()) return live_.end();
    auto found = std::prev(after);
    const int64_t offset = static_cast<const char*>(address) - found->first;
    return offset < std::max<int64_t>(found->second.bytes, 1) ? found : live_.end();
  }

 public:
  Pool() {
    pthread_atfork(nullptr, nullptr, [] { forked_child.store(true); });
  }

  char* allocate(int64_t bytes, int owner, bool tensor) {
    check_process();
    std::lock_guard<std::mutex> lock(mutex_);
    Block block;
    block.used = bytes;
    // with the locality check on, no two blocks share a hardware page
    bytes = round_up(bytes, locality_checked() ? kOsPageBytes : kAlignment);
    block.bytes = bytes;
    block.owner = owner;
    block.tensor = tensor;
    char* base = nullptr;
    if (bytes < kSmallBytes) {
      block.slab_shard = owner >= 0 ? owner : 0;
      base = with_retry([&] { return slabs(block.slab_shard).take(bytes); });
    } else {
      const int64_t pages = pages_for(bytes);
      block.arena = with_retry([&] { return arena_of(pages, owner); });
      base = block.arena->base();
    }
    add(base, std::move(block));
    return base;
  }

  char* reserve(int64_t bytes, int64_t capacity) {
    check_process();
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t pages = pages_for(bytes);
    Block block;
    block.used = block.bytes = bytes;
    block.owner = kSplit;
    block.tensor = true;
    block.growable = true;
    block.capacity = capacity;
    block.arena = with_retry([&] {
      auto arena = std::make_unique<Arena>(std::max<int64_t>(1, pages_for(capacity)));
      arena->grow_to(pages, [&](int64_t page) { return equal_page_shard(page, pages); });
      return arena;
    });
    char* base = block.arena->base();
    add(base, std::move(block));
    return base;
  }

  void grow(void* base, int64_t bytes) {
    check_process();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(base));
    if (found == live_.end() || !found->second.growable)
      throw std::invalid_argument(
          "this memory was not made by torch.mgpu.reserve(), so it cannot grow in place");
    Block& block = found->second;
    Arena& arena = *block.arena;
    const int64_t pages = pages_for(bytes);
    if (bytes > block.capacity)
      throw std::invalid_argument(std::to_string(bytes) + " bytes are more than its capacity of " +
                                  std::to_string(block.capacity) + " bytes");
    count(block, -1);
    const auto least_loaded = [&](int64_t) {
      std::vector<int64_t> load(static_cast<size_t>(mesh().size()));
      for (int64_t page = 0; page < arena.mapped_pages(); ++page)
        ++load[static_cast<size_t>(arena.shard(page))];
      return static_cast<int16_t>(std::min_element(load.begin(), load.end()) - load.begin());
    };
    try {
      with_retry([&] {
        if (arena.placed_by_user) {
          while (arena.mapped_pages() < pages) arena.grow_to(arena.mapped_pages() + 1, least_loaded);
        } else {
          arena.grow_to(pages, [&](int64_t page) { return equal_page_shard(page, pages); });
          for (int64_t page = 0; page < arena.mapped_pages(); ++page)
            if (arena.place(page) != kHostPage)
              arena.move(page, equal_page_shard(page, arena.mapped_pages()));
        }
        return 0;
      });
    } catch (...) {
      count(block, +1);
      throw;
    }
    block.used = block.bytes = bytes;
    count(block, +1);
  }

  void free(void* base) noexcept {
    if (base == nullptr || forked_child.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(base));
    if (found == live_.end()) return;
    Block block = std::move(found->second);
    if (locality_checked()) unprotect_block(base, block.bytes);
    count(block, -1);
    live_.erase(found);
    if (!block.arena) {
      slabs(block.slab_shard).give(static_cast<char*>(base), block.bytes);
    } else if (!block.growable) {
      keep(std::move(block.arena));
    }
  }

  BlockInfo info(const void* address) {
    if (forked_child.load()) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(address);
    if (found == live_.end()) return {};
    const Block& block = found->second;
    return {found->first, block.used, block.growable ? block.capacity : 0, block.arena != nullptr};
  }

  template <typename F>
  std::vector<int16_t> for_pages(const void* begin, const void* end, F value) {
    check_process();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(begin);
    if (found == live_.end())
      throw std::invalid_argument("this tensor does not lie in memory of the mgpu device");
    const Arena& arena = arena_at(found->first, found->second);
    const int64_t first = (static_cast<const char*>(begin) - arena.base()) / kPageBytes;
    const int64_t bytes = static_cast<const char*>(end) - arena.base();
    std::vector<int16_t> out;
    for (int64_t page = first; page < pages_for(bytes); ++page) out.push_back(value(arena, page));
    return out;
  }

  void move(const void* begin, const std::vector<int64_t>& pages, const std::vector<int16_t>& places) {
    check_process();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(begin);
    if (found == live_.end())
      throw std::invalid_argument("this tensor does not lie in memory of the mgpu device");
    Block& block = found->second;
    if (!block.arena)
      throw std::invalid_argument(
          "its page is shared with other small tensors; only tensors of at least 1 MiB, or made by "
          "torch.mgpu.reserve(), "
          "can be placed");
    Arena& arena = *block.arena;
    const int64_t first = (static_cast<const char*>(begin) - arena.base()) / kPageBytes;
    for (int64_t page : pages)
      if (page < 0 || first + page >= arena.mapped_pages())
        throw std::invalid_argument("page " + std::to_string(page) + " does not exist; the tensor has " +
                                    std::to_string(arena.mapped_pages() - first) + " pages");
    count(block, -1);
    for (size_t i = 0; i < pages.size(); ++i) arena.move(first + pages[i], places[i]);
    arena.placed_by_user = true;
    count(block, +1);
  }

  MemoryCounts counts() {
    check_process();
    std::lock_guard<std::mutex> lock(mutex_);
    MemoryCounts out;
    shards(mesh().size() - 1);
    for (const ShardMemory& shard : shards_) {
      out.shards.push_back(shard);
      out.allocated += shard.allocated;
    }
    auto add_pages = [&](const Arena& arena) {
      for (int64_t page = 0; page < arena.mapped_pages(); ++page) {
        if (arena.place(page) == kHostPage)
          out.host += kPageBytes;
        else
          ++out.shards[static_cast<size_t>(arena.shard(page))].pages;
      }
    };
    for (const auto& [base, block] : live_)
      if (block.arena) add_pages(*block.arena);
    for (const auto& arena : cached_) add_pages(*arena);
    for (size_t shard = 0; shard < slabs_.size(); ++shard) out.shards[shard].pages += slabs_[shard].pages();
    for (ShardMemory& shard : out.shards) {
      shard.reserved = shard.pages * kPageBytes;
      out.reserved += shard.reserved;
    }
    out.reserved += out.host;
    out.allocated += host_bytes_;
    out.peak = peak_;
    out.allocations = allocations_;
    out.live = static_cast<int64_t>(live_.size());
    return out;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (ShardMemory& shard : shards_) shard.peak = shard.allocated;
    peak_ = total_;
  }

  void empty_cache() {
    if (forked_child.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    drop_caches();
  }

  void store_split(const void* at, int64_t rows, int64_t row_bytes, const RowRange* row_from_shard,
                   const char* what) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(at);
    if (found == live_.end()) return;  // no rows, or not our memory: nothing to hold anybody to
    std::vector<RowRange> ranges(row_from_shard, row_from_shard + mesh().size());
    Block& block = found->second;
    const int64_t offset = static_cast<const char*>(at) - found->first;
    if (!block.split) block.split = std::make_unique<RowSplit>();
    *block.split = {offset, rows, row_bytes, std::move(ranges), what ? what : ""};
  }

  void visit(const std::function<void(const LiveBlock&)>& visit) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [base, block] : live_)
      visit({base, block.used, block.owner, block.tensor, block.split.get()});
  }

 private:
  Slabs& slabs(int shard) {
    while (static_cast<int>(slabs_.size()) <= shard) slabs_.emplace_back(static_cast<int>(slabs_.size()));
    return slabs_[static_cast<size_t>(shard)];
  }

  ShardMemory& shards(int shard) {
    if (static_cast<int>(shards_.size()) <= shard) shards_.resize(static_cast<size_t>(shard) + 1);
    return shards_[static_cast<size_t>(shard)];
  }

  const Arena& arena_at(const char* base, const Block& block) {
    return block.arena ? *block.arena : *slabs(block.slab_shard).slab_of(base);
  }

  // A kept arena of nearly the right size, or a new one.
  std::unique_ptr<Arena> arena_of(int64_t pages, int owner) {
    std::unique_ptr<Arena> arena;
    for (auto kept = cached_.rbegin(); kept != cached_.rend(); ++kept) {
      if ((*kept)->mapped_pages() >= pages && (*kept)->mapped_pages() <= pages + pages / 4) {
        arena = std::move(*kept);
        cached_.erase(std::next(kept).base());
        cached_bytes_ -= arena->mapped_pages() * kPageBytes;
        break;
      }
    }
    if (!arena) arena = std::make_unique<Arena>(pages);
    const int64_t total = arena->reserved_pages();
    const auto shard_of = [&](int64_t page) {
      return owner == kSplit ? equal_page_shard(page, total) : static_cast<int16_t>(owner >= 0 ? owner : 0);
    };
    if (arena->mapped_pages() == total) {
      for (int64_t page = 0; page < total; ++page) arena->move(page, shard_of(page));
    } else {
      arena->grow_to(total, shard_of);
    }
    arena->placed_by_user = false;
    return arena;
  }

  void keep(std::unique_ptr<Arena> arena) {
    cached_bytes_ += arena->mapped_pages() * kPageBytes;
    cached_.push_back(std::move(arena));
    while (cached_bytes_ > kCacheBytes) {
      cached_bytes_ -= cached_.front()->mapped_pages() * kPageBytes;
      cached_.erase(cached_.begin());
    }
  }

  void drop_caches() {
    cached_.clear();
    cached_bytes_ = 0;
    for (Slabs& slabs : slabs_) slabs.drop_empty();
  }

  void add(char* base, Block block) {
    ++allocations_;
    auto [at, inserted] = live_.emplace(base, std::move(block));
    count(at->second, +1);
  }

  // Add (sign +1) or take away (-1) a block's bytes on the shards that its pages lie on.
  void count(const Block& block, int64_t sign) {
    auto count_bytes = [&](int place, int64_t bytes) {
      if (place == kHostPage) {
        host_bytes_ += sign * bytes;
      } else {
        ShardMemory& shard = shards(place);
        shard.allocated += sign * bytes;
        shard.peak = std::max(shard.peak, shard.allocated);
      }
    };
    if (!block.arena) {
      count_bytes(block.slab_shard, block.bytes);
    } else {
      const Arena& arena = *block.arena;
      for (int64_t page = 0; page < pages_for(block.bytes);) {
        int64_t end = page + 1;
        while (end < pages_for(block.bytes) && arena.place(end) == arena.place(page)) ++end;
        count_bytes(arena.place(page), std::min(block.bytes, end * kPageBytes) - page * kPageBytes);
        page = end;
      }
    }
    total_ += sign * block.bytes;
    peak_ = std::max(peak_, total_);
  }

  std::mutex mutex_;
  std::map<char*, Block> live_;
  std::vector<Slabs> slabs_;                    // by shard
  std::vector<std::unique_ptr<Arena>> cached_;  // oldest first
  int64_t cached_bytes_ = 0;
  std::vector<ShardMemory> shards_;  // allocated and peak; pages are counted on demand
  int64_t host_bytes_ = 0;
  int64_t total_ = 0;
  int64_t peak_ = 0;
  int64_t allocations_ = 0;
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: tensors may outlive static destruction
  return *instance;
}

std::atomic<int64_t> threshold{kDefaultThreshold};

}  // namespace

int64_t shard_threshold() { return threshold.load(std::memory_order_relaxed); }
void set_shard_threshold(int64_t bytes) { threshold.store(std::max<int64_t>(1, bytes)); }

void* allocate_tensor(int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const bool split = bytes >= shard_threshold() && bytes >= kSmallBytes;
  return pool().allocate(bytes, split ? kSplit : 0, true);
}
void* reserve_tensor(int64_t bytes, int64_t capacity) { return pool().reserve(bytes, capacity); }
void* allocate_block(int64_t bytes, int owner) {
  return bytes <= 0 ? nullptr : pool().allocate(bytes, owner, false);
}
void free_block(void* base) noexcept { pool().free(base); }
void grow_block(void* base, int64_t bytes) { pool().grow(base, bytes); }
BlockInfo find_block(const void* address) { return pool().info(address); }

std::vector<int16_t> page_places(const void* begin, const void* end) {
  return pool().for_pages(begin, end, [](const Arena& arena, int64_t page) { return arena.place(page); });
}
std::vector<int16_t> page_shards(const void* begin, const void* end) {
  return pool().for_pages(begin, end, [](const Arena& arena, int64_t page) { return arena.shard(page); });
}
void move_pages(const void* begin, const std::vector<int64_t>& pages, const std::vector<int16_t>& places) {
  pool().move(begin, pages, places);
}

MemoryCounts memory_counts() { return pool().counts(); }
void reset_peak() { pool().reset_peak(); }
void empty_cache() { pool().empty_cache(); }
bool in_forked_child() { return forked_child.load(); }

void store_row_split(const void* base, int64_t rows, int64_t row_bytes, const RowRange* row_from_shard,
                     const char* what) {
  pool().store_split(base, rows, row_bytes, row_from_shard, what);
}
void visit_blocks(const std::function<void(const LiveBlock&)>& visit) { pool().visit(visit); }

}  // namespace mgpu
