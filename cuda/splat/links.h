// SPDX-License-Identifier: Apache-2.0
// links.h: what a frame sends from shard to shard, and the sum over all frames of the process. All of it is
// known on the host without a read of its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mgpu::splat {

struct Frame;
struct HaloPiece;

// [from, to] of all shards; a shard sends itself nothing.
class LinkBytes {
 public:
  LinkBytes() = default;
  explicit LinkBytes(int shards) : shards_(shards), bytes_(static_cast<size_t>(shards) * shards, 0) {}
  void add(int from, int to, int64_t bytes) {
    if (from != to) bytes_[static_cast<size_t>(from) * shards_ + to] += bytes;
  }
  LinkBytes& operator+=(const LinkBytes& other);
  int64_t at(int from, int to) const { return bytes_[static_cast<size_t>(from) * shards_ + to]; }
  int64_t total() const;
  int shards() const { return shards_; }

 private:
  int shards_ = 0;
  std::vector<int64_t> bytes_;
};

// Of one frame.
struct FrameLinks {
  LinkBytes records;          // from home to owner
  LinkBytes gradients;        // back
  LinkBytes pixels;           // of train_step: colours that one shard blends and another one's loss reads
  int64_t records_sent = 0;   // pairs of a record and an owner that is not its home
  int64_t remote_rows = 0;    // records that another shard than their home blends
  int64_t visible_rows = 0;   // records
  std::vector<int64_t> load;  // by owner: what its tiles cost, in pairs of (tile, record)

  double imbalance() const;  // largest load / mean load; 1 if there is none
};

// Fills all but gradients and pixels; after stage "exchange". Adds to the sums of the process.
void count_links(Frame& frame);
// Gradients, which take the records' way back. After stage "return".
void count_returned(Frame& frame);
// Pixels. After stage "loss".
void count_pixels(Frame& frame, const std::vector<HaloPiece>& halo);

// Sums since the process began or reset_link_totals() was called.
struct LinkTotals {
  int64_t frames = 0;
  FrameLinks sum;
  double imbalance_sum = 0.0, imbalance_max = 0.0;  // over frames
};
LinkTotals link_totals();
void reset_link_totals();

}  // namespace mgpu::splat
