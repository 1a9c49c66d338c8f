// SPDX-License-Identifier: Apache-2.0
// mesh.h: the ordered list of shards that make up the aggregate device, and the equal split of rows over
// them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace mgpu {

constexpr int kMaxShards = 64;
constexpr int kMaxGpus = 64;  // their numbers are below: sets of them are bits of a word

// One member of the aggregate device.
struct Shard {
  int index;         // position in the mesh, 0 is the lead shard
  std::string name;  // "cpu:2"
  int gpu = -1;      // the GPU that it lies on: its ordinal ("cuda:1"), unless GPUs are apart; -1: none
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
  friend void set_mesh(const std::vector<std::string>& names, bool apart);
  std::vector<Shard> shards_;
  std::vector<int> gpus_;
};

// The mesh of this process. One shard, "cpu:0", until set_mesh is called.
const Mesh& mesh();

// Called once, by ns_mgpu_splat.init(), before any tensor exists; `apart` as below. Throws
// std::invalid_argument on an empty list, and on GPUs that cannot be apart.
void set_mesh(const std::vector<std::string>& names, bool apart = false);

// Several GPUs have to be made to wait for each other.
inline bool several_gpus() { return mesh().gpus().size() > 1; }

// ---- GPUs apart (MGPU_TEST_APART), for tests of the order between GPUs on one
//
// Shards of one GPU share its stream, so nothing there can be out of order. Apart, each counts as a GPU of
// its own, with a stream, a heap and joins of its own: the k-th shard on GPU g, from 0 on, has the number
// g + 8 k. Numbers of GPUs are these everywhere; who asks CUDA or torch about one asks about
// physical_gpu(number). On all other meshes that is the number itself.

constexpr int kApartStep = 8;
inline bool gpus_apart = false;  // set_mesh() sets it

// CUDA's ordinal of a GPU; -1 stays -1.
inline int physical_gpu(int gpu) { return gpus_apart ? gpu % kApartStep : gpu; }
// True if CUDA knows this GPU by an earlier number of the mesh.
inline bool is_repeated(int gpu) { return physical_gpu(gpu) != gpu; }
// "cuda:1", for messages.
inline std::string gpu_name(int gpu) { return "cuda:" + std::to_string(physical_gpu(gpu)); }

// Shard::gpu of shards with these names.
std::vector<int> gpus_of(const std::vector<std::string>& names, bool apart);

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
