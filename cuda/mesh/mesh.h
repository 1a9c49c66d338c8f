// SPDX-License-Identifier: Apache-2.0
// mesh.h: the ordered list of shards that make up the aggregate device, and the equal split of rows over
// them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace mgpu {

constexpr int kMaxShards = 64;

// One member of the aggregate device.
struct Shard {
  int index;         // position in the mesh, 0 is the lead shard
  std::string name;  // "cpu:2"
  int gpu = -1;      // ordinal of the GPU that it lies on ("cuda:1"), -1 for any other name
};

// Half-open range of rows (or bytes, tiles, ...).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  constexpr int64_t size() const { return end - begin; }
  constexpr bool empty() const { return end <= begin; }
};

class Mesh {
 public:
  int size() const { return static_cast<int>(shards_.size()); }
  const Shard& operator[](int index) const { return shards_[static_cast<size_t>(index)]; }
  const std::vector<Shard>& shards() const { return shards_; }
  // GPUs of the shards, each once, the lead shard's first.
  const std::vector<int>& gpus() const { return gpus_; }

 private:
  friend void set_mesh(const std::vector<std::string>& names);
  std::vector<Shard> shards_;
  std::vector<int> gpus_;
};

// The mesh of this process. One shard, "cpu:0", until set_mesh is called.
const Mesh& mesh();

// Called once, by ns_mgpu_splat.init(), before any tensor exists. Throws std::invalid_argument on an empty
// list.
void set_mesh(const std::vector<std::string>& names);

// Part `shard` of `count` items cut into `shards` equal contiguous chunks; the last ones may be short or
// empty.
inline RowRange equal_chunk(int64_t count, int shard, int shards) {
  const int64_t chunk = (count + shards - 1) / shards;
  const int64_t begin = chunk * shard < count ? chunk * shard : count;
  return {begin, begin + chunk < count ? begin + chunk : count};
}

// The chunks of all shards of the mesh.
inline std::vector<RowRange> equal_chunks(int64_t count) {
  std::vector<RowRange> chunks(static_cast<size_t>(mesh().size()));
  for (int shard = 0; shard < mesh().size(); ++shard)
    chunks[static_cast<size_t>(shard)] = equal_chunk(count, shard, mesh().size());
  return chunks;
}

// Ascending ranges without gaps over one number of rows, stretched to another.
inline std::vector<RowRange> stretched(std::vector<RowRange> ranges, int64_t count) {
  const int64_t before = ranges.empty() ? 0 : ranges.back().end;
  if (before == count || before == 0) return before == count ? ranges : equal_chunks(count);
  const auto at = [&](int64_t row) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(row) * static_cast<uint64_t>(count) /
                                static_cast<uint64_t>(before));
  };
  for (RowRange& range : ranges) range = {at(range.begin), at(range.end)};
  return ranges;
}

}  // namespace mgpu
