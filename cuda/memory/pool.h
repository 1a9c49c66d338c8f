// SPDX-License-Identifier: Apache-2.0
// pool.h: every live block of aggregate memory: tensors' storages and stages' temporaries, who owns them, and
// counts.
//
// A block below kSmallBytes is cut from a slab, an arena of a few pages on one shard that many blocks share.
// A larger one has an arena of its own, so that its pages can be split over the shards; freed arenas are kept
// for reuse. Thread-safe. In a forked child nothing is touched: allocation throws, and freeing does nothing.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "mesh/mesh.h"

namespace mgpu {

constexpr int64_t kSmallBytes = int64_t{1} << 20;
constexpr int kSplit = -2;  // owner of a block whose pages are dealt to all shards in equal contiguous chunks

// ---- settings

// Storages and operands of at least this many bytes are split over the shards. MGPU_SHARD_THRESHOLD.
int64_t shard_threshold();
void set_shard_threshold(int64_t bytes);

// ---- blocks

// Uninitialised memory for a tensor, aligned to 512 bytes (null for 0): split over the shards if it reaches
// the threshold, else on the lead shard. Throws OutOfMemory.
void* allocate_tensor(int64_t bytes);

// A storage that can grow: `capacity` bytes of addresses, `bytes` of them mapped and zero. Always an arena of
// its own.
void* reserve_tensor(int64_t bytes, int64_t capacity);

// Memory of a stage, on one shard or in the exchange (owner kExchange: counted on the lead shard).
void* allocate_block(int64_t bytes, int owner);

// Free a block by its first byte. Null and unknown addresses are ignored.
void free_block(void* base) noexcept;

// Map pages until a reserved block holds `bytes`; new bytes are zero. Throws OutOfMemory,
// std::invalid_argument when the block was not reserved or its capacity is less.
void grow_block(void* base, int64_t bytes);

// Let a reserved block hold `bytes`, fewer than it does. Its pages stay mapped for the next growth, which
// takes what is in them for zero: the caller has cleared them.
void shrink_block(void* base, int64_t bytes);

// A segment of torch's CUDA allocator: split over the shards if it is large, else on the lead shard; its
// pages can be moved, whoever uses them. Null if there is no memory. Freed by free_block().
void* allocate_segment(int64_t bytes);

// ---- the order in which streams use memory (CUDA flavour)
//
// A freed block is used again by the stream that it was taken on, without waiting. If other streams use it
// too (note_use), it is kept until they have come past the point at which it was freed.
struct StreamOrder {
  int64_t (*tag)() = nullptr;                       // names the calling thread's stream
  void* (*mark)(int64_t stream) = nullptr;          // the point in a stream that it has been given work up to
  bool (*passed)(void* mark, bool wait) = nullptr;  // true: it has come past, and the mark is gone
  bool (*release_others)() = nullptr;  // give back what other allocators keep; waits for the GPUs
};
void set_stream_order(const StreamOrder& order);
void note_use(const void* base, int64_t stream);

// ---- memory that others made and a tensor on mgpu holds: counted as the lead shard's
void adopt_memory(const void* base, int64_t bytes);
void drop_adopted(const void* base) noexcept;

// What each shard holds, in words, for messages.
std::string memory_table();

// What is known about the block that an address lies in.
struct BlockInfo {
  char* base = nullptr;    // null: no such block
  int64_t bytes = 0;       // in use
  int64_t capacity = 0;    // reserved; 0 if it cannot grow
  bool own_arena = false;  // false: a slab, its pages are shared with other blocks
};
BlockInfo find_block(const void* address);

// ---- pages: `begin` and `end` bound the bytes of a tensor inside one block

std::vector<int16_t> page_places(const void* begin, const void* end);
// Move pages [first + i] to places[i]; kHostPage parks a page in host memory. The block must have its own
// arena.
void move_pages(const void* begin, const std::vector<int64_t>& pages, const std::vector<int16_t>& places);
// The shards of the pages, also of those that are away in host memory.
std::vector<int16_t> page_shards(const void* begin, const void* end);

// ---- counts

struct ShardMemory {
  int64_t allocated = 0;  // bytes in use
  int64_t reserved = 0;   // bytes of mapped pages, in use or kept for reuse
  int64_t peak = 0;       // largest `allocated` since reset_peak
  int64_t pages = 0;      // mapped pages on the shard
};
struct MemoryCounts {
  std::vector<ShardMemory> shards;
  int64_t host = 0;       // bytes of pages parked in host memory
  int64_t allocated = 0;  // sums over the shards and the host
  int64_t reserved = 0;
  int64_t peak = 0;
  int64_t allocations = 0;  // blocks handed out so far
  int64_t live = 0;         // blocks in use
};
MemoryCounts memory_counts();
void reset_peak();

// Give pages that no block uses back to the system. In the CUDA flavour, waits for the GPUs, and has the
// other allocators give back theirs.
void empty_cache();

// True in a process that was forked from one that used the pool.
bool in_forked_child();
// Throws std::runtime_error there, with what to do instead.
void refuse_forked_child();

// ---- for the locality check (locality.cpp)

// Declare how the rows of a block are split; see set_row_split in locality.h.
struct RowSplit {
  int64_t offset = 0;  // of row 0, from the block's base
  int64_t rows = 0;
  int64_t row_bytes = 0;
  std::vector<RowRange> row_from_shard;
  std::string what;
};
void store_row_split(const void* base, int64_t rows, int64_t row_bytes, const RowRange* row_from_shard,
                     const char* what);

struct LiveBlock {
  char* base;
  int64_t bytes;
  int owner;  // shard, kExchange or kSplit
  bool tensor;
  const RowSplit* split;  // null: none was declared
};
void visit_blocks(const std::function<void(const LiveBlock&)>& visit);

}  // namespace mgpu
