// SPDX-License-Identifier: Apache-2.0
#include "splat/exchange.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "math/tile.h"
#include "mesh/fork_join.h"
#include "splat/assign.h"

namespace mgpu::splat {

namespace {

constexpr int64_t kGrain = 4096;  // records a piece

int64_t tile_index(const View& view, int x, int y) { return view.tile_begin + int64_t{y} * view.tiles_x + x; }

// Calls visit(owner) once for every owner that has a tile of the record, ascending.
template <typename Visit>
void for_each_owner(const Frame& frame, const View& view, const Record& record, const Visit& visit) {
  const uint16_t* rect = record.tile_rect;
  const int first = owner_of_tile(frame, tile_index(view, rect[0], rect[1]));
  const int last = owner_of_tile(frame, tile_index(view, rect[2] - 1, rect[3] - 1));
  if (first == last) {  // nearly all: no test needed
    visit(first);
    return;
  }
  math::TileEllipse ellipse;
  if (!math::make_tile_ellipse(record.mean2d, record.conic, record.opacity, ellipse)) return;
  int visited = -1;  // tiles come in ascending order, and so do their owners
  for (int y = rect[1]; y < rect[3]; ++y) {
    const math::TileSpan span = math::tile_span_of(ellipse, view, rect, y);
    if (span.begin == span.end) continue;
    const int from = std::max(visited + 1, owner_of_tile(frame, tile_index(view, span.begin, y)));
    const int to = owner_of_tile(frame, tile_index(view, span.end - 1, y));
    for (int owner = from; owner <= to; ++owner) visit(owner);
    visited = std::max(visited, to);
  }
}

// At home: one parcel per owner, in record order.
void pack(Frame& frame, int home, std::vector<Parcel>& parcels) {
  ShardRecords& in = frame.shards[home];
  const int64_t shards = static_cast<int64_t>(frame.owners.size());
  const int64_t pieces = (in.count + kGrain - 1) / kGrain;
  std::vector<int64_t> position(static_cast<size_t>(pieces * shards),
                                0);  // [piece, owner] counts, then offsets
  std::vector<int64_t> remote(static_cast<size_t>(pieces), 0);
  parallel_for(in.count, kGrain, [&](int64_t begin, int64_t end) {
    int64_t* counts = &position[begin / kGrain * shards];
    for (int64_t r = begin; r < end; ++r) {
      bool leaves = false;
      for_each_owner(frame, frame.views[in.view[r]], in.record[r], [&](int owner) {
        ++counts[owner];
        leaves |= owner != home;
      });
      remote[begin / kGrain] += leaves;
    }
  });
  for (int64_t owner = 0; owner < shards; ++owner) {
    Parcel& parcel = parcels[owner];
    parcel.count = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t count = position[piece * shards + owner];
      position[piece * shards + owner] = parcel.count;
      parcel.count += count;
    }
    parcel.record = Buffer<Record>(parcel.count, kExchange);
    parcel.record_from_parcel = Buffer<int64_t>(parcel.count, home);
  }
  parallel_for(in.count, kGrain, [&](int64_t begin, int64_t end) {
    int64_t* next = &position[begin / kGrain * shards];
    for (int64_t r = begin; r < end; ++r) {
      for_each_owner(frame, frame.views[in.view[r]], in.record[r], [&](int owner) {
        const int64_t slot = next[owner]++;
        parcels[owner].record[slot] = in.record[r];
        parcels[owner].record_from_parcel[slot] = r;
      });
    }
  });
  in.remote = std::accumulate(remote.begin(), remote.end(), int64_t{0});
  for (Parcel& parcel : parcels) {
    parcel.view_begin.clear();
    for (const int64_t begin : in.view_begin) {
      const int64_t* first = parcel.record_from_parcel.begin();
      parcel.view_begin.push_back(std::lower_bound(first, first + parcel.count, begin) - first);
    }
  }
}

// At the owner: one contiguous copy per home.
void pull(const std::vector<std::vector<Parcel>>& parcels, int self, TileOwner& owner) {
  count_received(parcels, self, owner);
  const int64_t total = owner.received();
  owner.record = Buffer<Record>(total, self);
  owner.view = Buffer<int32_t>(total, self);
  for (size_t home = 0; home < parcels.size(); ++home) {
    const Parcel& parcel = parcels[home][self];
    std::copy(parcel.record.begin(), parcel.record.end(), owner.record.data() + owner.peer_begin[home]);
    for (size_t v = 0; v + 1 < parcel.view_begin.size(); ++v) {
      std::fill(owner.view.data() + owner.peer_begin[home] + parcel.view_begin[v],
                owner.view.data() + owner.peer_begin[home] + parcel.view_begin[v + 1],
                static_cast<int32_t>(v));
    }
  }
}

void add(RecordGrad& sum, const RecordGrad& part) {
  for (int i = 0; i < 2; ++i) sum.mean2d[i] += part.mean2d[i];
  for (int i = 0; i < 3; ++i) sum.conic[i] += part.conic[i];
  sum.opacity += part.opacity;
  for (int i = 0; i < 3; ++i) sum.rgb[i] += part.rgb[i];
  sum.depth += part.depth;
  for (int i = 0; i < 2; ++i) sum.abs_mean2d[i] += part.abs_mean2d[i];
}

}  // namespace

void exchange_records(Frame& frame) {
  const size_t shards = frame.homes.size();
  frame.parcels.clear();
  frame.parcels.resize(shards);
  for (auto& from_home : frame.parcels) from_home.resize(shards);
  for_each_shard("pack", [&](const Shard& shard) { pack(frame, shard.index, frame.parcels[shard.index]); });
  for_each_shard("exchange",
                 [&](const Shard& shard) { pull(frame.parcels, shard.index, frame.owners[shard.index]); });
  for (auto& from_home : frame.parcels) {
    for (Parcel& parcel : from_home) parcel.record = Buffer<Record>();  // delivered
  }
}

void return_gradients(Frame& frame) {
  for_each_shard("return", [&](const Shard& shard) {
    TileOwner& owner = frame.owners[shard.index];
    for (size_t home = 0; home < frame.parcels.size(); ++home) {
      Parcel& parcel = frame.parcels[home][shard.index];
      parcel.grad = Buffer<RecordGrad>(parcel.count, kExchange);
      const int64_t first = owner.peer_begin[home];
      parallel_for(parcel.count, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          RecordGrad sum{};
          for (int64_t slot = owner.slot_begin[first + i]; slot < owner.slot_begin[first + i + 1]; ++slot) {
            add(sum, owner.slot_grad[slot]);
          }
          parcel.grad[i] = sum;
        }
      });
    }
    owner.slot_grad = Buffer<RecordGrad>();
  });
  for_each_shard("collect", [&](const Shard& shard) {
    ShardRecords& home = frame.shards[shard.index];
    home.grad = Buffer<RecordGrad>(home.count, shard.index);
    std::fill(home.grad.begin(), home.grad.end(), RecordGrad{});
    for (Parcel& parcel : frame.parcels[shard.index]) {
      parallel_for(parcel.count, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) add(home.grad[parcel.record_from_parcel[i]], parcel.grad[i]);
      });
      parcel.grad = Buffer<RecordGrad>();
    }
  });
}

}  // namespace mgpu::splat
