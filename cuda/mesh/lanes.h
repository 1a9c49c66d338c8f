// SPDX-License-Identifier: Apache-2.0
// lanes.h: a host thread for each GPU, so that eight of them are given their work in the time that one takes
// (CUDA flavour). Issuing a training step takes the host 0.4 ms a GPU, which one thread cannot do for eight
// in the millisecond that they need for it.
//
// Lane 0 is the caller's own thread. The others are started at the first use, look for work for a moment
// after each that they had, and sleep then.
#pragma once
#include <cstdint>
#include <functional>

namespace mgpu {

// How many: one for each GPU of the mesh. MGPU_LAUNCH_THREADS=0: one, for all of them; =shards: one for each
// shard, so that one GPU can test what several do.
int lane_count();
// The lane that serves a shard, below lane_count().
int lane_of_shard(int shard);

// Calls work(lane) once for every lane, at the same time, and returns when all are done. The lanes belong to
// the caller's turn (gate.h), and use its streams. If some throw, the exception of the lowest lane is thrown
// again. Called from inside `work`, or while another thread is in it, the caller's thread does all the lanes'
// work itself.
void run_lanes(const std::function<void(int lane)>& work);

// True inside such work, while other lanes may be in theirs.
bool inside_lane();

// What lanes take over from the thread that they work for: `capture` on its side, `adopt` on theirs. Set by
// the backend, which knows torch's current streams, before there are any lanes.
struct LaneContext {
  int64_t (*capture)();
  void (*adopt)(int64_t captured);
};
void set_lane_context(const LaneContext& context);

}  // namespace mgpu
