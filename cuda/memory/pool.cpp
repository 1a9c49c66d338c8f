// SPDX-License-Identifier: Apache-2.0
#include "memory/pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

#include "memory/arena.h"
#include "memory/homes.h"
#include "memory/locality.h"
#include "memory/page.h"
#include "memory/provider.h"
#include "memory/tally.h"
#include "memory/temporaries.h"
#include "mesh/gate.h"

namespace mgpu {

namespace {

constexpr int64_t kAlignment = 512;                        // as torch's CUDA allocator
constexpr int64_t kSlabPages = 4;                          // 8 MiB a slab
constexpr int64_t kSplitSegmentBytes = int64_t{64} << 20;  // torch cuts smaller segments up for small tensors
constexpr int64_t kDefaultThreshold = int64_t{1} << 20;    // below it a fork costs more than it saves

std::atomic<bool> forked_child{false};

StreamOrder& stream_order() {
  static StreamOrder* instance = new StreamOrder;
  return *instance;
}
int64_t current_tag() { return stream_order().tag ? stream_order().tag() : 0; }

std::string gibibytes(int64_t bytes) {
  char text[32];
  snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  return text;
}

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
  int64_t tag = 0;  // of the stream that may use it again
  bool growable = false;
  int64_t capacity = 0;            // bytes that it may grow to
  bool segment = false;            // of torch's allocator, which counts what is in it
  std::vector<int64_t> used_on{};  // other streams
  std::unique_ptr<RowSplit> split;
};

class Pool {
  // Try; if memory is short, again without what the pool keeps, and again without what other allocators keep.
  // `work` runs under the lock, the others' caches are given back without it: they give their segments to
  // free().
  template <typename F>
  auto with_retry(F work) {
    refuse_forked_child();
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      try {
        return work();
      } catch (const OutOfMemory&) {
        drop_caches();
      }
      return work();
    } catch (const OutOfMemory& error) {
      if (!stream_order().release_others) throw with_table(error);
    }
    stream_order().release_others();
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      drop_caches();
      return work();
    } catch (const OutOfMemory& error) {
      throw with_table(error);
    }
  }

  OutOfMemory with_table(const OutOfMemory& error) {
    return OutOfMemory(std::string(error.what()) + " " + table());
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
    refuse_forked_child();
    const int64_t tag = current_tag();
    return with_retry([&] { return take(bytes, owner, tensor, tag); });
  }

  // A segment is asked for by torch's allocator, under a lock of its own: whose caches to give back, it knows
  // better.
  char* allocate_segment(int64_t bytes) {
    const int64_t tag = current_tag();
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      const int owner = bytes >= kSplitSegmentBytes ? kSplit : 0;
      char* base = nullptr;
      try {
        base = take(bytes, owner, true, tag, true);
      } catch (const OutOfMemory&) {
        drop_caches();
        base = take(bytes, owner, true, tag, true);
      }
      return base;
    } catch (const OutOfMemory&) {
      return nullptr;
    }
  }

 private:
  // With the lock held.
  char* take(int64_t bytes, int owner, bool tensor, int64_t tag, bool segment = false) {
    visit_pending(false);
    Block block;
    block.tag = tag;
    block.segment = segment;
    block.used = bytes;
    // with the locality check on, no two blocks share a hardware page
    bytes = round_up(bytes, locality_checked() ? kOsPageBytes : kAlignment);
    block.bytes = bytes;
    block.owner = owner;
    block.tensor = tensor;
    char* base = nullptr;
    if (bytes < kSmallBytes && !segment) {
      block.slab_shard = owner >= 0 ? owner : 0;
      base = slabs(block.slab_shard, tag).take(bytes);
    } else {
      const int64_t pages = pages_for(bytes);
      block.arena = arena_of(pages, owner, tag);
      base = block.arena->base();
    }
    add(base, std::move(block));
    return base;
  }

 public:
  char* reserve(int64_t bytes, int64_t capacity) {
    refuse_forked_child();
    const int64_t tag = current_tag();
    const LaunchScope turn;  // new pages are cleared
    return with_retry([&] { return take_growable(bytes, capacity, tag); });
  }

 private:
  char* take_growable(int64_t bytes, int64_t capacity, int64_t tag) {
    const int64_t pages = pages_for(bytes);
    Block block;
    block.tag = tag;
    block.used = block.bytes = bytes;
    block.owner = kSplit;
    block.tensor = true;
    block.growable = true;
    block.capacity = capacity;
    block.arena = std::make_unique<Arena>(std::max<int64_t>(1, pages_for(capacity)));
    block.arena->grow_to(pages, [&](int64_t page) { return equal_page_shard(page, pages); });
    block.arena->zero(0, pages);
    char* base = block.arena->base();
    add(base, std::move(block));
    return base;
  }

 public:
  void grow(void* base, int64_t bytes) {
    StillScope still;  // older pages may move
    with_retry([&] {
      grow_locked(base, bytes);
      return 0;
    });
  }

 private:
  void grow_locked(void* base, int64_t bytes) {
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
    const int64_t old_pages = arena.mapped_pages();
    try {
      if (arena.placed_by_user && old_pages > 0 && has_row_homes(base)) {
        // new rows are behind the last ones, and so with their home until somebody deals them anew
        arena.grow_to(pages, [&](int64_t) { return arena.shard(old_pages - 1); });
      } else if (arena.placed_by_user) {
        std::vector<int64_t> load(static_cast<size_t>(mesh().size()));
        for (int64_t page = 0; page < old_pages; ++page) ++load[static_cast<size_t>(arena.shard(page))];
        arena.grow_to(pages, [&](int64_t) {
          const auto least = std::min_element(load.begin(), load.end());
          ++*least;
          return static_cast<int16_t>(least - load.begin());
        });
      } else {
        arena.grow_to(pages, [&](int64_t page) { return equal_page_shard(page, pages); });
      }
      arena.zero(old_pages, arena.mapped_pages() - old_pages);
      if (!arena.placed_by_user) deal_again(arena, pages);
    } catch (...) {
      count(block, +1);
      throw;
    }
    block.used = block.bytes = bytes;
    count(block, +1);
  }

  // The chunks of all shards have changed: deal the pages in use again, but for those in host memory.
  static void deal_again(Arena& arena, int64_t pages) {
    std::vector<int16_t> places;
    for (int64_t page = 0; page < pages; ++page)
      places.push_back(arena.place(page) == kHostPage ? kHostPage : equal_page_shard(page, pages));
    tally_moved(arena.move(0, places));
  }

 public:
  void shrink(void* base, int64_t bytes) {
    StillScope still;
    with_retry([&] {
      auto found = live_.find(static_cast<char*>(base));
      if (found == live_.end() || !found->second.growable || bytes > found->second.bytes)
        throw std::invalid_argument(
            "only memory of torch.mgpu.reserve() can shrink, and only to fewer bytes");
      Block& block = found->second;
      count(block, -1);
      block.used = block.bytes = bytes;
      if (!block.arena->placed_by_user) deal_again(*block.arena, pages_for(bytes));
      count(block, +1);
      return 0;
    });
  }

  void free(void* base) noexcept {
    if (base == nullptr || forked_child.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(base));
    if (found == live_.end()) return;
    Block block = std::move(found->second);
    forget_row_homes(base);
    if (locality_checked()) unprotect_block(base, block.bytes);
    count(block, -1);
    live_.erase(found);
    if (block.used_on.empty()) {
      reuse(static_cast<char*>(base), std::move(block));
      return;
    }
    try {
      Pending entry{static_cast<char*>(base), std::move(block), {}};
      for (const int64_t stream : entry.block.used_on) entry.marks.push_back(stream_order().mark(stream));
      pending_.push_back(std::move(entry));
    } catch (...) {  // the driver is gone: the process ends, and its memory with it
    }
  }

  void note_use(const void* base, int64_t stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = around(base);
    if (found == live_.end() || !stream_order().mark) return;
    std::vector<int64_t>& used_on = found->second.used_on;
    if (std::find(used_on.begin(), used_on.end(), stream) == used_on.end()) used_on.push_back(stream);
  }

  void adopt(const void* base, int64_t bytes) {
    if (!base) return;
    std::lock_guard<std::mutex> lock(mutex_);
    bytes = round_up(bytes, kAlignment);
    const bool outside = around(base) == live_.end();  // not of a segment
    auto [at, inserted] = adopted_.try_emplace(static_cast<const char*>(base), Adopted{bytes, 0, outside});
    if (at->second.holders++ > 0) return;
    count_adopted(at->second, +1);
    ++allocations_;
  }

  void drop_adopted(const void* base) noexcept {
    if (forked_child.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = adopted_.find(static_cast<const char*>(base));
    if (found == adopted_.end() || --found->second.holders > 0) return;
    count_adopted(found->second, -1);
    adopted_.erase(found);
  }

  std::string table() {
    const MemoryCounts now = counts();
    std::string text = "Shards:";
    for (size_t shard = 0; shard < now.shards.size(); ++shard)
      text += " " + std::to_string(shard) + " (" + mesh()[static_cast<int>(shard)].name + ") holds " +
              gibibytes(now.shards[shard].allocated) + " in use and " +
              gibibytes(std::max<int64_t>(0, now.shards[shard].reserved - now.shards[shard].allocated)) +
              " kept" + (shard + 1 < now.shards.size() ? "," : ".");
    const std::string free = free_memory_table();
    if (!free.empty()) text += " " + free + ".";
    return text +
           " Free tensors, lower the number of Gaussians or the image size, or add a shard to MGPU_DEVICES.";
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
    refuse_forked_child();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(begin);
    if (found == live_.end()) {
      if (const auto [base, bytes] = around_adopted(begin); base) {
        const int64_t first = (static_cast<const char*>(begin) - base) / kPageBytes;
        return std::vector<int16_t>(
            static_cast<size_t>(pages_for(static_cast<const char*>(end) - base) - first), 0);
      }
      throw std::invalid_argument("this tensor does not lie in memory of the mgpu device");
    }
    const Arena& arena = arena_at(found->first, found->second);
    const int64_t first = (static_cast<const char*>(begin) - arena.base()) / kPageBytes;
    const int64_t bytes = static_cast<const char*>(end) - arena.base();
    std::vector<int16_t> out;
    for (int64_t page = first; page < pages_for(bytes); ++page) out.push_back(value(arena, page));
    return out;
  }

  void move(const void* begin, const std::vector<int64_t>& pages, const std::vector<int16_t>& places) {
    refuse_forked_child();
    StillScope still;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = around(begin);
    if (found == live_.end())
      throw std::invalid_argument(around_adopted(begin).first
                                      ? "a kernel of torch made it, in memory that stays on the lead shard; "
                                        "clone() it, and place the clone"
                                      : "this tensor does not lie in memory of the mgpu device");
    Block& block = found->second;
    if (!block.arena)
      throw std::invalid_argument(
          "its page is shared with other small tensors; only tensors of at least 1 MiB, or made by "
          "torch.mgpu.reserve(), can be placed");
    Arena& arena = *block.arena;
    const int64_t first = (static_cast<const char*>(begin) - arena.base()) / kPageBytes;
    for (int64_t page : pages)
      if (page < 0 || first + page >= arena.mapped_pages())
        throw std::invalid_argument("page " + std::to_string(page) + " does not exist; the tensor has " +
                                    std::to_string(arena.mapped_pages() - first) + " pages");
    count(block, -1);
    try {
      if (!pages.empty()) {  // in one go, from the first of them to the last
        const auto [least, most] = std::minmax_element(pages.begin(), pages.end());
        std::vector<int16_t> wanted;
        for (int64_t page = *least; page <= *most; ++page) wanted.push_back(arena.place(first + page));
        for (size_t i = 0; i < pages.size(); ++i) wanted[static_cast<size_t>(pages[i] - *least)] = places[i];
        tally_moved(arena.move(first + *least, wanted));
      }
    } catch (...) {
      count(block, +1);
      throw;
    }
    arena.placed_by_user = true;
    count(block, +1);
  }

  MemoryCounts counts() {
    refuse_forked_child();
    std::lock_guard<std::mutex> lock(mutex_);
    MemoryCounts out;
    for (int shard = 0; shard < mesh().size(); ++shard) {
      const Tally known = tally_of(shard);
      out.shards.push_back({known.allocated, 0, known.peak, 0});
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
    for (const Pending& entry : pending_)
      if (entry.block.arena) add_pages(*entry.block.arena);
    for (const Cached& kept : cached_) add_pages(*kept.arena);
    for (const auto& [key, slabs] : slabs_)
      out.shards[static_cast<size_t>(key.second)].pages += slabs.pages();
    for (ShardMemory& shard : out.shards) shard.reserved = shard.pages * kPageBytes;
    out.shards[0].reserved += adopted_outside_;
    for (size_t shard = 0; shard < out.shards.size(); ++shard) {
      out.shards[shard].reserved += temporaries_reserved(static_cast<int>(shard));
      out.reserved += out.shards[shard].reserved;
    }
    out.reserved += out.host;
    const Tally all = tally_of_all();
    out.allocated = all.allocated;
    out.peak = all.peak;
    out.allocations = allocations_;
    out.live = static_cast<int64_t>(live_.size() + adopted_.size());
    return out;
  }

  void empty_cache() {
    if (forked_child.load()) return;
    if (stream_order().release_others) stream_order().release_others();
    std::lock_guard<std::mutex> lock(mutex_);
    visit_pending(true);
    drop_caches();
    provider().trim();  // not where GPUs are short of memory: what it keeps is the host's
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
  struct Adopted {
    int64_t bytes;
    int64_t holders;
    bool outside;  // of the pool's arenas
  };
  struct Cached {
    std::unique_ptr<Arena> arena;
    int64_t tag;
  };
  struct Pending {
    char* base;
    Block block;
    std::vector<void*> marks;
  };

  Slabs& slabs(int shard, int64_t tag) { return slabs_.try_emplace({tag, shard}, shard).first->second; }

  // A freed block goes where the next one of its stream finds it.
  void reuse(char* base, Block block) {
    if (!block.arena)
      slabs(block.slab_shard, block.tag).give(base, block.bytes);
    else if (!block.growable)
      keep(std::move(block.arena), block.tag);
  }

  // Freed blocks that other streams have come past.
  void visit_pending(bool wait) {
    std::erase_if(pending_, [&](Pending& entry) {
      std::erase_if(entry.marks, [&](void* mark) { return stream_order().passed(mark, wait); });
      if (!entry.marks.empty()) return false;
      reuse(entry.base, std::move(entry.block));
      return true;
    });
  }

  // The adopted memory around an address: its first byte (null: none) and size.
  std::pair<const char*, int64_t> around_adopted(const void* address) const {
    auto after = adopted_.upper_bound(static_cast<const char*>(address));
    if (after == adopted_.begin()) return {nullptr, 0};
    const auto& [base, memory] = *std::prev(after);
    if (static_cast<const char*>(address) - base >= memory.bytes) return {nullptr, 0};
    return {base, memory.bytes};
  }

  void count_adopted(const Adopted& memory, int64_t sign) {
    tally(0, sign * memory.bytes);
    if (memory.outside) adopted_outside_ += sign * memory.bytes;
  }

  const Arena& arena_at(const char* base, const Block& block) {
    return block.arena ? *block.arena : *slabs(block.slab_shard, block.tag).slab_of(base);
  }

  // A kept arena of nearly the right size, or a new one.
  std::unique_ptr<Arena> arena_of(int64_t pages, int owner, int64_t tag) {
    const auto places_of = [&](int64_t total) {
      std::vector<int16_t> places;
      for (int64_t page = 0; page < total; ++page)
        places.push_back(owner == kSplit ? equal_page_shard(page, total)
                                         : static_cast<int16_t>(owner >= 0 ? owner : 0));
      return places;
    };
    for (auto kept = cached_.rbegin(); kept != cached_.rend(); ++kept) {
      Arena& arena = *kept->arena;
      const int64_t mapped = arena.mapped_pages();
      if (kept->tag != tag || mapped < pages || mapped > pages + pages / 4) continue;
      const std::vector<int16_t> places = places_of(mapped);
      if (!arena.lies_at(places)) continue;
      arena.move(0, places);
      arena.placed_by_user = false;
      std::unique_ptr<Arena> found = std::move(kept->arena);
      cached_bytes_ -= mapped * kPageBytes;
      cached_.erase(std::next(kept).base());
      return found;
    }
    auto arena = std::make_unique<Arena>(pages);
    const std::vector<int16_t> places = places_of(pages);
    arena->grow_to(pages, [&](int64_t page) { return places[static_cast<size_t>(page)]; });
    return arena;
  }

  void keep(std::unique_ptr<Arena> arena, int64_t tag) {
    cached_bytes_ += arena->mapped_pages() * kPageBytes;
    cached_.push_back({std::move(arena), tag});
    while (cached_bytes_ > provider().cache_bytes()) {
      cached_bytes_ -= cached_.front().arena->mapped_pages() * kPageBytes;
      cached_.erase(cached_.begin());
    }
  }

  void drop_caches() {
    cached_.clear();
    cached_bytes_ = 0;
    for (auto& [key, slabs] : slabs_) slabs.drop_empty();
  }

  void add(char* base, Block block) {
    ++allocations_;
    auto [at, inserted] = live_.emplace(base, std::move(block));
    count(at->second, +1);
  }

  // Add (sign +1) or take away (-1) a block's bytes on the shards that its pages lie on.
  void count(const Block& block, int64_t sign) {
    if (block.segment) return;  // what is in use of it is adopted by tensors
    if (!block.arena) {
      tally(block.slab_shard, sign * block.bytes);
    } else {
      const Arena& arena = *block.arena;
      for (int64_t page = 0; page < pages_for(block.bytes);) {
        int64_t end = page + 1;
        while (end < pages_for(block.bytes) && arena.place(end) == arena.place(page)) ++end;
        tally(arena.place(page), sign * (std::min(block.bytes, end * kPageBytes) - page * kPageBytes));
        page = end;
      }
    }
  }

  std::mutex mutex_;
  std::map<char*, Block> live_;
  std::map<std::pair<int64_t, int>, Slabs> slabs_;  // by stream and shard
  std::vector<Cached> cached_;                      // oldest first
  std::vector<Pending> pending_;                    // freed, but other streams still use them
  std::map<const char*, Adopted> adopted_;
  int64_t adopted_outside_ = 0;
  int64_t cached_bytes_ = 0;
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
void* allocate_segment(int64_t bytes) { return pool().allocate_segment(bytes); }
void set_stream_order(const StreamOrder& order) { stream_order() = order; }
void note_use(const void* base, int64_t stream) { pool().note_use(base, stream); }
void adopt_memory(const void* base, int64_t bytes) { pool().adopt(base, bytes); }
void drop_adopted(const void* base) noexcept { pool().drop_adopted(base); }
std::string memory_table() { return pool().table(); }
void free_block(void* base) noexcept { pool().free(base); }
void grow_block(void* base, int64_t bytes) { pool().grow(base, bytes); }
void shrink_block(void* base, int64_t bytes) { pool().shrink(base, bytes); }
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
void reset_peak() { reset_tally_peaks(); }
void empty_cache() { pool().empty_cache(); }
bool in_forked_child() { return forked_child.load(); }
void refuse_forked_child() {
  if (forked_child.load())
    throw std::runtime_error(
        "mgpu cannot be used in a forked process. Start workers with multiprocessing's 'spawn' method, or "
        "let them return CPU tensors and move those to mgpu in the parent.");
}

void store_row_split(const void* base, int64_t rows, int64_t row_bytes, const RowRange* row_from_shard,
                     const char* what) {
  pool().store_split(base, rows, row_bytes, row_from_shard, what);
}
void visit_blocks(const std::function<void(const LiveBlock&)>& visit) { pool().visit(visit); }

}  // namespace mgpu
